"""Fetches the logs of public.json again and labels them by its rule: needs a network.

    python -m benchmarks.watch.rebuild logs --only qhy991/GRPO-Clean-2
    mesotron watch logs                                  # or any other tool

Each log is taken from its repository's newest version; where the labelled one was older, from the
newest version of the file in which the reward ends as the label says. Logs belong to their authors:
keep them out of other repositories. A label that comes out different is printed.
"""

import argparse
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._lib.results import read_json
from mesotron.watch.log import read_log

HERE = Path(__file__).parent
RAW = "https://raw.githubusercontent.com/{repository}/{ref}/{path}"
COMMITS = "https://api.github.com/repos/{repository}/commits?path={path}&per_page=100"
TIMEOUT = 60
SAME = 2e-3  # difference of a label's best and end from ours


@dataclass(frozen=True)
class Labelled:
    """What the rule says of a reward curve."""

    label: str
    best: float
    end: float
    is_clear: bool


def label_of(rewards: Sequence[float]) -> Labelled:
    """The rule of public.json."""
    values = rescaled(rewards)
    best, end = best_and_end(values, 0.05)
    label = "unclear"
    if best < 0.05:
        label = "starved"
    elif end <= 0.5 * best and best >= 0.1:
        label = "collapsed"
    elif end >= 0.85 * best:
        label = "healthy"

    wide_best, wide_end = best_and_end(values, 0.2)
    is_clear = len(values) >= 30 and wide_end <= 0.5 * wide_best
    return Labelled(label, best, end, is_clear)


def best_and_end(values: Sequence[float], share: float) -> tuple[float, float]:
    """The maximum of the moving mean of a share of the run, and the mean of the last tenth."""
    width = max(round(len(values) * share), 1)
    means = []
    for start in range(len(values) - width + 1):
        means.append(sum(values[start : start + width]) / width)

    last = values[-max(round(len(values) / 10), 1) :]
    return max(means), sum(last) / len(last)


def rescaled(rewards: Sequence[float]) -> list[float]:
    """Rewards outside 0 to 1, from min(0, 1st percentile) to the 99th."""
    if all(0 <= reward <= 1 for reward in rewards):
        return [*rewards]

    ordered = sorted(rewards)
    last = len(ordered) - 1
    low = min(0.0, ordered[int(0.01 * last)])
    high = ordered[math.ceil(0.99 * last)]
    width = (high - low) or 1.0

    return [(reward - low) / width for reward in rewards]


def fetch(address: str) -> bytes:
    request = urllib.request.Request(address, headers={"User-Agent": "mesotron"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        return response.read()


def versions(run: dict[str, Any], raw: str, commits: str) -> Iterator[bytes]:
    """The file as it is now, then as it was, the newest first."""
    fields = {"repository": run["repository"], "path": urllib.parse.quote(run["source"])}
    with suppress(urllib.error.URLError):  # removed since
        yield fetch(raw.format(ref="HEAD", **fields))

    for commit in json.loads(fetch(commits.format(**fields))):
        yield fetch(raw.format(ref=commit["sha"], **fields))


def rebuild(run: dict[str, Any], path: Path, raw: str = RAW, commits: str = COMMITS) -> str:
    """Write the version of a log that has the label's reward; what became of it in words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for content in versions(run, raw, commits):
        path.write_bytes(content)
        try:
            rows = read_log(path).rows
        except ValueError:
            continue

        rewards = [row[run["reward_key"]] for row in rows if run["reward_key"] in row]
        if not rewards:
            continue

        ours = label_of(rewards)
        if abs(ours.best - run["best"]) < SAME and abs(ours.end - run["end"]) < SAME:
            return "as labelled" if ours.label == run["label"] else f"now {ours.label}"

    path.unlink(missing_ok=True)
    return "not found in any version"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the public runs again")
    parser.add_argument("folder", type=Path, help="where to put the logs")
    parser.add_argument("--only", nargs="+", default=[], help="repositories")
    given = parser.parse_args()

    for number, run in enumerate(read_json(HERE / "public.json")["runs"]):
        if given.only and run["repository"] not in given.only:
            continue

        name = run["repository"].replace("/", "__")
        path = given.folder / name / f"{number}_{Path(run['source']).name}"
        print(f"{run['repository']} {run['source']}: {rebuild(run, path)}")


if __name__ == "__main__":
    main()

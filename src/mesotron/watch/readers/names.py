"""Names of metrics that a user has mapped (`--rename reward=my_score`), for the watch and the
report; a file beside the log remembers them."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mesotron.config.base import suggest
from mesotron.runs.files import write_whole
from mesotron.watch.metrics import METRICS, canonical, guess_reward, own_name, suggest_names
from mesotron.watch.readers.parsers import Row

NAMES_FILE = "mesotron_names.json"  # {our name: name in the log}
MAX_BYTES = 2**20


def remembered_names(path: Path) -> dict[str, str]:
    """Names from the file beside a log, or else in the working folder."""
    for folder in (_folder(path), Path()):
        file = folder / NAMES_FILE
        if not file.is_file():
            continue

        try:
            values = json.loads(file.read_bytes()[:MAX_BYTES])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not JSON: fix or delete it") from error

        if not isinstance(values, dict) or not all(isinstance(x, str) for x in values.values()):
            raise ValueError(f'{file} must be an object such as {{"reward": "my_score"}}')

        return {ours: theirs for ours, theirs in values.items() if ours in METRICS}

    return {}


def remember_names(path: Path, names: Mapping[str, str]) -> Path | None:
    """Add names to the file beside a log, or in the working folder; None if neither is writable."""
    text = json.dumps(remembered_names(path) | dict(names), indent=2) + "\n"
    for folder in (_folder(path), Path()):
        with suppress(OSError):
            write_whole(folder / NAMES_FILE, text)
            return folder / NAMES_FILE

    return None


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


class Names:
    """Adds our names to the rows of one log: those that were mapped, and the reward if the log has
    none by that name but an accuracy, or rewards of single functions."""

    def __init__(self, path: Path, pairs: Sequence[str] = ()) -> None:
        self.given: dict[str, str] = {}
        for pair in pairs:
            ours, _, theirs = pair.partition("=")
            if not theirs:
                raise ValueError(f"--rename {pair} must have the form reward=my_score")

            if ours not in METRICS:
                known = f"{', '.join(METRICS)}{suggest(ours, METRICS)}"
                raise ValueError(f"--rename {pair}: {ours!r} is not one of {known}")

            self.given[ours] = theirs

        self.mapped = remembered_names(path) | self.given
        self.seen: set[str] = set()  # names in the log
        self.reward_from: list[str] = []

    def learn(self, names: Collection[str]) -> bool:
        """Take the names of new rows; True if the reward is now read from elsewhere."""
        if self.seen.issuperset(names):
            return False

        before = self.reward_from
        self.seen = self.seen | set(names)
        mapped = self.mapped.get("reward") in self.seen
        self.reward_from = [] if mapped else guess_reward(sorted(self.seen))

        return self.reward_from != before

    def check(self) -> None:
        """Refuse a given name that no row has."""
        for ours, theirs in self.given.items():
            if theirs not in self.seen:
                close = suggest(theirs, self.seen)
                raise ValueError(f"--rename {ours}={theirs}: no row has {theirs}{close}")

    def require_known(self, path: Path, rows: Iterable[Mapping[str, float]]) -> None:
        """Refuse rows without any metric that we know."""
        unknown = sorted(self.seen - {"step"})
        if not unknown:
            raise ValueError(f"{path} has no numbers other than steps: check its values")

        if not any(map(canonical, rows)):
            close = suggest_names(unknown)
            fix = f"map them with --rename, as in --rename reward={(close or ['my_score'])[0]}"
            known = ", ".join(close or unknown[:12])
            raise ValueError(f"{path} has no known metric (it has {known}): {fix}")

    def apply(self, row: Mapping[str, float]) -> Row:
        out = dict(row)
        for ours, theirs in self.mapped.items():
            if theirs in row:
                out[own_name(ours)] = row[theirs]

        if values := [row[name] for name in self.reward_from if name in row]:
            out[own_name("reward")] = sum(values) / len(values)

        return out

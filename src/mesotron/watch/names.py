"""Names of metrics that a user has mapped (`--rename reward=my_score`), for the watch and the
report; a file beside the log remembers them."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mesotron.config.base import suggest
from mesotron.runs.files import write_whole
from mesotron.watch.metrics import METRICS, canonical, guess_reward, own_name, suggest_names
from mesotron.watch.rows import Row

NAMES_FILE = "mesotron_names.json"  # {our name: name in the log}
MAX_BYTES = 2**20


def remembered_names(path: Path) -> dict[str, str]:
    """Names from the file beside a log, or else in the working folder."""
    for folder in _folders(path):
        file = folder / NAMES_FILE
        if file.is_file():
            return _read_names(file)

    return {}


def _read_names(file: Path) -> dict[str, str]:
    try:
        values = json.loads(file.read_bytes()[:MAX_BYTES])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: fix or delete it") from error

    if not isinstance(values, dict) or not all(isinstance(x, str) for x in values.values()):
        raise ValueError(f'{file} must be an object such as {{"reward": "my_score"}}')

    return {ours: theirs for ours, theirs in values.items() if ours in METRICS}


def remember_names(path: Path, names: Mapping[str, str]) -> Path | None:
    """Add names to the file beside a log, or in the working folder; None if neither is writable."""
    merged = remembered_names(path) | dict(names)
    text = json.dumps(merged, indent=2) + "\n"

    for folder in _folders(path):
        with suppress(OSError):
            write_whole(folder / NAMES_FILE, text)
            return folder / NAMES_FILE

    return None


def _folders(path: Path) -> tuple[Path, Path]:
    folder = path if path.is_dir() else path.parent
    return folder, Path()


def parse_renames(pairs: Sequence[str]) -> dict[str, str]:
    """The values of --rename as our name -> name in the log."""
    names = {}
    for pair in pairs:
        ours, _, theirs = pair.partition("=")
        if not theirs:
            raise ValueError(f"--rename {pair} must have the form reward=my_score")

        if ours not in METRICS:
            known = f"{', '.join(METRICS)}{suggest(ours, METRICS)}"
            raise ValueError(f"--rename {pair}: {ours!r} is not one of {known}")

        names[ours] = theirs

    return names


class Names:
    """Adds our names to the rows of one log.

    They are those that were mapped. The reward is also added if the log has none by that name but
    an accuracy, or rewards of single functions.
    """

    def __init__(self, path: Path, pairs: Sequence[str] = ()) -> None:
        self.given = parse_renames(pairs)
        self.mapped = remembered_names(path) | self.given
        self.seen: set[str] = set()  # names in the log
        self.reward_from: list[str] = []

    def learn(self, names: Collection[str]) -> bool:
        """Take the names of new rows; True if the reward is now read from elsewhere."""
        if self.seen.issuperset(names):
            return False

        before = self.reward_from
        self.seen = self.seen | set(names)
        if self.mapped.get("reward") in self.seen:
            self.reward_from = []
        else:
            self.reward_from = guess_reward(sorted(self.seen))

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

        if any(map(canonical, rows)):
            return

        close = suggest_names(unknown)
        best = close[0] if close else "my_score"
        listed = ", ".join(close or unknown[:12])
        raise ValueError(
            f"{path} has no known metric (it has {listed}): map them with --rename, as in "
            f"--rename reward={best}"
        )

    def apply(self, row: Mapping[str, float]) -> Row:
        named = dict(row)
        for ours, theirs in self.mapped.items():
            if theirs in row:
                named[own_name(ours)] = row[theirs]

        rewards = []
        for name in self.reward_from:
            if name in row:
                rewards.append(row[name])

        if rewards:
            named[own_name("reward")] = sum(rewards) / len(rewards)

        return named

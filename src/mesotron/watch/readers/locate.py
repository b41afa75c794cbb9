"""Finds the logs at a path: their format, their files, and the runs of a folder or a database."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path

from mesotron.config import LogKind
from mesotron.watch.readers import parsers, stores

PARSERS: dict[LogKind, type[parsers.Parser]] = {
    "run": parsers.JsonLines,
    "jsonl": parsers.JsonLines,
    "trainer_state": parsers.Document,
    "csv": parsers.Csv,
    "tensorboard": parsers.EventFile,
    "console": parsers.Console,
    "wandb": stores.Wandb,
    "database": stores.Database,
    "parquet": stores.Parquet,
    "mlflow": stores.Mlflow,
}
SUFFIXES: dict[str, LogKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".wandb": "wandb",
    ".parquet": "parquet",
    ".db": "database",
    ".sqlite": "database",
    ".sqlite3": "database",
    ".json": "trainer_state",
    ".ipynb": "trainer_state",
}
MAGIC: dict[bytes, LogKind] = {
    b"SQLite format 3\0": "database",
    b":W&B": "wandb",
    b"PAR1": "parquet",
}
CONSOLES = (".log", ".out", ".txt", ".err")
PEEK = 2**16  # bytes to recognize a format by
MAX_ENTRIES = 10_000  # searched at each level of a folder
MAX_RUNS = 1000
MAX_FOLDERS = 5000
DEPTH = 4
NOT_LOGS = {"samples.jsonl", "spectra.jsonl"}  # of a run folder
# Writers of one run, not runs.
PHASES = {"runs", "train", "training", "eval", "val", "validation", "test"}


@dataclass(frozen=True)
class Source:
    """One run: the files of its log in the order they were written."""

    kind: LogKind
    files: list[Path]
    part: str | None = None  # the run, in a file with several

    @property
    def is_file(self) -> bool:
        return len(self.files) == 1 and self.kind != "mlflow"


def find_runs(path: Path, kind: LogKind = "auto", notes: list[str] | None = None) -> list[Path]:
    """The runs at a path, each a path for `read_log`; one in a file with several is FILE#NAME.
    `notes` gets what was left out."""
    if not path.is_dir():
        source = locate_file(path, kind)
        parts = PARSERS[source.kind].parts(source.files[0]) if source.part is None else []
        names = [part for part in parts if part.isprintable() and 0 < len(part) < 200]
        return [Path(f"{path}#{name}") for name in names] or [path]

    notes = [] if notes is None else notes
    runs = list(islice(_runs_below(path, kind, notes), MAX_RUNS + 1))
    if not runs and kind == "auto":  # a console beside a log is the same run
        runs = list(islice(_runs_below(path, "console", notes), MAX_RUNS + 1))

    if not runs:
        raise ValueError(
            f"{path} has no {'' if kind == 'auto' else f'{kind} '}log: looked for metrics.jsonl, "
            "trainer_state.json, JSONL, CSV, Parquet, TensorBoard, W&B, trackio and MLflow files"
        )

    if len(runs) > MAX_RUNS:
        notes.append(f"only {MAX_RUNS} runs of {path} are read: give a folder inside it")

    return runs[:MAX_RUNS]


def _runs_below(root: Path, kind: LogKind, notes: list[str]) -> Iterator[Path]:
    folders = [(root, 0)]
    for _ in range(MAX_FOLDERS):
        if not folders:
            return

        path, depth = folders.pop()
        if source := _run_of(path, kind):
            runs = find_runs(source.files[0], source.kind) if source.is_file else [path]
            yield from runs if len(runs) > 1 else [path]
            continue

        for source in _files_of(path, kind, notes):
            yield from find_runs(source.files[0], source.kind)

        # runs/last and wandb/latest-run are links to one of the others.
        children = islice(path.iterdir(), MAX_ENTRIES if depth < DEPTH else 0)
        inside = (child for child in children if child.is_dir() and not child.is_symlink())
        folders += [
            (child, depth + 1)
            for child in sorted(inside, reverse=True)
            if not child.name.startswith(".")
        ]


def locate(path: Path, kind: LogKind = "auto") -> Source:
    """The log of one run."""
    if not path.is_dir():
        source = locate_file(path, kind)
        parts = PARSERS[source.kind].parts(source.files[0])
        named = {str(Path(f"#{part}"))[1:]: part for part in parts}  # a path drops some slashes
        if source.part is not None and source.part not in named:
            raise ValueError(f"{path} names no run of the file: it has {', '.join(parts) or 'one'}")
        if source.part is None and len(parts) > 1:
            raise ValueError(f"{path} has {len(parts)} runs: give one, as in {path}#{parts[0]}")

        return replace(source, part=named.get(source.part or "", next(iter(parts), None)))

    if source := _run_of(path, kind):
        return locate(source.files[0], source.kind) if source.is_file else source

    runs = find_runs(path, kind)
    if len(runs) > 1:
        raise ValueError(f"{path} has {len(runs)} runs: give one, such as {runs[0]}")

    return locate(runs[0], kind)


def locate_file(path: Path, kind: LogKind) -> Source:
    part = None
    name = str(path)
    for k in (k for k, letter in enumerate(name) if letter == "#" and not path.exists()):
        if Path(name[:k]).is_file():
            path = Path(name[:k])
            part = name[k + 1 :]

    if not path.exists():
        raise ValueError(f"{path} does not exist: give a run folder or a log file")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: give a run folder or a log file")

    return Source(recognize(path) if kind == "auto" else kind, [path], part)


def _run_of(path: Path, kind: LogKind) -> Source | None:
    """The log of a folder that is the folder of one run."""
    run = path / "metrics.jsonl"
    state = path / "trainer_state.json"
    states = {file.parent.name[11:]: file for file in path.glob("checkpoint-*/trainer_state.json")}
    last = max(filter(str.isdecimal, states), key=int, default=None)
    newest = [states[last]] if last else []  # a TRL output folder is one run
    events, several = _event_files(path)
    wandb = sorted(path.glob("*.wandb"))[:2]

    found: list[tuple[LogKind, list[Path]]] = [
        ("run", [run] if run.is_file() else []),
        ("trainer_state", [state] if state.is_file() else newest),
        ("wandb", wandb if len(wandb) == 1 else []),
        ("mlflow", [path] * ((path / "meta.yaml").is_file() and (path / "metrics").is_dir())),
        ("tensorboard", [] if several else events),
    ]

    matching = (Source(name, files) for name, files in found if files and kind in ("auto", name))
    return next(matching, None)


def _files_of(path: Path, kind: LogKind, notes: list[str]) -> list[Source]:
    """The log files in a folder, of the best kind that it has."""
    files = [
        file
        for file in sorted(islice(path.iterdir(), MAX_ENTRIES))
        if file.is_file() and file.name not in NOT_LOGS and not _is_dump(file)
    ]

    kinds: tuple[LogKind, ...] = ("wandb", "jsonl", "database", "parquet", "csv")
    found = [
        [Source(name, [file]) for file in files if SUFFIXES.get(inner_suffix(file)) == name]
        for name in kinds
        if kind in ("auto", name)
    ]

    best, *others = [*filter(None, found), []]
    if others[:-1]:
        how = " or ".join(f"--kind {sources[0].kind}" for sources in others[:-1])
        notes.append(f"of {path} only the {best[0].kind} logs are read: for others give {how}")

    if best:
        return best
    if kind != "console":
        return []

    consoles = [file for file in files if inner_suffix(file) in CONSOLES and not file.is_symlink()]
    return [Source("console", [file]) for file in consoles if _is_console(_head(file))]


def _is_dump(file: Path) -> bool:
    """Completions of one step, as verl writes them to 120.jsonl."""
    return file.suffix == ".jsonl" and file.stem.isdecimal() and b'"input":' in _head(file)


def _event_files(path: Path) -> tuple[list[Path], bool]:
    """Event files in a folder, or else up to two levels below, by the time in their names; and
    whether they belong to several runs."""
    entries = (x for name in ("*", "*/*", "*/*/*") for x in islice(path.glob(name), MAX_ENTRIES))
    found = [file for file in entries if "tfevents" in file.name and file.is_file()]
    folders = {file.parent for file in found}

    # add_scalars and add_hparams write into folders inside that of their run.
    found = [file for file in found if folders.isdisjoint(file.parent.parents)]
    parts = (takewhile("runs".__ne__, file.relative_to(path).parts[:-1]) for file in found)
    runs = {tuple(part for part in each if part.lower() not in PHASES) for each in parts}

    return sorted(found, key=lambda file: (file.name, str(file))), len(runs) > 1


def recognize(path: Path) -> LogKind:
    """The format of a file, by its name or its first bytes."""
    if "tfevents" in path.name:
        return "tensorboard"

    suffix = inner_suffix(path)
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]

    head = _head(path)
    for mark, kind in MAGIC.items():
        if head.startswith(mark):
            return kind

    if b"brain.Event:" in head[:64]:  # the version in the first record
        return "tensorboard"

    first, _, rest = head.decode("utf-8-sig", errors="replace").lstrip().partition("\n")
    if first.strip() in ("{", "["):
        return "trainer_state"
    if first.startswith('{"'):
        return "jsonl"
    if _is_table(first, rest.partition("\n")[0]):
        return "csv"
    if suffix in CONSOLES or _is_console(head):
        return "console"

    raise ValueError(f"{path} is not a known kind of log: give --kind, one of {', '.join(PARSERS)}")


def inner_suffix(path: Path) -> str:
    """The suffix of a file, without a .gz after it."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _head(path: Path) -> bytes:
    with parsers.open_bytes(path) as file:
        return parsers.read_bytes(file, PEEK, path)


def _is_console(head: bytes) -> bool:
    text = head.decode("utf-8", errors="replace")
    patterns = (parsers.VERL, parsers.PRINTED, parsers.STEP, parsers.COUNTED)
    return any(pattern.search(text) for pattern in patterns)


def _is_table(first: str, second: str) -> bool:
    delimiter = max(",\t;", key=first.count)
    rows = [line.strip().split(delimiter) for line in (first, second)]
    is_number = [cell.strip(' "').replace(".", "").lstrip("-").isdigit() for cell in rows[1]]

    return len(rows[0]) == len(rows[1]) > 1 and any(is_number) and "{" not in first

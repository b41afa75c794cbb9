"""Rows of a table: JSONL, JSON, CSV or Parquet on disk, or a dataset on the hub."""

import csv
import json
import math
import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesotron.config.base import suggest
from mesotron.runs.extras import require

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
OTHER_SUFFIXES = (".txt", ".tsv", ".gz", ".zip", ".xlsx")  # of files that cannot be read
SAVED_DATASET = ("dataset_dict.json", "dataset_info.json")  # by the `datasets` library
EVAL_NAMES = ("test", "eval", "validation")
DEFAULT_SUBSETS = {"openai/gsm8k": "main"}  # of hub datasets that need a subset
MAX_TEXT = 100_000  # characters of one question or answer


@dataclass(frozen=True)
class TableRow:
    """One row and its location, such as "problems.jsonl:12"."""

    place: str
    values: dict[str, Any]
    typed: bool = True  # False: all values are text, as in CSV

    def text(self, column: str) -> str:
        """A column as stripped text; numbers as they are written."""
        value = self.values.get(column)
        if type(value) is str:
            text = value.strip()
            if 0 < len(text) <= MAX_TEXT:
                return text

        if column not in self.values:
            known = ", ".join(map(str, list(self.values)[:8])) or "none"
            raise ValueError(f"{self.place}: no column {column!r}, only {known}: add it")

        value = self.values[column]
        where = f"{self.place}: column {column!r}"
        if _is_empty(value):
            raise ValueError(f"{where} is empty: fill it in or drop the row")

        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{where} is of type {type(value).__name__}, not text or a number")

        text = str(value).strip()
        if len(text) > MAX_TEXT:
            raise ValueError(f"{where} has over {MAX_TEXT:,} characters")

        return text


Splits = tuple[list[TableRow], list[TableRow] | None]  # to train on; a test split, if there is one


def _is_empty(value: Any) -> bool:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True

    return not str(value).strip()


def read_splits(path: str, subset: str | None = None) -> Splits:
    local = Path(path).expanduser()
    if local.is_dir():
        return _read_folder(local)
    if local.is_file():
        return list(read_rows(local)), None

    check_path(path)
    return _read_hub(path, subset or DEFAULT_SUBSETS.get(path))


def check_path(path: str) -> None:
    """Refuse a missing path; what may be a name on the hub passes."""
    local = Path(path).expanduser()
    if local.is_dir() or local.is_file():
        return

    is_local = path.startswith((".", "/", "~")) or local.exists()
    if is_local or local.suffix in (*SUFFIXES, *OTHER_SUFFIXES):
        neighbors = []
        if local.parent.is_dir():
            neighbors = [file.name for file in local.parent.glob("*")]

        raise ValueError(f"there is no file or folder {path}{suggest(local.name, neighbors)}")

    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?|[\w-]+", path):
        raise ValueError(f"{path!r} is neither a file or folder here nor a name on the hub")


def read_rows(path: Path) -> Iterator[TableRow]:
    match path.suffix:
        case ".jsonl":
            return _read_jsonl(path)
        case ".json":
            return _read_json(path)
        case ".csv":
            return _read_csv(path)
        case ".parquet":
            return _read_parquet(path)

    raise ValueError(f"{path} must be one of {', '.join(SUFFIXES)}")


def _read_folder(folder: Path) -> Splits:
    if any((folder / name).is_file() for name in SAVED_DATASET):
        return _choose_splits(_read_saved(folder), str(folder))

    inside = [*folder.iterdir(), *folder.glob("data/*")]
    files = sorted(path for path in inside if path.suffix in SUFFIXES and path.is_file())
    train = _read_split(files, ["train"])
    if train is not None:
        return train, _read_split(files, EVAL_NAMES)

    if len(files) == 1:
        return list(read_rows(files[0])), None

    raise ValueError(f"the folder {folder} has no train file ({', '.join(SUFFIXES)})")


def _read_saved(folder: Path) -> Any:
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    except Exception as error:  # an untrusted folder can break the library anywhere
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{folder} is no saved dataset that can be read ({reason})") from error


def _read_split(files: Sequence[Path], names: Sequence[str]) -> list[TableRow] | None:
    """The rows of the first split that has files; None if none has."""
    for name in names:
        pattern = rf"{name}(-\d+-of-\d+)?"  # train.jsonl, the hub's train-00000-of-00002.parquet
        parts = []
        for file in files:
            if re.fullmatch(pattern, file.stem):
                parts.append(file)

        if parts:
            return [row for part in parts for row in read_rows(part)]

    return None


def _read_jsonl(path: Path) -> Iterator[TableRow]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{path}:{number}"
                yield _make_row(place, _parse_json(line, place))


def _read_json(path: Path) -> Iterator[TableRow]:
    rows = _parse_json(path.read_bytes(), str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path} has no list of rows: write one object per line into a .jsonl")

    for number, row in enumerate(rows, start=1):
        yield _make_row(f"{path}: row {number}", row)


def _parse_json(text: bytes, place: str) -> Any:
    try:
        return json.loads(text.removeprefix(BOM_UTF8).decode())
    except RecursionError as error:
        raise ValueError(f"{place}: not JSON (nested too deeply)") from error
    except ValueError as error:  # also invalid UTF-8 and huge integers
        raise ValueError(f"{place}: not JSON ({error})") from error


def _make_row(place: str, row: Any) -> TableRow:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row must be an object, not {type(row).__name__}")
    return TableRow(place, row)


def _read_csv(path: Path) -> Iterator[TableRow]:
    with path.open("rb") as file:
        header = file.readline(1 << 16).decode(errors="replace")

    delimiter = max(",;\t", key=header.count)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True, delimiter=delimiter)
        try:
            for row in reader:
                place = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise ValueError(f"{place}: more or fewer fields than the header")
                yield TableRow(place, dict(row), typed=False)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{reader.line_num + 1}: not CSV in UTF-8 ({error})") from error


def _read_parquet(path: Path) -> Iterator[TableRow]:
    require(None, ["pyarrow"], str(path))
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"{path}: not Parquet ({first})") from error

    for number, row in enumerate(rows, start=1):
        yield TableRow(f"{path}: row {number}", row)


def _read_hub(name: str, subset: str | None) -> Splits:
    import datasets

    try:
        splits = datasets.load_dataset(name, subset)
    except Exception as error:
        # The hub's client raises a dozen unrelated types.
        offline = os.environ.get("HF_HUB_OFFLINE") == "1"

        if offline:
            reason = " (HF_HUB_OFFLINE is set, or there is no network)"
        else:
            reason = ""

        first = str(error).partition("\n")[0][:200]
        raise ValueError(
            f"{name!r} is not a local file and cannot be loaded from the hub{reason}: "
            f"{type(error).__name__}: {first}"
        ) from error

    return _choose_splits(splits, name)


def _choose_splits(data: Any, name: str) -> Splits:
    """The splits to train and to evaluate on, of one dataset or several by name."""
    tables: Mapping[str, Any] = data if isinstance(data, dict) else {"train": data}
    splits: dict[str, list[TableRow]] = {}
    for part, table in tables.items():
        places = (f"{name} {part}: row {number}" for number in range(1, len(table) + 1))
        splits[str(part)] = [TableRow(place, dict(row)) for place, row in zip(places, table)]

    if "train" not in splits:
        # MATH-500, for instance, has only a test split: divide it like a single file.
        return next(iter(splits.values())), None

    test = next((splits[name] for name in EVAL_NAMES if name in splits), None)
    return splits["train"], test

"""Rows of a table: JSONL, JSON, CSV or Parquet on disk, or a dataset on the hub."""

import csv
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesotron.config.base import suggest
from mesotron.runs.extras import require

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_EVAL_NAMES = ("test", "eval", "validation")
MAX_TEXT = 100_000  # characters of one question or answer


@dataclass(frozen=True)
class Row:
    """One row and its location, such as "problems.jsonl:12"."""

    place: str
    values: dict[str, Any]
    typed: bool = True  # False: all values are text, as in CSV

    def text(self, column: str) -> str:
        """A column as stripped text; numbers as they are written."""
        if column not in self.values:
            known = ", ".join(map(str, list(self.values)[:8])) or "none"
            raise ValueError(f"{self.place}: no column {column!r}, only {known}: add it")

        value = self.values[column]
        empty = value is None or value != value or not str(value).strip()  # None, NaN, ""
        if empty or isinstance(value, bool) or not isinstance(value, str | int | float):
            kind = f"of type {type(value).__name__}, not text or a number"
            kind = "empty: fill it in or drop the row" if empty else kind
            raise ValueError(f"{self.place}: column {column!r} is {kind}")

        text = str(value).strip()
        if len(text) > MAX_TEXT:
            raise ValueError(f"{self.place}: column {column!r} has over {MAX_TEXT:,} characters")

        return text


def read_splits(path: str, subset: str | None = None) -> tuple[list[Row], list[Row] | None]:
    local = Path(path).expanduser()
    if local.is_dir():
        return _read_folder(local)
    if local.is_file():
        return list(read_rows(local)), None

    check_path(path)
    return _read_hub(path, subset)


def check_path(path: str) -> None:
    """Refuse a missing path; what may be a name on the hub passes."""
    local = Path(path).expanduser()
    if local.is_dir() or local.is_file():
        return

    known = (*SUFFIXES, ".txt", ".tsv", ".gz", ".zip", ".xlsx")
    if local.suffix in known or path.startswith((".", "/", "~")) or local.exists():
        beside = [one.name for one in local.parent.glob("*")] if local.parent.is_dir() else []
        raise ValueError(f"there is no file or folder {path}{suggest(local.name, beside)}")

    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?|[\w-]+", path):
        raise ValueError(f"{path!r} is neither a file or folder here nor a name on the hub")


def read_rows(path: Path) -> Iterator[Row]:
    readers = dict(zip(SUFFIXES, (_read_jsonl, _read_json, _read_csv, _read_parquet)))
    if path.suffix not in readers:
        raise ValueError(f"{path} must be one of {', '.join(SUFFIXES)}")
    return readers[path.suffix](path)


def _read_folder(folder: Path) -> tuple[list[Row], list[Row] | None]:
    if any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        from datasets import load_from_disk

        return _choose_splits(load_from_disk(str(folder)), str(folder))

    files = [path for path in (*folder.iterdir(), *folder.glob("data/*")) if path.is_file()]
    files = sorted(path for path in files if path.suffix in SUFFIXES)

    def read(*names: str) -> list[Row] | None:
        for name in names:  # train.jsonl, or the hub's train-00000-of-00002.parquet
            parts = [path for path in files if re.fullmatch(rf"{name}(-\d+-of-\d+)?", path.stem)]
            if parts:
                return [row for path in parts for row in read_rows(path)]

        return None

    train = read("train")
    if train is None:
        if len(files) == 1:
            return list(read_rows(files[0])), None
        raise ValueError(f"the folder {folder} has no train file ({', '.join(SUFFIXES)})")

    return train, read(*_EVAL_NAMES)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{path}:{number}"
                yield _make_row(place, _parse_json(line, place))


def _read_json(path: Path) -> Iterator[Row]:
    rows = _parse_json(path.read_bytes(), str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path} has no list of rows: write one object per line into a .jsonl")

    for number, row in enumerate(rows, start=1):
        yield _make_row(f"{path}: row {number}", row)


def _parse_json(text: bytes, place: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also invalid UTF-8 and huge integers
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{place}: not JSON ({reason})") from error


def _make_row(place: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row must be an object, not {type(row).__name__}")
    return Row(place, row)


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        delimiter = max(",;\t", key=file.readline(1 << 16).decode(errors="replace").count)

    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True, delimiter=delimiter)
        try:
            for row in reader:
                place = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise ValueError(f"{place}: more or fewer fields than the header")
                yield Row(place, dict(row), typed=False)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{reader.line_num + 1}: not CSV in UTF-8 ({error})") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    require(None, ["pyarrow"], str(path))
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"{path}: not Parquet ({first})") from error

    for number, row in enumerate(rows, start=1):
        yield Row(f"{path}: row {number}", row)


def _read_hub(name: str, subset: str | None) -> tuple[list[Row], list[Row] | None]:
    import datasets

    try:
        splits = datasets.load_dataset(name, subset)
    except Exception as error:
        # The hub's client raises a dozen unrelated types.
        offline = os.environ.get("HF_HUB_OFFLINE") == "1"
        reason = " (HF_HUB_OFFLINE is set, or there is no network)" if offline else ""
        first = str(error).partition("\n")[0][:200]
        raise ValueError(
            f"{name!r} is not a local file and cannot be loaded from the hub{reason}: "
            f"{type(error).__name__}: {first}"
        ) from error

    return _choose_splits(splits, name)


def _choose_splits(data: Any, name: str) -> tuple[list[Row], list[Row] | None]:
    splits = data if isinstance(data, dict) else {"train": data}
    found = {
        str(part): [Row(f"{name} {part}: row {i}", dict(row)) for i, row in enumerate(rows, 1)]
        for part, rows in splits.items()
    }

    if "train" not in found:
        # MATH-500, for instance, has only a test split: divide it like a single file.
        return next(iter(found.values())), None

    return found["train"], next((found[part] for part in _EVAL_NAMES if part in found), None)

"""Result files: JSON, compressed where the name ends with .gz.

The same value gives the same bytes, so a result that did not change shows no difference in git.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The value in a .json or .json.gz file."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return json.loads(data)


def write_json(value: Any, path: Path, indent: int | None = None) -> None:
    """Write a value at once: a killed study leaves the old file or the new one.

    Args:
        value: what `json` can write.
        path: a name that ends with .gz is compressed, without white space.
        indent: of a plain file, to be read by people.
    """
    if path.suffix == ".gz":
        text = json.dumps(value, separators=(",", ":"))
    else:
        text = json.dumps(value, indent=indent) + "\n"

    write_text(text, path)


def write_result(result: dict[str, Any], path: Path) -> None:
    """Write a result with one line per item of its lists, so that differences can be read."""
    lines = []
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ",\n  ".join(json.dumps(item) for item in value)
            lines.append(f" {json.dumps(key)}: [\n  {items}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")

    write_text("{\n" + ",\n".join(lines) + "\n}\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a file at once, compressed where its name ends with .gz."""
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)

    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    draft.write_bytes(data)
    draft.replace(path)


def beside(path: Path, ending: str) -> Path:
    """The file beside a result whose name goes on in another way.

    Example:
        >>> beside(Path("out/study.json.gz"), "_curves.png").name
        'study_curves.png'
    """
    name, _, _ = path.name.partition(".json")
    return path.with_name(f"{name}{ending}")

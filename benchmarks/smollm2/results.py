"""The file of results: JSON, packed where its name ends with .gz."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def read_results(path: Path) -> dict[str, Any]:
    """Settings, machine and cells of a study."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def pack_results(found: dict[str, Any], path: Path) -> None:
    """Write them so that the same results give the same bytes."""
    words = json.dumps(found, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(words, mtime=0))

"""What a case made, as plain JSON, and the differences between two of them."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from golden.cases import choose

# Clocks, memory and speed differ between two runs of the same code.
VOLATILE = re.compile(
    r"(^|/|_)(time|seconds|runtime|wall|memory|cost|dollars|spent|rss|gib)($|/|_)|per_second|^date$"
)
# Settings have their own references, the parsed command lines; the environment names the commit.
SETTINGS = {"config", "out", "environment"}
# Versions, paths, settings, and what a run has cost.
LEFT_OUT = {"config.json", "env.json", "spent.json", "manifest.json"}
WEIGHTS = {"model.safetensors", "adapter_model.safetensors", "policy.safetensors"}


def digest_folder(folder: Path, inputs: Path) -> dict[str, Any]:
    """Every file that does not depend on the clock, by its name in the folder."""
    given = {path.name for path in inputs.iterdir()}
    digest: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.name not in LEFT_OUT and name.partition("/")[0] not in given:
            content = read(path, in_checkpoint="checkpoint" in name)
            if content is not None:
                digest[name] = content
    return digest


def read(path: Path, in_checkpoint: bool) -> Any:
    """The stable content of one file; None leaves it out."""
    if path.suffix == ".safetensors" and (path.name in WEIGHTS or not in_checkpoint):
        return digest_arrays(load_file(path))
    if in_checkpoint:
        return None

    if path.suffix == ".npz":
        return digest_arrays(np.load(path))

    if path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        return [without_volatile(json.loads(line)) for line in lines]

    if path.suffix == ".json":
        return without_volatile(json.loads(path.read_text(encoding="utf-8")))

    if path.name == "routing.txt":
        return path.read_text(encoding="utf-8").splitlines()

    return None


def digest_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    digests = {}
    for name, array in arrays.items():
        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        digests[name] = f"{array.dtype}{list(array.shape)} {digest}"
    return digests


def without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {}
        for key, item in value.items():
            if key not in SETTINGS and not VOLATILE.search(key):
                kept[key] = without_volatile(item)
        return kept
    if isinstance(value, list):
        return [without_volatile(item) for item in value]
    return value


def without_clocks(text: str) -> str:
    """A printed text without its milliseconds."""
    return re.sub(r"[\d.]+ ms\b", "... ms", text)


def compare_folders(first: Path, second: Path, only: Iterable[str] = ()) -> int:
    """Print one line per case; returns 1 if any differs, failed, or is missing on one side."""
    stems = set()
    for folder in (first, second):
        for path in folder.glob("*.json"):
            stems.add(path.stem)

    wanted = [name for name in choose(only) if name in stems or only]

    num_bad = 0
    for name in wanted:
        found = list(differences(load(first / f"{name}.json"), load(second / f"{name}.json")))
        num_bad += bool(found)
        print(f"{name:<24} {'DIFFERENT' if found else 'equal'}")
        for text in found[:3]:
            print(f"    {text}")
        if len(found) > 3:
            print(f"    and {len(found) - 3} more")

    print(f"{len(wanted) - num_bad} of {len(wanted)} cases are equal")
    return int(num_bad > 0 or not wanted)


def load(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"failed": f"{path} is missing"}
    return json.loads(path.read_text(encoding="utf-8"))


def differences(one: Any, two: Any, place: str = "") -> Iterator[str]:
    """Where two JSON values differ. A case that failed is a difference in itself."""
    if place == "":
        for side in (one, two):
            if "failed" in side:
                yield side["failed"]

    if isinstance(one, dict) and isinstance(two, dict):
        for key in [*one, *(key for key in two if key not in one)]:
            where = f"{place}/{key}" if place else key
            if key not in two:
                yield f"{where}: only in the first"
            elif key not in one:
                yield f"{where}: only in the second"
            else:
                yield from differences(one[key], two[key], where)
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            yield from differences(left, right, f"{place}[{index}]")
    elif json.dumps(one) != json.dumps(two):  # NaN equals itself here
        yield f"{place}: {shorten(one)} -> {shorten(two)}"


def shorten(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"{value!r:.60}"

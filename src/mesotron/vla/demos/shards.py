"""Demonstrations on disk: a folder of npz files with LeRobot's key names, and demos.json.

A shard is a block of takes. It is written aside and renamed, so a killed run leaves whole shards
and the next run makes the missing ones. Compact shards hold the simulator's state in place of
images.

Legend: n actions, m observations of a shard.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mesotron.config import WorldConfig
from mesotron.runs.lines import write_json
from mesotron.vla.demos.takes import Recorded, Take
from mesotron.vla.interface import IMAGES, STATE, TASK, Demos

Arrays = dict[str, np.ndarray]
MANIFEST = "demos.json"
FORMAT = "mesotron demonstrations 1"
QPOS = "qpos"
TAKE_FIELDS = ("seed", "task", "swap", "scatter")


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"shard-{number:05d}.npz"


def pack(
    recorded: Sequence[Recorded], numbers: Sequence[int], compact: bool, failed: int
) -> Arrays:
    """The arrays of a shard.

    Args:
        recorded: at least one take.
        numbers: of the takes in the whole set, as episode_index.
        compact: keep joint positions instead of images.
        failed: takes of this block that are left out.
    """
    seen = [one for take in recorded for one in take.observations]
    lengths = [len(take.actions) for take in recorded]
    starts = np.cumsum([0, *lengths[:-1]])
    texts, index = np.unique([one[TASK] for one in seen], return_inverse=True)
    counts = [len(take.observations) for take in recorded]
    arrays: Arrays = {
        "action": np.concatenate([np.stack(take.actions) for take in recorded]),
        "episode_index": np.repeat(numbers, lengths),
        "frame_index": np.concatenate([np.arange(length) for length in lengths]),
        "start": np.concatenate([n + np.array(take.answers) for n, take in zip(starts, recorded)]),
        STATE: np.stack([one[STATE] for one in seen]),
        "task_index": index.astype(np.int64),
        "tasks": texts,
        "where": np.stack([place for take in recorded for place in take.where]),
        "failed": np.array(failed),
    }
    if compact:
        return arrays | pack_takes(recorded, counts)
    cameras = [key for key in seen[0] if key.startswith(IMAGES)]
    return arrays | {key: np.stack([one[key] for one in seen]) for key in cameras}


def pack_takes(recorded: Sequence[Recorded], counts: list[int]) -> Arrays:
    """What is needed to draw each observation again; scenes differ in their number of joints."""
    positions = [qpos for take in recorded for qpos in take.qpos]
    padded = np.zeros((len(positions), max(map(len, positions))), np.float32)
    for row, qpos in zip(padded, positions):
        row[: len(qpos)] = qpos
    columns = {
        name: np.repeat([getattr(take.take, name) for take in recorded], counts)
        for name in TAKE_FIELDS
    }
    return columns | {QPOS: padded}


def takes_of(arrays: Arrays) -> list[Take]:
    """The take of each observation in a compact shard."""
    seeds, tasks, swaps, scatters = (arrays[name].tolist() for name in TAKE_FIELDS)
    return [Take(*row) for row in zip(seeds, tasks, swaps, scatters, strict=True)]


def write_shard(path: Path, arrays: Arrays) -> None:
    """Write a shard at once or not at all."""
    draft = path.with_name(f".{path.stem}.writing.npz")
    np.savez_compressed(draft, **arrays)  # pyright: ignore[reportArgumentType]
    draft.replace(path)


def read_shard(path: Path) -> Arrays:
    """All arrays of a shard."""
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The demos.json of a folder, or a sentence that it has none."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} holds no demonstrations: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} says format {manifest.get('format')!r}, not {FORMAT!r}")
    return {"every": 1} | manifest  # older ones always looked


def write_manifest(folder: Path, world: WorldConfig, compact: bool, rest: dict[str, Any]) -> None:
    """Write demos.json: the world, the number of shards and how they were made."""
    world_fields = asdict(world) | {"tasks": list(world.tasks)}
    write_json(
        folder / MANIFEST, {"format": FORMAT, "world": world_fields, "compact": compact, **rest}
    )


def world_of(manifest: dict[str, Any]) -> WorldConfig:
    """The world that a manifest names."""
    return WorldConfig(**manifest["world"] | {"tasks": tuple(manifest["world"]["tasks"])})


def load_shards(folder: Path) -> Demos:
    """Read a whole folder of ours into memory.

    Raises:
        ValueError: shards are missing, or hold no images yet.
    """
    manifest = read_manifest(folder)
    if manifest["compact"] and manifest["cameras"]:
        raise ValueError(
            f"{folder} holds no images, only what they are made of: "
            f"mesotron vla demos --render {folder} --out FOLDER"
        )
    paths = [shard_path(folder, number) for number in range(manifest["num_shards"])]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ValueError(
            f"{folder} is not finished, {len(missing)} of {len(paths)} shards are missing: "
            "give the command that made it once more"
        )
    shards = [read_shard(path) for path in paths]
    return join(shards, manifest["cameras"], world_of(manifest))


def join(shards: list[Arrays], cameras: list[str], world: WorldConfig) -> Demos:
    """Shards as one set: rows and texts are counted through."""
    full = [arrays for arrays in shards if len(arrays["action"])]
    texts = sorted({str(text) for arrays in full for text in arrays["tasks"]})
    place = {text: k for k, text in enumerate(texts)}
    first_rows = np.cumsum([0, *(len(arrays["action"]) for arrays in full[:-1])])

    def column(key: str) -> np.ndarray:
        return np.concatenate([arrays[key] for arrays in full])

    task_index = [
        np.array([place[str(text)] for text in arrays["tasks"]])[arrays["task_index"]]
        for arrays in full
    ]
    return Demos(
        images={camera: column(IMAGES + camera) for camera in cameras},
        state=column(STATE),
        task_index=np.concatenate(task_index),
        tasks=texts,
        start=np.concatenate([arrays["start"] + n for arrays, n in zip(full, first_rows)]),
        action=column("action"),
        episode_index=column("episode_index"),
        frame_index=column("frame_index"),
        where=column("where"),
        world=world,
    )

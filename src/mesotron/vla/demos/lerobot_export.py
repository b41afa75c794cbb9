"""Demonstrations as a LeRobotDataset v3.0: parquet files, images inside them, no video.

The layout is that of LeRobot (Cadene et al., github.com/huggingface/lerobot, v3.0); needs pyarrow
and pillow, not LeRobot itself. Single frames with a scattered hand are no episodes and stay behind.
"""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mesotron.runs.lines import write_json
from mesotron.vla.interface import IMAGES, STATE, Demos
from mesotron.vla.worlds import require

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VERSION = "v3.0"
CHUNK_FILES = 1000
FILE_FRAMES = 20_000
SCALARS = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64"}
SCALARS |= {"index": "int64", "task_index": "int64"}


def export_lerobot(demos: Demos, folder: Path) -> int:
    """Write the whole episodes of a set.

    Args:
        demos: with images or states.
        folder: must not exist yet.

    Returns:
        How many single frames were left out.
    """
    require("pyarrow", "lerobot")
    if folder.exists():
        raise ValueError(f"{folder} exists; give --lerobot a new name")
    rows = whole_episodes(demos)
    if not len(rows):
        raise ValueError("there is no whole episode among these demonstrations; make some")
    columns = make_columns(demos, rows)
    bounds = np.flatnonzero(np.diff(columns["episode_index"], prepend=-1, append=-1)).tolist()
    files = write_data(demos, rows, columns, bounds, folder)
    write_episodes(demos, columns, bounds, files, folder)
    write_tasks(demos.tasks, folder)
    write_json(folder / "meta/info.json", describe(demos, len(rows), len(bounds) - 1))
    write_json(folder / "meta/stats.json", statistics(demos, rows, columns))
    return len(demos) - len(rows)


def whole_episodes(demos: Demos) -> np.ndarray:
    """Observations whose episode was observed at every action, int (m,)."""
    actions = np.bincount(demos.episode_index)
    seen = np.bincount(demos.episode_index[demos.start], minlength=len(actions))
    return np.flatnonzero((seen == actions)[demos.episode_index[demos.start]])


def make_columns(demos: Demos, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Everything but images, episodes counted anew from 0."""
    start = demos.start[rows]
    frame = demos.frame_index[start]
    _, episode = np.unique(demos.episode_index[start], return_inverse=True)
    return {
        STATE: demos.state[rows].astype(np.float32),
        "action": demos.action[start].astype(np.float32),
        "timestamp": (frame / demos.fps).astype(np.float32),
        "frame_index": frame.astype(np.int64),
        "episode_index": episode.astype(np.int64),
        "index": np.arange(len(rows), dtype=np.int64),
        "task_index": demos.task_index[rows].astype(np.int64),
    }


def write_data(
    demos: Demos, rows: np.ndarray, columns: dict[str, np.ndarray], bounds: list[int], folder: Path
) -> list[int]:
    """Write frames, an episode to a row group; returns the number of each episode's file."""
    from pyarrow import parquet

    files: list[int] = []
    writer, number, written = None, -1, FILE_FRAMES
    for first, last in pairwise(bounds):
        if written >= FILE_FRAMES:
            if writer is not None:
                writer.close()
            writer, number, written = None, number + 1, 0
        table = make_table(demos, rows, columns, slice(first, last))
        if writer is None:
            writer = parquet.ParquetWriter(place(folder, DATA_PATH, number), table.schema)
        writer.write_table(table)
        written += last - first
        files.append(number)
    if writer is not None:
        writer.close()
    return files


def make_table(demos: Demos, rows: np.ndarray, columns: dict[str, np.ndarray], part: slice) -> Any:
    """Some frames as an arrow table."""
    import pyarrow as pa

    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    arrays: dict[str, Any] = {}
    for camera, images in demos.images.items():
        shown = [{"bytes": to_png(images[row]), "path": None} for row in rows[part]]
        arrays[IMAGES + camera] = pa.array(shown, image)
    for key, values in columns.items():
        some = values[part]
        flat = pa.array(some.ravel())
        arrays[key] = (
            flat if some.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, some.shape[1])
        )
    return pa.table(arrays)


def to_png(image: np.ndarray) -> bytes:
    """A uint8 image as a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png")
    return buffer.getvalue()


def place(folder: Path, template: str, number: int) -> Path:
    """The path of a numbered file, its folder made."""
    chunk, file = divmod(number, CHUNK_FILES)
    path = folder / template.format(chunk_index=chunk, file_index=file)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_episodes(
    demos: Demos,
    columns: dict[str, np.ndarray],
    bounds: list[int],
    files: list[int],
    folder: Path,
) -> None:
    """One row for each episode: its tasks, its length, where its frames are."""
    import pyarrow as pa
    from pyarrow import parquet

    pairs = list(pairwise(bounds))
    table = {
        "episode_index": list(range(len(pairs))),
        "tasks": [[demos.tasks[columns["task_index"][first]]] for first, _ in pairs],
        "length": [last - first for first, last in pairs],
        "dataset_from_index": [first for first, _ in pairs],
        "dataset_to_index": [last for _, last in pairs],
        "data/chunk_index": [file // CHUNK_FILES for file in files],
        "data/file_index": [file % CHUNK_FILES for file in files],
        "meta/episodes/chunk_index": [0] * len(pairs),
        "meta/episodes/file_index": [0] * len(pairs),
    }
    parquet.write_table(pa.table(table), place(folder, EPISODES_PATH, 0))


def write_tasks(tasks: list[str], folder: Path) -> None:
    """The instructions, as the index of a pandas table: that is how LeRobot reads them."""
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"task_index": list(range(len(tasks))), "task": tasks})
    kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": stored}
        for name, (kind, stored) in kinds.items()
    ]
    hint = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
    table = table.replace_schema_metadata({"pandas": json.dumps(hint)})
    parquet.write_table(table, folder / "meta/tasks.parquet")


def describe(demos: Demos, num_frames: int, num_episodes: int) -> dict[str, Any]:
    """The dataset's info.json."""
    features: dict[str, Any] = {
        IMAGES + camera: {
            "dtype": "image",
            "shape": list(images.shape[1:]),
            "names": ["height", "width", "channels"],
        }
        for camera, images in demos.images.items()
    }
    for key, values in ((STATE, demos.state), ("action", demos.action)):
        features[key] = {"dtype": "float32", "shape": [values.shape[1]], "names": None}
    features |= {key: {"dtype": kind, "shape": [1], "names": None} for key, kind in SCALARS.items()}
    return {
        "codebase_version": VERSION,
        "robot_type": demos.world.name if demos.world else None,
        "total_episodes": num_episodes,
        "total_frames": num_frames,
        "total_tasks": len(demos.tasks),
        "chunks_size": CHUNK_FILES,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 500,
        "fps": round(demos.fps),
        "splits": {"train": f"0:{num_episodes}"},
        "data_path": DATA_PATH,
        "video_path": None,
        "features": features,
    }


def statistics(
    demos: Demos, rows: np.ndarray, columns: dict[str, np.ndarray]
) -> dict[str, dict[str, Any]]:
    """Least, most, mean and deviation of every feature; of images for each colour, in 0..1."""
    found = {key: moments(values, axis=0) for key, values in columns.items()}
    for camera, images in demos.images.items():
        scaled = images[rows] / np.float32(255)
        of_colours = moments(scaled, axis=(0, 1, 2))
        found[IMAGES + camera] = {
            key: value if key == "count" else [[[number]] for number in value]
            for key, value in of_colours.items()
        }
    return found


def moments(values: np.ndarray, axis: int | tuple[int, ...]) -> dict[str, Any]:
    """What LeRobot keeps of a feature."""
    named = {"min": values.min, "max": values.max, "mean": values.mean, "std": values.std}
    found = {name: np.atleast_1d(of(axis=axis)).tolist() for name, of in named.items()}
    return found | {"count": [len(values)]}

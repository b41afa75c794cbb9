"""Read and write LeRobotDataset v3.0: parquet files, images inside them or as video.

Not by the package (github.com/huggingface/lerobot), which pins older versions of torch and numpy.
"""

import importlib.util
import io
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from mesotron.runs.files import read_json, write_json
from mesotron.vla.interface import IMAGES, STATE, Demos

VERSION = "v3.0"
OTHER_ERRORS = (pa.ArrowException, Image.DecompressionBombError)  # of damaged files
INFO = "meta/info.json"
TASKS = "meta/tasks.parquet"
STATS = "meta/stats.json"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
CHUNK_FILES = 1000
FILE_FRAMES = 20_000

Decoder = Callable[[Path], Iterable[tuple[float, np.ndarray]]]  # (seconds, image) in order


def load_lerobot(folder: Path, pixels: int | None = None) -> Demos:
    """Read a whole dataset into memory; larger images are shrunk to `pixels`."""
    info = read_json(folder / INFO, follow_links=True)
    check_readable(folder, info)

    paths = sorted((folder / "data").glob("*/*.parquet"))
    columns = _read_columns(paths)
    num = len(columns["action"])
    total = info["total_frames"]
    if num != total or not num:
        raise ValueError(f"{folder} has {num:,} of {total:,} frames: download it again")

    for key in (STATE, "action"):  # LeRobot stores vectors of one number as numbers
        columns[key] = columns[key].reshape(num, -1).astype(np.float32)

    images = {}
    for key, feature in info["features"].items():
        if not key.startswith(IMAGES):
            continue

        camera = key.removeprefix(IMAGES)
        if feature["dtype"] == "image":
            images[camera] = _read_images(paths, key, num, pixels)
        elif feature["dtype"] == "video":
            images[camera] = read_videos(folder, info, key, columns, pixels)

    texts = _read_tasks(folder)
    return Demos(
        images=images,
        state=columns[STATE],
        task_index=columns["task_index"],
        tasks=[texts[k] for k in range(1 + max(columns["task_index"]))],
        start=np.arange(num),
        action=columns["action"],
        episode_index=columns["episode_index"],
        frame_index=columns["frame_index"],
        fps=float(info["fps"]),
    )


def check_readable(folder: Path, info: dict[str, Any]) -> None:
    """Refuse a dataset of another version, without states or actions, or without a decoder."""
    version = info.get("codebase_version")
    features = info["features"]
    if version != VERSION:
        raise ValueError(f"{folder} is a LeRobotDataset {version}: convert it to {VERSION}")

    for key in (STATE, "action"):
        if key not in features:
            raise ValueError(f"{folder} has no {key}")

    has_video = any(feature["dtype"] == "video" for feature in features.values())
    if has_video and importlib.util.find_spec("av") is None:
        raise ValueError(f"{folder} stores images as video: pip install av")


def _read_columns(paths: list[Path]) -> dict[str, np.ndarray]:
    keys = [STATE, "action", "episode_index", "frame_index", "task_index"]
    parts: dict[str, list[np.ndarray]] = {key: [] for key in keys}
    for path in paths:
        table = parquet.read_table(path, columns=keys)
        for key in keys:
            parts[key].append(np.array(table[key].to_pylist()))

    columns = {}
    for key, arrays in parts.items():
        columns[key] = np.concatenate(arrays) if arrays else np.empty(0)

    return columns


def _read_tasks(folder: Path) -> dict[int, str]:
    """Number -> instruction."""
    table = parquet.read_table(folder / TASKS)

    # The text column is called "task", or is an unnamed index.
    name = next(name for name in table.column_names if name != "task_index")
    return dict(zip(table["task_index"].to_pylist(), table[name].to_pylist(), strict=True))


def _read_images(paths: list[Path], key: str, num: int, pixels: int | None) -> np.ndarray:
    def decoded() -> Iterator[np.ndarray]:
        for path in paths:
            for batch in parquet.ParquetFile(path).iter_batches(batch_size=256, columns=[key]):
                for cell in batch[key].to_pylist():
                    image = Image.open(io.BytesIO(cell["bytes"]))
                    yield _shrink(image.convert("RGB"), pixels)

    return _collect(enumerate(decoded()), num)


def _shrink(image: Any, pixels: int | None) -> np.ndarray:
    if pixels is not None and max(image.size) > pixels:
        image = image.resize((pixels, pixels))

    return np.asarray(image, np.uint8)


def _collect(images: Iterable[tuple[int, np.ndarray]], num: int) -> np.ndarray:
    """Images by row as one array, (N, H, W, 3), without holding all of them twice."""
    stacked = np.empty((num, 0, 0, 3), np.uint8)
    for row, image in images:
        if not stacked.size:
            stacked = np.empty((num, *image.shape), np.uint8)
        stacked[row] = image

    return stacked


def _decode_video(path: Path) -> Iterator[tuple[float, np.ndarray]]:
    import av

    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield float(frame.time or 0.0), frame.to_ndarray(format="rgb24")


def read_videos(
    folder: Path,
    info: dict[str, Any],
    key: str,
    columns: dict[str, np.ndarray],
    pixels: int | None,
    decode: Decoder = _decode_video,
) -> np.ndarray:
    """The frames of a camera stored as video, in the order of the rows, uint8 (N, H, W, 3)."""
    rows_by_file = _rows_of_videos(folder, info, key, columns)
    fps = info["fps"]
    seen: set[int] = set()

    def frames() -> Iterator[tuple[int, np.ndarray]]:
        for path, rows in sorted(rows_by_file.items()):
            for seconds, image in decode(path):
                row = rows.get(round(seconds * fps))
                if row is not None:
                    seen.add(row)
                    yield row, _shrink(Image.fromarray(image), pixels)

    images = _collect(frames(), len(columns["episode_index"]))
    missing = len(images) - len(seen)
    if missing:
        raise ValueError(f"{folder}: {missing:,} frames of {key} are not in its video files")

    return images


def _rows_of_videos(
    folder: Path, info: dict[str, Any], key: str, columns: dict[str, np.ndarray]
) -> dict[Path, dict[int, int]]:
    """File -> number of a frame in it -> row of the dataset."""
    rows_by_file: dict[Path, dict[int, int]] = {}
    place = f"videos/{key}"
    wanted = [
        "episode_index",
        f"{place}/chunk_index",
        f"{place}/file_index",
        f"{place}/from_timestamp",
    ]
    for path in sorted((folder / "meta/episodes").glob("*/*.parquet")):
        for record in parquet.read_table(path, columns=wanted).to_pylist():
            episode, chunk, number, begin = (record[name] for name in wanted)
            file = info["video_path"].format(video_key=key, chunk_index=chunk, file_index=number)
            rows = rows_by_file.setdefault(folder / file, {})

            first = round(begin * info["fps"])
            for row in np.flatnonzero(columns["episode_index"] == episode):
                rows[first + int(columns["frame_index"][row])] = int(row)

    return rows_by_file


def export_lerobot(demos: Demos, folder: Path) -> int:
    """Write the whole episodes to a new folder; returns how many single frames are left out."""
    if folder.exists():
        raise ValueError(f"--lerobot {folder} already exists")

    # Episodes that were observed at every action.
    actions = np.bincount(demos.episode_index)
    observed = np.bincount(demos.episode_index[demos.start], minlength=len(actions))
    rows = np.flatnonzero((observed == actions)[demos.episode_index[demos.start]])
    if not len(rows):
        raise ValueError("--lerobot needs whole episodes: make some with --episodes")

    start = demos.start[rows]
    frame = demos.frame_index[start]
    episode = np.unique(demos.episode_index[start], return_inverse=True)[1]

    columns = {
        STATE: demos.state[rows].astype(np.float32),
        "action": demos.action[start].astype(np.float32),
        "timestamp": (frame / demos.fps).astype(np.float32),
        "frame_index": frame.astype(np.int64),
        "episode_index": episode.astype(np.int64),
        "index": np.arange(len(rows), dtype=np.int64),
        "task_index": demos.task_index[rows].astype(np.int64),
    }

    bounds = np.flatnonzero(np.diff(episode, prepend=-1, append=-1)).tolist()
    files = _write_frames(demos, rows, columns, bounds, folder)
    _write_episodes(demos, columns, bounds, files, folder)
    _write_tasks(demos, folder)
    write_json(folder / INFO, _describe(demos, columns, len(bounds) - 1))
    stats = {key: moments(values, axis=0) for key, values in columns.items()}
    for camera, images in demos.images.items():  # by channel, in 0..1
        channels = np.moveaxis(images[rows], -1, 1) / np.float32(255)
        stats[IMAGES + camera] = moments(channels, axis=(0, 2, 3))

    write_json(folder / STATS, stats)
    return len(demos) - len(rows)


def _write_frames(
    demos: Demos, rows: np.ndarray, columns: dict[str, np.ndarray], bounds: list[int], folder: Path
) -> list[int]:
    """Write one row group per episode; returns the file number of each episode."""
    files: list[int] = []
    writer = None
    number = -1

    written = FILE_FRAMES
    for first, last in pairwise(bounds):
        table = _make_table(demos, rows, columns, slice(first, last))
        if writer is None or written >= FILE_FRAMES:
            if writer is not None:
                writer.close()

            number += 1
            written = 0
            writer = parquet.ParquetWriter(_file_path(folder, DATA_PATH, number), table.schema)

        writer.write_table(table)
        written += last - first
        files.append(number)

    if writer is not None:
        writer.close()

    return files


def _make_table(demos: Demos, rows: np.ndarray, columns: dict[str, np.ndarray], part: slice) -> Any:
    def to_png(image: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "png")
        return buffer.getvalue()

    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    arrays: dict[str, Any] = {}
    for camera, images in demos.images.items():
        cells = [{"bytes": to_png(images[row]), "path": None} for row in rows[part]]
        arrays[IMAGES + camera] = pa.array(cells, image_type)

    for key, values in columns.items():
        array = pa.array(values[part].ravel())
        if values.ndim > 1:
            array = pa.FixedSizeListArray.from_arrays(array, values.shape[1])
        arrays[key] = array

    return pa.table(arrays)


def _file_path(folder: Path, template: str, number: int) -> Path:
    chunk, file = divmod(number, CHUNK_FILES)
    path = folder / template.format(chunk_index=chunk, file_index=file)
    path.parent.mkdir(parents=True, exist_ok=True)

    return path


def _write_episodes(
    demos: Demos, columns: dict[str, np.ndarray], bounds: list[int], files: list[int], folder: Path
) -> None:
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

    parquet.write_table(pa.table(table), _file_path(folder, EPISODES_PATH, 0))


def _write_tasks(demos: Demos, folder: Path) -> None:
    """The instructions as the index of a pandas table, as LeRobot reads them."""
    tasks = pa.table({"task_index": list(range(len(demos.tasks))), "task": demos.tasks})
    described = []
    for name, kind, stored in (("task_index", "int64", "int64"), ("task", "unicode", "object")):
        column = {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": stored}
        described.append(column)

    metadata = {"index_columns": ["task"], "column_indexes": [], "columns": described}
    tasks = tasks.replace_schema_metadata({"pandas": json.dumps(metadata)})
    parquet.write_table(tasks, folder / TASKS)


def _describe(demos: Demos, columns: dict[str, np.ndarray], num_episodes: int) -> dict[str, Any]:
    features: dict[str, Any] = {}
    names = ["height", "width", "channels"]
    for camera, images in demos.images.items():
        features[IMAGES + camera] = {
            "dtype": "image",
            "shape": [*images.shape[1:]],
            "names": names,
        }

    for key, values in columns.items():
        shape = list(values.shape[1:]) or [1]
        features[key] = {"dtype": str(values.dtype), "shape": shape, "names": None}

    return {
        "codebase_version": VERSION,
        "robot_type": demos.world.name if demos.world else None,
        "total_episodes": num_episodes,
        "total_frames": len(columns["index"]),
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


def moments(values: np.ndarray, axis: int | tuple[int, ...]) -> dict[str, Any]:
    """The statistics LeRobot keeps of a feature."""
    kept: Any = {"axis": axis, "keepdims": True}
    arrays = {
        "min": values.min(**kept),
        "max": values.max(**kept),
        "mean": values.mean(dtype=float, **kept),  # sums of many pixels
        "std": values.std(dtype=float, **kept),
    }

    stats = {name: np.atleast_1d(array[0]).tolist() for name, array in arrays.items()}
    stats["count"] = [len(values)]

    return stats

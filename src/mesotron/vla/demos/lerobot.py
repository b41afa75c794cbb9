"""Read any LeRobotDataset v3.0 from disk as `Demos`: images in parquet, or video if av is there.

LIBERO, as LeRobot publishes it, comes in by this door. Needs pyarrow and pillow, not LeRobot.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mesotron.vla.demos.lerobot_export import VERSION
from mesotron.vla.interface import IMAGES, STATE, Demos
from mesotron.vla.worlds import require

INFO = "meta/info.json"
Video = Callable[[Path], Iterable[tuple[float, np.ndarray]]]
"""A video file to (seconds, uint8 (H, W, 3)), in order."""


def is_lerobot(folder: Path) -> bool:
    """Whether a folder looks like a LeRobotDataset."""
    return (folder / INFO).is_file()


def load_lerobot(folder: Path, pixels: int | None = None) -> Demos:
    """Read a whole dataset into memory.

    Args:
        folder: of the dataset, with meta/info.json.
        pixels: images that are larger are shrunk to this width and height; as they are if None.

    Raises:
        ValueError: another version, no state or action, or a package is missing.
    """
    require("pyarrow", "lerobot")
    info = json.loads((folder / INFO).read_text())
    check(folder, info)
    columns = read_columns(folder, info)
    images = {}
    for key, feature in info["features"].items():
        if key.startswith(IMAGES) and feature["dtype"] == "image":
            num = info["total_frames"]
            images[key.removeprefix(IMAGES)] = decode_images(folder, key, num, pixels)
        elif key.startswith(IMAGES) and feature["dtype"] == "video":
            images[key.removeprefix(IMAGES)] = read_videos(folder, info, key, columns, pixels)
    texts = read_tasks(folder)
    return Demos(
        images=images,
        state=columns[STATE].astype(np.float32),
        task_index=columns["task_index"],
        tasks=texts,
        start=np.arange(len(columns["action"])),
        action=columns["action"].astype(np.float32),
        episode_index=columns["episode_index"],
        frame_index=columns["frame_index"],
        fps=float(info["fps"]),
    )


def check(folder: Path, info: dict[str, Any]) -> None:
    """Refuse what cannot be read, in a sentence."""
    version = info.get("codebase_version")
    if version != VERSION:
        raise ValueError(
            f"{folder} is a LeRobotDataset {version}, and {VERSION} is read here: "
            "convert it with LeRobot's own script"
        )
    missing = [key for key in (STATE, "action") if key not in info["features"]]
    if missing:
        raise ValueError(f"{folder} has no {missing[0]}, which a policy is trained on")
    kinds = {feature["dtype"] for feature in info["features"].values()}
    if "video" in kinds and importlib.util.find_spec("av") is None:
        raise ValueError(f"{folder} keeps its images as video, which av reads: pip install av")


def data_files(folder: Path) -> list[Path]:
    """The parquet files of frames, in order."""
    return sorted((folder / "data").glob("*/*.parquet"))


def read_columns(folder: Path, info: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every feature that is not an image; rows in the order of the files."""
    from pyarrow import parquet

    keys = [STATE, "action", "episode_index", "frame_index", "task_index"]
    tables = [parquet.read_table(path, columns=keys) for path in data_files(folder)]
    found = sum(len(table) for table in tables)
    if found != info["total_frames"]:
        raise ValueError(
            f"{folder} holds {found:,} of {info['total_frames']:,} frames; fetch it once more"
        )
    return {
        key: np.concatenate([np.array(table[key].to_pylist()) for table in tables]) for key in keys
    }


def read_tasks(folder: Path) -> list[str]:
    """Instructions by their index; the column of texts is named task, or not at all."""
    from pyarrow import parquet

    table = parquet.read_table(folder / "meta/tasks.parquet")
    column = next(name for name in table.column_names if name != "task_index")
    texts = dict(zip(table["task_index"].to_pylist(), table[column].to_pylist(), strict=True))
    return [texts[k] for k in range(len(texts))]


def decode_images(folder: Path, key: str, num: int, pixels: int | None) -> np.ndarray:
    """The `num` images inside the parquet files, uint8 (N, H, W, 3)."""
    from pyarrow import parquet

    batches = (
        batch[key].to_pylist()
        for path in data_files(folder)
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=256, columns=[key])
    )
    images = (open_image(cell["bytes"], pixels) for cells in batches for cell in cells)
    return fill(enumerate(images), num)


def fill(images: Iterable[tuple[int, np.ndarray]], num: int) -> np.ndarray:
    """Images by row as one array, (N, H, W, 3); they are never all in memory twice."""
    found = np.empty((num, 0, 0, 3), np.uint8)
    for row, image in images:
        if not found.size:
            found = np.empty((num, *image.shape), np.uint8)
        found[row] = image
    return found


def open_image(data: bytes, pixels: int | None) -> np.ndarray:
    """An image file as uint8 (H, W, 3)."""
    from PIL import Image

    return shrink(Image.open(io.BytesIO(data)).convert("RGB"), pixels)


def shrink(image: Any, pixels: int | None) -> np.ndarray:
    """A pillow image as an array, made smaller if it is too large."""
    fits = pixels is None or max(image.size) <= pixels
    return np.asarray(image if fits else image.resize((pixels, pixels)), np.uint8)


def read_video(path: Path) -> Iterator[tuple[float, np.ndarray]]:
    """Decode a video file with av."""
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
    video: Video = read_video,
) -> np.ndarray:
    """The frames of a camera that is kept as video, in the order of the rows.

    An episode is a stretch of a file: it begins at `from_timestamp`, and each row is one frame.
    """
    rows = list_episodes(folder)
    wanted: dict[Path, dict[int, int]] = {}
    for episode, file, begin in episode_videos(rows, info, key):
        mine = np.flatnonzero(columns["episode_index"] == episode)
        first = round(begin * info["fps"])
        places = wanted.setdefault(folder / file, {})
        places |= {first + int(columns["frame_index"][row]): int(row) for row in mine}
    seen: set[int] = set()

    def picked() -> Iterator[tuple[int, np.ndarray]]:
        for path, places in sorted(wanted.items()):
            for row, image in pick_frames(video(path), places, info["fps"], pixels):
                seen.add(row)
                yield row, image

    images = fill(picked(), len(columns["episode_index"]))
    missing = len(images) - len(seen)
    if missing:
        raise ValueError(f"{folder}: {missing:,} frames of {key} are not in its video files")
    return images


def pick_frames(
    frames: Iterable[tuple[float, np.ndarray]],
    places: dict[int, int],
    fps: float,
    pixels: int | None,
) -> Iterator[tuple[int, np.ndarray]]:
    """The frames of a file that rows want, with their rows. `places` is frame number to row."""
    from PIL import Image

    for seconds, image in frames:
        row = places.get(round(seconds * fps))
        if row is not None:
            yield row, shrink(Image.fromarray(image), pixels)


def list_episodes(folder: Path) -> list[dict[str, Any]]:
    """The rows of meta/episodes, without their statistics."""
    from pyarrow import parquet

    rows: list[dict[str, Any]] = []
    for path in sorted((folder / "meta/episodes").glob("*/*.parquet")):
        names = parquet.read_schema(path).names
        kept = [name for name in names if not name.startswith("stats/")]
        rows += parquet.read_table(path, columns=kept).to_pylist()
    return rows


def episode_videos(
    rows: list[dict[str, Any]], info: dict[str, Any], key: str
) -> Iterator[tuple[int, str, float]]:
    """Episode, its video file and the second at which it begins there."""
    for row in rows:
        chunk, file = row[f"videos/{key}/chunk_index"], row[f"videos/{key}/file_index"]
        name = info["video_path"].format(video_key=key, chunk_index=chunk, file_index=file)
        yield row["episode_index"], name, row[f"videos/{key}/from_timestamp"]

"""LeRobotDataset v3.0: round trip, reading by other libraries, video, refusals."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from mesotron.config import DemosConfig, WorldConfig
from mesotron.vla import lerobot
from mesotron.vla.demos import load_demos, make_demos
from mesotron.vla.interface import Demos
from mesotron.vla.lerobot import export_lerobot, read_videos

WORLD = WorldConfig(name="object10", pixels=16, wrist=True)
FRONT = "observation.images.front"


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Demos:
    out = tmp_path_factory.mktemp("demos") / "ours"
    return make_demos(
        DemosConfig(
            out=out,
            episodes=4,
            starts=6,
            workers=1,
            world=WORLD,
        ),
        log=None,
    )


@pytest.fixture(scope="module")
def exported(demos, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lerobot") / "theirs"
    assert export_lerobot(demos, folder) == 6
    return folder


@pytest.fixture(scope="module")
def loaded(exported) -> Demos:
    return load_demos(exported)


def read_info(folder: Path) -> dict:
    return json.loads((folder / "meta/info.json").read_text())


def test_round_trip_keeps_everything_but_single_frames(demos, loaded):
    whole = demos.episode_index[demos.start] < 4
    np.testing.assert_array_equal(loaded.state, demos.state[whole])
    np.testing.assert_array_equal(loaded.action, demos.action[demos.start[whole]])

    for camera, images in demos.images.items():
        np.testing.assert_array_equal(loaded.images[camera], images[whole])

    texts = [demos.tasks[k] for k in demos.task_index[whole]]
    assert [loaded.tasks[k] for k in loaded.task_index] == texts
    assert loaded.fps == demos.fps
    assert loaded.where is None

    ours = demos.chunks(np.flatnonzero(whole), 5)
    theirs = loaded.chunks(np.arange(len(loaded)), 5)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[1], theirs[1])


def test_datasets_and_pandas_read_the_files(exported, loaded, tmp_path):
    datasets = pytest.importorskip("datasets")
    pandas = pytest.importorskip("pandas")

    # The features that LeRobot derives from info.json and passes to `datasets`.
    info = read_info(exported)
    features = {}
    for key, feature in info["features"].items():
        if feature["dtype"] == "image":
            features[key] = datasets.Image()
            continue

        value = datasets.Value(feature["dtype"])
        length = feature["shape"][0]
        features[key] = value if length == 1 else datasets.Sequence(value, length=length)

    paths = [str(path) for path in sorted(exported.glob("data/*/*.parquet"))]
    table = datasets.Dataset.from_parquet(
        paths, features=datasets.Features(features), cache_dir=str(tmp_path)
    )
    assert len(table) == info["total_frames"]

    image = np.asarray(table[7]["observation.images.wrist"])
    np.testing.assert_array_equal(image, loaded.images["wrist"][7])
    assert table[7]["timestamp"] == pytest.approx(7 / 20)

    tasks = pandas.read_parquet(exported / "meta/tasks.parquet")
    assert tasks.index.name == "task"
    assert tasks.loc[loaded.tasks[2]].task_index == 2


def test_episodes_locate_their_frames_and_statistics_match(exported, loaded):
    rows = parquet.read_table(next(exported.glob("meta/episodes/*/*.parquet"))).to_pylist()
    info = read_info(exported)
    assert len(rows) == info["total_episodes"] == 4
    assert rows[0]["dataset_from_index"] == 0
    assert rows[-1]["dataset_to_index"] == info["total_frames"]

    for row in rows:
        chunk = row["data/chunk_index"]
        file = row["data/file_index"]
        path = exported / info["data_path"].format(chunk_index=chunk, file_index=file)
        frames = parquet.read_table(path, columns=["episode_index", "index"]).to_pylist()
        own = []
        for frame in frames:
            if frame["episode_index"] == row["episode_index"]:
                own.append(frame["index"])

        assert len(own) == row["length"]
        assert own[0] == row["dataset_from_index"]

    stats = json.loads((exported / "meta/stats.json").read_text())
    np.testing.assert_allclose(stats["action"]["mean"], loaded.action.mean(axis=0), rtol=1e-5)
    assert stats["action"]["count"] == [len(loaded)]

    std = (loaded.images["front"] / 255).std(axis=(0, 1, 2))
    np.testing.assert_allclose(stats[FRONT]["std"], std[:, None, None], rtol=1e-3)
    many = np.moveaxis(np.full((16, 256, 256, 3), 127 / 255, np.float32), -1, 1)

    assert lerobot.moments(many, (0, 2, 3))["mean"][0][0] == pytest.approx([127 / 255])


def test_large_sets_are_split_and_large_images_shrunk(demos, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(lerobot, "FILE_FRAMES", 30)
    export_lerobot(demos, tmp_path / "split")
    assert len(list((tmp_path / "split").glob("data/*/*.parquet"))) == 2

    loaded = load_demos(tmp_path / "split")
    np.testing.assert_array_equal(loaded.action, demos.action[: len(loaded)])

    for pixels, kept in ((8, 8), (64, 16)):
        assert load_demos(exported, pixels=pixels).images["front"].shape[1:] == (kept, kept, 3)


def test_video_frames_follow_the_order_of_the_rows(exported, loaded, tmp_path, monkeypatch):
    # The metadata of the dataset with its front camera declared as video.
    (tmp_path / "meta/episodes/chunk-000").mkdir(parents=True)
    info = read_info(exported)
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    info["features"][FRONT]["dtype"] = "video"
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    table = parquet.read_table(next(exported.glob("meta/episodes/*/*.parquet")))
    starts = [row / info["fps"] for row in table["dataset_from_index"].to_pylist()]
    zeros = [0] * len(table)

    added = {
        "chunk_index": zeros,
        "file_index": zeros,
        "from_timestamp": starts,
    }
    for name, values in added.items():
        table = table.append_column(f"videos/{FRONT}/{name}", pa.array(values))

    parquet.write_table(table, tmp_path / "meta/episodes/chunk-000/file-000.parquet")
    images = loaded.images["front"]
    shuffled = np.random.default_rng(0).permutation(len(loaded))
    columns = {name: getattr(loaded, name)[shuffled] for name in ("episode_index", "frame_index")}

    def decode(path):
        assert path.name == "file-000.mp4"
        for number, image in enumerate(images):
            yield number / 20 + 1e-4, image

    frames = read_videos(
        tmp_path,
        info,
        FRONT,
        columns,
        None,
        decode,
    )

    np.testing.assert_array_equal(frames, images[shuffled])
    with pytest.raises(ValueError, match=f"1 frames of {FRONT}"):
        read_videos(
            tmp_path,
            info,
            FRONT,
            columns,
            None,
            lambda path: list(decode(path))[1:],
        )

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "av" or None)
    with pytest.raises(ValueError, match="install av"):
        load_demos(tmp_path)


def test_unreadable_datasets_and_invalid_exports_are_refused(demos, exported, tmp_path):
    (tmp_path / "meta").mkdir()
    (tmp_path / "data").symlink_to(exported / "data")

    for change, keyword in (
        ({"codebase_version": "v2.1"}, "v2.1"),
        ({"total_frames": 10**6}, "1,000,000 frames"),
        ({"features": {"action": {"dtype": "float32"}}}, "observation.state"),
    ):
        (tmp_path / "meta/info.json").write_text(json.dumps(read_info(exported) | change))
        with pytest.raises(ValueError, match=keyword):
            load_demos(tmp_path)

    with pytest.raises(ValueError, match="exists"):
        export_lerobot(demos, exported)

    single = demos.episode_index[demos.start] >= 4
    with pytest.raises(ValueError, match="--episodes"):
        export_lerobot(replace(demos, start=demos.start[single]), tmp_path / "none")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("action", 0.5, None),
        ("action", np.nan, "NaN"),
        ("action", None, "damaged"),
        ("task_index", 99, "damaged"),
    ],
)
def test_columns_of_single_numbers_and_damaged_ones(exported, tmp_path, column, value, message):
    shutil.copytree(exported, tmp_path / "one")
    (path,) = (tmp_path / "one/data").glob("*/*.parquet")

    table = parquet.read_table(path).drop_columns([column])
    if value is not None:
        table = table.append_column(column, pa.array([value] * len(table)))

    parquet.write_table(table, path)
    if message is None:
        assert load_demos(tmp_path / "one").action.shape == (len(table), 1)
    else:
        with pytest.raises(ValueError, match=message):
            load_demos(tmp_path / "one")


def test_an_image_that_claims_too_many_pixels_is_one_sentence(exported, monkeypatch):
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 1)
    with pytest.raises(ValueError, match=r"damaged.*pixels"):
        load_demos(exported)

"""LeRobotDataset v3.0: what we write others read, and what others write we read."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from mesotron.config import DemosConfig, WorldConfig
from mesotron.vla.demos import load_demos, make_demos
from mesotron.vla.demos.lerobot import read_videos
from mesotron.vla.demos.lerobot_export import export_lerobot, moments
from mesotron.vla.interface import Demos

WORLD = WorldConfig(name="object10", pixels=16, wrist=True)


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Demos:
    out = tmp_path_factory.mktemp("demos") / "ours"
    return make_demos(DemosConfig(out=out, episodes=4, starts=6, workers=1, world=WORLD), say=None)


@pytest.fixture(scope="module")
def exported(demos, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lerobot") / "theirs"
    assert export_lerobot(demos, folder) == 6
    return folder


def test_a_round_trip_keeps_everything_but_single_frames(demos, exported):
    again = load_demos(exported)
    whole = demos.episode_index[demos.start] < 4
    np.testing.assert_array_equal(again.state, demos.state[whole])
    np.testing.assert_array_equal(again.action, demos.action[demos.start[whole]])
    for camera, images in demos.images.items():
        np.testing.assert_array_equal(again.images[camera], images[whole])
    texts = [demos.tasks[k] for k in demos.task_index[whole]]
    assert [again.tasks[k] for k in again.task_index] == texts
    assert again.fps == demos.fps
    assert again.where is None
    actions, real = again.chunks(np.arange(len(again)), 5)
    mine, ours = demos.chunks(np.flatnonzero(whole), 5)
    np.testing.assert_array_equal(actions, mine)
    np.testing.assert_array_equal(real, ours)


def test_hugging_face_datasets_read_the_frames(exported, tmp_path):
    """With the features that LeRobot derives from info.json, which it passes on to `datasets`."""
    datasets = pytest.importorskip("datasets")
    info = json.loads((exported / "meta/info.json").read_text())
    features = {}
    for key, feature in info["features"].items():
        if feature["dtype"] == "image":
            features[key] = datasets.Image()
        elif feature["shape"] == [1]:
            features[key] = datasets.Value(feature["dtype"])
        else:
            value = datasets.Value(feature["dtype"])
            features[key] = datasets.Sequence(value, length=feature["shape"][0])
    paths = [str(path) for path in sorted(exported.glob("data/*/*.parquet"))]
    table = datasets.Dataset.from_parquet(
        paths, features=datasets.Features(features), cache_dir=str(tmp_path)
    )
    assert len(table) == info["total_frames"]
    ours = load_demos(exported)
    np.testing.assert_array_equal(
        np.asarray(table[7]["observation.images.wrist"]), ours.images["wrist"][7]
    )
    assert table[7]["timestamp"] == pytest.approx(7 / 20)


def test_pandas_reads_the_tasks_as_an_index(exported):
    pandas = pytest.importorskip("pandas")
    tasks = pandas.read_parquet(exported / "meta/tasks.parquet")
    assert tasks.index.name == "task"
    ours = load_demos(exported)
    assert tasks.loc[ours.tasks[2]].task_index == 2


def test_episodes_say_where_their_frames_are(exported):
    rows = parquet.read_table(next(exported.glob("meta/episodes/*/*.parquet"))).to_pylist()
    info = json.loads((exported / "meta/info.json").read_text())
    assert len(rows) == info["total_episodes"] == 4
    assert rows[0]["dataset_from_index"] == 0
    assert rows[-1]["dataset_to_index"] == info["total_frames"]
    for row in rows:
        path = info["data_path"].format(
            chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]
        )
        frames = parquet.read_table(exported / path, columns=["episode_index", "index"])
        mine = frames.filter(pa.compute.equal(frames["episode_index"], row["episode_index"]))
        assert len(mine) == row["length"]
        assert mine["index"].to_pylist()[0] == row["dataset_from_index"]


def test_many_episodes_go_to_several_files(demos, tmp_path, monkeypatch):
    from mesotron.vla.demos import lerobot_export

    monkeypatch.setattr(lerobot_export, "FILE_FRAMES", 30)
    export_lerobot(demos, tmp_path / "split")
    assert len(list((tmp_path / "split").glob("data/*/*.parquet"))) == 2
    again = load_demos(tmp_path / "split")
    np.testing.assert_array_equal(again.action, demos.action[: len(again)])


def test_statistics_are_those_of_numpy(demos, exported):
    stats = json.loads((exported / "meta/stats.json").read_text())
    ours = load_demos(exported)
    np.testing.assert_allclose(stats["action"]["mean"], ours.action.mean(axis=0), rtol=1e-5)
    image = np.array(stats["observation.images.front"]["std"])
    assert image.shape == (3, 1, 1)
    expected = (ours.images["front"] / 255).std(axis=(0, 1, 2))
    np.testing.assert_allclose(image.ravel(), expected, rtol=1e-3)
    assert moments(np.arange(3.0), axis=0)["count"] == [3]


def test_images_are_made_smaller_on_the_way_in(exported):
    assert load_demos(exported, pixels=8).images["front"].shape[1:] == (8, 8, 3)
    assert load_demos(exported, pixels=64).images["front"].shape[1:] == (16, 16, 3)


def as_video(folder: Path, copy: Path) -> np.ndarray:
    """The dataset with its front camera declared as video; returns the frames of one file."""
    images = load_demos(folder).images["front"]
    (copy / "meta/episodes/chunk-000").mkdir(parents=True)
    info = json.loads((folder / "meta/info.json").read_text())
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    info["features"]["observation.images.front"]["dtype"] = "video"
    (copy / "meta/info.json").write_text(json.dumps(info))
    table = parquet.read_table(next(folder.glob("meta/episodes/*/*.parquet")))
    begins = [row / info["fps"] for row in table["dataset_from_index"].to_pylist()]
    key = "videos/observation.images.front"
    for name, values in (
        ("chunk_index", [0] * len(table)),
        ("file_index", [0] * len(table)),
        ("from_timestamp", begins),
    ):
        table = table.append_column(f"{key}/{name}", pa.array(values))
    parquet.write_table(table, copy / "meta/episodes/chunk-000/file-000.parquet")
    return images


def test_frames_of_a_video_come_back_in_the_order_of_the_rows(exported, tmp_path):
    images = as_video(exported, tmp_path)
    info = json.loads((tmp_path / "meta/info.json").read_text())
    ours = load_demos(exported)
    shuffled = np.random.default_rng(0).permutation(len(ours))
    columns = {
        "episode_index": ours.episode_index[shuffled],
        "frame_index": ours.frame_index[shuffled],
    }

    def decode(path):
        assert path.name == "file-000.mp4"
        for number, image in enumerate(images):
            yield number / 20 + 1e-4, image

    key = "observation.images.front"
    found = read_videos(tmp_path, info, key, columns, None, video=decode)
    np.testing.assert_array_equal(found, images[shuffled])
    with pytest.raises(ValueError, match=r"1 frames of observation.images.front are not in"):
        read_videos(tmp_path, info, key, columns, None, video=lambda path: list(decode(path))[1:])


def test_a_video_without_av_is_a_sentence(exported, tmp_path, monkeypatch):
    as_video(exported, tmp_path)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "av" else real(name)
    )
    with pytest.raises(ValueError, match="keeps its images as video, which av reads"):
        load_demos(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"codebase_version": "v2.1"}, r"LeRobotDataset v2.1, and v3.0 is read here"),
        ({"total_frames": 10**6}, "of 1,000,000 frames; fetch it once more"),
        ({"features": {"action": {"dtype": "float32"}}}, "has no observation.state"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(exported, tmp_path, change, sentence):
    info = json.loads((exported / "meta/info.json").read_text()) | change
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    (tmp_path / "data").symlink_to(exported / "data")
    with pytest.raises(ValueError, match=sentence):
        load_demos(tmp_path)


def test_what_cannot_be_written_is_a_sentence(demos, exported, tmp_path):
    with pytest.raises(ValueError, match="exists; give --lerobot a new name"):
        export_lerobot(demos, exported)
    single = demos.episode_index[demos.start] >= 4
    only = replace(demos, start=demos.start[single])
    with pytest.raises(ValueError, match="no whole episode"):
        export_lerobot(only, tmp_path / "none")

"""Demonstrations: recording, shards, continuing an interrupted run, refusals."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mesotron import cli
from mesotron.config import DemosConfig, WorldConfig
from mesotron.vla import demos as demos_module
from mesotron.vla.demos import (
    DemoSpec,
    load_demos,
    make_demos,
    plan_demos,
    record,
    render_demos,
    shard_path,
    write_demos,
)
from mesotron.vla.interface import EVAL_SEED, Demos
from mesotron.vla.worlds import build_world

CONFIG = DemosConfig(
    episodes=4, starts=6, workers=1, world=WorldConfig(name="object10", pixels=16, wrist=True)
)

QUICK = ["--steps", "1", "--episodes", "0", "--policy.size", "ci", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("demos") / "demos"
    write_demos(replace(CONFIG, out=path), log=None)
    return path


@pytest.fixture(scope="module")
def demos(folder) -> Demos:
    return load_demos(folder)


def assert_same_shards(one: Path, two: Path) -> None:
    paths = [sorted(path.glob("shard-*.npz")) for path in (one, two)]
    for a, b in zip(*paths, strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_arrays_and_chunks(demos):
    m, n = len(demos), len(demos.action)
    assert (demos.state.shape, demos.where.shape) == ((m, 4), (m, 3))
    shapes = {camera: images.shape for camera, images in demos.images.items()}
    assert shapes == dict.fromkeys(("front", "wrist"), (m, 16, 16, 3))
    assert demos.action.dtype == np.float32
    assert np.abs(demos.action).max() <= 1
    assert len(demos.episode_index) == len(demos.frame_index) == n
    assert len(np.unique(demos.episode_index)) == 10
    assert demos.task_index.max() == len(demos.tasks) - 1
    # A single frame is observed once, at the start of its actions.
    singles = demos.episode_index[demos.start] >= 4
    assert singles.sum() == 6
    assert (demos.frame_index[demos.start][singles] == 0).all()
    assert n - m == 6 * (CONFIG.horizon - 1)
    # Chunks end with their episode.
    actions, real = demos.chunks(np.arange(m), 8)
    assert actions.shape == (m, 8, 4)
    for row, start in enumerate(demos.start):
        length = int(real[row].sum())
        np.testing.assert_array_equal(actions[row, :length], demos.action[start : start + length])
        episodes = demos.episode_index[start : start + 8]
        assert length == (episodes == episodes[0]).sum()
        assert (actions[row, length:] == actions[row, length - 1]).all()


def test_recorded_actions_are_the_experts(demos):
    world = build_world(CONFIG.world)
    recording = record(world, DemoSpec(0, 0), CONFIG.noise, CONFIG.horizon)
    count = len(recording.actions)
    np.testing.assert_array_equal(demos.action[:count], np.stack(recording.actions))
    world.reset(0, 0)
    for qpos, action in zip(recording.qpos, recording.actions, strict=True):
        world.show(qpos)
        np.testing.assert_allclose(world.expert(), action, atol=2e-3)


def test_every_keeps_all_actions(demos, tmp_path):
    sparse = make_demos(replace(CONFIG, out=tmp_path / "sparse", every=3), log=None)
    np.testing.assert_array_equal(sparse.action, demos.action)
    np.testing.assert_array_equal(sparse.episode_index, demos.episode_index)
    rows = np.flatnonzero(demos.frame_index[demos.start] % 3 == 0)
    np.testing.assert_array_equal(sparse.start, demos.start[rows])
    np.testing.assert_array_equal(sparse.images["front"], demos.images["front"][rows])


def test_noise_moves_the_hand_but_not_the_labels():
    world = build_world(WorldConfig(name="blocks_state"))
    clean, noisy = (record(world, DemoSpec(1, 0), noise, 8) for noise in (0.0, 0.3))
    np.testing.assert_array_equal(clean.actions[0], noisy.actions[0])
    assert not np.allclose(clean.actions[1], noisy.actions[1])
    assert (clean.success, noisy.success) == (True, True)


def test_every_scene_has_two_instructions():
    specs = plan_demos(replace(CONFIG, episodes=40, starts=60), build_world(CONFIG.world))
    for one, two in zip(specs[::2], specs[1::2], strict=True):
        assert (one.seed, one.task, one.scatter) == (two.seed, two.task, two.scatter)
        assert (one.swap, two.swap) == (False, True)
    tasks = np.bincount([spec.task for spec in specs if not spec.scatter])
    assert tasks.tolist() == [4] * 10


def test_interrupted_run_continues(folder, tmp_path, monkeypatch):
    config = replace(CONFIG, out=tmp_path / "broken")

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demos_module, "record", interrupt)
        with pytest.raises(KeyboardInterrupt, match="same command"):
            write_demos(config, log=None)
    write_demos(config, log=None)
    kept = shard_path(config.out, 0).stat().st_mtime_ns
    shard_path(config.out, 1).unlink()
    with pytest.raises(ValueError, match="1 of 2"):
        load_demos(config.out)
    write_demos(config, log=None)
    assert shard_path(config.out, 0).stat().st_mtime_ns == kept
    assert_same_shards(folder, config.out)


def test_worker_processes_make_the_same(tmp_path):
    config = replace(CONFIG, world=WorldConfig(name="blocks", pixels=8))  # of two shards
    for name, workers in (("one", 1), ("two", 2)):
        write_demos(replace(config, out=tmp_path / name, workers=workers), log=None)
    assert_same_shards(tmp_path / "one", tmp_path / "two")


def test_compact_demos_render_the_same_images(demos, tmp_path):
    compact, drawn = tmp_path / "compact", tmp_path / "drawn"
    write_demos(replace(CONFIG, out=compact, compact=True), log=None)
    with pytest.raises(ValueError, match="--render"):
        load_demos(compact)
    other = replace(CONFIG.world, name="blocks")
    with pytest.raises(ValueError, match="object10"):
        render_demos(replace(CONFIG, render=compact, out=drawn, world=other), log=None)
    render_demos(replace(CONFIG, render=compact, out=drawn), log=None)
    rendered = load_demos(drawn)
    np.testing.assert_array_equal(rendered.action, demos.action)
    np.testing.assert_array_equal(rendered.state, demos.state)
    assert rendered.tasks == demos.tasks
    for camera, images in demos.images.items():
        # Joint positions are stored in float32: an edge may fall on the next pixel.
        assert (rendered.images[camera] == images).mean() > 0.995


def test_failed_episodes_are_dropped_and_counted_and_too_many_are_an_error(tmp_path, monkeypatch):
    lines: list[str] = []

    def fail_once(world, spec, *settings):
        return record(world, spec, *settings)._replace(success=spec.seed != 3)

    world = WorldConfig(name="blocks_state")
    config = DemosConfig(out=tmp_path / "d", episodes=24, starts=0, workers=1, world=world)
    with monkeypatch.context() as patch:
        patch.setattr(demos_module, "record", fail_once)
        demos = make_demos(config, log=lines.append)
    assert set(np.unique(demos.episode_index)) == set(range(24)) - {6, 7}
    assert "22 demonstrations; 2 failed" in lines[-1]
    # Starts cannot fail and must not hide the failures.
    config = replace(config, out=tmp_path / "bad", episodes=6, starts=60, noise=3.0)
    with pytest.raises(ValueError, match="--noise"):
        write_demos(config, log=None)


def test_invalid_settings_and_folders_of_other_data_are_refused(folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for changes, keyword in (
        ({"seed": EVAL_SEED - 1}, "--seed"),
        ({"episodes": 0, "starts": 0}, "--episodes"),
        ({"workers": 0}, "--workers"),
        ({"world": replace(CONFIG.world, pixels=20), "out": folder}, "world"),
        ({"seed": 9, "out": folder}, "seed"),
        ({"out": tmp_path}, "--out"),
    ):
        with pytest.raises(ValueError, match=keyword):
            write_demos(replace(CONFIG, **{"out": tmp_path / "d"} | changes), log=None)
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"demos"):
            load_demos(path)


def test_command(tmp_path, capsys):
    arguments = ["vla", "demos", "--out", str(tmp_path / "d"), "--episodes", "2", "--starts", "2"]
    assert cli.main([*arguments, "--world.pixels", "8", "--workers", "1"]) == 0
    assert "4 demonstrations; 0 failed" in capsys.readouterr().out.replace("\n", " ")
    assert len(load_demos(tmp_path / "d").images["front"]) > 20
    assert cli.main([*arguments, "--world.tasks", "pink"]) == 2
    assert "pink" in capsys.readouterr().err


def test_a_shard_that_is_no_archive_of_arrays_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "demos")
    shard_path(tmp_path / "demos", 0).write_bytes(b"")
    with pytest.raises(ValueError, match="shard-00000"):
        write_demos(replace(CONFIG, out=tmp_path / "demos"), log=None)
    np.savez(tmp_path / "a.npz", action=np.array([{}], dtype=object))
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 cut off")
    for name in ("a.npz", "b.npz"):
        with pytest.raises(ValueError, match=re.escape(name)):
            demos_module.read_shard(tmp_path / name)


@pytest.mark.parametrize(
    "change",
    [{"num_shards": 10**15}, {"num_shards": "2"}, {"num_shards": -1}, {"num_shards": 0},
     {"cameras": ["rear"]}, {"cameras": 3}, {"world": None}, {"world": {"name": 3}}],
    ids=str,
)  # fmt: skip
def test_damaged_manifests_are_one_sentence(folder, tmp_path, change, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "demos")
    manifest = json.loads((folder / "demos.json").read_text()) | change
    (tmp_path / "demos" / "demos.json").write_text(json.dumps(manifest))
    assert cli.main(["vla", "train", str(tmp_path / "demos"), *QUICK]) == 2
    assert "demos" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"action": None}, {"start": np.array([10**9])}, {"task_index": np.array([99])},
     {"state": np.array(["x"])}, {"action": np.array([[np.nan] * 4])}, {"tasks": np.array(7)},
     {"images": np.zeros((1, 2), np.uint8)}, {"episode_index": np.array([10**15])}],
    ids=str,
)  # fmt: skip
def test_damaged_shards_are_one_sentence(folder, tmp_path, change, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "demos")
    names = {"state": "observation.state", "images": "observation.images.front"}
    arrays = demos_module.read_shard(shard_path(folder, 0))
    for name, value in change.items():
        key = names.get(name, name)
        if value is None:
            del arrays[key]
        else:  # in every row, so that lengths agree
            arrays[key] = value.repeat(len(arrays[key]), 0) if value.ndim else value
    demos_module.write_shard(shard_path(tmp_path / "demos", 0), arrays)
    assert cli.main(["vla", "train", str(tmp_path / "demos"), *QUICK]) == 2
    assert "damaged" in capsys.readouterr().err


def test_shards_with_damaged_bytes_are_one_sentence(folder, tmp_path):
    whole = shard_path(folder, 0).read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "a.npz"
    for _ in range(60):
        data = bytearray(whole[: rng.integers(1, len(whole))] if rng.random() < 0.2 else whole)
        for place in rng.integers(0, len(data), 20):
            data[place] = rng.integers(256)
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.npz"):
            demos_module.read_shard(path)
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"b\.npy"):
        demos_module.read_shard(tmp_path / "b.npy")

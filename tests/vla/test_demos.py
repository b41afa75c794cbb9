"""Demonstrations: recording, shards, continuing an interrupted run, refusals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mesotron import cli
from mesotron.config import DemosConfig, WorldConfig
from mesotron.vla import demos as demos_module
from mesotron.vla.demos import load_demos, make_demos, record, shard_path, write_demos
from mesotron.vla.interface import EVAL_SEED, IMAGES, STATE, Demos
from mesotron.vla.worlds import build_world

FRONT = IMAGES + "front"
CONFIG = DemosConfig(
    episodes=4,
    starts=6,
    workers=1,
    world=WorldConfig(
        name="object10",
        pixels=16,
        wrist=True,
    ),
)
METAWORLD = WorldConfig(
    name="metaworld",
    pixels=16,
    tasks=("reach",),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("demos") / "demos"
    write_demos(replace(CONFIG, out=path), log=None)
    return path


@pytest.fixture(scope="module")
def demos(folder) -> Demos:
    return load_demos(folder)


def test_arrays_and_chunks(demos):
    m = len(demos)
    n = len(demos.action)
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
    recording = record(world, demos_module.DemoSpec(0, 0), CONFIG.noise, CONFIG.horizon)
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
    clean, noisy = (record(world, demos_module.DemoSpec(1, 0), noise, 8) for noise in (0.0, 0.3))
    np.testing.assert_array_equal(clean.actions[0], noisy.actions[0])

    assert not np.allclose(clean.actions[1], noisy.actions[1])
    assert (clean.success, noisy.success) == (True, True)


def test_every_scene_has_two_instructions():
    config = replace(CONFIG, episodes=40, starts=60)
    specs = demos_module.plan_demos(config, build_world(CONFIG.world))
    for one, two in zip(specs[::2], specs[1::2], strict=True):
        assert (one.seed, one.task, one.scatter) == (two.seed, two.task, two.scatter)
        assert (one.swap, two.swap) == (False, True)

    tasks = np.bincount([spec.task for spec in specs if not spec.scatter])
    assert tasks.tolist() == [4] * 10


def test_interrupted_run_continues_with_more_workers(folder, tmp_path, monkeypatch):
    config = replace(CONFIG, out=tmp_path / "broken")

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demos_module, "record", interrupt)
        with pytest.raises(KeyboardInterrupt, match="same command"):
            write_demos(config, log=None)

    config = replace(config, workers=2)
    write_demos(config, log=None)
    kept = shard_path(config.out, 0).stat().st_mtime_ns
    shard_path(config.out, 1).unlink()

    with pytest.raises(ValueError, match="1 of 2"):
        load_demos(config.out)

    write_demos(config, log=None)
    assert shard_path(config.out, 0).stat().st_mtime_ns == kept

    for number in range(2):
        paths = [shard_path(path, number) for path in (folder, config.out)]
        assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize(
    ("world", "same"), [(CONFIG.world, 0.995), (METAWORLD, 0.97)], ids=["object10", "metaworld"]
)
def test_compact_demos_render_the_same_images(world, same, tmp_path):
    if world is METAWORLD:
        pytest.importorskip("metaworld")

    compact = tmp_path / "compact"
    drawn = tmp_path / "drawn"
    config = replace(
        CONFIG,
        world=world,
        episodes=1,
        starts=None,
        every=3,
    )

    direct = make_demos(replace(config, out=tmp_path / "direct"), log=None)
    write_demos(replace(config, out=compact, compact=True), log=None)

    with pytest.raises(ValueError, match="--render"):
        load_demos(compact)

    other = replace(world, name="blocks", tasks=())
    with pytest.raises(ValueError, match=world.name):
        demos_module.render_demos(
            replace(
                config,
                render=compact,
                out=drawn,
                world=other,
            ),
            log=None,
        )

    demos_module.render_demos(replace(config, render=compact, out=drawn), log=None)
    rendered = load_demos(drawn)
    np.testing.assert_array_equal(rendered.action, direct.action)

    assert rendered.tasks == direct.tasks
    for camera, images in direct.images.items():
        # Joint positions are stored in float32: an edge may fall on the next pixel.
        assert (rendered.images[camera] == images).mean() > same


def test_failed_episodes_are_dropped_and_counted_and_too_many_are_an_error(tmp_path, monkeypatch):
    lines: list[str] = []

    def fail_once(world, spec, *settings):
        return record(world, spec, *settings)._replace(success=spec.seed != 3)

    world = WorldConfig(name="blocks_state")
    config = DemosConfig(
        out=tmp_path / "d",
        episodes=24,
        starts=0,
        workers=1,
        world=world,
    )
    with monkeypatch.context() as patch:
        patch.setattr(demos_module, "record", fail_once)
        demos = make_demos(config, log=lines.append)

    assert set(np.unique(demos.episode_index)) == set(range(24)) - {6, 7}
    assert "22 demonstrations; 2 failed" in lines[-1]

    # Starts cannot fail and must not hide the failures.
    config = replace(
        config,
        out=tmp_path / "bad",
        episodes=6,
        starts=60,
        noise=3.0,
    )
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


DAMAGED_MANIFESTS = [
    {"num_shards": 10**15},
    {"num_shards": "2"},
    {"num_shards": -1},
    {"num_shards": 0},
    {"cameras": ["rear"]},
    {"cameras": 3},
    {"world": None},
    {"world": {"name": 3}},
]
DAMAGED_SHARDS = [
    {"start": [10**9]},
    {"task_index": [99]},
    {"episode_index": [10**15]},
    {STATE: ["x"]},
    {"action": None},
    {"action": [0.5]},
    {"action": [[np.nan] * 4]},
    {FRONT: [[0]]},
]


@pytest.mark.parametrize("change", [*DAMAGED_MANIFESTS, *DAMAGED_SHARDS], ids=str)
def test_damaged_folders_are_one_sentence(folder, tmp_path, change, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "demos"
    shutil.copytree(folder, copy)

    if change in DAMAGED_MANIFESTS:
        manifest = json.loads((folder / "demos.json").read_text()) | change
        (copy / "demos.json").write_text(json.dumps(manifest))
    else:
        ((key, row),) = change.items()
        arrays = demos_module.read_shard(shard_path(folder, 0))

        whole = arrays.pop(key)
        if row is not None:
            arrays[key] = np.array(row).repeat(len(whole), 0)  # lengths agree

        demos_module.write_shard(shard_path(copy, 0), arrays)

    quick = ["--steps", "1", "--episodes", "0", "--policy.size", "ci", "--device", "cpu"]
    assert cli.main(["vla", "train", str(copy), *quick]) == 2
    assert "demos" in capsys.readouterr().err


def test_shards_with_damaged_bytes_are_named(folder, tmp_path):
    copy = tmp_path / "demos"
    rng = np.random.default_rng(0)
    shutil.copytree(folder, copy)
    path = shard_path(copy, 0)
    whole = path.read_bytes()
    path.write_bytes(b"")

    with pytest.raises(ValueError, match="shard-00000"):
        write_demos(replace(CONFIG, out=copy), log=None)

    np.savez(tmp_path / "objects.npz", action=np.array([{}], dtype=object))
    np.save(tmp_path / "array.npy", np.zeros(3))
    damaged = [(tmp_path / name).read_bytes() for name in ("objects.npz", "array.npy")]
    damaged += [whole[: len(whole) // 2], b"PK\x03\x04 cut off"]

    for _ in range(40):
        data = np.frombuffer(whole, np.uint8).copy()
        data[rng.integers(0, len(data), 20)] = rng.integers(0, 256, 20)
        damaged.append(data.tobytes())

    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(ValueError, match="shard-00000"):
            demos_module.read_shard(path)

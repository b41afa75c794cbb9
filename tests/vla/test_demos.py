"""Demonstrations: what is recorded, what is kept, what a second run adds, what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mesotron.config import DemosConfig, WorldConfig
from mesotron.vla.demos import load_demos, make_demos
from mesotron.vla.demos.make import render_demos, write_demos
from mesotron.vla.demos.shards import read_manifest, shard_path
from mesotron.vla.demos.takes import Take, plan_takes, record
from mesotron.vla.interface import EVAL_SEED, Demos
from mesotron.vla.worlds import build_world

CONFIG = DemosConfig(
    episodes=4, starts=6, workers=1, world=WorldConfig(name="object10", pixels=16, wrist=True)
)


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Demos:
    return make_demos(replace(CONFIG, out=tmp_path_factory.mktemp("k") / "demos"), say=None)


def arrays_of(folder: Path) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(path)) for path in sorted(folder.glob("shard-*.npz"))]


def assert_same_shards(one: Path, two: Path) -> None:
    for a, b in zip(arrays_of(one), arrays_of(two), strict=True):
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[key], b[key]) for key in a)


def test_rows_fit_together(demos):
    m, n = len(demos), len(demos.action)
    assert demos.state.shape == (m, 4)
    assert demos.where.shape == (m, 3)
    assert set(demos.images) == {"front", "wrist"}
    assert all(images.shape == (m, 16, 16, 3) for images in demos.images.values())
    assert demos.action.dtype == np.float32
    assert np.abs(demos.action).max() <= 1
    assert len(demos.episode_index) == len(demos.frame_index) == n
    assert len(np.unique(demos.episode_index)) == 10
    assert demos.task_index.max() == len(demos.tasks) - 1
    # An observation's row is the frame that it was seen at; starts are seen once.
    singles = demos.episode_index[demos.start] >= 4
    assert singles.sum() == 6
    assert (demos.frame_index[demos.start][singles] == 0).all()
    assert n - m == 6 * (CONFIG.horizon - 1)


def test_what_is_recorded_is_what_the_expert_would_do(demos):
    """The oracle is the world itself, put into the recorded states."""
    world = build_world(CONFIG.world)
    for row in range(0, 20, 5):  # within the first episode: seed 0, task 0
        world.reset(0, 0)
        assert demos.episode_index[demos.start[row]] == 0
    seen = record(world, Take(0, 0), CONFIG.noise, CONFIG.horizon)
    count = len(seen.actions)
    np.testing.assert_array_equal(demos.action[:count], np.stack(seen.actions))
    world.reset(0, 0)
    for qpos, action in zip(seen.qpos, seen.actions, strict=True):
        world.show(qpos)
        np.testing.assert_allclose(world.expert(), action, atol=2e-3)


def test_looking_seldom_keeps_every_action(demos, tmp_path):
    """The same episodes, a third of their frames, each followed by the same actions."""
    seldom = make_demos(replace(CONFIG, out=tmp_path / "seldom", every=3), say=None)
    np.testing.assert_array_equal(seldom.action, demos.action)
    np.testing.assert_array_equal(seldom.episode_index, demos.episode_index)
    rows = np.flatnonzero(demos.frame_index[demos.start] % 3 == 0)
    np.testing.assert_array_equal(seldom.start, demos.start[rows])
    np.testing.assert_array_equal(seldom.images["front"], demos.images["front"][rows])
    few, many = (d.chunks(np.arange(5), 6)[0] for d in (seldom, demos))
    np.testing.assert_array_equal(few[1], many[3])


def test_noise_moves_the_hand_but_not_the_labels():
    world = build_world(WorldConfig(name="blocks_state"))
    clean, noisy = (record(world, Take(1, 0), noise, 8) for noise in (0.0, 0.3))
    np.testing.assert_array_equal(clean.actions[0], noisy.actions[0])
    assert not np.allclose(clean.actions[1], noisy.actions[1])
    assert clean.success
    assert noisy.success


def test_every_scene_is_asked_for_two_things():
    world = build_world(CONFIG.world)
    takes = plan_takes(replace(CONFIG, episodes=40, starts=60), world)
    by_scene: dict[int, list[Take]] = {}
    for take in takes:
        by_scene.setdefault(take.seed, []).append(take)
    for pair in by_scene.values():
        one, two = pair
        assert (one.task, one.scatter) == (two.task, two.scatter)
        assert (one.swap, two.swap) == (False, True)
    tasks = np.bincount([take.task for take in takes if not take.scatter])
    assert tasks.tolist() == [4] * 10


def test_scattered_hands_tell_nothing_about_the_thing(demos):
    """The point of them: at the start of an episode's later frames the hand is at the thing."""
    config = replace(CONFIG, world=WorldConfig(name="blocks_state"), episodes=0, starts=200)
    world = build_world(config.world)
    seen = [record(world, take, 0, 1) for take in plan_takes(config, world)]
    hand = np.stack([one.observations[0]["observation.state"][:2] for one in seen])
    thing = np.stack([one.where[0][:2] for one in seen])
    for axis in range(2):
        assert abs(np.corrcoef(hand[:, axis], thing[:, axis])[0, 1]) < 0.3
    episode = demos.episode_index[demos.start] < 4
    late = episode & (demos.frame_index[demos.start] > 8)
    apart = np.linalg.norm(demos.state[late, :2] - demos.where[late, :2], axis=1)
    assert np.median(apart) < 0.02


def test_chunks_stop_at_the_end_of_an_episode(demos):
    rows = np.arange(len(demos))
    actions, real = demos.chunks(rows, 8)
    assert actions.shape == (len(demos), 8, 4)
    assert real[:, 0].all()
    for row in rows:
        start = demos.start[row]
        length = int(real[row].sum())
        np.testing.assert_array_equal(actions[row, :length], demos.action[start : start + length])
        follow = demos.episode_index[start : start + 8]
        assert length == (follow == follow[0]).sum()
        assert (actions[row, length:] == actions[row, length - 1]).all()


def test_a_killed_run_goes_on_where_it_was(demos, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        write_demos(replace(CONFIG, out=folder), say=None)
    kept = shard_path(broken, 0).stat().st_mtime_ns
    shard_path(broken, 1).unlink()
    with pytest.raises(ValueError, match="not finished, 1 of 2 shards are missing"):
        load_demos(broken)
    write_demos(replace(CONFIG, out=broken), say=None)
    assert shard_path(broken, 0).stat().st_mtime_ns == kept
    assert_same_shards(whole, broken)


def test_processes_make_the_same(tmp_path):
    config = replace(CONFIG, episodes=40, starts=4, world=WorldConfig(name="blocks", pixels=8))
    for name, workers in (("one", 1), ("two", 2)):
        write_demos(replace(config, out=tmp_path / name, workers=workers), say=None)
    assert_same_shards(tmp_path / "one", tmp_path / "two")


def test_compact_demonstrations_are_drawn_elsewhere(demos, tmp_path):
    compact, drawn = tmp_path / "compact", tmp_path / "drawn"
    write_demos(replace(CONFIG, out=compact, compact=True), say=None)
    with pytest.raises(ValueError, match=r"holds no images.*--render"):
        load_demos(compact)
    render_demos(replace(CONFIG, render=compact, out=drawn), say=None)
    again = load_demos(drawn)
    np.testing.assert_array_equal(again.action, demos.action)
    np.testing.assert_array_equal(again.state, demos.state)
    assert again.tasks == demos.tasks
    for camera, images in demos.images.items():
        # Joint positions are kept in float32: an edge may fall on the next pixel.
        assert (again.images[camera] == images).mean() > 0.995


def test_compact_demonstrations_of_another_world_are_refused(tmp_path):
    write_demos(replace(CONFIG, out=tmp_path / "c", compact=True, episodes=2, starts=0), say=None)
    other = replace(CONFIG.world, name="blocks")
    with pytest.raises(ValueError, match=r"is of object10 .all tasks., not of blocks"):
        render_demos(
            replace(CONFIG, render=tmp_path / "c", out=tmp_path / "d", world=other), say=None
        )


def test_an_expert_that_fails_is_an_error(tmp_path):
    config = DemosConfig(
        out=tmp_path / "bad",
        episodes=6,
        starts=60,  # which cannot fail, and hide nothing
        noise=3.0,
        workers=1,
        world=WorldConfig(name="blocks_state"),
    )
    with pytest.raises(ValueError, match=r"the expert succeeded in \d+% .* less than 90%"):
        write_demos(config, say=None)


def test_failed_episodes_are_left_out_and_counted(tmp_path, monkeypatch):
    lines: list[str] = []
    from mesotron.vla.demos import make

    def record_but_fail_once(world, take, *settings):
        done = record(world, take, *settings)
        return done._replace(success=take.seed != 3)

    monkeypatch.setattr(make, "record", record_but_fail_once)
    config = DemosConfig(
        out=tmp_path / "d", episodes=24, starts=0, workers=1, world=WorldConfig(name="blocks_state")
    )
    demos = make_demos(config, say=lines.append)
    assert set(np.unique(demos.episode_index)) == set(range(24)) - {6, 7}
    assert "22 takes; 2 failed" in lines[-1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": EVAL_SEED - 1}, "is not a training scene: those are 0 to 999,999"),
        ({"seed": -5}, "not a training scene"),
        ({"episodes": 0, "starts": 0}, "0 episodes and 0 starts make no demonstrations"),
        ({"horizon": 0}, "--horizon 0 leaves a frame no action"),
        ({"every": 0}, "--every 0 never looks"),
        ({"every": 3, "lerobot": Path("there")}, "--every 3 leaves frames out"),
        ({"noise": -1.0}, "noise -1.0 is negative"),
        ({"workers": 0}, "--workers 0 must be at least 1"),
        ({"world": WorldConfig(perturbation="light")}, "perturbation 'light' is for evaluation"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        write_demos(replace(CONFIG, out=tmp_path / "d", **changes), say=None)


def test_a_folder_of_others_is_not_touched(demos, tmp_path):
    config = replace(CONFIG, out=tmp_path / "d", episodes=2, starts=0)
    write_demos(config, say=None)
    with pytest.raises(ValueError, match=r"holds other demonstrations .world differ.*--out"):
        write_demos(replace(config, world=replace(CONFIG.world, pixels=20)), say=None)
    with pytest.raises(ValueError, match=r"holds other demonstrations .*seed"):
        write_demos(replace(config, seed=9), say=None)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else"):
        write_demos(replace(config, out=tmp_path / "notes"), say=None)
    assert read_manifest(config.out)["episodes"] == 2


def test_an_interrupted_run_says_how_to_go_on(tmp_path, monkeypatch):
    from mesotron.vla.demos import make

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(make, "record", interrupted)
    with pytest.raises(KeyboardInterrupt, match="the same command goes on from here"):
        write_demos(replace(CONFIG, out=tmp_path / "d"), say=None)
    monkeypatch.undo()
    write_demos(replace(CONFIG, out=tmp_path / "d"), say=None)
    assert len(load_demos(tmp_path / "d")) > 60


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_a_path_without_demonstrations_is_a_sentence(tmp_path, name):
    with pytest.raises(ValueError, match=r"is not there; make it|holds no demonstrations"):
        load_demos(tmp_path / name)


def test_the_command(mesotron, sentence, tmp_path):
    words = ["vla", "demos", "--out", str(tmp_path / "d"), "--episodes", "2", "--starts", "2"]
    done = mesotron(*words, "--world.pixels", "8", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "4 takes; 0 failed" in done.stdout.replace("\n", " ")
    assert len(load_demos(tmp_path / "d").images["front"]) > 20
    assert "no task 'pink'" in sentence(*words, "--world.tasks", "pink")

"""Rollouts: waves, worker processes, controls, episodes that raise, results."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mesotron.config import DemosConfig, WorldConfig
from mesotron.runs.trust import search_working_folder
from mesotron.vla.demos import make_demos
from mesotron.vla.evaluation import write_gifs
from mesotron.vla.interface import EVAL_SEED, IMAGES, STATE
from mesotron.vla.rollout import EpisodeJob, evaluate, evaluate_expert, simulation_pool
from mesotron.vla.worlds.blocks import BlocksWorld

WORLD = WorldConfig(name="blocks_state")
SEEDS = range(EVAL_SEED, EVAL_SEED + 3)


def reach(observations):
    """A policy that moves to the object with an open hand and never succeeds."""
    states = np.stack([one[STATE] for one in observations])
    move = np.clip((states[:, 4:7] - states[:, :3]) / 0.03, -1, 1)
    chunk = np.concatenate([move, -np.ones((len(states), 1))], 1)

    return np.repeat(chunk[:, None], 6, axis=1)


class Twins:
    """A policy that acts by the expert of twin worlds that it steps itself."""

    def __init__(self, seeds, execute, swap=False):
        self.execute = execute
        self.worlds = [BlocksWorld(WORLD) for _ in range(2 * len(seeds))]

        for k, world in enumerate(self.worlds):
            world.reset(seeds[k // 2], k % 2, swap=swap)

    def __call__(self, observations):
        chunks = []
        for one in observations:
            hand = one[STATE][:4]
            same = [w for w in self.worlds if w.instruction == one["task"]]
            world = next(w for w in same if np.array_equal(w.observe()[STATE][:4], hand))
            chunks.append([])

            for _ in range(self.execute):
                chunks[-1].append(world.expert())
                world.move(chunks[-1][-1])

        return np.array(chunks)


def test_policy_that_acts_like_the_expert_succeeds():
    result = evaluate(
        Twins(SEEDS, 3),
        WORLD,
        SEEDS,
        execute=3,
        workers=1,
    )

    assert result.success == 1
    assert result.by_task == {"red-cube": (3, 3), "blue-cube": (3, 3)}

    pairs = []
    for task in ("red-cube", "blue-cube"):
        for seed in SEEDS:
            pairs.append((task, seed))

    assert [(e.task, e.seed) for e in result.episodes] == pairs

    expert = evaluate_expert(WORLD, SEEDS, workers=1)
    assert expert.success == 1
    assert expert.control == "expert"
    assert [e.steps for e in expert.episodes] == [e.steps for e in result.episodes]


def test_result_does_not_depend_on_the_number_of_workers():
    world = WorldConfig(name="blocks", pixels=12)

    def act(observations):
        images = np.stack([one[IMAGES + "front"] for one in observations])
        light = images.reshape(len(images), -1)[:, :24].mean(axis=1) / 255
        return np.repeat((light[:, None, None] - 0.5) * np.ones((1, 1, 4)), 5, axis=1)

    one, two = (
        evaluate(
            act,
            world,
            SEEDS,
            execute=5,
            workers=k,
            frames=1,
        )
        for k in (1, 2)
    )

    assert one.episodes == two.episodes
    np.testing.assert_equal(one.frames, two.frames)


@pytest.mark.parametrize("batch", [1, 4])
def test_one_call_answers_all_live_episodes(batch):
    sizes = []

    def act(observations):
        sizes.append(len(observations))
        return reach(observations)

    result = evaluate(
        act,
        WORLD,
        SEEDS,
        execute=6,
        workers=1,
        batch=batch,
    )

    assert len(result.episodes) == 6
    assert max(sizes) == batch
    assert len(sizes) == -(-54 // 6) * -(-6 // batch)


def test_wrong_instruction_is_judged_by_the_right_one():
    # A policy that obeys puts the other object into the bin and fails.
    obedient = Twins([EVAL_SEED], 1, swap=True)
    result = evaluate(
        obedient,
        WORLD,
        [EVAL_SEED],
        execute=1,
        workers=1,
        wrong=True,
    )

    assert result.control == "wrong instruction"
    assert result.success == 0
    assert all(world.table.is_in_bin(world.scene.target) for world in obedient.worlds)
    assert [episode.task for episode in result.episodes] == ["red-cube", "blue-cube"]


def test_episode_that_raises_has_failed(monkeypatch):
    move = BlocksWorld.move

    def break_sometimes(self, action):
        if self.scene.objects[self.scene.target].color == "blue" and self.num_steps == 5:
            raise RuntimeError("the simulator blew up")
        return move(self, action)

    monkeypatch.setattr(BlocksWorld, "move", break_sometimes)
    result = evaluate_expert(WORLD, SEEDS, workers=1)
    assert result.by_task == {"red-cube": (3, 3), "blue-cube": (0, 3)}

    errors = set()
    for episode in result.episodes:
        if episode.task == "blue-cube":
            errors.add(episode.error)

    assert errors == {"RuntimeError: the simulator blew up"}


@pytest.mark.parametrize(
    ("act", "execute", "keyword"),
    [
        (lambda observations: np.zeros((len(observations), 4)), 1, r"shape \(6, 4\)"),
        (lambda observations: np.zeros((len(observations), 2, 4)), 3, "execute=3"),
        (reach, 0, "execute=0"),
        (lambda observations: int("not an action"), 1, "not an action"),
    ],
)
def test_invalid_evaluations_are_refused(act, execute, keyword):
    with pytest.raises(ValueError, match=keyword):
        evaluate(act, WORLD, SEEDS, workers=1, execute=execute)


def test_results_as_json_and_gifs(tmp_path):
    good = evaluate_expert(WORLD, SEEDS, workers=1, frames=1)
    data = json.loads(json.dumps(good.to_json()))
    red = data["tasks"]["red-cube"]

    assert (red["successes"], red["episodes"], red["value"]) == (3, 3, 1.0)
    assert red["low"] == pytest.approx(0.4385, abs=1e-3)  # Wilson, 3 of 3
    assert data["world"]["name"] == "blocks_state"
    assert len(data["episodes"]) == 6

    bad = evaluate(reach, WORLD, SEEDS, workers=1, frames=1)
    files = write_gifs(good, tmp_path) + write_gifs(bad, tmp_path)
    ends = ("red-cube", "success"), ("blue-cube", "success"), ("red-cube", "failure")
    names = {f"{task}-{EVAL_SEED}-{end}.gif" for task, end in (*ends, ("blue-cube", "failure"))}

    assert {path.name for path in files} == names
    with Image.open(files[0]) as image:
        assert image.n_frames == good.episodes[0].steps + 1


def test_workers_import_no_framework():
    # Importing torch would take each of them seconds and half a gigabyte.
    with simulation_pool(2) as pool:
        job = (WORLD, EpisodeJob(0, EVAL_SEED, 0))
        assert pool.each("mesotron.vla.rollout:play_expert", [job, None])[0].success
        make = pool.each("mesotron.vla.demos:shard_path", [(Path("."), 0), None])
        names = pool.each("builtins:eval", [("list(__import__('sys').modules)",), None])[0]

    assert make
    assert not {"torch", "jax", "transformers"} & set(names)


def test_own_world_by_its_class(tmp_path, monkeypatch):
    # It lies in the working folder, which is not on the path, also of the workers.
    (tmp_path / "my_worlds.py").write_text(
        "from dataclasses import replace\n"
        "from mesotron.vla.worlds.blocks import BlocksWorld\n"
        "class Longer(BlocksWorld):\n"
        "    max_steps = 99\n"
        "    def __init__(self, config):\n"
        "        super().__init__(replace(config, name='blocks_state'))\n"
    )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    search_working_folder()  # as for a name on the command line
    world = WorldConfig(name="my_worlds:Longer")

    assert evaluate_expert(world, SEEDS, workers=2).success == 1
    assert evaluate(reach, world, SEEDS, workers=1).episodes[0].steps == 99

    config = DemosConfig(
        world=world,
        out=tmp_path / "d",
        episodes=2,
        starts=2,
        workers=1,
    )

    demos = make_demos(config, log=None)
    assert demos.images == {}
    assert demos.world == world

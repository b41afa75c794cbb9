"""Rollouts: waves, processes, controls, episodes that raise, and what becomes of the results."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from mesotron.config import DemosConfig, WorldConfig
from mesotron.vla.demos import make_demos
from mesotron.vla.gifs import write_gifs
from mesotron.vla.interface import EVAL_SEED, EvalResult, stack_images
from mesotron.vla.rollout import evaluate, evaluate_expert
from mesotron.vla.simulation.processes import Workers
from mesotron.vla.worlds.blocks import BlocksWorld

STATE = WorldConfig(name="blocks_state")
SEEDS = range(EVAL_SEED, EVAL_SEED + 3)


def reach(seen):
    """Go to the thing that the state gives, hand open: a policy that looks but never succeeds."""
    states = np.stack([one["observation.state"] for one in seen])
    move = np.clip((states[:, 4:7] - states[:, :3]) / 0.03, -1, 1)
    return np.repeat(np.concatenate([move, -np.ones((len(seen), 1))], 1)[:, None], 6, axis=1)


class Teacher:
    """Acts by the expert of twin worlds that it steps itself: a policy that succeeds."""

    def __init__(self, config, seeds, execute):
        self.execute = execute
        self.twins = []
        for task in range(len(BlocksWorld(config).tasks)):
            for seed in seeds:
                twin = BlocksWorld(config)
                twin.reset(seed, task)
                self.twins.append(twin)

    def __call__(self, seen):
        chunks = []
        for one in seen:
            twin = next(
                twin
                for twin in self.twins
                if np.array_equal(twin.observe()["observation.state"], one["observation.state"])
            )
            chunk = []
            for _ in range(self.execute):
                chunk.append(twin.expert())
                twin.move(chunk[-1])
            chunks.append(chunk)
        return np.array(chunks)


def test_a_policy_that_acts_as_the_expert_succeeds():
    result = evaluate(Teacher(STATE, SEEDS, 3), STATE, SEEDS, execute=3, workers=1)
    assert result.success == 1
    assert result.by_task == {"red-cube": (3, 3), "blue-cube": (3, 3)}
    assert [(e.task, e.seed) for e in result.episodes] == [
        (task, seed) for task in ("red-cube", "blue-cube") for seed in SEEDS
    ]
    expert = evaluate_expert(STATE, SEEDS, workers=1)
    assert expert.success == 1
    assert expert.control == "expert"
    assert [e.steps for e in expert.episodes] == [e.steps for e in result.episodes]


def test_results_do_not_depend_on_processes():
    world = WorldConfig(name="blocks", pixels=12)

    def act(seen):  # depends on the picture and on who else is in the batch only by its own row
        light = stack_images(seen, "front").reshape(len(seen), -1)[:, :24].mean(axis=1) / 255
        return np.repeat((light[:, None, None] - 0.5) * np.ones((1, 1, 4)), 5, axis=1)

    one = evaluate(act, world, SEEDS, execute=5, workers=1, frames=1)
    two = evaluate(act, world, SEEDS, execute=5, workers=2, frames=1)
    assert one.episodes == two.episodes
    for key, frames in one.frames.items():
        np.testing.assert_array_equal(frames, two.frames[key])


@pytest.mark.parametrize("batch", [1, 4])
def test_one_call_answers_all_live_episodes(batch):
    sizes = []

    def act(seen):
        sizes.append(len(seen))
        return reach(seen)

    result = evaluate(act, STATE, SEEDS, execute=6, workers=1, batch=batch)
    assert len(result.episodes) == 6
    assert max(sizes) == batch
    calls = -(-54 // 6)
    assert len(sizes) == calls * -(-6 // batch)


def test_a_wrong_instruction_is_told_and_the_right_one_judged():
    told = []

    def act(seen):
        told.extend(one["task"] for one in seen)
        return reach(seen)

    result = evaluate(act, STATE, [EVAL_SEED], workers=1, wrong=True)
    assert result.control == "wrong instruction"
    world, wrong, right = BlocksWorld(STATE), set(), set()
    for task in range(2):
        world.reset(EVAL_SEED, task)
        wrong.add(world.wrong_instruction)
        right.add(world.instruction)
    assert set(told) == wrong != right
    assert [episode.task for episode in result.episodes] == list(world.tasks)


def test_the_other_thing_in_the_bin_is_judged_by_the_right_instruction():
    """A policy that obeys puts the wrong thing into the bin, and that is the control's failure."""
    swapped = {}

    def act(seen):
        chunks = []
        for one in seen:
            if one["task"] not in swapped:
                twin = BlocksWorld(STATE)
                for task in range(2):
                    twin.reset(EVAL_SEED, task, swap=True)
                    if twin.instruction == one["task"]:
                        swapped[one["task"]] = twin
                        break
            twin = swapped[one["task"]]
            chunks.append([twin.expert()])
            twin.move(chunks[-1][0])
        return np.array(chunks)

    assert evaluate(act, STATE, [EVAL_SEED], workers=1, wrong=True, execute=1).success == 0
    assert all(twin.table.is_in_bin(twin.scene.target) for twin in swapped.values())


def test_an_episode_that_raises_has_failed(monkeypatch):
    move = BlocksWorld.move

    def break_sometimes(self, action):
        if self.scene.things[self.scene.target].colour == "blue" and self.num_steps == 5:
            raise RuntimeError("the simulator blew up")
        return move(self, action)

    monkeypatch.setattr(BlocksWorld, "move", break_sometimes)
    result = evaluate_expert(STATE, SEEDS, workers=1)
    assert result.by_task == {"red-cube": (3, 3), "blue-cube": (0, 3)}
    errors = {episode.error for episode in result.episodes if episode.task == "blue-cube"}
    assert errors == {"RuntimeError: the simulator blew up"}


def test_a_policy_that_raises_is_not_a_failed_episode():
    def act(seen):
        raise ZeroDivisionError("a bug in the policy")

    with pytest.raises(ZeroDivisionError):
        evaluate(act, STATE, SEEDS, workers=1)


@pytest.mark.parametrize(
    ("act", "options", "sentence"),
    [
        (lambda seen: np.zeros((len(seen), 4)), {}, r"not with shape \(6, 4\)"),
        (lambda seen: np.zeros((len(seen), 2, 4)), {"execute": 3}, "fewer than the 3"),
        (reach, {"execute": 0}, "0 actions cannot be taken"),
        (reach, {"seeds": []}, "no seed to evaluate on"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(act, options, sentence):
    options = {"seeds": SEEDS, "workers": 1} | options
    with pytest.raises(ValueError, match=sentence):
        evaluate(act, STATE, **options)


def test_results_are_json_with_intervals():
    result = evaluate_expert(STATE, SEEDS, workers=1)
    data = json.loads(json.dumps(result.to_json()))
    red = data["tasks"]["red-cube"]
    assert (red["successes"], red["episodes"], red["value"]) == (3, 3, 1.0)
    assert red["low"] == pytest.approx(0.4385, abs=1e-3)  # Wilson, 3 of 3
    assert data["world"]["name"] == "blocks_state"
    assert len(data["episodes"]) == 6


def test_gifs_show_how_it_ended(tmp_path):
    good = evaluate_expert(STATE, SEEDS, workers=1, frames=1)
    bad = evaluate(reach, STATE, SEEDS, workers=1, frames=1)
    assert len(good.frames) == len(bad.frames) == 2
    files = write_gifs(good, tmp_path / "a") + write_gifs(bad, tmp_path / "a")
    names = sorted(path.name for path in files)
    assert names == sorted(
        f"{colour}-cube-{EVAL_SEED}-{end}.gif"
        for colour in ("red", "blue")
        for end in ("success", "failure")
    )
    with Image.open(files[0]) as image:
        assert image.n_frames == good.episodes[0].steps + 1


def test_perturbed_worlds_are_evaluated_by_name():
    world = WorldConfig(name="blocks", pixels=12)
    for name in ("camera", "light", "noise", "position", "wording"):
        result = evaluate_expert(replace(world, perturbation=name), [EVAL_SEED], workers=1)
        assert result.success == 1
        assert result.to_json()["world"]["perturbation"] == name


def test_processes_answer_in_order_and_pass_errors_on():
    with Workers(2) as workers:
        assert len(workers.members) == 2
        jobs = [(k, 10) for k in range(7)]
        assert dict(workers.map("operator:add", jobs)) == {k: k + 10 for k in range(7)}
        assert workers.each("operator:neg", [(1,), None]) == [-1, None]
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            dict(workers.map("operator:truediv", [(1, 0)]))
        with pytest.raises(ValueError, match="this needs the package nosuch"):
            dict(workers.map("mesotron.vla.worlds:require", [("nosuch", "vla")]))
        with pytest.raises(RuntimeError, match="ended with code 7"):
            dict(workers.map("os:_exit", [(7,)]))


def test_processes_import_no_framework():
    """They are many, and torch would take each of them seconds and half a gigabyte."""
    with Workers(2) as workers:
        loaded = workers.each(
            "mesotron.vla.simulation.episodes:play_expert", [(STATE, job()), None]
        )
        assert loaded[0].success
        names = workers.each("builtins:eval", [("list(__import__('sys').modules)",), None])[0]
    assert not {"torch", "jax", "transformers"} & set(names)


def job():
    from mesotron.vla.simulation.episodes import Job

    return Job(0, EVAL_SEED, 0)


def test_a_world_of_ones_own_is_named_by_its_class(tmp_path, monkeypatch):
    """It lies in the working folder, which the path of `mesotron` does not have; also in processes,
    which import it by the same name."""
    (tmp_path / "my_worlds.py").write_text(
        "from dataclasses import replace\n"
        "from mesotron.vla.worlds.blocks import BlocksWorld\n"
        "class Bigger(BlocksWorld):\n"
        "    max_steps = 99\n"
        "    def __init__(self, config):\n"
        "        super().__init__(replace(config, name='blocks_state'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    mine = WorldConfig(name="my_worlds:Bigger")
    assert evaluate_expert(mine, SEEDS, workers=2).success == 1
    assert evaluate(reach, mine, SEEDS, workers=1).episodes[0].steps == 99
    demos = make_demos(
        DemosConfig(world=mine, out=tmp_path / "d", episodes=2, starts=2, workers=1), say=None
    )
    assert demos.images == {}
    assert demos.world == mine


def test_an_empty_result_has_no_share():
    with pytest.raises(ValueError, match="at least one problem"):
        _ = EvalResult(STATE, []).score

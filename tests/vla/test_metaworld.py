"""Meta-World by the same protocol: its experts succeed here, seeds repeat, rays see its scenes."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from mesotron.config import DemosConfig, WorldConfig
from mesotron.vla.demos.make import make_demos, render_demos, write_demos
from mesotron.vla.demos.shards import load_shards
from mesotron.vla.demos.takes import plan_takes
from mesotron.vla.interface import EVAL_SEED
from mesotron.vla.rollout import evaluate_expert
from mesotron.vla.worlds import build_world
from mesotron.vla.worlds.mesh_rays import Mark, meet_ball, nearest_difference, shade
from mesotron.vla.worlds.metaworld_sentences import MT10, SENTENCES
from mesotron.vla.worlds.rays import AMBIENT, Light

pytest.importorskip("metaworld")

CONFIG = WorldConfig(name="metaworld", pixels=24, tasks=("drawer-open", "reach"))
FRONT = "observation.images.front"


@pytest.fixture(scope="module")
def world():
    return build_world(CONFIG)


def test_an_observation_is_what_the_protocol_says(world):
    seen = world.reset(3, 0)
    assert seen[FRONT].shape == (24, 24, 3)
    assert seen[FRONT].dtype == np.uint8
    assert seen["observation.state"].shape == (world.state_dim,)
    assert seen["observation.state"].dtype == np.float32
    assert seen["task"] == "open the drawer"
    assert world.wrong_instruction == "reach the goal"


def test_a_scene_repeats_from_its_seed_alone(world):
    first = world.reset(3, 0)
    world.advance(np.ones((9, 4), np.float32))
    other = world.reset(4, 0)
    again = world.reset(3, 0)
    np.testing.assert_array_equal(first[FRONT], again[FRONT])
    np.testing.assert_array_equal(first["observation.state"], again["observation.state"])
    assert not np.array_equal(first[FRONT], other[FRONT])


def test_the_first_picture_shows_the_scene_as_it_is(world):
    """Bodies that a reset has moved are in their places before the first physics step."""
    world.reset(3, 0)
    before = world.picture(48).astype(int)
    world.move(np.zeros(4, np.float32))
    after = world.picture(48).astype(int)
    assert (np.abs(before - after).max(axis=-1) > 30).mean() < 0.02


def test_the_experts_succeed():
    result = evaluate_expert(CONFIG, range(EVAL_SEED, EVAL_SEED + 2), workers=1)
    assert result.success == 1
    assert max(episode.steps for episode in result.episodes) <= 125


@pytest.mark.slow
def test_the_experts_of_mt10_succeed():
    world = WorldConfig(name="metaworld", pixels=8)
    result = evaluate_expert(world, range(EVAL_SEED, EVAL_SEED + 10), workers=2)
    assert set(result.by_task) == set(MT10)
    assert result.success >= 0.95


def test_an_expert_is_quiet_and_within_bounds(world):
    world.reset(0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        action = world.expert()
    assert action.dtype == np.float32
    assert np.abs(action).max() <= 1


def test_goals_that_the_package_draws_as_sites_are_seen(world):
    """A ball of the goal's own colour, at the goal."""
    world.reset(5, 1)
    image = world.picture(96).astype(int)
    red, green, blue = image[..., 0], image[..., 1], image[..., 2]
    rows, columns = np.nonzero((blue > 2 * green) & (red > 2 * green) & (blue > 80))
    assert len(rows) > 5
    camera = world._view.camera
    towards = world.env._target_pos - np.array(camera.position)
    rays = camera.rays(96)
    nearest = int(np.argmax(rays @ (towards / np.linalg.norm(towards))))
    assert abs(rows.mean() - nearest // 96) < 4
    assert abs(columns.mean() - nearest % 96) < 4


def test_perturbations_change_the_picture_or_the_words(world):
    plain = world.reset(2, 0)
    for name in ("camera", "light", "noise"):
        seen = build_world(replace(CONFIG, perturbation=name)).reset(2, 0)
        assert not np.array_equal(seen[FRONT], plain[FRONT])
        assert seen["task"] == plain["task"]
    reworded = build_world(replace(CONFIG, perturbation="wording")).reset(2, 0)
    np.testing.assert_array_equal(reworded[FRONT], plain[FRONT])
    assert reworded["task"] != plain["task"]


def test_compact_demonstrations_are_drawn_elsewhere(tmp_path):
    config = DemosConfig(
        world=replace(CONFIG, tasks=("reach",), pixels=16), episodes=1, workers=1, noise=0.1
    )
    direct = make_demos(replace(config, out=tmp_path / "direct"), say=None)
    write_demos(replace(config, out=tmp_path / "compact", compact=True), say=None)
    render_demos(replace(config, render=tmp_path / "compact", out=tmp_path / "drawn"), say=None)
    drawn = load_shards(tmp_path / "drawn")
    np.testing.assert_array_equal(direct.action, drawn.action)
    assert (direct.images["front"] == drawn.images["front"]).mean() > 0.97
    assert len(direct) == len(direct.action), "every action has its picture"


def test_takes_stay_with_a_task(world):
    takes = plan_takes(DemosConfig(world=CONFIG, episodes=6), world)
    assert [take.task for take in takes] == [0, 0, 0, 1, 1, 1]
    assert [take.seed for take in takes] == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="cannot put the hand anywhere; leave --starts out"):
        plan_takes(DemosConfig(world=CONFIG, starts=5), world)


def test_every_task_of_the_package_has_a_sentence():
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS, MT10_V3

    assert {f"{name}-v3" for name in SENTENCES} == set(ALL_V3_ENVIRONMENTS)
    assert [f"{name}-v3" for name in MT10] == list(MT10_V3)
    assert len(set(SENTENCES.values())) == len(SENTENCES)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tasks": ("fly",)}, "no task 'fly'; it has assembly"),
        ({"wrist": True}, "no wrist camera"),
        ({"perturbation": "position"}, "draws its own positions"),
        ({"renderer": "gl"}, "needs MUJOCO_GL=egl"),
    ],
)
def test_what_is_not_there_is_a_sentence(monkeypatch, changes, sentence):
    monkeypatch.setenv("MUJOCO_GL", "disable")
    with pytest.raises(ValueError, match=sentence):
        build_world(replace(CONFIG, **changes))


def test_a_scene_has_one_instruction(world):
    with pytest.raises(ValueError, match="neither be swapped"):
        world.reset(0, 0, swap=True)


def test_rays_meet_a_ball_where_geometry_says():
    ball = Mark(np.array([0.0, 0.0, 2.0]), 0.5, (1, 0, 0))
    tilt = np.arcsin(0.25)  # a tangent, just missed
    rays = np.array([[0, 0, 1], [0, 0, -1], [np.sin(tilt) + 0.01, 0, np.cos(tilt)]])
    rays = rays / np.linalg.norm(rays, axis=1, keepdims=True)
    distances = meet_ball(np.zeros(3), rays, ball)
    assert distances[0] == pytest.approx(1.5)
    assert np.isinf(distances[1:]).all()


def test_shade_from_depth_is_that_of_the_plane():
    x, y = np.meshgrid(np.linspace(-1, 1, 9), np.linspace(-1, 1, 9))
    points = np.stack([x, y, 0.5 * x], axis=-1)  # its normal is (-1, 0, 2) / sqrt(5)
    found = shade(points, np.array([0.0, 0.0, 5.0]), Light((0, 0, 3.0)))
    np.testing.assert_allclose(found, AMBIENT + (1 - AMBIENT) * 2 / 5**0.5)
    step = np.array([[[0.0], [1.0], [1.1]]])
    np.testing.assert_allclose(nearest_difference(step, 1).ravel(), [1.0, 0.1, 0.1])

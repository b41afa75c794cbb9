"""Meta-World as a `World`: its experts succeed, seeds repeat, rays show its scenes."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from mesotron.config import DemosConfig, WorldConfig
from mesotron.vla.demos import plan_demos
from mesotron.vla.evaluation import measure
from mesotron.vla.interface import EVAL_SEED, IMAGES, STATE
from mesotron.vla.rollout import evaluate_expert
from mesotron.vla.worlds import build_world
from mesotron.vla.worlds.rendering import AMBIENT, Ball, Light, hit_ball, shade_from_depth

pytest.importorskip("metaworld")

CONFIG = WorldConfig(
    name="metaworld",
    pixels=24,
    tasks=("drawer-open", "reach"),
)
FRONT = IMAGES + "front"


@pytest.fixture(scope="module")
def world():
    return build_world(CONFIG)


def test_episode_repeats_from_its_seed(world):
    first = world.reset(3, 0)
    assert (first[FRONT].shape, first[FRONT].dtype) == ((24, 24, 3), np.uint8)
    assert (first[STATE].shape, first[STATE].dtype) == ((world.state_dim,), np.float32)
    assert first["task"] == "open the drawer"
    assert world.wrong_instruction == "reach the goal"

    before = world.picture(48).astype(int)  # shows the bodies that the reset moved
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.abs(world.expert()).max() <= 1

    world.move(np.zeros(4, np.float32))
    assert (np.abs(before - world.picture(48)).max(axis=-1) > 30).mean() < 0.02

    world.advance(np.ones((9, 4), np.float32))
    other = world.reset(4, 0)
    again = world.reset(3, 0)
    np.testing.assert_array_equal(first[FRONT], again[FRONT])
    np.testing.assert_array_equal(first[STATE], again[STATE])

    assert not np.array_equal(first[FRONT], other[FRONT])
    with pytest.raises(ValueError, match="swap"):
        world.reset(0, 0, swap=True)


@pytest.mark.parametrize(
    ("tasks", "episodes"), [(CONFIG.tasks, 1), pytest.param((), 10, marks=pytest.mark.slow)]
)
def test_experts_succeed(tasks, episodes):
    world = replace(CONFIG, pixels=8, tasks=tasks)
    result = evaluate_expert(world, range(EVAL_SEED, EVAL_SEED + episodes), workers=2)
    assert len(result.by_task) == (len(tasks) or 10)
    assert result.success >= 0.95
    assert tasks == () or max(episode.steps for episode in result.episodes) <= 125


def test_goals_are_drawn(world):
    world.reset(5, 1)
    image = world.picture(96).astype(int)
    red = image[..., 0]
    green = image[..., 1]
    blue = image[..., 2]
    rows, columns = np.nonzero((blue > 2 * green) & (red > 2 * green) & (blue > 80))

    assert len(rows) > 5
    camera = world._view.camera
    offset = world.env._target_pos - np.array(camera.position)
    nearest = int(np.argmax(camera.rays(96) @ (offset / np.linalg.norm(offset))))

    assert abs(rows.mean() - nearest // 96) < 4
    assert abs(columns.mean() - nearest % 96) < 4


def test_perturbations_change_the_image_or_the_instruction(world, monkeypatch):
    plain = world.reset(2, 0)
    for name in ("camera", "light", "noise", "wording"):
        monkeypatch.setattr(world, "config", replace(CONFIG, perturbation=name))
        changed = world.reset(2, 0)
        assert np.array_equal(changed[FRONT], plain[FRONT]) is (name == "wording")
        assert (changed["task"] == plain["task"]) is (name != "wording")


def test_demos_are_planned_task_by_task(world):
    specs = plan_demos(DemosConfig(world=CONFIG, episodes=6), world)
    assert [spec.task for spec in specs] == [0, 0, 0, 1, 1, 1]
    assert [spec.seed for spec in specs] == [0, 1, 2, 0, 1, 2]

    with pytest.raises(ValueError, match="--starts"):
        plan_demos(DemosConfig(world=CONFIG, starts=5), world)


def test_every_task_has_a_sentence_of_its_own():
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    from mesotron.vla.worlds.metaworld import SENTENCES

    assert {f"{name}-v3" for name in SENTENCES} == set(ALL_V3_ENVIRONMENTS)
    assert len(set(SENTENCES.values())) == len(SENTENCES)


def test_unsupported_settings_are_refused(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "disable")
    for changes, keyword in (
        ({"tasks": ("fly",)}, "fly"),
        ({"wrist": True}, "wrist"),
        ({"perturbation": "position"}, "position"),
        ({"renderer": "gl"}, "MUJOCO_GL"),
    ):
        with pytest.raises(ValueError, match=keyword):
            build_world(replace(CONFIG, **changes))

    options = {
        "episodes": 1,
        "execute": 1,
        "workers": 1,
        "perturb": ("position",),
    }
    with pytest.raises(ValueError, match="position"):
        measure(lambda observations: pytest.fail("played first"), CONFIG, **options)


def test_rays_hit_a_ball():
    tilt = np.arcsin(0.25) + np.array([-0.01, 0.01])  # around a tangent
    rays = [[0, 0, 1], [0, 0, -1], *np.stack([np.sin(tilt), 0 * tilt, np.cos(tilt)], axis=1)]
    ball = Ball(np.array([0.0, 0.0, 2.0]), 0.5, (1, 0, 0))
    distances = hit_ball(np.zeros(3), np.array(rays), ball)

    assert distances[0] == pytest.approx(1.5)
    assert np.isinf(distances).tolist() == [False, True, False, True]


def test_shading_from_depth_equals_the_plane():
    x, y = np.meshgrid(np.linspace(-1, 1, 9), np.linspace(-1, 1, 9))
    points = np.stack([x, y, 0.5 * x], axis=-1)  # its normal is (-1, 0, 2) / sqrt(5)
    shade = shade_from_depth(points, np.array([0.0, 0.0, 5.0]), Light((0, 0, 3.0)))
    np.testing.assert_allclose(shade, AMBIENT + (1 - AMBIENT) * 2 / 5**0.5)

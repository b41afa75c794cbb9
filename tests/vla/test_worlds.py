"""The blocks worlds: the contract of `World`, rendering against geometry, a successful expert."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from mesotron.config import WorldConfig
from mesotron.vla.interface import EVAL_SEED, IMAGES, STATE
from mesotron.vla.worlds import build_world
from mesotron.vla.worlds import scene as scenes
from mesotron.vla.worlds.blocks import pick_and_place
from mesotron.vla.worlds.rendering import Camera, cast_rays, mj, surface_normals

NAMES = ["blocks", "object10", "blocks_state", "object10_state"]
FRONT_IMAGE = IMAGES + "front"


def build(name="blocks", **fields):
    return build_world(WorldConfig(name=name, **fields))


def play_expert(world):
    while not (step := world.step(world.expert())).done:
        pass
    return step


@pytest.mark.parametrize("name", NAMES)
def test_observations_have_their_shapes_and_repeat_from_the_seed(name):
    def play(world):
        observations = [world.reset(seed=8, task=0)]
        return observations + [world.step(world.expert()).observation for _ in range(6)]

    world = build(name, pixels=20, wrist=True)
    observation = play(world)[0]
    assert observation[STATE].shape == (world.state_dim,)
    assert observation[STATE].dtype == np.float32

    images = {}
    for key, value in observation.items():
        if key.startswith(IMAGES):
            images[key] = value

    assert set(images) == {IMAGES + camera for camera in world.cameras}
    assert all((x.shape, x.dtype) == ((20, 20, 3), np.uint8) for x in images.values())
    assert bool(images) is not name.endswith("_state")
    assert observation["task"] == world.instruction
    assert world.expert().shape == (world.action_dim,)

    for a, b in zip(play(world), play(build(name, pixels=20, wrist=True)), strict=True):
        np.testing.assert_equal(a, b)


@pytest.mark.parametrize("name", ["blocks_state", "object10_state"])
@pytest.mark.parametrize("scatter", [False, True])
def test_expert_succeeds_within_half_the_time(name, scatter):
    world = build(name)
    for seed in range(EVAL_SEED, EVAL_SEED + 8):
        world.reset(seed, seed % len(world.tasks), scatter=scatter)
        assert play_expert(world).success, seed
        assert scatter or world.num_steps <= world.max_steps / 2


def test_other_object_in_the_bin_is_no_success_and_a_released_one_falls():
    world = build("blocks_state")
    world.reset(3, 0)

    while not world.table.is_in_bin(world.scene.other):
        assert not world.step(pick_and_place(world.table, world.scene.other)).success

    world.reset(0, 0)
    while world.where[2] < 0.08:
        world.step(world.expert())

    world.table.move(np.array([0, 0, 0, -1.0]))
    for _ in range(8):
        world.table.move(np.array([0, 0, 1.0, -1.0]))

    assert world.where[2] == pytest.approx(0.022, abs=0.004)


def test_chunk_equals_single_steps_and_ends_after_max_steps():
    world = build("blocks")
    world.reset(4, 1)
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 4)).astype(np.float32)
    chunked = world.advance(actions)
    world.reset(4, 1)
    single = [world.step(action) for action in actions][-1]
    np.testing.assert_equal(chunked.observation, single.observation)
    last = world.advance(np.zeros((world.max_steps, 4), np.float32))

    assert (last.done, last.success) == (True, False)
    assert world.num_steps == world.max_steps


def test_swap_changes_only_the_instruction():
    world = build("object10", pixels=32)
    for seed in range(4):
        one = world.reset(seed, 6)
        wrong = world.wrong_instruction
        two = world.reset(seed, 6, swap=True)
        np.testing.assert_equal(one | {"task": wrong}, two)

        assert wrong != one["task"]


@pytest.mark.parametrize("outside", [False, True])
def test_scene_invariants(outside):
    suite = scenes.SUITES["object10"]
    counts = set()
    hands = []

    targets = []
    for seed in range(100):
        task = seed % 10
        scene = scenes.draw_scene(suite, seed, task, outside=outside)
        assert scene.objects[scene.target].name == suite.objects[task].name
        assert scene.other != scene.target
        assert len({item.name for item in scene.objects}) == len(scene.objects)

        places = np.array([item.place for item in scene.objects])
        gaps = np.linalg.norm(places[:, None] - places[None], axis=-1)
        assert gaps[~np.eye(len(places), dtype=bool)].min() >= scenes.SPACING

        (left, right), (near, far) = scenes.REGION
        x, y = places.T
        inside = (left < x) & (x < right) & (near < y) & (y < far)

        assert inside.all() if not outside else not inside.any()
        hand = scenes.draw_free_hand(scene, np.random.default_rng(seed))
        assert not any(scenes.touches(item, *hand) for item in scene.objects)

        hands.append(hand[:2])
        targets.append(scene.objects[scene.target].place)
        counts.add(len(scene.objects))

    assert counts == {4, 5, 6}

    # The scattered hand does not reveal the object.
    correlation = np.corrcoef(np.array(hands).T, np.array(targets).T)[:2, 2:]
    assert np.abs(correlation).max() < 0.3


def test_held_out_sentences_are_held_out():
    worlds = build("blocks_state"), build("blocks_state", perturbation="wording")
    plain, reworded = ({w.reset(seed, 0)["task"] for seed in range(40)} for w in worlds)
    assert len(plain) == len(scenes.TRAINING_SENTENCES)
    assert len(reworded) == len(scenes.HELD_OUT_SENTENCES)
    assert not plain & reworded


@pytest.mark.parametrize("name", ["camera", "light", "noise", "position", "wording"])
def test_perturbation_changes_only_what_it_names(name):
    config = WorldConfig(name="object10", pixels=32)
    plain = build_world(config)
    perturbed = build_world(replace(config, perturbation=name))
    before = plain.reset(7, 2)
    after = perturbed.reset(7, 2)
    np.testing.assert_equal(after, perturbed.reset(7, 2))
    changed = set()
    for key in before:
        if not np.array_equal(before[key], after[key]):
            changed.add(key)

    assert changed == ({"task"} if name == "wording" else {FRONT_IMAGE})
    places = [[item.place for item in world.scene.objects] for world in (plain, perturbed)]
    assert (places[0] != places[1]) is (name == "position")


def test_rays_and_normals_match_geometry():
    world = build("object10", tasks=("red-can",))
    assert "red can" in world.reset(2, 0)["task"]

    model = world.table.model
    data = world.table.data
    can = world.scene.target
    mj.mj_kinematics(model, data)
    center = world.table.position(can)
    rays = np.array([[0.0, 0.0, -1.0], [1.0, 0.0, 0.0]])
    geoms, distances = cast_rays(model, data, center + np.array([0, 0, 0.5]), rays)

    assert model.geom(int(geoms[0])).name == f"object{can}"
    assert distances[0] == pytest.approx(0.5 - 0.034)
    assert geoms[1] == -1

    side = np.array([0.6, 0.8, 0.0])
    points = np.array([0.02 * side, [0.001, 0.002, 0.034], [0.0, 0.001, -0.034]])
    normals = surface_normals(model, data, geoms[[0, 0, 0]], center + points)
    np.testing.assert_allclose(normals, [side, [0, 0, 1], [0, 0, -1]], atol=1e-6)


def test_camera_rays():
    camera = Camera((0.0, -1.0, 1.0), (0.0, 0.0, 0.0), 40.0)
    rays = camera.rays(31).reshape(31, 31, 3)
    np.testing.assert_allclose(rays[15, 15], np.array([0, 1, -1]) / 2**0.5, atol=1e-9)

    assert rays[15, 30, 0] > 0 > rays[15, 0, 0], "right is right"
    assert rays[0, 15, 2] > rays[30, 15, 2], "up is up"

    edge = np.degrees(np.arccos(rays[15, 15] @ rays[0, 15]))
    assert edge == pytest.approx(20 * 30 / 31, abs=0.5)


@pytest.mark.parametrize(
    ("fields", "keyword"),
    [
        ({"tasks": ("pink-cube",)}, "pink-cube"),
        ({"pixels": 4}, "world.pixels"),
        ({"name": "bloks"}, "bloks"),
        ({"name": "nowhere:World"}, "nowhere"),
        ({"name": "metaworld"}, "metaworld.*pip install"),
    ],
)
def test_invalid_worlds_and_missing_packages_are_refused(monkeypatch, fields, keyword):
    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(ValueError, match=keyword):
        build(**fields)

"""The blocks worlds: promises of the protocol, rays against geometry, an expert that succeeds."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

from mesotron.config import WorldConfig
from mesotron.vla.interface import EVAL_SEED
from mesotron.vla.worlds import build_world
from mesotron.vla.worlds.blocks import FRONT as FRONT_VIEW
from mesotron.vla.worlds.engine import mj
from mesotron.vla.worlds.pick_and_place import pick_and_place
from mesotron.vla.worlds.rays import Camera, Painter, cast, normals
from mesotron.vla.worlds.scene import (
    COLOURS,
    REGION,
    SPACING,
    SUITES,
    Scene,
    Thing,
    draw_scene,
    scatter_hand,
    touches,
)
from mesotron.vla.worlds.table import Table
from mesotron.vla.worlds.wording import HELD_OUT, TRAINING

NAMES = ["blocks", "object10", "blocks_state", "object10_state"]
FRONT = "observation.images.front"
STATE = "observation.state"


def build(name="blocks", **fields):
    return build_world(WorldConfig(name=name, **fields))


def same(a, b):
    assert a.keys() == b.keys()
    return all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", NAMES)
def test_an_observation_is_what_the_protocol_says(name):
    world = build(name, pixels=20, wrist=True)
    seen = world.reset(seed=5, task=1)
    assert seen[STATE].shape == (world.state_dim,)
    assert seen[STATE].dtype == np.float32
    images = {key: value for key, value in seen.items() if key.startswith("observation.images.")}
    assert set(images) == {f"observation.images.{camera}" for camera in world.cameras}
    assert all(image.shape == (20, 20, 3) for image in images.values())
    assert all(image.dtype == np.uint8 for image in images.values())
    assert seen["task"] == world.instruction
    assert world.expert().shape == (world.action_dim,)
    assert bool(images) is not name.endswith("_state")


@pytest.mark.parametrize("name", NAMES)
def test_an_episode_repeats_from_its_seed(name):
    def play(world):
        seen = [world.reset(seed=8, task=0)]
        for _ in range(6):
            seen.append(world.step(world.expert()).observation)
        return seen

    used = build(name)
    play(used)  # a world that has played before begins anew
    for a, b in zip(play(used), play(build(name)), strict=True):
        assert same(a, b)


@pytest.mark.parametrize("name", ["blocks_state", "object10_state"])
def test_the_expert_succeeds_within_half_the_time(name):
    world = build(name)
    for seed in range(EVAL_SEED, EVAL_SEED + 10):
        world.reset(seed, seed % len(world.tasks))
        while not (step := world.step(world.expert())).done:
            pass
        assert step.success
        assert world.num_steps <= world.max_steps / 2


def test_the_expert_needs_no_phase_and_recovers_from_any_hand():
    world = build("object10_state")
    for seed in range(8):
        world.reset(seed, seed, scatter=True)
        while not (step := world.step(world.expert())).done:
            pass
        assert step.success, seed


def test_the_wrong_thing_in_the_bin_is_no_success():
    world = build("blocks_state")
    world.reset(3, 0)
    wrong = world.scene.other
    step = None
    while not world.table.is_in_bin(wrong):
        step = world.step(pick_and_place(world.table, wrong))
    assert step is not None
    assert not step.success


def test_time_runs_out():
    world = build("blocks_state")
    world.reset(0, 0)
    step = world.advance(np.zeros((world.max_steps + 5, 4), np.float32))
    assert step.done
    assert not step.success
    assert world.num_steps == world.max_steps


def test_chunks_end_where_single_steps_end():
    world = build("blocks")
    world.reset(4, 1)
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 4)).astype(np.float32)
    chunked = world.advance(actions)
    world.reset(4, 1)
    for action in actions:
        single = world.step(action)
    assert same(chunked.observation, single.observation)


def test_only_friction_holds_a_thing():
    world = build("blocks_state")
    world.reset(0, 0)
    while world.where[2] < 0.08:
        world.step(world.expert())
    world.table.move(np.array([0, 0, 0, -1.0]))
    for _ in range(8):
        world.table.move(np.array([0, 0, 1.0, -1.0]))
    assert world.where[2] == pytest.approx(0.022, abs=0.004)


def test_both_instructions_of_a_scene_share_its_picture():
    world = build("object10", pixels=32)
    for seed in range(4):
        one = world.reset(seed, 6)
        wrong = world.wrong_instruction
        two = world.reset(seed, 6, swap=True)
        assert np.array_equal(one[FRONT], two[FRONT])
        assert np.array_equal(one[STATE], two[STATE])
        assert two["task"] == wrong != one["task"]


@pytest.mark.parametrize("outside", [False, True])
def test_scenes_keep_their_promises(outside):
    suite = SUITES["object10"]
    counts = set()
    for seed in range(60):
        task = seed % 10
        scene = draw_scene(suite, seed, task, outside=outside)
        assert scene.things[scene.target].name == suite.things[task].name
        assert scene.other != scene.target
        assert len({thing.name for thing in scene.things}) == len(scene.things)
        places = np.array([thing.place for thing in scene.things])
        gaps = np.linalg.norm(places[:, None] - places[None], axis=-1)
        assert gaps[~np.eye(len(places), dtype=bool)].min() >= SPACING
        (left, right), (near, far) = REGION
        x, y = places.T
        inside = (left < x) & (x < right) & (near < y) & (y < far)
        assert inside.all() if not outside else not inside.any()
        hand = scatter_hand(scene, np.random.default_rng(seed))
        assert not any(touches(thing, *hand) for thing in scene.things)
        counts.add(len(scene.things))
    assert counts == {4, 5, 6}


def test_every_thing_is_asked_for_by_its_own_task():
    assert len(build("object10").tasks) == 10
    assert len(set(build("object10").tasks)) == 10
    chosen = build("object10_state", tasks=("yellow-can",))
    assert "yellow can" in chosen.reset(1, 0)["task"]


def test_held_out_sentences_are_held_out():
    assert not set(TRAINING) & set(HELD_OUT)
    plain, reworded = build("blocks_state"), build("blocks_state", perturbation="wording")
    said = {plain.reset(seed, 0)["task"] for seed in range(40)}
    asked = {reworded.reset(seed, 0)["task"] for seed in range(40)}
    assert len(said) == len(TRAINING)
    assert len(asked) == len(HELD_OUT)
    assert not said & asked


@pytest.mark.parametrize("name", ["camera", "light", "noise", "position", "wording"])
def test_a_perturbation_changes_what_it_names_and_nothing_else(name):
    config = WorldConfig(name="object10", pixels=32)
    plain = build_world(config)
    perturbed = build_world(replace(config, perturbation=name))
    before, after = plain.reset(7, 2), perturbed.reset(7, 2)
    assert same(after, perturbed.reset(7, 2)), "a perturbed episode repeats too"
    changed = {key for key in before if not np.array_equal(before[key], after[key])}
    expected = {"task"} if name == "wording" else {FRONT}
    assert changed == expected
    moved = [thing.place for thing in plain.scene.things] != [
        thing.place for thing in perturbed.scene.things
    ]
    assert moved is (name == "position")


def test_rays_meet_what_geometry_says():
    world = build("blocks")
    world.reset(2, 0)
    model, data = world.table.model, world.table.data
    mj.mj_kinematics(model, data)
    thing = world.table.position(0)
    above = thing + np.array([0, 0, 0.5])
    down = np.array([[0.0, 0.0, -1.0], [1.0, 0.0, 0.0]])
    geoms, distances = cast(model, data, above, down)
    assert model.geom(int(geoms[0])).name == "thing0"
    assert distances[0] == pytest.approx(0.5 - 0.022)
    assert geoms[1] == -1
    top = normals(model, data, geoms[:1], (above + distances[0] * down[0])[None])
    np.testing.assert_allclose(top, [[0, 0, 1]], atol=1e-6)


def test_normals_of_a_can_point_away_from_its_axis():
    world = build("object10", tasks=("red-can",))
    world.reset(2, 0)
    model, data = world.table.model, world.table.data
    mj.mj_kinematics(model, data)
    can = world.scene.target
    geom = np.array([model.geom(f"thing{can}").id] * 3)
    middle = world.table.position(can)
    side = np.array([0.6, 0.8, 0.0])
    points = middle + np.array([0.02 * side, [0.001, 0.002, 0.034], [0.0, 0.001, -0.034]])
    found = normals(model, data, geom, points)
    np.testing.assert_allclose(found, [side, [0, 0, 1], [0, 0, -1]], atol=1e-6)


def test_a_camera_looks_where_it_is_told():
    camera = Camera((0.0, -1.0, 1.0), (0.0, 0.0, 0.0), 40.0)
    rays = camera.rays(31).reshape(31, 31, 3)
    np.testing.assert_allclose(rays[15, 15], np.array([0, 1, -1]) / 2**0.5, atol=1e-9)
    assert rays[15, 30, 0] > 0 > rays[15, 0, 0], "right is right"
    assert rays[0, 15, 2] > rays[30, 15, 2], "up is up"
    edge = np.degrees(np.arccos(rays[15, 15] @ rays[0, 15]))
    assert edge == pytest.approx(20 * 30 / 31, abs=0.5)


def test_colours_and_shapes_can_be_told_apart():
    def paint(shape):
        things = (Thing("red", shape, (0.0, -0.05)), Thing("blue", "cube", (0.1, 0.0)))
        scene = Scene(things, 0, 1, TRAINING[0], (-0.1, 0.05, 0.15))
        table = Table(scene)
        names = [table.model.geom(k).name for k in range(table.model.ngeom)]
        colours = np.array([COLOURS["red"] if name == "thing0" else (0, 0, 0) for name in names])
        camera = FRONT_VIEW.camera
        painter = Painter(table.model, colours, FRONT_VIEW.light)
        image = painter.paint(table.data, np.array(camera.position), camera.rays(64))
        return image[image[..., 0] > 20]

    cube, can = paint("cube"), paint("can")
    assert len(cube) > 20
    assert len(can) > 20
    # Two faces of a cube are seen from here; a can's wall turns slowly away from the light.
    assert len(np.unique(cube, axis=0)) == 2
    assert len(np.unique(can, axis=0)) > 4
    hue = cube[0] / cube[0].sum()
    np.testing.assert_allclose(hue, np.array(COLOURS["red"]) / sum(COLOURS["red"]), atol=0.02)


def test_a_recorded_state_shows_the_same_picture():
    world = build("object10", pixels=32, wrist=True)
    world.reset(5, 3)
    for _ in range(7):
        seen = world.step(world.expert()).observation
    qpos = np.append(world.qpos, [0.0, 0.0])  # shards pad
    world.reset(5, 3)
    shown = world.show(qpos)
    for camera in world.cameras:
        key = f"observation.images.{camera}"
        assert (seen[key] == shown[key]).mean() > 0.99
    np.testing.assert_allclose(seen[STATE], shown[STATE], atol=1e-6)


def test_mistakes_are_sentences():
    with pytest.raises(ValueError, match="no task 'pink-cube'; it has red-cube, blue-cube"):
        build(tasks=("pink-cube",))
    with pytest.raises(ValueError, match="4 pixels show nothing"):
        build(pixels=4)
    with pytest.raises(ValueError, match=r"no world 'bloks'; there are blocks, .* of your own"):
        build("bloks")
    with pytest.raises(ValueError, match="nowhere:World cannot be imported: No module"):
        build("nowhere:World")


@pytest.mark.parametrize(("name", "package"), [("blocks", "mujoco"), ("metaworld", "metaworld")])
def test_a_missing_package_is_a_sentence(monkeypatch, name, package):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted: None if wanted == package else real(wanted)
    )
    with pytest.raises(ValueError, match=f"needs the package {package}.*pip install"):
        build(name)

"""Demonstrations by scripted experts: planned, recorded in worker processes, stored as npz shards.

A folder holds demos.json and npz shards with LeRobot's keys; a killed run leaves complete shards
and the next run makes the missing ones. Compact shards hold the simulator's state, not images.

In an episode the hand is soon near the object it must take, and a policy learns to read the hand
instead of the image. Single frames with a scattered hand, each scene with two instructions, made
the difference between 8 % and 98 % success in our prototype.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from mesotron.config import DemosConfig, WorldConfig
from mesotron.config.base import from_plain, to_plain
from mesotron.runs.console import LiveView, SafeConsole
from mesotron.runs.extras import require
from mesotron.runs.files import read_json, write_json
from mesotron.runs.links import open_draft
from mesotron.runs.trust import check_trusted, code_names
from mesotron.vla.interface import EVAL_SEED, IMAGES, STATE, TASK, Demos, Observation, World
from mesotron.vla.rollout import simulation_pool
from mesotron.vla.worlds import build_world

MANIFEST = "demos.json"
FORMAT = "mesotron demonstrations 1"
SHARD_ACTIONS = 600  # per shard, about half a second of simulation
MAX_SHARDS = 1_000_000
MIN_SUCCESS = 0.9
DAMAGED = (  # raised by readers of damaged files
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    BadZipFile,
    struct.error,
    zlib.error,
)

Arrays = dict[str, np.ndarray]
Log = Callable[[str], None] | None  # None prints nothing and shows no progress bar


def run(config: DemosConfig) -> int:
    if config.lerobot is not None:
        require("lerobot", what="--lerobot")

    if config.render is not None:
        render_demos(config)
    else:
        write_demos(config)

    if config.lerobot is not None:
        from mesotron.vla.lerobot import export_lerobot

        dropped = export_lerobot(load_demos(config.out), config.lerobot)
        print(f"{config.lerobot}: LeRobotDataset v3.0 without the {dropped:,} single frames")

    return 0


def load_demos(path: Path, pixels: int | None = None) -> Demos:
    """Load a folder of `mesotron vla demos`, or a LeRobotDataset with images shrunk to `pixels`."""
    load = load_shards
    errors = ()
    if is_lerobot(path):
        require("lerobot", what=f"{path}, a LeRobotDataset,")
        from mesotron.vla.lerobot import OTHER_ERRORS, load_lerobot

        load = partial(load_lerobot, pixels=pixels)
        errors = OTHER_ERRORS

    with naming_damage(path, errors):
        demos = load(path)
        demos.check()

    return demos


@contextmanager
def naming_damage(path: Path, more: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """One sentence for what zip, NumPy, Arrow, Pillow and PyAV raise for damaged files."""
    try:
        yield
    except (*DAMAGED, *more) as error:
        if isinstance(error, ValueError) and str(error).startswith((str(path), "--")):
            raise  # a sentence already
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path} is damaged ({why}): remove it and get it again") from error


def is_lerobot(folder: Path) -> bool:
    return (folder / "meta/info.json").is_file()


def make_demos(config: DemosConfig, log: Log = print) -> Demos:
    """Make the missing demonstrations and load all of them; a ValueError if the folder holds other
    data, or the expert fails in over 10 % of the episodes."""
    write_demos(config, log)
    return load_demos(config.out)


def write_demos(config: DemosConfig, log: Log = print) -> None:
    """Record the missing shards of a folder."""
    world = config.world
    simulator = build_world(world)
    specs = plan_demos(config, simulator)
    blocks = split_into_shards(specs, config.horizon, simulator.max_steps)

    facts = {
        "num_shards": len(blocks),
        "noise": config.noise,
        "horizon": config.horizon,
        "episodes": config.episodes,
        "starts": len(specs) - config.episodes,
        "cameras": list(simulator.cameras),
        "every": config.every,
        "seed": config.seed,
    }
    _open_folder(config.out, world, config.compact, facts)

    # Compact shards keep no images: render the smallest.
    blind = replace(world, pixels=8, wrist=False) if config.compact else world
    jobs = [(replace(config, world=blind), block, first) for first, block in blocks]
    _write_shards("mesotron.vla.demos:make_shard", jobs, config, log)


def split_into_shards(
    specs: Sequence["DemoSpec"], horizon: int, max_steps: int
) -> list[tuple[int, list["DemoSpec"]]]:
    """(number of the first demonstration, demonstrations) of each shard: episodes, then single
    frames."""
    blocks = []
    first = 0
    for scatter, group in groupby(specs, key=attrgetter("scatter")):
        alike = list(group)
        actions = horizon if scatter else max_steps // 3  # of one demonstration, about
        size = max(1, SHARD_ACTIONS // actions)
        for start in range(0, len(alike), size):
            blocks.append((first + start, alike[start : start + size]))

        first += len(alike)

    return blocks


def render_demos(config: DemosConfig, log: Log = print) -> None:
    """Make `config.out` from the compact demonstrations in `config.render`, with images."""
    assert config.render is not None
    manifest = read_manifest(config.render)
    source = world_of(manifest)
    world = config.world
    if not manifest["compact"]:
        raise ValueError(f"--render {config.render} already has images")

    if (source.name, source.tasks) != (world.name, world.tasks):
        given = describe_world(source)
        raise ValueError(f"--render {config.render} is from {given}, not {describe_world(world)}")

    kept = ("num_shards", "noise", "horizon", "episodes", "starts", "seed", "every")
    with naming_damage(config.render / MANIFEST):
        facts = {key: manifest[key] for key in kept}

    _open_folder(config.out, world, False, facts | {"cameras": list(build_world(world).cameras)})
    jobs = [(shard_path(config.render, k), world) for k in range(manifest["num_shards"])]
    _write_shards("mesotron.vla.demos:render_shard", jobs, config, log)


def describe_world(world: WorldConfig) -> str:
    return f"{world.name} ({', '.join(world.tasks) or 'all tasks'})"


def _open_folder(folder: Path, world: WorldConfig, compact: bool, facts: dict[str, Any]) -> None:
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        wanted = facts | {"compact": compact}

        differs = []
        for key, value in wanted.items():
            if manifest.get(key) != value:
                differs.append(key)

        if world_of(manifest) != world:
            differs.insert(0, "world")

        if differs:
            raise ValueError(f"{folder} has another {', '.join(differs)}: choose another --out")

        return

    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another --out")

    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, world, compact, facts)


def _write_shards(
    target: str, jobs: Sequence[tuple[Any, ...]], config: DemosConfig, log: Log
) -> None:
    """Call target(path, *job) for each missing shard, then report the expert's success."""
    paths = [shard_path(config.out, number) for number in range(len(jobs))]
    calls = []
    for path, job in zip(paths, jobs):
        if not path.exists():
            calls.append((path, *job))

    console = SafeConsole(quiet=log is None)

    columns = {"frames": "frames"}
    with simulation_pool(config.workers) as pool, LiveView(len(calls), columns, console) as view:
        frames = 0
        try:
            for done, (_, made) in enumerate(pool.map(target, calls), 1):
                frames += made
                view.update(done, {"frames": frames})
        except KeyboardInterrupt:
            raise KeyboardInterrupt("run the same command again to continue") from None

    failed = 0
    observations = 0
    kept = 0
    for path in paths:
        with naming_damage(path):
            shard = read_shard(path, ("failed", "start", "episode_index"))
            failed += int(shard["failed"])
            observations += len(shard.get("start", ()))
            kept += len(np.unique(shard.get("episode_index", ())))

    if log is not None:
        counts = f"{observations:,} frames from {kept:,} demonstrations"
        log(f"{config.out}: {counts}; {failed} failed and were dropped")

    # Of whole episodes: a single frame cannot fail.
    success = 1 - failed / max(1, read_manifest(config.out)["episodes"])
    if success < MIN_SUCCESS:
        share = f"{success:.0%} of the episodes"
        raise ValueError(f"the expert succeeded in only {share}: lower --noise")


class DemoSpec(NamedTuple):
    """A demonstration to record; see `World.reset` for the fields."""

    seed: int
    task: int
    swap: bool = False
    scatter: bool = False


class RecordedDemo(NamedTuple):
    spec: DemoSpec
    observations: list[Observation]
    where: list[np.ndarray]
    qpos: list[np.ndarray]
    actions: list[np.ndarray]
    success: bool
    answers: list[int]  # numbers of the actions taken at the observations


def plan_demos(config: DemosConfig, world: World) -> list[DemoSpec]:
    """All demonstrations in order: episodes, then single frames; only pairs share a scene."""
    starts = config.starts
    tasks = len(world.tasks)
    if starts and not world.is_paired:
        raise ValueError(f"{config.world.name} cannot scatter the hand: leave --starts out")

    if starts is None:
        starts = 10 * config.episodes if world.is_paired else 0

    if config.episodes < 0 or starts < 0 or config.episodes + starts == 0:
        raise ValueError(f"nothing to make: --episodes {config.episodes} --starts {starts}")

    if world.is_paired:
        first_start = config.seed + (config.episodes + 1) // 2
        specs = plan_pairs(config.seed, config.episodes, tasks)
        specs += plan_pairs(first_start, starts, tasks, scatter=True)
    else:
        specs = plan_task_by_task(config.seed, config.episodes, tasks)

    seeds = [spec.seed for spec in specs]
    if min(seeds) < 0 or max(seeds) >= EVAL_SEED:
        raise ValueError(f"scene {max(seeds)} is beyond training's {EVAL_SEED:,}: lower --seed")

    return specs


def plan_task_by_task(first: int, count: int, tasks: int) -> list[DemoSpec]:
    """Demonstrations in the order of their tasks, since switching builds a new simulator."""
    specs = [DemoSpec(first + k // tasks, k % tasks) for k in range(count)]
    return sorted(specs, key=lambda spec: spec.task)


def plan_pairs(first: int, count: int, tasks: int, scatter: bool = False) -> list[DemoSpec]:
    """Demonstrations of which every two share a scene, under another instruction each."""
    specs = []
    for k in range(count):
        pair, place = divmod(k, 2)
        specs.append(DemoSpec(first + pair, pair % tasks, swap=place == 1, scatter=scatter))

    return specs


def record(
    world: World, spec: DemoSpec, noise: float, horizon: int, every: int = 1
) -> RecordedDemo:
    """Let the expert act and record what it observes and does. Noise is added to each action after
    it is recorded, so that the expert shows corrections (Laskey et al. 2017, arXiv 1703.09327)."""
    rng = np.random.default_rng([spec.seed, spec.task, spec.swap, 17])
    first = world.reset(*spec)

    recording = RecordedDemo(
        spec, observations=[], where=[], qpos=[], actions=[], success=False, answers=[]
    )
    for number in range(horizon if spec.scatter else world.max_steps):
        action = world.expert()
        if number == 0 or (not spec.scatter and number % every == 0):
            recording.observations.append(world.observe() if number else first)
            recording.where.append(world.where)
            recording.qpos.append(world.qpos)
            recording.answers.append(number)

        recording.actions.append(action)

        if spec.scatter:
            moved = action
        else:
            moved = action + rng.normal(0, noise, action.shape)

        success, done = world.move(np.clip(moved, -1, 1).astype(np.float32))
        if done:
            return recording._replace(success=success)

    return recording


_cached_world = cache(build_world)  # some take a second to build


def make_shard(path: Path, config: DemosConfig, specs: list[DemoSpec], first: int) -> int:
    """Record a block of demonstrations, numbered from `first`; returns the number of frames."""
    world = _cached_world(config.world)
    numbers = []
    good = []
    for number, spec in enumerate(specs, first):
        recording = record(world, spec, config.noise, config.horizon, config.every)
        if recording.success or spec.scatter:
            numbers.append(number)
            good.append(recording)

    if not good:  # count the failures
        write_shard(path, {"action": np.empty((0, 0)), "failed": np.array(len(specs))})
        return 0

    arrays = _pack(good, numbers, config.compact, failed=len(specs) - len(good))
    write_shard(path, arrays)

    return len(arrays["start"])


def render_shard(path: Path, source: Path, world: WorldConfig) -> int:
    """Render the observations of a compact shard; returns their number."""
    with naming_damage(source):
        arrays = read_shard(source)
        frames = []
        if len(arrays["action"]):
            columns = [arrays[name].tolist() for name in DemoSpec._fields]
            frames = list(zip(zip(*columns, strict=True), arrays["qpos"], strict=True))

    if not frames:
        write_shard(path, arrays)
        return 0

    simulator = _cached_world(world)
    observations = []

    scene = None
    for spec, qpos in frames:
        if spec != scene:
            simulator.reset(*spec[:3])
            scene = spec
        observations.append(simulator.show(qpos))

    for camera in simulator.cameras:
        arrays[IMAGES + camera] = np.stack([seen[IMAGES + camera] for seen in observations])

    for name in ("qpos", *DemoSpec._fields):
        arrays.pop(name, None)

    write_shard(path, arrays)
    return len(observations)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.npz"


def _pack(
    recordings: Sequence[RecordedDemo], numbers: Sequence[int], compact: bool, failed: int
) -> Arrays:
    """The arrays of a shard; `numbers` are the episode indices, `failed` counts dropped ones."""
    observations: list[Observation] = []
    actions: list[np.ndarray] = []
    where: list[np.ndarray] = []
    starts: list[int] = []  # row of the action taken at each observation
    frames: list[int] = []  # number of each action in its episode
    for recording in recordings:
        starts += [len(actions) + answer for answer in recording.answers]
        frames += range(len(recording.actions))
        observations += recording.observations
        actions += recording.actions
        where += recording.where

    lengths = [len(recording.actions) for recording in recordings]
    texts, index = np.unique([one[TASK] for one in observations], return_inverse=True)
    arrays: Arrays = {
        "action": np.stack(actions),
        "episode_index": np.repeat(numbers, lengths),
        "frame_index": np.array(frames),
        "start": np.array(starts),
        STATE: np.stack([one[STATE] for one in observations]),
        "task_index": index.astype(np.int64),
        "tasks": texts,
        "where": np.stack(where),
        "failed": np.array(failed),
    }
    if compact:
        return arrays | _pack_scenes(recordings)

    for key in observations[0]:
        if key.startswith(IMAGES):
            arrays[key] = np.stack([one[key] for one in observations])

    return arrays


def _pack_scenes(recordings: Sequence[RecordedDemo]) -> Arrays:
    """What it takes to render the observations later: the scenes and the joint positions."""
    arrays: Arrays = {}
    counts = [len(recording.observations) for recording in recordings]
    for name in DemoSpec._fields:
        values = [getattr(recording.spec, name) for recording in recordings]
        arrays[name] = np.repeat(values, counts)

    # Scenes differ in their number of joints.
    positions = [qpos for recording in recordings for qpos in recording.qpos]
    arrays["qpos"] = np.zeros((len(positions), max(map(len, positions))), np.float32)
    for row, qpos in zip(arrays["qpos"], positions):
        row[: len(qpos)] = qpos

    return arrays


def write_shard(path: Path, arrays: Arrays) -> None:
    draft = path.with_name(f".{path.stem}.writing.npz")
    with open_draft(draft, "xb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]

    draft.replace(path)


def read_shard(path: Path, keys: Sequence[str] | None = None) -> Arrays:
    with naming_damage(path), path.open("rb") as handle, np.load(handle) as file:
        return {key: file[key] for key in file.files if keys is None or key in keys}


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} has no {MANIFEST}: make it with mesotron vla demos")

    manifest = read_json(path, follow_links=True)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} has format {manifest.get('format')!r}, not {FORMAT!r}")

    count = manifest.get("num_shards", 0)
    if type(count) is not int or not 0 <= count <= MAX_SHARDS:
        raise ValueError(f"{path} is damaged: it has num_shards {count!r:.40}")

    older = {"every": 1, "compact": False, "world": None}  # which older ones lack
    return older | manifest


def write_manifest(folder: Path, world: WorldConfig, compact: bool, facts: dict[str, Any]) -> None:
    head = {"format": FORMAT, "world": to_plain(world), "compact": compact}
    write_json(folder / MANIFEST, head | facts)


def world_of(manifest: dict[str, Any]) -> WorldConfig:
    return from_plain(WorldConfig, manifest["world"], MANIFEST)


def trusted_world(folder: Path, trust: bool) -> WorldConfig:
    world = world_of(read_manifest(folder))
    check_trusted(code_names(world), folder / MANIFEST, trust)
    return world


def load_shards(folder: Path) -> Demos:
    manifest = read_manifest(folder)
    if manifest["compact"] and manifest["cameras"]:
        raise ValueError(f"{folder} has no images: run mesotron vla demos --render {folder}")

    paths = [shard_path(folder, number) for number in range(manifest["num_shards"])]
    missing = sum(not path.is_file() for path in paths)
    if missing:
        count = f"{missing} of {len(paths)} shards"
        raise ValueError(f"{folder} lacks {count}: run the command that made it again")

    shards = [arrays for arrays in map(read_shard, paths) if len(arrays["action"])]
    named = []
    starts = []
    first_row = 0
    for arrays in shards:
        named.append(arrays["tasks"][arrays["task_index"]])
        starts.append(arrays["start"] + first_row)
        first_row += len(arrays["action"])

    tasks, task_index = np.unique(np.concatenate(named).astype(str), return_inverse=True)

    def column(key: str) -> np.ndarray:
        return np.concatenate([arrays[key] for arrays in shards])

    return Demos(
        images={camera: column(IMAGES + camera) for camera in manifest["cameras"]},
        state=column(STATE),
        task_index=task_index,
        tasks=tasks.tolist(),
        start=np.concatenate(starts),
        action=column("action"),
        episode_index=column("episode_index"),
        frame_index=column("frame_index"),
        where=column("where"),
        world=world_of(manifest),
    )

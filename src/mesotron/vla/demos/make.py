"""Make demonstrations in worker processes, shard by shard; what is there already is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mesotron.config import DemosConfig, WorldConfig
from mesotron.runs.console import LiveView
from mesotron.vla.demos.shards import (
    MANIFEST,
    QPOS,
    TAKE_FIELDS,
    load_shards,
    pack,
    read_manifest,
    read_shard,
    shard_path,
    takes_of,
    world_of,
    write_manifest,
    write_shard,
)
from mesotron.vla.demos.takes import Take, plan_takes, record
from mesotron.vla.interface import IMAGES, Demos, World
from mesotron.vla.simulation.processes import Workers
from mesotron.vla.worlds import build_world

HERE = "mesotron.vla.demos.make"
SHARD_ACTIONS = 600  # about as many in each shard: half a second of simulation
LEAST_SUCCESS = 0.9

Say = Callable[[str], None] | None
"""Told sentences; None keeps silent, and shows no progress."""


def make_demos(config: DemosConfig, say: Say = print) -> Demos:
    """Make the demonstrations that are not there yet, and load all of them.

    Args:
        config: which, how many, and where to.
        say: told in sentences how it went; None keeps silent.

    Raises:
        ValueError: the folder holds others, or the expert fails in more than one of ten episodes.

    Example:
        >>> import tempfile
        >>> config = DemosConfig(episodes=2, starts=2, workers=1, world=WorldConfig(pixels=8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     demos = make_demos(replace(config, out=Path(folder) / "two"), say=None)
        >>> demos.images["front"].shape[1:], demos.action.shape[1]
        ((8, 8, 3), 4)
    """
    write_demos(config, say)
    return load_shards(config.out)


def write_demos(config: DemosConfig, say: Say = print) -> None:
    """Make the demonstrations that are not there yet, without loading them."""
    world = config.world
    # Without images a take is quick, and the same for every size of picture.
    blind = replace(world, pixels=8, wrist=False) if config.compact else world
    simulator = build_world(world)
    takes = plan_takes(config, simulator)
    blocks = split(takes, simulator.max_steps // 3, config.horizon)
    facts = {"num_shards": len(blocks), "noise": config.noise, "horizon": config.horizon}
    facts |= {"episodes": config.episodes, "starts": len(takes) - config.episodes}
    facts |= {"cameras": list(simulator.cameras), "every": config.every}
    open_folder(config.out, world, config.compact, facts | {"seed": config.seed})
    jobs = [
        (shard_path(config.out, k), replace(config, world=blind), block, first)
        for k, (first, block) in enumerate(blocks)
        if not shard_path(config.out, k).exists()
    ]
    run_jobs(f"{HERE}:make_shard", jobs, config.workers, say)
    report(config.out, say)


def render_demos(config: DemosConfig, say: Say = print) -> None:
    """Make `config.out` from compact demonstrations: the images at `config.world`'s size.

    Raises:
        ValueError: they are of another world, or not compact.
    """
    assert config.render is not None
    manifest = read_manifest(config.render)
    source, world = world_of(manifest), config.world
    if not manifest["compact"]:
        raise ValueError(f"{config.render} has its images already")
    if (source.name, source.tasks) != (world.name, world.tasks):
        raise ValueError(
            f"{config.render} is of {describe(source)}, not of {describe(world)}; "
            f"give --world.name {source.name}"
        )
    kept = ("num_shards", "noise", "horizon", "episodes", "starts", "seed", "every")
    facts = {key: manifest[key] for key in kept}
    facts |= {"cameras": list(build_world(world).cameras)}
    open_folder(config.out, world, False, facts)
    numbers = range(manifest["num_shards"])
    jobs = [
        (shard_path(config.render, k), shard_path(config.out, k), world)
        for k in numbers
        if not shard_path(config.out, k).exists()
    ]
    run_jobs(f"{HERE}:render_shard", jobs, config.workers, say)
    report(config.out, say)


def describe(world: WorldConfig) -> str:
    """A world and its tasks in words."""
    return f"{world.name} ({', '.join(world.tasks) or 'all tasks'})"


def split(takes: list[Take], length: int, horizon: int) -> list[tuple[int, list[Take]]]:
    """Blocks of takes of one kind, with the number of each block's first.

    Args:
        takes: all of them.
        length: actions of an episode, about.
        horizon: actions of a single frame.
    """
    blocks: list[tuple[int, list[Take]]] = []
    for scatter, actions in ((False, length), (True, horizon)):
        kind = [(k, take) for k, take in enumerate(takes) if take.scatter is scatter]
        size = max(1, SHARD_ACTIONS // actions)
        for start in range(0, len(kind), size):
            block = kind[start : start + size]
            blocks.append((block[0][0], [take for _, take in block]))
    return blocks


def open_folder(folder: Path, world: WorldConfig, compact: bool, facts: dict[str, Any]) -> None:
    """Begin a folder, or see that the one there is the same."""
    if (folder / MANIFEST).exists():
        found = read_manifest(folder)
        ours = facts | {"compact": compact}
        differs = [key for key, value in ours.items() if found.get(key) != value]
        if world_of(found) != world:
            differs.insert(0, "world")
        if differs:
            raise ValueError(
                f"{folder} holds other demonstrations ({', '.join(differs)} differ); "
                "give --out another name"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds something else; give --out another name")
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, world, compact, facts)


def run_jobs(target: str, jobs: list[tuple[Any, ...]], workers: int | None, say: Say) -> None:
    """Do the jobs that are left, with progress."""
    console = Console(quiet=say is None)
    if not jobs:
        console.print("nothing is left to make")
        return
    with Workers(workers) as crew, LiveView(len(jobs), {"frames": "frames"}, console) as view:
        frames = 0
        try:
            for done, (_, made) in enumerate(crew.map(target, jobs), 1):
                frames += made
                view.update(done, {"frames": frames})
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command goes on from here") from None


def make_shard(path: Path, config: DemosConfig, takes: list[Take], first: int) -> int:
    """Record a block of takes, counted from `first`; returns how many frames were seen."""
    world = cached_world(config.world)
    numbered = [
        (number, record(world, take, config.noise, config.horizon, config.every))
        for number, take in enumerate(takes, first)
    ]
    good = [(number, one) for number, one in numbered if one.success or one.take.scatter]
    if not good:  # nothing to keep, but the failures count
        write_shard(path, {"action": np.empty((0, 0)), "failed": np.array(len(takes))})
        return 0
    numbers, recorded = zip(*good)
    arrays = pack(recorded, numbers, config.compact, failed=len(takes) - len(good))
    write_shard(path, arrays)
    return len(arrays["start"])


def render_shard(source: Path, path: Path, world: WorldConfig) -> int:
    """Draw the observations of a compact shard; returns their number."""
    arrays = read_shard(source)
    if not len(arrays["action"]):
        write_shard(path, arrays)
        return 0
    simulator = cached_world(world)
    shown, scene = [], None
    for take, qpos in zip(takes_of(arrays), arrays[QPOS], strict=True):
        if take != scene:
            simulator.reset(take.seed, take.task, take.swap)
            scene = take
        shown.append(simulator.show(qpos))
    for camera in simulator.cameras:
        arrays[IMAGES + camera] = np.stack([seen[IMAGES + camera] for seen in shown])
    write_shard(path, {k: v for k, v in arrays.items() if k not in (QPOS, *TAKE_FIELDS)})
    return len(shown)


_worlds: dict[WorldConfig, World] = {}


def cached_world(config: WorldConfig) -> World:
    """This process's world, built once: some take a second."""
    if config not in _worlds:
        _worlds[config] = build_world(config)
    return _worlds[config]


def report(folder: Path, say: Say) -> None:
    """Say how the expert did, and refuse an expert that fails often."""
    manifest = read_manifest(folder)
    failed = observations = kept = 0
    for number in range(manifest["num_shards"]):
        with np.load(shard_path(folder, number)) as file:
            failed += int(file["failed"])
            if "start" in file.files:
                observations += len(file["start"])
                kept += len(np.unique(file["episode_index"]))
    # Of whole episodes: a single frame cannot fail.
    share = 1 - failed / max(1, manifest["episodes"])
    if say is not None:
        counts = f"{observations:,} frames of {kept:,} takes; {failed} failed and were left out"
        say(f"{folder}: {counts}")
    if share < LEAST_SUCCESS:
        raise ValueError(
            f"the expert succeeded in {share:.0%} of the episodes, less than {LEAST_SUCCESS:.0%}; "
            "give less --noise, or leave out the tasks it cannot do"
        )

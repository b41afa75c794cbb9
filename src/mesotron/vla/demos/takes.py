"""What is demonstrated: whole episodes, and single frames with the hand anywhere.

In an episode the hand is soon near the thing it was told to take, and a policy learns to read the
hand instead of the picture. Frames with a scattered hand, each scene asked for two of its things,
break that: in our prototype they made the difference between 8 % and 98 % success.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mesotron.config import DemosConfig
from mesotron.vla.interface import EVAL_SEED, Observation, World


@dataclass(frozen=True)
class Take:
    """One demonstration to record; see `World.reset` for the fields."""

    seed: int
    task: int
    swap: bool = False
    scatter: bool = False


class Recorded(NamedTuple):
    """A take: m observations, n actions, and which of them answers each observation."""

    take: Take
    observations: list[Observation]
    where: list[np.ndarray]
    qpos: list[np.ndarray]
    actions: list[np.ndarray]
    success: bool
    answers: list[int]


def count_starts(config: DemosConfig, world: World) -> int:
    """How many single frames: as asked, or ten for each episode where the world can make them."""
    starts = 10 * config.episodes if config.starts is None else config.starts
    if world.is_paired:
        return starts
    if config.starts:
        raise ValueError(f"{config.world.name} cannot put the hand anywhere; leave --starts out")
    return 0


def plan_takes(config: DemosConfig, world: World) -> list[Take]:
    """Every take in order: episodes, then starts, over scenes that no two of them share but pairs.

    Raises:
        ValueError: the scenes would run into those of evaluation, or there is nothing to make.
    """
    starts, tasks = count_starts(config, world), len(world.tasks)
    if config.episodes < 0 or starts < 0 or config.episodes + starts == 0:
        raise ValueError(f"{config.episodes} episodes and {starts} starts make no demonstrations")
    if not world.is_paired:
        # Task by task: a simulator of another task takes a while to build.
        whole = [Take(config.seed + k // tasks, k % tasks) for k in range(config.episodes)]
        return check_seeds(sorted(whole, key=lambda take: take.task))
    pairs = [(k // 2, k // 2 % tasks, k % 2 == 1) for k in range(config.episodes)]
    whole = [Take(config.seed + scene, task, swap) for scene, task, swap in pairs]
    first = config.seed + (config.episodes + 1) // 2
    pairs = [(k // 2, k // 2 % tasks, k % 2 == 1) for k in range(starts)]
    return check_seeds(
        whole + [Take(first + scene, task, swap, scatter=True) for scene, task, swap in pairs]
    )


def check_seeds(takes: list[Take]) -> list[Take]:
    """Refuse scenes that are kept for evaluation."""
    last = max(take.seed for take in takes)
    if min(take.seed for take in takes) < 0 or last >= EVAL_SEED:
        raise ValueError(
            f"scene {last} is not a training scene: those are 0 to {EVAL_SEED - 1:,}; "
            "give another --seed, or fewer"
        )
    return takes


def record(world: World, take: Take, noise: float, horizon: int, every: int = 1) -> Recorded:
    """Let the expert act, note what it saw and did.

    Args:
        world: any.
        take: what to record.
        noise: standard deviation of what is added to each action after it is noted, so that the
            expert is seen to correct itself (Laskey et al. 2017, arXiv 1703.09327).
        horizon: actions that follow a single frame.
        every: actions of an episode from one observation to the next.
    """
    rng = np.random.default_rng([take.seed, take.task, take.swap, 17])
    first = world.reset(take.seed, take.task, take.swap, take.scatter)
    kept = Recorded(take, [], [], [], [], success=False, answers=[])
    for number in range(horizon if take.scatter else world.max_steps):
        action = world.expert()
        if number == 0 or (not take.scatter and number % every == 0):
            kept.observations.append(world.observe() if number else first)
            kept.where.append(world.where)
            kept.qpos.append(world.qpos)
            kept.answers.append(number)
        kept.actions.append(action)
        moved = action if take.scatter else action + rng.normal(0, noise, action.shape)
        success, done = world.move(np.clip(moved, -1, 1).astype(np.float32))
        if done:
            return kept._replace(success=success)
    return kept

"""Checkpoints of a policy: weights and normalisation in safetensors, everything else in JSON.

Nothing is pickled. A checkpoint can be acted with on any machine: it says what the policy sees and
moves, and in which world its demonstrations were made.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from mesotron.config import PolicyConfig, WorldConfig
from mesotron.config.base import from_plain
from mesotron.rlvr.checkpoint import load_state, own_memory, save_state
from mesotron.runs.checkpoints import newest_whole, prune, writing
from mesotron.runs.folder import plain
from mesotron.vla.policy import Body, Policy
from mesotron.vla.towers import LanguageTower, VisionTower

if TYPE_CHECKING:
    from mesotron.vla.training import Trainer

DESCRIPTION, WEIGHTS, OPTIMIZER = "policy.json", "policy.safetensors", "optimizer"


class Saved(NamedTuple):
    """A policy that was read, the step it was written at, its demonstrations' world if any, and
    the run's own `--execute` if it had one."""

    policy: Policy
    step: int
    world: WorldConfig | None
    path: Path
    execute: int | None


def save(root: Path, trainer: Trainer, world: WorldConfig | None, keep: int) -> None:
    """Write a checkpoint of a training at its present step; all but `keep` are removed."""
    with writing(root, trainer.step) as draft:
        save_policy(draft, trainer.policy, trainer.step, world, trainer.config.execute)
        save_state(draft, OPTIMIZER, trainer.optimizer.state_dict())
    prune(root, keep, newest=trainer.step)


def save_policy(
    folder: Path, policy: Policy, step: int, world: WorldConfig | None, execute: int | None = None
) -> None:
    """Write weights and description of a policy into an empty folder."""
    tensors = {name: own_memory(tensor) for name, tensor in policy.state_dict().items()}
    save_file(tensors, folder / WEIGHTS)
    description = {
        "step": step,
        "policy": plain(policy.config),
        "body": plain(policy.body),
        "where": policy.where is not None,
        "world": None if world is None else plain(world),
        "execute": execute,
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2))
    for part in (policy.vision, policy.language):
        if isinstance(part, VisionTower | LanguageTower):
            part.save_description(folder)


def load_policy(path: Path, device: torch.device | str = "cpu") -> Saved:
    """Read a policy to act with.

    Args:
        path: a run folder, whose newest whole checkpoint is read, or a checkpoint.
        device: where it goes.

    Raises:
        ValueError: there is none, in one sentence.
    """
    folder = find(path)
    described = json.loads((folder / DESCRIPTION).read_text())
    config = from_plain(PolicyConfig, described["policy"], str(folder / DESCRIPTION))
    body = Body(**{**described["body"], "cameras": tuple(described["body"]["cameras"])})
    policy = Policy(config, body, described["where"], folder)
    load_weights(policy, folder)
    world = described["world"]
    made_in = None if world is None else from_plain(WorldConfig, world, str(folder / DESCRIPTION))
    execute = described.get("execute")  # checkpoints of before say nothing of it
    return Saved(policy.to(device).eval(), described["step"], made_in, folder, execute)


def load_weights(policy: Policy, folder: Path) -> None:
    """Read a checkpoint's weights into a policy of its config.

    Raises:
        ValueError: they are those of another architecture.
    """
    found = load_file(folder / WEIGHTS)
    odd = sorted(set(found) ^ set(policy.state_dict()))
    if odd:
        raise ValueError(
            f"{folder} is of a policy built otherwise ({odd[0]} is in one and not in the other), "
            "by another version of mesotron: train it once more, or act with that version"
        )
    policy.load_state_dict(found)


def find(path: Path) -> Path:
    """The checkpoint that a path names, whole."""
    if (path / DESCRIPTION).is_file():
        return path
    newest, damaged = newest_whole(path / "checkpoints")
    if newest is None:
        why = damaged[0] if damaged else "it has no checkpoint of a policy"
        raise ValueError(f"{path} has nothing to act with: {why}; give a run of mesotron vla train")
    return newest.path


def restore(trainer: Trainer, folder: Path, step: int) -> None:
    """Put a training where a checkpoint left it."""
    load_weights(trainer.policy, folder)
    trainer.optimizer.load_state_dict(load_state(folder, OPTIMIZER))
    trainer.step = step


def describe(policy: Policy) -> str:
    """A policy in a few words.

    Example:
        >>> policy = Policy(PolicyConfig(size="ci"), Body((), 0, 4, 4))
        >>> describe(policy)
        'ci policy of 0.15M weights, l1 head, chunks of 8, from state'
    """
    count = sum(p.numel() for p in policy.parameters())
    body, config = asdict(policy.body), policy.config
    seen = " and ".join(f"{camera} {body['pixels']} px" for camera in body["cameras"]) or "state"
    return (
        f"{config.size} policy of {count / 1e6:.2f}M weights, {config.head} head, chunks of "
        f"{config.chunk}, from {seen}"
    )

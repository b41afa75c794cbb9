"""Checkpoints of a policy: weights and normalization in safetensors, everything else in JSON."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mesotron.config import PolicyConfig, WorldConfig
from mesotron.config.base import from_plain, to_plain
from mesotron.rlvr.state import load_state, own_memory, save_state
from mesotron.runs.checkpoints import newest_whole, outside, prune, writing
from mesotron.runs.files import read_json
from mesotron.runs.links import open_own, refuse_links
from mesotron.vla.policy import Body, Policy
from mesotron.vla.towers import LanguageTower, VisionTower

if TYPE_CHECKING:
    from mesotron.vla.training import Trainer

DESCRIPTION = "policy.json"
WEIGHTS = "policy.safetensors"
OPTIMIZER = "optimizer"


class Saved(NamedTuple):
    policy: Policy
    step: int
    world: WorldConfig | None  # None for recordings from elsewhere
    path: Path  # of the checkpoint
    execute: int | None  # the run's `--execute`; missing in older checkpoints


def save(root: Path, trainer: "Trainer", world: WorldConfig | None, keep: int) -> None:
    with writing(root, trainer.step) as draft:
        save_policy(
            draft,
            trainer.policy,
            trainer.step,
            world,
            trainer.config.execute,
        )

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
        "policy": to_plain(policy.config),
        "body": to_plain(policy.body),
        "where": policy.where is not None,
        "world": None if world is None else to_plain(world),
        "execute": execute,
    }

    with open_own(folder / DESCRIPTION, "w") as file:
        file.write(json.dumps(description, indent=2))

    for part in (policy.vision, policy.language):
        if isinstance(part, VisionTower | LanguageTower):
            part.save_description(folder)


def load_policy(path: Path, device: torch.device | str = "cpu") -> Saved:
    """Load a policy from a checkpoint, or from the newest complete one of a run folder."""
    if (outside(path) / "checkpoints").is_dir():
        refuse_links(outside(path))

    folder = path
    if not (path / DESCRIPTION).is_file():
        newest, damaged = newest_whole(path / "checkpoints")
        if newest is None:
            if damaged:
                reason = damaged[0]
            else:
                reason = "give a run of mesotron vla train"

            raise ValueError(f"{path} has no checkpoint of a policy: {reason}")

        for wrong in damaged:
            logging.getLogger("mesotron").warning("skipping a damaged checkpoint: %s", wrong)

        folder = newest.path

    source = str(folder / DESCRIPTION)
    description = read_json(folder / DESCRIPTION, follow_links=True)
    try:
        config = from_plain(PolicyConfig, description["policy"], source)
        body = Body(**{**description["body"], "cameras": tuple(description["body"]["cameras"])})
        policy = Policy(config, body, description["where"], folder)
        _load_weights(policy, folder)
        step = description["step"]
        world = description["world"]
    except (KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{folder} is damaged, give another checkpoint ({reason})") from error

    world = None if world is None else from_plain(WorldConfig, world, source)
    return Saved(
        policy.to(device).eval(),
        step,
        world,
        folder,
        description.get("execute"),
    )


def restore(trainer: "Trainer", folder: Path, step: int) -> None:
    _load_weights(trainer.policy, folder)
    trainer.optimizer.load_state_dict(load_state(folder, OPTIMIZER))
    trainer.step = step
    prune(folder.parent, trainer.config.keep, newest=step)  # maybe killed before it was


def _load_weights(policy: Policy, folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    if differing := sorted(set(weights) ^ set(policy.state_dict())):
        raise ValueError(f"{folder} is from another version of mesotron: {differing[0]} differs")
    policy.load_state_dict(weights)

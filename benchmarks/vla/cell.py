"""One cell of the VLA study: trains a policy, plays its episodes, records its statistics."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

from benchmarks.vla.plan import CONTENDERS, Cell

WORLDS = {
    "blocks": {"name": "blocks", "pixels": 24},
    "object10": {"name": "object10", "pixels": 64},
    "mt10": {"name": "metaworld", "pixels": 64},
}
PROBES = (0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.95)  # shares of a training
EXECUTE = 5
WAVE = 200  # episodes that are played at once


class Late(Exception):
    """The time was up before the training ended."""


class Bench:
    """A process's demonstrations, on the device once, and the cells that are trained on them.

    Args:
        given: the study's settings.
        deadline: on `time.time`; a training that would pass it ends with `Late`.
    """

    def __init__(self, given: Any, deadline: float) -> None:
        from mesotron.vla.demos import load_demos

        self.given = given
        self.deadline = deadline
        self.demos = load_demos(demos_config(given).out)
        self.frames: Any = None

    def run(self, cell: Cell) -> Cell:
        """A finished cell."""
        start = time.time()
        trainer = self.make_trainer(cell)
        seen = self.train(trainer, cell)
        trained = time.time() - start
        played = self.play(trainer, cell)
        del trainer
        gc.collect()  # a recorded step holds on to its memory by a cycle
        seconds = {"train_seconds": trained, "seconds": time.time() - start}

        return cell | seen | played | seconds

    def make_trainer(self, cell: Cell) -> Any:
        """A new policy on the shared demonstrations."""
        import torch

        from mesotron.vla.training import Trainer

        config = train_config(self.given, cell)
        device = torch.device(self.given.device)
        trainer = Trainer(config, self.demos, device, frames=self.frames)
        self.frames = trainer.frames

        return trainer

    def train(self, trainer: Any, cell: Cell) -> Cell:
        """Train to the end; losses, and gradient probes for one seed of the full budget."""
        steps = cell["steps"]
        is_probed = cell["seed"] == 0 and steps == self.given.full and cell["strength"] == "noise"

        if is_probed:
            places = {round(share * steps) for share in PROBES}
        else:
            places = set()

        losses = []
        probes = []
        half = {}

        while trainer.step < steps:
            if trainer.step in places:
                probes.append({"step": trainer.step, **trainer.probe()})

            found = trainer.advance()
            if trainer.step % 20 == 0 or trainer.step == steps:
                if time.time() > self.deadline:
                    raise Late
                losses.append([trainer.step, float(found["loss/action"])])

            if trainer.step == steps // 2:
                half = describe_step(trainer.statistics())

        tail = [loss for _, loss in losses[-5:]]
        return {
            "loss": sum(tail) / len(tail),
            "losses": losses,
            "probes": probes,
            "half": half,
        }

    def play(self, trainer: Any, cell: Cell) -> Cell:
        """Success on validation scenes, on test scenes (half as many at the small budget), and for
        one seed of the others when told something else."""
        import torch

        from mesotron.vla.interface import EVAL_SEED, VALIDATION_SEED
        from mesotron.vla.policy import make_act
        from mesotron.vla.rollout import evaluate

        given = self.given
        narrow = torch.autocast(given.device, torch.bfloat16, enabled=given.device == "cuda")
        act = narrow(make_act(trainer.policy, given.device))

        def success(first: int, count: int, wrong: bool = False) -> float:
            seeds = range(first, first + count)
            world = self.demos.world
            assert world is not None

            options = {"execute": EXECUTE, "workers": 1, "wrong": wrong, "batch": WAVE}
            return evaluate(act, world, seeds, **options).success

        is_small = cell["steps"] == given.small
        is_plain = cell["strength"] == "noise" and cell["action_scale"] == 1
        is_control = not is_small and cell["seed"] == 0 and is_plain
        half = max(given.test // 2, 1)

        return {
            "validation": success(VALIDATION_SEED, given.validation),
            "test": success(EVAL_SEED, half if is_small else given.test),
            "wrong": success(EVAL_SEED, half, wrong=True) if is_control else None,
        }


def describe_step(statistics: dict[str, float]) -> dict[str, float]:
    """The statistics of the action module that the page shows."""
    action = statistics["update_rms/action"]
    vision = statistics["update_rms/vision"]
    shown = {"action_to_vision": action / max(vision, 1e-30)}

    of_action = [key for key in statistics if key.startswith("optim/action/")]
    for name in ("passed_rank", "dead_blocks", "concentration"):
        found = [statistics[key] for key in of_action if key.endswith(name)]
        if found:
            shown[name] = sum(found) / len(found)
    return shown


def demos_config(given: Any) -> Any:
    """The config of the demonstrations that all cells share."""
    from mesotron.config import DemosConfig, WorldConfig

    world = WorldConfig(**WORLDS[given.world], wrist=given.wrist)
    return DemosConfig(
        world=world,
        out=Path(given.state) / f"{given.world}-demos",
        episodes=given.episodes,
        starts=given.starts,
        every=given.every,
    )


def train_config(given: Any, cell: Cell) -> Any:
    """A cell as the configuration of a run."""
    from mesotron.config import PartsOptimConfig, PolicyConfig, VlaTrainConfig

    promote = None
    if cell["strength"].startswith("k_p="):
        promote = int(cell["strength"].removeprefix("k_p="))

    optim = PartsOptimConfig(
        **CONTENDERS[cell["contender"]],
        lr=cell["rate"],
        aux_lr=given.aux_adamw if cell["contender"] == "adamw" else given.aux,
        promote=promote,
        action_scale=cell["action_scale"],
    )
    return VlaTrainConfig(
        policy=PolicyConfig(size=given.size, head=cell["head"]),
        optim=optim,
        steps=cell["steps"],
        batch=given.batch,
        where=given.where,
        seed=cell["seed"],
        device=given.device,
        graph=None if given.graph else False,
    )

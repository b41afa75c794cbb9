"""`mesotron vla train` as a kind of run: a score is the success of a seeded episode."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from mesotron.compare.change import change
from mesotron.compare.kind import CELL_SETTINGS, Kind, OptimChoice, Scores
from mesotron.compare.record import Contender
from mesotron.config import VlaTrainConfig
from mesotron.runs import RunFolder
from mesotron.runs.files import Row

# Cells run side by side and have no cores to spare for their evaluation.
ALWAYS = (*CELL_SETTINGS, "probe_every=0", "workers=1")
RULES = {"pion_action": "muon", "lowrank": "low_rank"}  # of all parts, where the name is no rule


class RobotKind(Kind):
    name = "vla"
    config_type = VlaTrainConfig
    extra = "vla"
    measure = "share of episodes that succeeded"
    unit = (
        "Rates are AdamW's, of the hidden matrices: a spectral step of full rank changes a weight "
        "as much as AdamW's usual 0.2 of the rate. What a filter removes is not compensated, since "
        "parts of one policy have different filters. All other weights have one rate in all runs."
    )
    curve = "loss/action"
    falls = True
    problems_setting = "episodes"
    contested = ("optim.vision", "optim.language", "optim.fusion", "optim.action")
    usual = ("adamw", "muon", "pion_action", "pion", "lowrank")
    optims: ClassVar = {
        "adamw": OptimChoice("AdamW on every weight"),
        "muon": OptimChoice("Muon on all hidden matrices"),
        "pion_action": OptimChoice("Pion on the action module, Muon on the rest"),
        "pion": OptimChoice("Pion on all hidden matrices"),
        "lowrank": OptimChoice("Muon's top directions by exact SVD"),
    }

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        from mesotron.vla.demos import is_lerobot

        super().__init__(recipe, changes)

        # The rules are the contenders', but a strength of Pion is only valid beside Pion.
        has_strength = any(one.startswith(("optim.promote", "optim.cutoff")) for one in changes)
        pion = ("optim.action=pion",) if has_strength else ()
        self.config: VlaTrainConfig = change(VlaTrainConfig(), (*ALWAYS, *pion, *changes))
        if is_lerobot(self.config.demos):
            raise ValueError(f"{self.config.demos} is a LeRobotDataset, which has no simulator")

        self.base_rate = self.config.optim.lr

    @staticmethod
    def run(config: VlaTrainConfig) -> int:
        from mesotron.vla import session

        return session.train(config)

    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> VlaTrainConfig:
        rule = RULES.get(contender.optim, contender.optim)
        changes: dict[str, Any] = {}
        for name in self.contested:
            changes[name.removeprefix("optim.")] = rule

        if contender.optim == "pion_action":
            changes["action"] = "pion"
        if "pion" not in changes.values():
            changes |= {"promote": None, "cutoff": None}

        optim = replace(self.config.optim, lr=rate * gain, **changes)
        return replace(self.config, optim=optim, seed=seed, out=run)

    @property
    def num_problems(self) -> int:
        from mesotron.vla.demos import trusted_world
        from mesotron.vla.worlds import build_world

        world = trusted_world(self.config.demos, self.config.trust)
        return self.config.episodes * len(build_world(world).tasks)

    def evaluations(self, run: RunFolder) -> tuple[Scores, Scores]:
        evaluation = run.load("evaluation")
        if evaluation is None or run.result is None:
            return {}, {}

        scores = {}
        for episode in evaluation["success"]["episodes"]:
            scores[f"{episode['task']} {episode['seed']}"] = float(episode["success"])

        return {}, scores

    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        seconds = []
        frames = []
        spent = 0.0
        before = 0

        for row in rows:
            step = row["step"]
            spent += row.get("time/step", 0.0) * (step - before)
            before = step
            seconds.append(spent)
            frames.append(float(step * self.config.batch))

        return seconds, frames

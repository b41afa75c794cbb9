"""`mesotron train RECIPE` as a kind of run: a score is the greedy accuracy on held-out problems."""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

from mesotron.compare.change import change
from mesotron.compare.kind import CELL_SETTINGS, Kind, OptimChoice, Scores, check_known
from mesotron.compare.record import Contender
from mesotron.config import OptimConfig, TrainConfig
from mesotron.config.registry import OBJECTIVES
from mesotron.config.rules import SPECTRAL_RULES
from mesotron.recipes import make_recipe
from mesotron.rewards.call import is_own
from mesotron.runs import RunFolder
from mesotron.runs.files import Row

# About an hour on two cores; one half of the held-out problems chooses rates, the other ranks.
SHORTER = {"arith": ("steps=32", "rollout.prompts=8", "task.num_eval=600")}
# The contender's own settings; schedule, momentum, decay and clipping are the recipe's.
OWN_SETTINGS = ("name", "per_head", "promote", "cutoff", "rank", "scale", "aux_lr")
PROBE_STEPS = 12  # momentum has half settled by then
PROBE_PROBLEMS = 8
UPDATES = f"optim/({'|'.join(SPECTRAL_RULES)}).*/update_rms"  # of hidden matrices


class LanguageKind(Kind):
    name = "rlvr"
    config_type = TrainConfig
    extra = "rlvr"
    measure = "greedy accuracy on held-out problems"
    unit = (
        "Rates are in AdamW's unit. A short run measures the RMS of a contender's updates, and the "
        "rate of its matrices is multiplied (the x in the table) so that the RMS is AdamW's usual "
        "0.2 of the rate; embeddings, norms and head keep the rate itself, or SGD's own."
    )
    curve = "facts/correct"
    problems_setting = "task.num_eval"
    contested = ("optim.name", "optim.per_head", "optim.promote", "optim.cutoff", "optim.rank")
    usual = ("adamw", "muon", "muon_sgd", "muon_heads", "pion", "pion_cutoff")
    optims: ClassVar = {
        "adamw": OptimChoice("AdamW on every weight", {"name": "adamw"}),
        "muon": OptimChoice("Muon on hidden matrices, AdamW on the rest", {"name": "muon"}),
        "muon_sgd": OptimChoice("Muon on hidden matrices, SGD on the rest", {"name": "muon_sgd"}),
        "normuon": OptimChoice(
            "NorMuon on hidden matrices, AdamW on the rest", {"name": "normuon"}
        ),
        "muon_heads": OptimChoice(
            "Muon, per head in attention", {"name": "muon", "per_head": True}
        ),
        "lowrank": OptimChoice("Muon's top 8 directions by exact SVD", {"name": "muon", "rank": 8}),
        "pion": OptimChoice(
            "Pion as its paper trains language models, per head with k_p = 0",
            {"name": "pion", "per_head": True, "promote": 0},
        ),
        "pion_cutoff": OptimChoice(
            "Pion with a continuous cutoff, aligned with the strongest direction",
            {"name": "pion", "cutoff": "aligned"},
        ),
    }

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        super().__init__(recipe, changes)
        shorter = SHORTER.get(recipe, ())
        self.config: TrainConfig = change(make_recipe(recipe), (*shorter, *CELL_SETTINGS, *changes))

        if self.config.task.has_own_data and is_own(self.config.reward):
            self.measure = "mean reward on held-out prompts"
            self.curve = "reward"

        optim = self.config.optim
        if optim.scale not in ("rms", "moonlight"):
            raise ValueError(f"optim.scale={optim.scale}: compare in AdamW's unit, optim.scale=rms")

        self.base_rate = optim.lr
        if optim.name in SPECTRAL_RULES and optim.aux_lr is not None:
            self.base_rate = optim.aux_lr  # AdamW has another rate than the matrices

    @staticmethod
    def run(config: TrainConfig) -> int:
        from mesotron.rlvr import train

        return train.run(config)

    def contenders(self, optims: Sequence[str], objectives: Sequence[str]) -> list[Contender]:
        for objective in objectives:
            check_known("objective", objective, OBJECTIVES.names())

        contenders = []
        for optim in optims:
            about, _ = self.optim_config(optim)
            for objective in objectives or (self.config.objective.name,):
                name = f"{optim}+{objective}" if len(objectives) > 1 else optim
                contenders.append(
                    Contender(name=name, optim=optim, objective=objective, about=about)
                )

        return contenders

    def optim_config(self, optim: str) -> tuple[str, OptimConfig]:
        """Description and config of an optimizer; `pion:promote=2` is a variant."""
        name, _, variant = optim.partition(":")
        check_known("optimizer", name, self.optims)

        changes = [text.strip() for text in variant.split(",") if text]
        if any(text.partition("=")[0].strip() in ("lr", "name") for text in changes):
            raise ValueError(f"--optims {optim}: rates are searched (--rates), the name is {name}")

        choice = self.optims[name]
        own = OptimConfig(**choice.settings)
        config = replace(
            self.config.optim, **{setting: getattr(own, setting) for setting in OWN_SETTINGS}
        )
        if not changes:
            return choice.about, config

        return f"{choice.about}, with {', '.join(changes)}", change(config, changes)

    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> TrainConfig:
        _, optim = self.optim_config(contender.optim)

        # Embeddings, norms and head keep AdamW's rate; SGD's has another unit and its own default.
        if optim.name in SPECTRAL_RULES and optim.aux_lr is None:
            optim = replace(optim, aux_lr=rate)

        return replace(
            self.config,
            optim=replace(optim, lr=rate * gain),
            objective=replace(self.config.objective, name=contender.objective),
            seed=seed,
            out=run,
        )

    def probe(self, contender: Contender, seed: int, run: Path) -> TrainConfig | None:
        _, optim = self.optim_config(contender.optim)
        if optim.name == "adamw":
            return None  # AdamW's own step is the unit

        config = self.settings(contender, self.base_rate, seed, run)
        return replace(
            config,
            steps=min(config.steps, PROBE_STEPS),
            task=replace(config.task, num_eval=min(config.task.num_eval, PROBE_PROBLEMS)),
            # Constant, since rows log the rate of the auxiliary rule, not of the matrices.
            optim=replace(config.optim, schedule="constant", warmup=0.0),
        )

    def evaluations(self, run: RunFolder) -> tuple[Scores, Scores]:
        after = read_scores(run, "after") if run.result is not None else {}
        return read_scores(run, "before"), after

    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        seconds = list(accumulate(row.get("step_time", 0.0) for row in rows))
        tokens = [float(row.get("num_tokens", 0.0)) for row in rows]

        return seconds, tokens

    def update_ratio(self, run: RunFolder, rows: Sequence[Row]) -> float | None:
        """Of the hidden matrices, in the later half; None for AdamW, or if the rate changed."""
        optim = run.config["optim"]
        if optim["schedule"] != "constant" or optim["warmup"] > 0 or not optim["lr"] > 0:
            return None

        updates = []
        for row in rows[len(rows) // 2 :]:
            for name, value in row.items():
                if re.fullmatch(UPDATES, name) and math.isfinite(value):
                    updates.append(value)

        if not updates:
            return None

        return statistics.median(updates) / optim["lr"]


def read_scores(run: RunFolder, name: str) -> Scores:
    """The score of each problem in the evaluation `before` or `after`."""
    evaluation = run.load(name) or {"transcripts": []}
    kind = "reward" if evaluation.get("measure") == "reward" else "correct"

    return {one["id"]: float(one[kind] or 0.0) for one in evaluation["transcripts"]}

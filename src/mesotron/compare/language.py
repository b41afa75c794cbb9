"""Runs of `mesotron train` as cells: language models with verifiable rewards."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from mesotron.compare.changes import change
from mesotron.compare.kind import Kind, Row
from mesotron.compare.record import Contender
from mesotron.config import ObjectiveName, OptimConfig, TrainConfig
from mesotron.recipes import make_recipe
from mesotron.rlvr.train import check
from mesotron.runs import RunFolder
from mesotron.runs.resume import settings_to_resume

# What is a contender's own; the schedule, momentum, decay and clipping are the recipe's.
OWN = ("name", "per_head", "promote", "cutoff", "rank", "scale", "aux_lr")
OPTIMS: dict[str, tuple[str, OptimConfig]] = {
    "adamw": ("AdamW on every weight", OptimConfig(name="adamw")),
    "muon": ("Muon on hidden matrices, AdamW on the rest", OptimConfig(name="muon")),
    "muon_sgd": ("Muon on hidden matrices, SGD on the rest", OptimConfig(name="muon_sgd")),
    "muon_heads": ("Muon, head by head in attention", OptimConfig(name="muon", per_head=True)),
    "pion": (
        "Pion as its paper trains language models, head by head with k_p = 0",
        OptimConfig(name="pion", per_head=True, promote=0),
    ),
    "pion_cutoff": (
        "Pion with a continuous cutoff, at the edge of noise",
        OptimConfig(name="pion", cutoff="noise"),
    ),
    "lowrank": ("Muon's top 8 directions, by an exact SVD", OptimConfig(name="muon", rank=8)),
}
# What a tournament of a recipe changes in it, so that many runs fit into an hour of two cores; with
# more held-out problems, since one half of them chooses and the other judges.
SHORTER = {
    "arith": ("steps=32", "rollout.prompts=8", "task.num_eval=600"),
}
# Momentum has half settled by then.
PROBE_STEPS = 12
PROBE_PROBLEMS = 8
ALWAYS = ("guard=warn", "save_every=0", "keep=1")


class Language(Kind):
    """`mesotron train RECIPE`; a score is the greedy accuracy on held-out problems.

    Example:
        >>> kind = Language("arith", ("steps=5",))
        >>> kind.config.steps, kind.base_rate, len(kind.contenders(["muon", "pion"], []))
        (5, 0.0006, 2)
    """

    name = "rlvr"
    measure = "greedy accuracy on held-out problems"
    unit = (
        "Rates are in AdamW's unit. A short run measures the RMS of a contender's updates, and its "
        "matrices' own rate is multiplied so that it is AdamW's usual 0.2 of the rate (the x in "
        "the table); embeddings, norms and head keep the rate itself, or SGD's own."
    )
    curve = "facts/correct"
    problems_setting = "task.num_eval"
    usual = ("adamw", "muon", "muon_sgd", "muon_heads", "pion", "pion_cutoff")

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        self.recipe = recipe
        self.config: TrainConfig = change(
            make_recipe(recipe), (*SHORTER.get(recipe, ()), *ALWAYS, *changes)
        )
        if self.config.optim.scale not in ("rms", "moonlight"):
            raise ValueError(
                f"the recipe's optim.scale={self.config.optim.scale} is not AdamW's unit, around "
                "which rates are searched: change it with --set optim.scale=rms optim.lr=..."
            )

    @property
    def base_rate(self) -> float:
        """The recipe's own rate; where its AdamW has another than its matrices, AdamW's."""
        optim = self.config.optim
        if optim.name in ("muon", "pion") and optim.aux_lr is not None:
            return optim.aux_lr
        return optim.lr

    def contenders(self, optims: Sequence[str], objectives: Sequence[str]) -> list[Contender]:
        """Every optimizer with every objective; the recipe's objective if none is named."""
        for name in objectives:
            if name not in get_args(ObjectiveName):
                known = ", ".join(get_args(ObjectiveName))
                raise ValueError(f"unknown objective {name!r}: choose from {known}")
        found = []
        for optim in optims:
            about = self.optim_config(optim)[0]
            for objective in objectives or (self.config.objective.name,):
                shown = f"{optim}+{objective}" if len(objectives) > 1 else optim
                found.append(Contender(name=shown, optim=optim, objective=objective, about=about))
        return found

    def optim_config(self, optim: str) -> tuple[str, OptimConfig]:
        """What an optimizer is, and its config over the recipe's: `pion:promote=2` is a variant."""
        name, _, variant = optim.partition(":")
        if name not in OPTIMS:
            raise ValueError(f"unknown optimizer {name!r}: choose from {', '.join(OPTIMS)}")
        about, own = OPTIMS[name]
        kept = {field: getattr(own, field) for field in OWN}
        config = change(replace(self.config.optim, **kept), variant.split(",") if variant else ())
        return f"{about}, but {variant.replace(',', ', ')}" if variant else about, config

    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> TrainConfig:
        """The recipe with the contender's optimizer and objective, at a rate, with a seed.

        Embeddings, norms and head keep AdamW's rate, whatever the gain of the matrices; SGD's has
        another unit, and its own default.
        """
        optim = self.optim_config(contender.optim)[1]
        if optim.name in ("muon", "pion") and optim.aux_lr is None:
            optim = replace(optim, aux_lr=rate)
        return replace(
            self.config,
            optim=replace(optim, lr=rate * gain),
            objective=replace(self.config.objective, name=contender.objective),
            seed=seed,
            out=run,
        )

    def check(self, settings: TrainConfig) -> None:
        """As `mesotron train` does."""
        check(settings)

    def probe(self, contender: Contender, seed: int, run: Path) -> TrainConfig | None:
        """A few steps at the recipe's rate, hardly evaluated; AdamW's own step is the unit.

        The rate is constant: what a row calls the rate is the auxiliary rule's (SGD's own, for
        instance), so the matrices' is known from the config alone.
        """
        if self.optim_config(contender.optim)[1].name == "adamw":
            return None
        config = self.settings(contender, self.base_rate, seed, run)
        few = min(config.task.num_eval, PROBE_PROBLEMS)
        return replace(
            config,
            steps=min(config.steps, PROBE_STEPS),
            task=replace(config.task, num_eval=few),
            optim=replace(config.optim, schedule="constant", warmup=0.0),
        )

    @property
    def num_problems(self) -> int:
        """Those that are held out."""
        return self.config.task.num_eval

    def uses_gpu(self) -> bool:
        """Unless the recipe, or --set device=cpu, says otherwise."""
        return self.config.device != "cpu"

    def resuming(self, run: Path) -> TrainConfig:
        """`--resume`: the run knows its own settings."""
        return settings_to_resume(TrainConfig, run)

    def evaluations(self, run: RunFolder) -> tuple[dict[str, float], dict[str, float]]:
        """Whether each held-out problem was solved in the asked format, before and after."""
        before, after = (scores_of(run.load(name)) for name in ("before", "after"))
        return before, after if run.result is not None else {}

    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        """Seconds of the steps one after the other, and the tokens that TRL has counted."""
        seconds, spent = [], 0.0
        for row in rows:
            spent += row.get("step_time", 0.0)
            seconds.append(spent)
        return seconds, [float(row.get("num_tokens", 0.0)) for row in rows]

    def update_ratio(self, run: RunFolder, rows: Sequence[Row]) -> float | None:
        """Of the groups of hidden matrices, over the later half of the steps; None for AdamW, and
        where the rate was not constant, since rows hold the auxiliary rule's rate alone."""
        optim = run.config["optim"]
        if optim["schedule"] != "constant" or optim["warmup"] > 0 or not optim["lr"] > 0:
            return None
        updates = [
            value
            for row in rows[len(rows) // 2 :]
            for name, value in row.items()
            if name.endswith("/update_rms")
            and name.startswith(("optim/muon", "optim/pion"))
            and math.isfinite(value)
        ]
        return statistics.median(updates) / optim["lr"] if updates else None


def scores_of(evaluation: dict[str, Any] | None) -> dict[str, float]:
    """Problem -> 1 if it was solved in the asked format, else 0."""
    if evaluation is None:
        return {}
    return {one["id"]: float(one["correct"]) for one in evaluation["transcripts"]}

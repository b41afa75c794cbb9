"""`mesotron ppo snake` as a kind of run: a score is the fruit of a greedy game."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from mesotron.compare.change import change
from mesotron.compare.kind import XLA_ONE_THREAD, Kind, OptimChoice, Scores
from mesotron.compare.record import Contender
from mesotron.config import SnakeConfig
from mesotron.runs import RunFolder
from mesotron.runs.files import Row


class SnakeKind(Kind):
    name = "ppo"
    config_type = SnakeConfig
    extra = "ppo"
    measure = "fruit of a greedy game"
    unit = (
        "Rates are in Adam's unit: Muon's and Pion's own are those at which a step of full rank "
        "changes a weight as much as Adam's usual 0.2 of the rate."
    )
    before = "random legal moves"
    curve = "episode/fruit"
    problems_setting = "eval_episodes"
    contested = ("optim", "muon_lr", "aux_adam_lr")
    placed = ("seed", "num_seeds", "sweep", "save_dir", "run_name", "resume")
    usual = ("adam", "muon", "pion")
    optims: ClassVar = {
        "adam": OptimChoice("Adam on every weight"),
        "muon": OptimChoice("Muon on hidden matrices, Adam on the rest"),
        "pion": OptimChoice("Pion with a continuous cutoff on hidden matrices, Adam on the rest"),
    }

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        super().__init__(recipe, changes)
        self.config: SnakeConfig = change(SnakeConfig(gif=False), changes)
        self.base_rate = self.config.lr

    @staticmethod
    def run(config: SnakeConfig) -> int:
        from mesotron import ppo

        return ppo.run(config)

    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> SnakeConfig:
        # Muon's rate is the spectral norm of a step; the RMS change of a weight by a step of full
        # rank is that over sqrt(inputs). What Pion's filter removes is not compensated.
        muon_lr = 0.2 * rate * gain * math.sqrt(self.config.d_model)

        return replace(
            self.config,
            optim=contender.optim,
            lr=rate,
            muon_lr=muon_lr,
            aux_adam_lr=rate,
            save_dir=run.parent,
            run_name=run.name,
            seed=seed,
        )

    def evaluations(self, run: RunFolder) -> tuple[Scores, Scores]:
        result = run.result
        if result is None:
            return {}, {}

        # Games start alike in all runs.
        games = {f"game-{k}": float(fruit) for k, fruit in enumerate(result["greedy_games"][0])}
        random = float(result["baselines"]["random_masked"])

        return dict.fromkeys(games, random), games

    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        return [row["time/seconds"] for row in rows], [row["time/env_steps"] for row in rows]

    def environment(self, threads: int) -> dict[str, str]:
        variables = super().environment(threads)
        if threads == 1:
            variables |= XLA_ONE_THREAD

        return variables

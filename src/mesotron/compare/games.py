"""Runs of `mesotron ppo snake` as cells: one seed each, judged by whole greedy games."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mesotron.compare.changes import change
from mesotron.compare.kind import Kind, Row
from mesotron.compare.record import Contender
from mesotron.config import SnakeConfig
from mesotron.runs import RunFolder
from mesotron.runs.resume import settings_to_resume

OPTIMS = {
    "adam": "Adam on every weight",
    "muon": "Muon on hidden matrices, Adam on the rest",
    "pion": "Pion with a continuous cutoff on hidden matrices, Adam on the rest",
}
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


class Games(Kind):
    """`mesotron ppo snake`; a score is the fruit of a greedy game.

    Example:
        >>> kind = Games("snake", ("total_timesteps=4096",))
        >>> kind.config.total_timesteps, kind.base_rate
        (4096, 0.008)
    """

    name = "ppo"
    measure = "fruit of a greedy game"
    unit = (
        "Rates are in Adam's unit: Muon's and Pion's own are those at which a step of full rank "
        "changes a weight as much as Adam's usual 0.2 of the rate."
    )
    before = "by random legal moves"
    curve = "episode/fruit"
    problems_setting = "eval_episodes"
    usual = ("adam", "muon", "pion")

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        self.recipe = recipe
        self.config: SnakeConfig = change(SnakeConfig(gif=False), changes)
        if self.config.num_seeds > 1 or self.config.sweep:
            raise ValueError("a cell is one run: leave num_seeds and sweep out of --set")

    @property
    def base_rate(self) -> float:
        """Adam's."""
        return self.config.lr

    def contenders(self, optims: Sequence[str], objectives: Sequence[str]) -> list[Contender]:
        """The optimizers; PPO is the only objective."""
        if objectives:
            raise ValueError(f"PPO has no objective {objectives[0]!r}: leave --objectives out")
        for name in optims:
            if name not in OPTIMS:
                raise ValueError(f"unknown optimizer {name!r}: choose from {', '.join(OPTIMS)}")
        return [Contender(name=x, optim=x, objective="", about=OPTIMS[x]) for x in optims]

    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> SnakeConfig:
        """The game with an optimizer at a rate.

        Muon's and Pion's own rate is the spectral norm of a step of a wide matrix. The RMS change
        of a weight by a step of full rank is that over sqrt(inputs), AdamW's usual one 0.2 of its
        rate. PPO logs no update's RMS, so what Pion's filter takes away is not made up for.
        """
        return replace(
            self.config,
            optim=contender.optim,
            use_muon=False,
            lr=rate,
            muon_lr=0.2 * rate * gain * math.sqrt(self.config.d_model),
            aux_adam_lr=rate,
            seed=seed,
            save_dir=run.parent,
            run_name=run.name,
        )

    @property
    def num_problems(self) -> int:
        """Greedy games."""
        return self.config.eval_episodes

    def resuming(self, run: Path) -> SnakeConfig:
        """`--resume`: the run knows its own settings."""
        return settings_to_resume(SnakeConfig, run)

    def evaluations(self, run: RunFolder) -> tuple[dict[str, float], dict[str, float]]:
        """Fruit of each greedy game; they begin alike in all runs. Before: random legal moves."""
        result = run.result
        if result is None:
            return {}, {}
        games = {f"game-{k}": float(x) for k, x in enumerate(result["greedy_games"][0])}
        random_play = float(result["baselines"]["random_masked"])
        return dict.fromkeys(games, random_play), games

    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        """Seconds without the compilation, and environment steps."""
        return [row["time/seconds"] for row in rows], [row["time/env_steps"] for row in rows]

    def environment(self, threads: int) -> dict[str, str]:
        """XLA takes every core unless it is told."""
        return super().environment(threads) | ({"XLA_FLAGS": ONE_THREAD} if threads == 1 else {})

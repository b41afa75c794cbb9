"""Compares Adam, Muon and Pion on Snake with PPO: equally many rate trials, then equal seeds.

    python -m benchmarks.ppo.snake 6 --steps 2400000 --seeds 5 --out study.json.gz

One compiled program per board and optimizer serves its sweep and its seeds, since rates and horizon
are traced numbers; the programs of a board compile in parallel. Each cell is written when it is
done, and the same command resumes an interrupted study.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np
import tyro

from benchmarks._lib.pictures import shrink
from benchmarks._lib.results import beside, read_json, write_json
from mesotron.config import SnakeConfig
from mesotron.ppo.evaluate import (
    Curve,
    Games,
    bootstrap_band,
    draw_curves,
    make_evaluation,
    measure_baselines,
)
from mesotron.ppo.loop import TrainState
from mesotron.ppo.policy import Params
from mesotron.ppo.program import Program, make_program, make_runs
from mesotron.runs import describe_environment

Cell = dict[str, Any]
Evaluate = Callable[[Params, int], dict[str, Games]]
EVALUATION_SEED = 1_000_003
# Longest game, as Jumanji has it; perfect play on 10x10 needs about half of it.
MOST_STEPS = 4000
_POINTS = 150
# Equally many for each rule, in the order in which a shorter list would cut them off.
_SPECTRAL = [(0.02, 2e-3), (0.01, 1e-3), (0.04, 4e-3), (0.02, 5e-4), (0.01, 4e-3), (0.04, 1e-3)]
TRIALS: dict[str, list[dict[str, float]]] = {
    "adam": [{"lr": rate} for rate in (2e-3, 1e-3, 4e-3, 5e-4, 8e-3, 2.5e-4)],
    "muon": [{"muon_lr": rate, "aux_adam_lr": aux} for rate, aux in _SPECTRAL],
    "pion": [{"muon_lr": rate, "aux_adam_lr": aux} for rate, aux in _SPECTRAL],
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Compare Adam, Muon and Pion on Snake: a rate sweep each, then seeds, in one program."""

    boards: tyro.conf.Positional[tuple[int, ...]] = (6,)
    """Sides of the boards."""

    optims: tuple[Literal["adam", "muon", "pion"], ...] = ("adam", "muon", "pion")
    """Optimizers to compare."""

    seeds: int = 5
    """Seeds of each optimizer, trained side by side; also the number of rates that are tried."""

    seconds: float = 60.0
    """What the seeds of one optimizer may take; the first optimizer's pace turns it into steps,
    which are then the same for all."""

    steps: int | None = None
    """Environment steps of each seed, instead of --seconds."""

    sweep_share: float = 0.2
    """Length of a trial of the rate sweep, as a share of the steps of a seed."""

    num_envs: int = 1024
    """Games played side by side in each run."""

    num_steps: int = 64
    """Steps of each game in one rollout."""

    update_epochs: int = 4
    """Passes over each rollout."""

    num_minibatches: int = 16
    """Gradient steps in one pass."""

    gamma: float = 0.99
    """Discount."""

    ent_coef: float = 0.01
    """Weight of the entropy bonus."""

    d_model: int = 64
    """Width of a token."""

    num_layers: int = 2
    """Transformer layers."""

    num_heads: int = 4
    """Attention heads."""

    use_cnn: bool = False
    """Put a 3x3 convolution before the transformer."""

    readout: Literal["all", "head"] = "all"
    """Where the last layer looks from: all cells, or the snake's head alone."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the network's products."""

    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Who computes attention, see mesotron ppo snake."""

    eval_episodes: int = 256
    """Whole games of the evaluation, greedy and sampled each."""

    out: Path = Path("benchmarks/ppo/study.json.gz")
    """Result; cells that it has already are not run again."""

    plot: bool = True
    """Also draw the curves beside it."""


class Kit(NamedTuple):
    """What the cell of an optimizer is run with."""

    config: SnakeConfig
    program: Program
    trials: list[dict[str, float]]
    compile_seconds: float


def run(config: Config) -> int:
    """Run every cell that the result lacks, and print each."""
    if not 1 <= config.seeds <= len(_SPECTRAL):
        raise ValueError(f"seeds={config.seeds} must lie between 1 and {len(_SPECTRAL)}")

    study = read_json(config.out) if config.out.exists() else {"boards": {}}
    study["environment"] = describe_environment(jax.devices()[0].device_kind, 0)
    config.out.parent.mkdir(parents=True, exist_ok=True)

    for side in config.boards:
        board = study["boards"].setdefault(f"{side}x{side}", {"cells": {}})
        base = make_base(config, side)

        rules = [rule for rule in config.optims if rule not in board["cells"]]
        with ThreadPoolExecutor() as pool:
            random = pool.submit(measure_baselines, base)
            kits = list(pool.map(partial(prepare, config, base), rules))
            board.setdefault("baselines", random.result())

        evaluate = make_evaluation(base)
        for rule, kit in zip(rules, kits, strict=True):
            if "updates" not in board:
                board["updates"] = plan_updates(config, kit)
            board["cells"][rule] = run_cell(config, kit, evaluate, board["updates"])
            write_json(study, config.out)
            print(describe(side, rule, board), flush=True)

        if config.plot:
            draw(board, side, config)
    return 0


def make_base(config: Config, side: int) -> SnakeConfig:
    """The training that all cells of a board share."""
    return SnakeConfig(
        width=side,
        height=side,
        max_steps=min(side**4, MOST_STEPS),
        num_envs=config.num_envs,
        num_steps=config.num_steps,
        update_epochs=config.update_epochs,
        num_minibatches=config.num_minibatches,
        gamma=config.gamma,
        ent_coef=config.ent_coef,
        d_model=config.d_model,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        use_cnn=config.use_cnn,
        readout=config.readout,
        dtype=config.dtype,
        attention=config.attention,
        eval_episodes=config.eval_episodes,
        num_seeds=config.seeds,
        chunk=8,
    )


def prepare(config: Config, base: SnakeConfig, rule: str) -> Kit:
    """Compile the program of an optimizer."""
    made = replace(base, optim=cast(Any, rule))
    program = make_program(made, config.seeds)
    trials = [trial | {"seed": 0} for trial in TRIALS[rule][: config.seeds]]
    runs = make_runs(made, trials)
    began = time.perf_counter()
    jax.block_until_ready(program.advance(program.start(runs), runs, 0))
    return Kit(made, program, trials, time.perf_counter() - began)


def run_cell(config: Config, kit: Kit, evaluate: Evaluate, updates: int) -> Cell:
    """Sweep the rates, train the seeds at the best, play whole games."""
    made = kit.config
    sweep = train(kit, kit.trials, max(1, round(updates * config.sweep_share)))
    scores = evaluate(sweep["params"], 1)["sampled"].fruit.mean(1)  # [trials]
    best = kit.trials[int(np.argmax(scores))]

    final = train(kit, [best | {"seed": 1 + k} for k in range(config.seeds)], updates)
    games = evaluate(final["params"], EVALUATION_SEED)

    steps = updates * made.batch_size
    cell: Cell = {
        "rates": {name: value for name, value in best.items() if name != "seed"},
        "trials": [
            trial | {"sampled_fruit": float(score)}
            for trial, score in zip(kit.trials, scores, strict=True)
        ],
        "compile_seconds": kit.compile_seconds,
        "steps_per_seed": steps,
        "seconds": final["seconds"],
        "steps_per_second": steps * config.seeds / final["seconds"],
        "gradient_steps": updates * made.update_epochs * made.num_minibatches,
        "curve": final["curve"],
    }
    for way, played in games.items():
        cell[f"{way}_fruit"] = played.fruit.mean(1).tolist()
        cell[f"{way}_won"] = played.won.mean(1).tolist()
    return cell


def plan_updates(config: Config, kit: Kit) -> int:
    """Updates of each seed: as many as `seconds` hold at the pace of a few."""
    if config.steps is not None:
        return max(1, config.steps // kit.config.batch_size)

    runs = make_runs(kit.config, kit.trials)
    states = kit.program.start(runs)
    count = 4
    began = time.perf_counter()
    jax.block_until_ready(kit.program.advance(states, runs, count))
    seconds = time.perf_counter() - began
    return max(1, int(config.seconds / seconds * count))


def train(kit: Kit, values: list[dict[str, float]], updates: int) -> dict[str, Any]:
    """Train these runs side by side; the rates fall to zero over just these updates."""
    config = kit.config
    steps = updates * config.update_epochs * config.num_minibatches
    runs = make_runs(config, [{**run, "num_gradient_steps": steps} for run in values])
    states: TrainState = kit.program.start(runs)
    jax.block_until_ready(states)

    began = time.perf_counter()
    done = 0
    fruit = []
    ended = []
    seconds: list[float] = []
    while done < updates:
        count = min(config.chunk, updates - done)
        states, metrics = kit.program.advance(states, runs, count)
        fruit.append(np.asarray(metrics["episode/fruit"])[:, :count])
        ended.append(np.asarray(metrics["episode/finished"])[:, :count])

        before = seconds[-1] if seconds else 0.0
        now = time.perf_counter() - began
        seconds += np.linspace(before, now, count + 1)[1:].tolist()
        done += count

    took = time.perf_counter() - began
    curve = thin_curve(np.concatenate(fruit, 1), np.concatenate(ended, 1), seconds, config)
    return {"params": states.params, "seconds": took, "curve": curve}


def thin_curve(
    fruit: np.ndarray, ended: np.ndarray, seconds: list[float], config: SnakeConfig
) -> dict[str, Any]:
    """At most so many points for each run: fruit per game over the updates of each stretch."""
    places = np.array_split(np.arange(fruit.shape[1]), min(_POINTS, fruit.shape[1]))
    total = np.stack([(fruit * ended)[:, place].sum(1) for place in places], 1)
    games = np.stack([ended[:, place].sum(1) for place in places], 1)
    return {
        "steps": [int(place[-1] + 1) * config.batch_size for place in places],
        "seconds": [round(seconds[place[-1]], 3) for place in places],
        "fruit": (total / np.maximum(games, 1)).round(3).tolist(),
    }


def describe(side: int, rule: str, board: Cell) -> str:
    """A cell in one line."""
    cell = board["cells"][rule]
    baselines = board["baselines"]
    greedy = np.array(cell["greedy_fruit"])
    low, high = bootstrap_band(greedy[:, None])
    rates = " ".join(f"{name}={value:g}" for name, value in cell["rates"].items())

    line = (
        f"{side}x{side} {rule:5} {rates}: greedy {greedy.mean():.2f} "
        f"[{low[0]:.2f}, {high[0]:.2f}], sampled {np.mean(cell['sampled_fruit']):.2f} "
        f"of {baselines['maximum']:.0f} (random {baselines['random_masked']:.2f})"
        f", won {np.mean(cell['greedy_won']):.0%}; {cell['steps_per_seed']:,} steps a seed, "
        f"{cell['steps_per_second']:,.0f} steps/s, compiled in {cell['compile_seconds']:.0f} s"
    )

    plain = board["cells"].get("adam")
    if plain and rule != "adam":
        more = 1 - cell["steps_per_second"] / plain["steps_per_second"]
        line += f"; its share of a step beyond Adam's {more:.1%}"
    return line


def draw(board: Cell, side: int, config: Config) -> None:
    """The curves of a board beside the result."""
    curves = {}
    for rule, cell in board["cells"].items():
        points = {name: np.array(values) for name, values in cell["curve"].items()}
        curves[rule] = Curve(points["steps"], points["seconds"], points["fruit"])

    path = beside(config.out, f"_{side}x{side}.png")
    title = f"Snake {side}x{side}, training games, {config.seeds} seeds"
    draw_curves(curves, board["baselines"], path, title)
    shrink(path, path)


if __name__ == "__main__":
    raise SystemExit(run(tyro.cli(Config, description=__doc__)))

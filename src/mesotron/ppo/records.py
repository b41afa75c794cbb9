"""What a PPO run writes to its folder and reads there: rows, evaluations, curves, last words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesotron.config import SnakeConfig
from mesotron.ppo.draw import Curve
from mesotron.ppo.evaluate import Games
from mesotron.ppo.guard import Guard
from mesotron.ppo.hyper import Runs
from mesotron.ppo.mirrors import Mirrors
from mesotron.ppo.policy import Params
from mesotron.ppo.seeds import Program
from mesotron.runs import RunFolder
from mesotron.runs.console import LiveView
from mesotron.runs.lines import append_row, read_rows

# Of games that ended; meaningless in an update where none did.
SCORES = ("episode/fruit", "episode/length", "episode/truncated")


class Session(NamedTuple):
    """What the steps of a run share."""

    config: SnakeConfig
    folder: RunFolder
    runs: Runs
    program: Program
    evaluate: Callable[[Params, int], dict[str, Games]]
    view: LiveView
    mirrors: Mirrors
    guard: Guard

    @property
    def by_run(self) -> Path:
        """Rows of single runs, where several are trained side by side."""
        return self.folder.path / "runs.jsonl"


def write_chunk(
    session: Session,
    metrics: dict[str, np.ndarray],
    done: int,
    count: int,
    start: float,
    end: float,
) -> None:
    """One row for each update: means over the runs; and a row for each run, if there are more.

    The seconds of an update are its chunk's, divided evenly.
    """
    config, runs = session.config, session.runs.values
    rate = config.batch_size * len(runs) * count / (end - start)
    for k in range(count):
        step = done + k + 1
        seconds = start + (end - start) * (k + 1) / count
        times = {"time/seconds": seconds, "time/step": (end - start) / count}
        times["time/steps_per_second"] = rate
        times["time/env_steps"] = float(step * config.batch_size)
        values = {name: column[:, k] for name, column in metrics.items()}
        row = {"step": step, **mean_over_runs(values), **times}
        session.folder.append("metrics", row)
        session.view.update(step, row)
        session.mirrors.write(row)
        session.guard.take(row)
        if len(runs) > 1:
            for number, run in enumerate(runs):
                own = mean_over_runs({name: v[number : number + 1] for name, v in values.items()})
                append_row(session.by_run, {"step": step, "run": number, **run, **own, **times})


def mean_over_runs(values: dict[str, np.ndarray]) -> dict[str, float]:
    """Means over runs; scores of games are left out where none ended.

    Example:
        >>> mean_over_runs({"episode/finished": np.zeros(2), "episode/fruit": np.zeros(2)})
        {'episode/finished': 0.0}
    """
    ended = values["episode/finished"] > 0
    means = {}
    for name, each in values.items():
        counted = each[ended] if name in SCORES else each
        if len(counted):
            means[name] = float(counted.mean())
    return means


def write_evaluation(session: Session, found: dict[str, Games], done: int) -> None:
    """Whole games as a row of samples.jsonl: the means, and each run's own."""
    each = {f"{way}_fruit": games.fruit.mean(1).round(4).tolist() for way, games in found.items()}
    means = {k: v for way, games in found.items() for k, v in games.summarise(way).items()}
    row = {"step": done, "kind": "evaluation", **means, "each": each}
    session.folder.append("samples", row)
    session.mirrors.write({"step": done, **{f"eval/{k}": v for k, v in means.items()}})
    session.view.say(
        f"update {done}: fruit {means['greedy_fruit']:.2f} greedy, "
        f"{means['sampled_fruit']:.2f} sampled, of {session.config.most_fruit}"
    )


def curve_of(session: Session) -> Curve:
    """Fruit of the games that ended in training, per run; a gap repeats what was before it."""
    several = len(session.runs.values) > 1
    rows = read_rows(session.by_run) if several else session.folder.rows("metrics")
    num_runs = len(session.runs.values)
    times = [row for row in rows if row.get("run", 0) == 0]
    fruit = np.full((num_runs, len(times)), np.nan)
    for row in rows:
        fruit[row.get("run", 0), row["step"] - 1] = row.get("episode/fruit", np.nan)
    for k in range(fruit.shape[1]):
        before = fruit[:, k - 1] if k else np.zeros(num_runs)
        fruit[:, k] = np.where(np.isnan(fruit[:, k]), before, fruit[:, k])
    steps = np.array([row["time/env_steps"] for row in times])
    return Curve(steps, np.array([row["time/seconds"] for row in times]), fruit)


def describe(result: dict[str, Any], config: SnakeConfig) -> str:
    """The result in words."""
    base = result["baselines"]
    lines = [
        f"Snake {config.width}x{config.height}, {config.rule}, {len(result['runs'])} run(s) of "
        f"{result['env_steps']:,.0f} steps: {result['steps_per_second']:,.0f} steps/s, "
        f"{result['seconds']:.0f} s",
        f"greedy   {result['greedy_fruit']:.2f} fruit of {config.most_fruit}, "
        f"{result['greedy_won']:.0%} of games won",
        f"sampled  {result['sampled_fruit']:.2f} fruit, {result['sampled_won']:.0%} won",
        f"random   {base['random_masked']:.2f} among legal moves, "
        f"{base['random_unmasked']:.2f} among all",
    ]
    if len(result["runs"]) > 1:
        for run, fruit in zip(result["runs"], result["greedy_fruit_each"]):
            named = "  ".join(f"{name} {value:g}" for name, value in run.items())
            lines.append(f"  {named}  greedy {fruit:.2f}")
    return "\n".join(lines)

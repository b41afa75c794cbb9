"""Times PPO on Snake in environment steps per second of whole updates, side by side in one run.

    python -m benchmarks.ppo.speed mesotron_adam plain_jax_adam sb3_adam@64 --repeats 5

Ours with each optimizer, a plain JAX loop and Stable-Baselines3, all with the same game, network
and PPO settings: rollout and learning together, metrics on the host; no evaluation, no checkpoints,
compilation reported separately. `sb3_adam@64` plays 64 games instead of --num-envs. The table also
has the processor time of this process, which other programs on the machine disturb less; it means
nothing on a GPU or where games run in processes of their own.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import torch
import tyro

from benchmarks._lib.console import describe, progress, show_table
from benchmarks._lib.contenders import check_names
from benchmarks._lib.plain_ppo import make_plain_run, make_plain_start
from benchmarks._lib.results import write_result
from benchmarks._lib.rows import where
from benchmarks._lib.snake_sb3 import ENDS, make_sb3
from mesotron.config import SnakeConfig
from mesotron.optim import muon
from mesotron.ppo.program import make_program, read_runs

Turn = Callable[[], object]
OURS = {
    "mesotron_adam": "adam",
    "mesotron_muon": "muon",
    "mesotron_pion": "pion",
}
SB3_GAMES: dict[str, Literal["batched", "in_turn", "processes"]] = {
    "sb3_adam": "batched",
    "sb3_muon": "batched",
    "sb3_in_turn": "in_turn",
    "sb3_processes": "processes",
}
KINDS = (*OURS, "plain_jax_adam", *SB3_GAMES)
# What is timed if nothing is named: processes are left to be asked for, since each loads torch.
CONTENDERS = tuple(name for name in KINDS if name != "sb3_processes")
PACKAGES = ("jax", "flax", "optax", "jumanji", "torch", "stable-baselines3", "gymnasium")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Time PPO on Snake against Stable-Baselines3 and a plain loop in JAX, in one run."""

    contenders: tyro.conf.Positional[tuple[str, ...]] = ()
    """What to time, by name, or as sb3_adam@64 with its own number of games; everything but
    sb3_processes if not given."""

    board: int = 6
    """Rows and columns of the board."""

    num_envs: int = 64
    """Games played side by side."""

    num_steps: int = 32
    """Steps of each game in one update."""

    num_minibatches: int = 4
    """Gradient steps in one pass over an update's steps."""

    update_epochs: int = 4
    """Passes over an update's steps."""

    d_model: int = 64
    """Width of the network, the same for all."""

    num_layers: int = 2
    """Its layers."""

    num_heads: int = 4
    """Its attention heads."""

    readout: Literal["all", "head"] = "all"
    """Where its last layer looks from: all cells, or the snake's head alone."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the JAX networks' products; Stable-Baselines3's are float32."""

    updates: int = 2
    """Updates in one timing."""

    repeats: int = 3
    """Timings of each contender, interleaved; the median is reported."""

    out: Path | None = None
    """Also write the result to this JSON file."""


class Entry(NamedTuple):
    """A contender and the number of games it plays: `sb3_adam@64`, or `sb3_adam` for --num-envs."""

    label: str
    kind: str
    game: SnakeConfig


def run(config: Config) -> int:
    """Time every contender, print the table, write JSON where asked."""
    if config.repeats < 1 or config.updates < 1:
        raise ValueError("--repeats and --updates must be at least 1")

    entries = [read_entry(label, config) for label in config.contenders or CONTENDERS]
    result: dict[str, Any] = {**describe_machine(), "settings": settings(config)}
    with progress(len(entries) * (1 + config.repeats)) as say:
        result["contenders"] = measure(entries, config, say)

    result["ratios"] = ratios(result["contenders"], "steps_per_second")
    if jax.default_backend() == "cpu":
        result["cpu_time_ratios"] = ratios(result["contenders"], "steps_per_cpu_second")

    show(result)
    if config.out is not None:
        write_result(result, config.out)

    return 0


def read_entry(label: str, config: Config) -> Entry:
    """A contender as it is written on the command line."""
    kind, at, games = label.partition("@")
    check_names((kind,), KINDS)
    if at and not games.isdecimal():
        raise ValueError(f"{label!r} must look like {kind}@64: the number of games it plays")

    game = make_game(config, int(games) if at else config.num_envs)
    return Entry(label, kind, game)


def make_game(config: Config, num_envs: int) -> SnakeConfig:
    """The run that a contender makes a piece of; its rates end beyond the benchmark."""
    steps = num_envs * config.num_steps
    return SnakeConfig(
        width=config.board,
        height=config.board,
        num_envs=num_envs,
        num_steps=config.num_steps,
        num_minibatches=config.num_minibatches,
        update_epochs=config.update_epochs,
        d_model=config.d_model,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        readout=config.readout,
        dtype=config.dtype,
        lr=1e-3,
        total_timesteps=1000 * steps,
        chunk=config.updates,
    )


def measure(
    entries: list[Entry], config: Config, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Warm up each contender, then time all of them once a round."""
    turns = {}
    first = {}
    for entry in entries:
        say(f"{entry.label}: first turn, compilation included")
        turns[entry.label] = prepare(entry, config.updates)
        first[entry.label] = seconds(turns[entry.label]).wall

    times: dict[str, list[Time]] = {entry.label: [] for entry in entries}
    for repeat in range(config.repeats):
        for entry in entries:
            say(f"{entry.label}: {repeat + 1} of {config.repeats}")
            times[entry.label].append(seconds(turns[entry.label]))

    rows = []
    for entry in entries:
        row = make_row(entry, config.updates, times[entry.label])
        rows.append(row | {"first_seconds": first[entry.label]})
    return rows


def make_row(entry: Entry, updates: int, times: list[Time]) -> dict[str, Any]:
    """A contender's times and what they mean."""
    steps = updates * entry.game.batch_size
    wall = [one.wall for one in times]
    cpu = [one.cpu for one in times]
    return {
        "name": entry.label,
        "kind": entry.kind,
        "num_envs": entry.game.num_envs,
        "env_steps": steps,
        "steps_per_second": steps / median(wall),
        "seconds": wall,
        "steps_per_cpu_second": steps / median(cpu),
        "cpu_seconds": cpu,
    }


class Time(NamedTuple):
    """Seconds of one turn."""

    wall: float
    cpu: float  # of this process


def seconds(turn: Turn) -> Time:
    """The time of a turn, until its metrics are on the host."""
    wall = time.perf_counter()
    cpu = time.process_time()
    turn()
    return Time(time.perf_counter() - wall, time.process_time() - cpu)


def prepare(entry: Entry, updates: int) -> Turn:
    """A function that makes so many updates and goes on from there when called again."""
    if entry.kind in OURS:
        return prepare_ours(replace(entry.game, optim=OURS[entry.kind]), updates)
    if entry.kind == "plain_jax_adam":
        return prepare_plain(entry.game, updates)

    return prepare_sb3(entry, updates)


def prepare_ours(game: SnakeConfig, updates: int) -> Turn:
    """`mesotron ppo snake`, as its command runs it."""
    runs = read_runs(game)
    program = make_program(game, num_runs=1)
    states = program.start(runs)

    def turn() -> None:
        nonlocal states
        states, metrics = program.advance(states, runs, updates)
        jax.device_get(metrics)

    return turn


def prepare_plain(game: SnakeConfig, updates: int) -> Turn:
    """The plain loop, jitted whole."""
    runner = jax.jit(make_plain_start(game))(jax.random.PRNGKey(game.seed))
    go_on = jax.jit(make_plain_run(game, updates))

    def turn() -> None:
        nonlocal runner
        runner, metrics = go_on(runner)
        jax.device_get(metrics)

    return turn


def prepare_sb3(entry: Entry, updates: int) -> Turn:
    """Stable-Baselines3, on the device that torch would take."""
    game = replace(entry.game, anneal_lr=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_sb3(game, device, SB3_GAMES[entry.kind])

    network: Any = model.policy.network
    if entry.kind == "sb3_muon":
        model.policy.optimizer = muon(network, lr=game.lr, weight_decay=0.0, overrides=ENDS)

    def turn() -> None:
        model.learn(updates * game.batch_size, reset_num_timesteps=False)
        if device == "cuda":
            torch.cuda.synchronize()

    return turn


def ratios(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    """What the speeds under `key` say: at the same number of games, and of the fastest of each.

    Example:
        >>> speeds = {"mesotron_adam": 90.0, "sb3_adam": 30.0}
        >>> rows = [{"kind": k, "num_envs": 8, "speed": v} for k, v in speeds.items()]
        >>> ratios(rows, "speed")
        {'ours_over_sb3@8': 3.0, 'fastest_ours_over_fastest_sb3': 3.0}
    """
    found = {}
    for games in sorted({row["num_envs"] for row in rows}):
        speed = {row["kind"]: row[key] for row in where(rows, num_envs=games)}
        for name, value in _compare(speed).items():
            found[f"{name}@{games}"] = value

    ours = [row[key] for row in rows if row["kind"] == "mesotron_adam"]
    with_adam = set(SB3_GAMES) - {"sb3_muon"}
    sb3 = [row[key] for row in rows if row["kind"] in with_adam]
    if ours and sb3:
        found["fastest_ours_over_fastest_sb3"] = max(ours) / max(sb3)
    return found


def _compare(speed: dict[str, float]) -> dict[str, float]:
    """Ratios of those pairs that were timed."""
    pairs = {
        "ours_over_sb3": ("mesotron_adam", "sb3_adam"),
        "ours_over_sb3_in_turn": ("mesotron_adam", "sb3_in_turn"),
        "ours_over_sb3_processes": ("mesotron_adam", "sb3_processes"),
        "ours_over_plain_jax": ("mesotron_adam", "plain_jax_adam"),
        "muon_over_sb3_muon": ("mesotron_muon", "sb3_muon"),
    }

    found = {}
    for key, (a, b) in pairs.items():
        if a in speed and b in speed:
            found[key] = speed[a] / speed[b]

    for rule in ("muon", "pion"):
        ours = f"mesotron_{rule}"
        if ours in speed and "mesotron_adam" in speed:
            # Of the time of a step: what Adam's step does not take.
            found[f"{rule}_share_of_step"] = 1 - speed[ours] / speed["mesotron_adam"]
    return found


def describe_machine() -> dict[str, Any]:
    device = jax.devices()[0]
    torch_device = "cuda" if torch.cuda.is_available() else "cpu"
    about = describe(torch.device(torch_device), PACKAGES)
    about["device"] = device.device_kind
    if device.platform == "cpu":
        about["device"] = f"{platform.machine()} CPU"
    return about | {"torch_device": torch_device, "torch_threads": about.pop("threads")}


def settings(config: Config) -> dict[str, Any]:
    """The config as JSON."""
    kept = vars(config).items()
    return {name: value for name, value in kept if name not in ("out", "contenders")}


def show(result: dict[str, Any]) -> None:
    """Print the table and the ratios."""
    rows = result["contenders"]
    slowest = min(row["steps_per_second"] for row in rows)
    lines = []
    for row in rows:
        line = [
            row["kind"],
            f"{row['num_envs']:,}",
            f"{row['steps_per_second']:,.0f}",
            f"{row['steps_per_second'] / slowest:.2f}",
            f"{row['steps_per_cpu_second']:,.0f}",
            f"{row['first_seconds']:.1f}",
        ]
        lines.append(line)

    side = result["settings"]["board"]
    title = f"Snake {side}x{side}, {result['device']}"
    headings = ["contender", "games", "steps/s", "times the slowest", "steps/CPU s", "first turn s"]
    show_table(title, headings, lines)

    by_cpu = result.get("cpu_time_ratios", {})
    for name, value in result["ratios"].items():
        also = f", by CPU time {by_cpu[name]:.3f}" if by_cpu else ""
        print(f"{name.replace('_', ' ')}: {value:.3f}{also}")


if __name__ == "__main__":
    raise SystemExit(run(tyro.cli(Config, description=__doc__)))

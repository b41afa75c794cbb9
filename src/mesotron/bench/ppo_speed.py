"""`mesotron bench ppo`: environment steps per second of whole updates, side by side in one run.

Ours with each optimizer, a plain loop in JAX and Stable-Baselines3, all with one game, one network
and one setting of PPO: playing and learning together, metrics on the host; compilation apart, no
evaluation, no checkpoints. Beside the wall clock stands the processor time of the whole process,
which other programs on the machine lengthen less; on a GPU it says nothing.
"""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from statistics import median
from typing import Any

import jax
import torch

from mesotron import __version__
from mesotron.bench.console import check_writable, progress, show_table, write_result
from mesotron.bench.contenders import check_names
from mesotron.bench.plain_ppo import make_plain_run, make_plain_start
from mesotron.bench.snake_sb3 import ENDS, make_sb3
from mesotron.config import BenchPpoConfig, SnakeConfig
from mesotron.optim import build
from mesotron.ppo.hyper import read_runs
from mesotron.ppo.seeds import make_program

Turn = Callable[[], object]
OURS = {"mesotron_adam": "adam", "mesotron_muon": "muon", "mesotron_pion": "pion"}
CONTENDERS = (*OURS, "plain_jax_adam", "sb3_adam", "sb3_muon")
PACKAGES = ("jax", "flax", "optax", "jumanji", "torch", "stable-baselines3", "gymnasium")


def run(config: BenchPpoConfig) -> int:
    """Time every contender, print the table, write JSON where asked."""
    names = check_names(config.contenders, CONTENDERS)
    if config.repeats < 1 or config.updates < 1:
        raise ValueError("bench ppo needs at least one repeat and one update")
    if config.out is not None:
        check_writable(config.out)
    game = make_game(config)
    game.check()
    with progress(len(names) * (1 + config.repeats)) as say:
        rows = measure(names, game, config, say)
    result = {**describe(), "settings": settings(config), "contenders": rows}
    result["ratios"] = ratios(rows, "steps_per_second")
    if jax.default_backend() == "cpu":
        result["cpu_time_ratios"] = ratios(rows, "steps_per_cpu_second")
    show(result)
    if config.out is not None:
        write_result(result, config.out)
    return 0


def make_game(config: BenchPpoConfig) -> SnakeConfig:
    """The run that every contender makes a piece of; its rates end beyond the benchmark."""
    steps = config.num_envs * config.num_steps
    return SnakeConfig(
        width=config.board,
        height=config.board,
        num_envs=config.num_envs,
        num_steps=config.num_steps,
        num_minibatches=config.num_minibatches,
        update_epochs=config.update_epochs,
        d_model=config.d_model,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        dtype=config.dtype,
        lr=1e-3,
        total_timesteps=1000 * steps,
        chunk=config.updates,
    )


def measure(
    names: tuple[str, ...], game: SnakeConfig, config: BenchPpoConfig, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Warm up each contender, then time all of them once a round."""
    turns, first = {}, {}
    for name in names:
        say(f"{name}: first turn, compilation included")
        turns[name] = prepare(name, game, config.updates)
        first[name] = seconds(turns[name])[0]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for repeat in range(config.repeats):
        for name in names:
            say(f"{name}: {repeat + 1} of {config.repeats}")
            times[name].append(seconds(turns[name]))
    steps = config.updates * game.batch_size
    rows = []
    for name in names:
        wall, cpu = (list(column) for column in zip(*times[name]))
        row = {"name": name, "env_steps": steps, "first_seconds": first[name]}
        row |= {"steps_per_second": steps / median(wall), "seconds": wall}
        row |= {"steps_per_cpu_second": steps / median(cpu), "cpu_seconds": cpu}
        rows.append(row)
    return rows


def seconds(turn: Turn) -> tuple[float, float]:
    """Wall and processor time of one turn, until its metrics are on the host."""
    wall, cpu = time.perf_counter(), time.process_time()
    turn()
    return time.perf_counter() - wall, time.process_time() - cpu


def prepare(name: str, game: SnakeConfig, updates: int) -> Turn:
    """A function that makes so many updates and goes on from there when called again."""
    if name in OURS:
        return prepare_ours(replace(game, optim=OURS[name]), updates)
    if name == "plain_jax_adam":
        return prepare_plain(game, updates)
    return prepare_sb3(game, updates, use_muon=name == "sb3_muon")


def prepare_ours(game: SnakeConfig, updates: int) -> Turn:
    """`mesotron ppo snake`, as its command runs it."""
    runs, program = read_runs(game), make_program(game, num_runs=1)
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


def prepare_sb3(game: SnakeConfig, updates: int, use_muon: bool) -> Turn:
    """Stable-Baselines3 on the batched game, on the device that torch would take."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_sb3(replace(game, anneal_lr=False), device=device)
    network: Any = model.policy.network
    if use_muon:
        model.policy.optimizer = build.muon(network, lr=game.lr, weight_decay=0.0, overrides=ENDS)

    def turn() -> None:
        model.learn(updates * game.batch_size, reset_num_timesteps=False)
        if device == "cuda":
            torch.cuda.synchronize()

    return turn


def ratios(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    """What the speeds under `key` say, of those pairs that were timed."""
    speed = {row["name"]: row[key] for row in rows}
    pairs = {
        "ours_over_sb3": ("mesotron_adam", "sb3_adam"),
        "ours_over_plain_jax": ("mesotron_adam", "plain_jax_adam"),
        "muon_over_sb3_muon": ("mesotron_muon", "sb3_muon"),
    }
    found = {key: speed[a] / speed[b] for key, (a, b) in pairs.items() if a in speed and b in speed}
    for rule in ("muon", "pion"):
        ours = f"mesotron_{rule}"
        if ours in speed and "mesotron_adam" in speed:
            # Of the time of a step: what Adam's step does not take.
            found[f"{rule}_share_of_step"] = 1 - speed[ours] / speed["mesotron_adam"]
    return found


def describe() -> dict[str, Any]:
    """What a result needs to be read later."""
    device = jax.devices()[0]
    words = device.device_kind if device.platform != "cpu" else f"{platform.machine()} CPU"
    return {
        "command": shlex.join(["mesotron", *sys.argv[1:]]),
        "mesotron": __version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "device": words,
        "torch_device": "cuda" if torch.cuda.is_available() else "cpu",
        "torch_threads": torch.get_num_threads(),
    }


def settings(config: BenchPpoConfig) -> dict[str, Any]:
    """The config as JSON."""
    kept = vars(config).items()
    return {name: value for name, value in kept if name not in ("out", "contenders")}


def show(result: dict[str, Any]) -> None:
    """Print the table and the ratios."""
    rows = result["contenders"]
    slowest = min(row["steps_per_second"] for row in rows)
    cells = [
        [
            row["name"],
            f"{row['steps_per_second']:,.0f}",
            f"{row['steps_per_second'] / slowest:.2f}",
            f"{row['steps_per_cpu_second']:,.0f}",
            f"{row['first_seconds']:.1f}",
        ]
        for row in rows
    ]
    title = f"Snake {result['settings']['board']}x{result['settings']['board']}, {result['device']}"
    headings = ["contender", "steps/s", "times the slowest", "steps/CPU s", "first turn s"]
    show_table(title, headings, cells)
    by_cpu = result.get("cpu_time_ratios", {})
    for name, value in result["ratios"].items():
        also = f", by CPU time {by_cpu[name]:.3f}" if by_cpu else ""
        print(f"{name.replace('_', ' ')}: {value:.3f}{also}")

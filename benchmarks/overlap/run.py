"""How much faster is training with the next rollout sampled ahead, and does it learn the same?

    PYTHONPATH=src:. python -m benchmarks.overlap.run --out overlap.json --wait 0.3

Runs of both ways take turns, seed by seed, in one process. The clock begins with the end of the
second step, when everything is captured and compiled. A reward that waits stands for tools, judges
and sandboxes. The file is written after each run, so a run that is cut short keeps what it has.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from transformers import TrainerCallback

from mesotron.answers.verify import Verifier
from mesotron.cli import COMMANDS, parse
from mesotron.config import TrainConfig
from mesotron.rlvr.parts import Parts, build_trainer, evaluate_part, load
from mesotron.runs import RunFolder
from mesotron.runs.folder import describe_environment

WARM_UP = 2  # steps before the clock begins
SMOOTH = 5  # steps that a reward is the mean of
LOGGED = (
    "reward",
    "entropy",
    "time/step",
    "time/rollout",
    "sample/staleness_mean",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)


class Clock(TrainerCallback):
    """Seconds since the warm-up, and metrics, at the end of each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.start = 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in (logs or {}):
            return
        if state.global_step <= WARM_UP:
            self.start = time.perf_counter()

        row = {"step": state.global_step, "seconds": time.perf_counter() - self.start}
        row |= {name: logs[name] for name in LOGGED if name in logs}
        self.rows.append(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that the reward waits")
    parser.add_argument("--target", type=float, default=0.9, help="of the reward")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many")
    options, flags = parser.parse_known_args()  # further flags are those of `mesotron train`

    began = time.perf_counter()
    config = parse(TrainConfig, ["arith", *flags], "mesotron train", COMMANDS["train"].presets)
    runs: list[dict[str, Any]] = []

    for seed in options.seeds:
        for staleness in (0, 1):
            if time.perf_counter() - began > options.seconds:
                break

            runs.append(run(config, seed, staleness, options.wait))
            record = summary(runs, options.target) | {"runs": runs, "wait": options.wait}
            options.out.write_text(json.dumps(record))

    print(table(summary(runs, options.target)))


def run(config: TrainConfig, seed: int, staleness: int, wait: float) -> dict[str, Any]:
    rollout = replace(config.rollout, max_staleness=staleness, fast=True)
    config = replace(config, seed=seed, rollout=rollout, save_every=0)

    with tempfile.TemporaryDirectory() as folder, Verifier(config.reward.timeout) as verifier:
        parts = load(config, verifier)
        environment = describe_environment(str(parts.device), seed)
        trainer = build_trainer(parts, RunFolder.create(Path(folder) / "run", config, environment))
        delay_reward(trainer, wait)
        clock = Clock()
        trainer.add_callback(clock)

        trainer.train()
        accuracy = accuracy_of(parts, trainer)

    result = {"seed": seed, "staleness": staleness, "accuracy": accuracy, "rows": clock.rows}
    print(json.dumps({k: v for k, v in result.items() if k != "rows"} | clock.rows[-1]), flush=True)
    return result


def delay_reward(trainer: Any, seconds: float) -> None:
    place = trainer.reward_func_names.index("reward")
    trainer.reward_funcs[place] = delayed(trainer.reward_funcs[place], seconds)


def delayed(reward: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    @wraps(reward)
    def waits(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return reward(*args, **kwargs)

    return waits


def accuracy_of(parts: Parts, trainer: Any) -> float:
    return evaluate_part(parts, trainer.model, "after")["greedy"]["strict"]["value"]


def summary(runs: list[dict[str, Any]], target: float) -> dict[str, Any]:
    ways = {}
    for name, staleness in (("sync", 0), ("ahead", 1)):
        own = [each for each in runs if each["staleness"] == staleness]
        ways[name] = {
            "s/step": [seconds_per_step(each["rows"]) for each in own],
            "seconds": [each["rows"][-1]["seconds"] for each in own],
            "to target": [seconds_to(each["rows"], target) for each in own],
            "last reward": [mean_reward(each["rows"]) for each in own],
            "accuracy": [each["accuracy"] for each in own],
        }

    return {"target": target, "ways": ways}


def seconds_per_step(rows: list[dict[str, float]]) -> float:
    after = [row["seconds"] for row in rows[WARM_UP - 1 :]]
    return median(b - a for a, b in pairwise(after))


def mean_reward(rows: list[dict[str, float]]) -> float:
    return mean(row["reward"] for row in rows[-2 * SMOOTH :])


def seconds_to(rows: list[dict[str, float]], target: float) -> float | None:
    """When the mean reward of the last steps first reached the target."""
    for k in range(SMOOTH, len(rows) + 1):
        if mean(row["reward"] for row in rows[k - SMOOTH : k]) >= target:
            return max(0.0, rows[k - 1]["seconds"])

    return None


def table(record: dict[str, Any]) -> str:
    lines = []
    for name, values in record["ways"].items():
        cells = []
        for key, numbers in values.items():
            shown = ["never" if x is None else f"{x:.3g}" for x in numbers]
            cells.append(f"{key}: {', '.join(shown)}")

        lines.append(f"{name}: " + "; ".join(cells))

    return "\n".join(lines)


if __name__ == "__main__":
    main()

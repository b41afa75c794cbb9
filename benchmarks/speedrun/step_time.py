"""Seconds per step of a plain `mesotron train arith_smollm2` and of plain TRL, on the same GPU.

    python -m benchmarks.speedrun.step_time --out step_time.json [--model FOLDER]

Every contender is a process of its own, one after the other, in the recipe's own sizes; `--repeat`
takes turns. The median leaves out the first steps, which compile and capture; they are listed too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._lib.results import read_json, write_json

OURS = {
    "ours": [],
    "ours, kernels": ["--optim.fused"],
    "ours, AdamW": ["--optim", "adamw"],
    "ours, without fast": ["--no-rollout.fast"],
    "ours, float32": ["--model.dtype", "float32"],
}
FIRST = 5  # steps left out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("step_time.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--names", nargs="+", default=["TRL", *OURS])
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of mesotron train")
    given = parser.parse_args()

    if given.names == ["only TRL"]:
        return train_stock(given)

    rows = []
    for number in range(given.repeat):
        for name in given.names:
            if name == "TRL":
                times = time_stock(given)
            else:
                times = time_ours(name, given)

            row = {
                "name": name,
                "repeat": number,
                "first": times[:FIRST],
                "median": statistics.median(times[FIRST:]),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
            write_json(rows, given.out, indent=1)


def time_ours(name: str, given: argparse.Namespace) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "mesotron", "train", "arith_smollm2", "--out", str(run)]
        command += ["--model", given.model, "--steps", str(given.steps)]
        command += ["--task.num-eval", "8", *OURS[name], *given.flags]
        subprocess.run(command, check=True)

        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["time/step"] for line in lines]


def time_stock(given: argparse.Namespace) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [sys.executable, "-m", "benchmarks.speedrun.step_time", "--names", "only TRL"]
        command += ["--model", given.model, "--steps", str(given.steps), "--out", str(out)]
        command += ["--flags", *given.flags]
        subprocess.run(command, check=True)
        return read_json(out)


def train_stock(given: argparse.Namespace) -> None:
    """`trl.GRPOTrainer` as the speedrun builds it: fused AdamW, float32 weights, bf16 products."""
    import time

    from transformers import TrainerCallback

    from benchmarks.speedrun.contenders import make_stock
    from mesotron.answers.verify import Verifier
    from mesotron.cli import COMMANDS, parse
    from mesotron.config import TrainConfig
    from mesotron.rlvr.lifecycle import quiet_libraries
    from mesotron.rlvr.parts import load

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__) -> None:
            times.append(time.perf_counter() - self.began)

    quiet_libraries()
    words = ["arith_smollm2", "--model", given.model, "--steps", str(given.steps)]
    words += ["--model.dtype", "float32", *given.flags]

    config = parse(TrainConfig, words, presets=COMMANDS["train"].presets)
    with Verifier(config.reward.timeout) as verifier, tempfile.TemporaryDirectory() as folder:
        trainer = make_stock(load(config, verifier), Path(folder))
        trainer.add_callback(Clock())
        trainer.train()

    write_json(times, given.out)


if __name__ == "__main__":
    main()

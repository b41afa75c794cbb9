"""Makes the long logs, the many runs and the large dataset with which the reading is timed.

    python -m benchmarks.watch.synthetic log /data/long.jsonl --rows 1000000
    python -m benchmarks.watch.synthetic log /data/fall.jsonl --rows 1000000 --fall 500000:60
    python -m benchmarks.watch.synthetic runs /data/runs --count 1000 --rows 150
    python -m benchmarks.watch.synthetic data /data/sums.jsonl --megabytes 200

    /usr/bin/time -v mesotron watch /data/long.jsonl

The numbers are those of a GRPO run that learns: noise of single batches, rising reward, an
evaluation every hundred rows. With `--fall STEP:ROWS` the reward is lost for so many rows.
"""

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

EVERY = 100  # rows between evaluations


def rows(count: int, seed: int = 0, fall: tuple[int, int] | None = None) -> Iterator[dict]:
    """The rows of one run."""
    draw = random.Random(seed)
    for step in range(count):
        learned = 1 - math.exp(-3 * step / count)
        level = 0.3 + 0.4 * learned

        if fall is not None and fall[0] <= step < fall[0] + fall[1]:
            level = 0.02

        reward = min(max(draw.gauss(level, 0.06), 0.0), 1.0)
        row = {
            "step": step,
            "loss": draw.gauss(0.0, 0.01),
            "reward": reward,
            "reward_std": draw.gauss(0.35, 0.03),
            "kl": draw.gauss(0.01 + 0.01 * learned, 0.001),
            "entropy": draw.gauss(0.9 - 0.3 * learned, 0.05),
            "grad_norm": abs(draw.gauss(0.5, 0.1)),
            "learning_rate": 1e-6,
            "completions/mean_length": draw.gauss(120.0, 5.0),
            "completions/clipped_ratio": min(abs(draw.gauss(0.0, 0.02)), 1.0),
            "frac_reward_zero_std": draw.randrange(5) / 16,
            "num_tokens": 16000.0 * step,
        }
        yield row

        if step % EVERY == 0:
            yield {"step": step, "eval/accuracy": round(draw.gauss(level, 0.02), 4)}


def write_log(path: Path, count: int, seed: int = 0, fall: tuple[int, int] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows(count, seed, fall):
            file.write(json.dumps(row) + "\n")


def write_runs(folder: Path, count: int, num_rows: int) -> None:
    """A folder for each run; every tenth loses its reward."""
    for k in range(count):
        fall = (num_rows // 2, num_rows) if k % 10 == 9 else None
        write_log(folder / f"run{k:04}" / "metrics.jsonl", num_rows, seed=k, fall=fall)


def write_data(path: Path, megabytes: int) -> None:
    """Word problems with their answers, a few hundred bytes each, as GSM8K has them."""
    draw = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)

    size = 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1_000_000:
            a, b, c = (draw.randrange(10, 1000) for _ in range(3))
            question = (
                f"A shop has {a} boxes with {b} pens each and sells {c} of the pens. A second shop "
                f"has {b} boxes with {c} pens each. How many pens do the two shops have together?"
            )
            worked = f"{a} x {b} - {c} = {a * b - c}, and {b} x {c} = {b * c}."
            answer = f"{worked}\n#### {a * b - c + b * c}"
            line = json.dumps({"question": question, "answer": answer}) + "\n"
            size += len(line)
            file.write(line)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make logs, runs and data of any size")
    kinds = parser.add_subparsers(dest="kind", required=True)

    log = kinds.add_parser("log")
    log.add_argument("path", type=Path)
    log.add_argument("--rows", type=int, default=1_000_000)
    log.add_argument("--fall", help="STEP:ROWS without a reward")

    runs = kinds.add_parser("runs")
    runs.add_argument("path", type=Path)
    runs.add_argument("--count", type=int, default=1000)
    runs.add_argument("--rows", type=int, default=150)

    data = kinds.add_parser("data")
    data.add_argument("path", type=Path)
    data.add_argument("--megabytes", type=int, default=200)

    given = parser.parse_args()
    if given.kind == "log":
        first, _, length = (given.fall or "").partition(":")
        fall = (int(first), int(length)) if given.fall else None
        write_log(given.path, given.rows, fall=fall)
    elif given.kind == "runs":
        write_runs(given.path, given.count, given.rows)
    else:
        write_data(given.path, given.megabytes)


if __name__ == "__main__":
    main()

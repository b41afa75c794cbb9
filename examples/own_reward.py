"""Your own data and reward: the steps of README's section, on the shipped tiny model.

    python examples/own_reward.py

It writes 400 problems, checks the reward, and trains for 30 steps: a minute or two on a CPU core.
Replace `make_rows` by your file, `score` by your reward, and `tiny` by your model.
"""

import json
import random
import re
import sys
from pathlib import Path

from mesotron import cli

REWARD = f"{Path(__file__)}:score"
BOXED = re.compile(r"\\boxed\{([^{}]*)\}\s*$")


def score(completions: list[str], answer: list[int], **_: object) -> list[float]:
    """1 where the last thing written is the right number in a box, as in TRL one per completion."""
    rewards = []
    for text, gold in zip(completions, answer, strict=True):
        written = BOXED.search(text)
        is_right = written is not None and written[1].strip() == str(gold)
        rewards.append(float(is_right))

    return rewards


def make_rows(count: int, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    rows = {}
    while len(rows) < count:
        a = rng.randint(2, 49)
        b = rng.randint(2, 49)
        question = f"Ann has {a} shells. Ann buys {b} more. How many shells does Ann have now?"
        rows[question] = {"question": question, "answer": a + b}

    return list(rows.values())


def main(folder: Path, steps: int = 30, held_out: int = 50) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "mine.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in make_rows(400)))

    own = ["--data", str(data)]
    if cli.main(["check", REWARD, *own]):
        raise SystemExit("the reward is not sound: see above")

    words = ["train", "--model", "tiny", *own, "--reward", REWARD, "--guard", "rollback"]
    words += ["--steps", str(steps), "--task.num-eval", str(held_out)]
    cli.main([*words, "--lr", "1e-3", "--max-tokens", "32", "--out", str(folder / "run")])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "own_reward"))

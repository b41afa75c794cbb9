"""A process that writes the run folder of a `mesotron train` run without training.

Its score follows from its config: the nearer a rate is to its optimizer's best one, the more
problems are solved. Large rates diverge. Environment variables select runs, by optimizer and seed,
that crash or end with weights that are not finite, and set the number of problems and the skill.
"""

import json
import math
import os
import random
import sys
import time
from pathlib import Path

from mesotron.runs import RunFolder

BEST = {"adamw": 1e-3, "muon": 1e-3, "pion": 4e-3}  # of the matrices
SKILL = {"adamw": 0.6, "muon": 0.6, "pion": 0.25}
PROBLEMS = int(os.environ.get("PROBLEMS", "120"))


def chance(config: dict) -> float:
    name, rate = config["optim"]["name"], config["optim"]["lr"]
    if "SKILL" in os.environ:
        return float(os.environ["SKILL"])
    return SKILL[name] - 0.1 * abs(math.log2(rate / BEST[name]))


def evaluation(seed: str, share: float) -> dict:
    rng = random.Random(seed)
    ids = [f"problem-{k}" for k in range(PROBLEMS)]
    return {"transcripts": [{"id": id, "correct": rng.random() < share} for id in ids]}


def write_run(config: dict) -> None:
    rate, steps = config["optim"]["lr"], config["steps"]
    run = RunFolder.create(Path(config["out"]), config, {})
    with run:
        run.save("before", evaluation("before", 0.2))
        diverges = rate > 0.009
        name = config["optim"]["name"]
        ratio = 0.05 if name == "pion" else 0.2
        ratio = math.nan if os.environ.get("NAN_UPDATES") == name else ratio
        falls = config["optim"]["schedule"] == "linear"
        for step in range(1, steps + 1):
            broken = diverges and step == steps
            row = {"step": step, "loss": math.nan if broken else 0.1, "step_time": 2.0}
            row |= {"facts/correct": 0.2 + 0.4 * step / steps, "num_tokens": 100.0 * step}
            share = 1 - (step - 1) / steps if falls else 1.0
            # As Transformers has it: the rate of the first group, which is the auxiliary rule's.
            row |= {"optim/muon/update_rms": ratio * rate * share, "learning_rate": 0.1 * share}
            run.append("metrics", row)
            time.sleep(float(os.environ.get("SECONDS_A_STEP", "0")))
        if diverges:
            raise ValueError(f"the loss is nan at step {steps}")
        if os.environ.get("SPOIL_AT") == f"{name} {config['seed']}":
            raise ValueError(f"weights are not finite after step {steps}, so training has stopped")
        after = evaluation(f"{config['seed']} {config['optim']['name']}", chance(config))
        run.save("after", after)
        share = sum(one["correct"] for one in after["transcripts"]) / PROBLEMS
        run.finish({"steps": steps, "after": {"value": share}}, "done")


if __name__ == "__main__":
    config = json.loads(Path(sys.argv[1]).read_text())["config"]
    if config["resume"]:
        resumed = Path(config["resume"])
        config = json.loads((resumed / "config.json").read_text())
        for path in resumed.glob("*.json*"):
            path.unlink()
        (resumed / "lock").unlink()
        (resumed / "checkpoints").rmdir()
    if os.environ.get("CRASH_AT") == f"{config['optim']['name']} {config['seed']}":
        raise RuntimeError("out of memory")
    write_run(config)

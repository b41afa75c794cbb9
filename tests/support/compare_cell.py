"""A process that writes the run folder of a `mesotron train` run without training.

Its score follows from its config: the nearer a rate is to its optimizer's best one, the more
problems are solved. Large rates diverge. Environment variables select runs, by optimizer and seed,
that crash or end with weights that are not finite, and set the number of problems and the skill.
Its process does not import mesotron, which would take longer than the rest.
"""

import json
import math
import os
import random
import sys
import time
from pathlib import Path

BEST = {
    "adamw": 1e-3,
    "muon": 1e-3,
    "pion": 4e-3,
}  # of the matrices
SKILL = {"adamw": 0.6, "muon": 0.6, "pion": 0.25}


def command(path: Path, kind: str, config: object) -> list[str]:
    """In place of `cell_command`."""
    from mesotron.compare.cell import cell_command

    return [sys.executable, __file__, *cell_command(path, kind, config)[-1:]]


def evaluation(seed: str, share: float) -> dict:
    rng = random.Random(seed)
    ids = [f"problem-{k}" for k in range(int(os.environ.get("PROBLEMS", "120")))]
    return {"transcripts": [{"id": id, "correct": rng.random() < share} for id in ids]}


def write_run(config: dict) -> None:
    name, rate, falls = (config["optim"][key] for key in ("name", "lr", "schedule"))
    seed = config["seed"]
    steps = config["steps"]
    run = Path(config["out"])
    skill = SKILL[name] - 0.1 * abs(math.log2(rate / BEST[name]))
    ratio = 0.05 if name == "pion" else 0.2
    ratio = math.nan if os.environ.get("NAN_UPDATES") == name else ratio

    def save(file: str, value: object, mode: str = "w") -> None:
        with (run / file).open(mode) as out:
            out.write(json.dumps(value) + "\n")

    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").unlink(missing_ok=True)  # of a run that is resumed
    save("env.json", {})
    save("config.json", config)
    save("before.json", evaluation("before", 0.2))

    for step in range(1, steps + 1):
        diverges = rate > 0.009 and step == steps
        row = {
            "step": step,
            "loss": math.nan if diverges else 0.1,
            "step_time": 2.0,
        }

        row |= {"facts/correct": 0.2 + 0.4 * step / steps, "num_tokens": 100.0 * step}
        share = 1 - (step - 1) / steps if falls == "linear" else 1.0

        # As Transformers has it: the rate of the first group, which is the auxiliary rule's.
        row |= {"optim/muon/update_rms": ratio * rate * share, "learning_rate": 0.1 * share}
        save("metrics.jsonl", row, "a")
        time.sleep(float(os.environ.get("SECONDS_A_STEP", "0")))
        if diverges:
            raise ValueError(f"the loss is nan at step {steps}")

    if os.environ.get("SPOIL_AT") == f"{name} {seed}":
        raise ValueError(f"weights are not finite after step {steps}, so training has stopped")

    save("after.json", evaluation(f"{seed} {name}", float(os.environ.get("SKILL", skill))))
    save("result.json", {"steps": steps})


if __name__ == "__main__":
    config = json.loads(Path(sys.argv[1]).read_text())["config"]
    if config["resume"]:
        config = json.loads((Path(config["resume"]) / "config.json").read_text())

    if os.environ.get("CRASH_AT") == f"{config['optim']['name']} {config['seed']}":
        raise RuntimeError("out of memory")

    write_run(config)

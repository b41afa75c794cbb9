"""A process that takes the arguments of `mesotron train` and writes a run folder without training.

The score is highest at a rate of 1e-3; above 1e-2 the reward collapses and the run hangs. It does
not import mesotron, which would take longer than the rest.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

ROWS = 60


def main(arguments: list[str]) -> None:
    flags = dict(one.split("=", 1) for one in arguments if one.startswith("--"))
    if os.environ.get("CRASH"):
        raise RuntimeError("out of memory")

    run = Path(flags.get("--resume") or flags["--out"])
    config = run / "config.json"
    metrics = run / "metrics.jsonl"

    if "--resume" not in flags:
        run.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps({"rate": float(flags["--optim.lr"])}))

    rate = json.loads(config.read_text())["rate"]
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    for step in range(done + 1, ROWS + 1):
        collapsed = rate > 1e-2 and step > 20
        row = {
            "step": step,
            "reward": 0.1 if collapsed else 0.7,
            "loss": 0.1,
        }
        with metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

        time.sleep(float(os.environ.get("SECONDS_A_STEP", "0")))
        if collapsed and step == ROWS:
            time.sleep(60)  # until the watch ends it

    score = 1 - abs(math.log10(rate / 1e-3))
    (run / "result.json").write_text(json.dumps({"after": {"value": score}, "resumed_at": done}))


if __name__ == "__main__":
    main(sys.argv[1:])

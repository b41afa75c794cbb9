"""A process that takes the arguments of `mesotron train` and writes a run folder without training.

The score is highest at a rate of 1e-3; above 1e-2 the reward collapses and the run hangs.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

from mesotron.runs import RunFolder

ROWS = 60


def main(arguments: list[str]) -> None:
    flags = dict(one.split("=", 1) for one in arguments if one.startswith("--"))
    if os.environ.get("CRASH"):
        raise RuntimeError("out of memory")
    if "--resume" in flags:
        run = RunFolder(Path(flags["--resume"]))
        rate = json.loads((run.path / "config.json").read_text())["optim"]["lr"]
    else:
        rate = float(flags["--optim.lr"])
        run = RunFolder.create(Path(flags["--out"]), {"optim": {"lr": rate}}, {})
    with run:
        done = len(run.rows("metrics"))
        for step in range(done + 1, ROWS + 1):
            collapsed = rate > 1e-2 and step > 20
            row = {"step": step, "reward": 0.1 if collapsed else 0.7, "loss": 0.1}
            run.append("metrics", row)
            time.sleep(float(os.environ.get("SECONDS_A_STEP", "0")))
            if collapsed and step == ROWS:
                time.sleep(60)  # until the watch ends it
        score = 1 - abs(math.log10(rate / 1e-3))
        run.finish({"after": {"value": score}, "resumed_at": done}, "done")


if __name__ == "__main__":
    main(sys.argv[1:])

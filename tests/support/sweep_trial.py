"""A process that takes the words of `mesotron train` and leaves a run folder, training nothing.

The score is highest at a rate of 1e-3; above 1e-2 the reward collapses and the run goes on in vain.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

from mesotron import config
from mesotron.cli import Presets, parse
from mesotron.config.base import to_plain
from mesotron.recipes import describe_recipes, make_recipe
from mesotron.runs import RunFolder

ROWS = 60


def main(words: list[str]) -> None:
    made = parse(config.TrainConfig, words, "sweep_trial", Presets(make_recipe, describe_recipes))
    if os.environ.get("CRASH"):
        raise RuntimeError("out of memory")
    if made.resume:
        run = RunFolder(made.resume)
        rate = json.loads((made.resume / "config.json").read_text())["optim"]["lr"]
    else:
        assert made.out is not None
        run, rate = RunFolder.create(made.out, to_plain(made), {}), made.optim.lr
    with run:
        done = len(run.rows("metrics"))
        for step in range(done + 1, ROWS + 1):
            collapsed = rate > 1e-2 and step > 20
            row = {"step": step, "reward": 0.1 if collapsed else 0.7, "loss": 0.1}
            run.append("metrics", row)
            time.sleep(float(os.environ.get("SECONDS_A_STEP", "0")))
            if collapsed and step == ROWS:
                time.sleep(60)  # until the watch has it ended
        score = 1 - abs(math.log10(rate / 1e-3))
        run.finish({"after": {"value": score}, "resumed_at": done}, "done")


if __name__ == "__main__":
    main([word for word in sys.argv[1:] if word != "train"] or [str(Path())])

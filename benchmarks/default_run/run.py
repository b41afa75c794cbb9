"""`mesotron train` over several seeds: its curves, its gain and its time.

    python -m benchmarks.default_run.run --seeds 11 12 13 14 15
    python -m benchmarks.default_run.run --recipe arith_collapse --guard rollback --seeds 11 12 13

Finished runs are not made again. One thread for each: the processor time of a run is what it would
take on a core of its own, whatever else the machine does.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json, write_json
from mesotron.runs.files import read_rows

HERE = Path(__file__).parent
Row = dict[str, Any]
RESULT = ("problems", "before", "after", "gain", "lenient", "gained", "lost")
EVENT = ("kind", "step", "detector", "severity", "action", "checkpoint", "began", "changes")
CURVES = ("reward", "facts/correct", "facts/formatted", "facts/correct_unformatted", "entropy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[11, 12, 13, 14, 15])
    add("--runs", type=Path, default=Path("runs/default_run"))
    add("--recipe", default="arith")
    add("--guard", default="warn")
    add("--workers", type=int, default=1, help="runs at once")
    add("--flags", nargs=argparse.REMAINDER, default=[], help="of mesotron train")
    given = parser.parse_args()

    folder = given.runs / f"{given.recipe}-{given.guard}"
    with ThreadPoolExecutor(given.workers) as pool:
        rows = list(pool.map(lambda seed: train(seed, folder, given), given.seeds))

    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if key != "curves"}))

    if not given.flags:
        if given.recipe == "arith":
            name = "result"
        else:
            name = f"{given.recipe}_{given.guard}"

        write_json(rows, HERE / f"{name}.json.gz")
        draw(rows, HERE / f"{name}.png")


def train(seed: int, folder: Path, given: argparse.Namespace) -> Row:
    """One run, unless it is there already."""
    path = folder / str(seed)
    if (path / "seconds.json").exists():
        return collect(path)

    command = [sys.executable, "-m", "mesotron", "train", given.recipe, "--guard", given.guard]
    command += ["--seed", str(seed), "--out", str(path), "--device", "cpu", "--threads", "1"]
    began = time.monotonic()
    child = subprocess.Popen([*command, *given.flags], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"{path}: mesotron train failed")

    seconds = {"wall": time.monotonic() - began, "processor": used.ru_utime + used.ru_stime}
    write_json(seconds, path / "seconds.json")
    return collect(path)


def collect(path: Path) -> Row:
    """What is kept of a finished run."""
    rows = read_rows(path / "metrics.jsonl")
    run: Row = {"seed": int(path.name), "steps": len({row["step"] for row in rows})}
    if (path / "result.json").exists():
        result = read_json(path / "result.json")
        run |= {key: result[key] for key in RESULT}

    run["events"] = []
    for event in read_rows(path / "events.jsonl"):
        run["events"].append({key: value for key, value in event.items() if key in EVENT})

    run["seconds"] = read_json(path / "seconds.json")
    run["curves"] = {name: [[row["step"], row[name]] for row in rows] for name in CURVES}
    return run


def draw(result: list[Row], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {
        "facts/correct": "right and in the format",
        "facts/formatted": "in the format",
        "facts/correct_unformatted": "right outside the format",
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), constrained_layout=True)
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for row in result:
            steps, curve = zip(*row["curves"][name], strict=True)
            axis.plot(steps, curve, label=f"seed {row['seed']}", linewidth=1)
        axis.set(title=f"{title}, sampled", xlabel="step", ylim=(0, 1.02))
        axis.grid(alpha=0.3)

    axes[0].legend()
    save_picture(figure, file, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()

"""The default run over several seeds: `mesotron train`, its curves and its gain.

    python -m benchmarks.default_run.run --seeds 0 1 2

Finished runs are not made again, stopped ones are continued.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
CURVES = ("reward", "facts/correct", "facts/formatted", "facts/correct_unformatted", "entropy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/default_run"))
    parser.add_argument("--workers", type=int, default=2, help="runs at once, one thread each")
    given = parser.parse_args()
    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(lambda seed: train(seed, given.runs), given.seeds))
    result = [collect(seed, given.runs) for seed in given.seeds]
    (HERE / "result.json").write_text(json.dumps(result, indent=1))
    draw(result)
    for row in result:
        print(row["seed"], row["before"], row["after"], row["gain"], f"{row['seconds']:.0f} s")


def train(seed: int, runs: Path) -> None:
    path = runs / str(seed)
    if (path / "result.json").exists():
        return
    command = [sys.executable, "-m", "mesotron", "train"]
    if (path / "config.json").exists():
        command += ["--resume", str(path)]
    else:
        command += ["--seed", str(seed), "--out", str(path), "--threads", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def collect(seed: int, runs: Path) -> dict:
    path = runs / str(seed)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((path / "result.json").read_text())
    return {
        "seed": seed,
        **{key: result[key] for key in ("problems", "before", "after", "gain")},
        "seconds": sum(row["time/step"] for row in rows),
        "curves": {name: [row[name] for row in rows] for name in CURVES},
    }


def draw(result: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), constrained_layout=True)
    titles = {
        "facts/correct": "right and in the format",
        "facts/formatted": "in the format",
        "facts/correct_unformatted": "right outside the format",
    }
    for axis, (name, title) in zip(axes, titles.items()):
        for row in result:
            curve = row["curves"][name]
            smooth = [sum(curve[max(0, k - 4) : k + 1]) / min(k + 1, 5) for k in range(len(curve))]
            axis.plot(range(1, len(curve) + 1), smooth, label=f"seed {row['seed']}")
        axis.set(title=f"{title}, mean of 5 steps", xlabel="step", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(HERE / "curve.png", dpi=110)


if __name__ == "__main__":
    main()

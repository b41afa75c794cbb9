"""The best checkpoint by held-out evaluations against the last one.

    python -m benchmarks.pocket.best --seeds 300 301 302 303 304

Each run keeps every evaluated checkpoint. All of them are then evaluated on the problems that chose
and on many others, so that several rules of choice can be compared on the same runs.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks._lib.results import read_json, write_json
from mesotron.rlvr.own_end import why_end
from mesotron.runs.best import BestCheckpoint, HeldOut
from mesotron.runs.files import read_rows

HERE = Path(__file__).parent
RESULT = HERE / "best.json.gz"
EVERY = 3  # steps between evaluations
NUM_CHOOSING = 100
NUM_FRESH = 400
COMMON = (
    f"--steps 30 --batch 8 --guard off --eval-every {EVERY} --save-every {EVERY} --keep 99 "
    f"--task.num-eval {NUM_CHOOSING} --device cpu --threads 1"
)
SETTINGS = {
    "healthy": "arith",  # Muon at 1e-3, falling
    "collapsing": "arith --lr 1.2e-2 --reward sparse",  # twelve times that
}
Row = dict[str, Any]
Rule = Callable[[Sequence[HeldOut]], int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[300, 301, 302, 303, 304])
    add("--runs", type=Path, default=Path("runs/best"))
    add("--workers", type=int, default=1, help="runs at once")
    add("--out", type=Path, default=RESULT)
    add("--finished", action="store_true", help="gather the runs that are there, and start none")
    add("--table", action="store_true", help="of the result that is there")
    given = parser.parse_args()

    if given.finished:
        paths = sorted(given.runs.glob("*/curve.json"), key=lambda path: path.parent.name)
        write_json([entry(path.parent) for path in paths], given.out)
    elif not given.table:
        jobs = [(setting, seed) for seed in given.seeds for setting in SETTINGS]
        with ThreadPoolExecutor(given.workers) as pool:
            rows = list(pool.map(lambda job: run_child(*job, given.runs), jobs))

        write_json(rows, given.out)

    runs = read_json(given.out)
    for line in [*table(runs), "", *resampled(runs), "", *ends(runs)]:
        print(line)


# One run, in a process of its own


def run_child(setting: str, seed: int, folder: Path) -> Row:
    """A run and the evaluations of all its checkpoints, unless they are there already."""
    path = folder / f"{setting}-{seed}"
    done = path / "curve.json"
    if not done.exists():
        words = f"{SETTINGS[setting]} {COMMON} --seed {seed} --out {path}"
        command = [sys.executable, "-m", "mesotron", "train", *words.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        code = f"from benchmarks.pocket.best import measure; measure({str(path)!r})"
        subprocess.run([sys.executable, "-c", code], check=True)

    return entry(path)


def entry(path: Path) -> Row:
    setting, _, seed = path.name.partition("-")
    rewards = [[row["step"], row["reward"]] for row in read_rows(path / "metrics.jsonl")]
    run = {"setting": setting, "seed": int(seed), "rewards": rewards}
    return run | read_json(path / "curve.json")


def measure(run: str) -> None:
    """Evaluate every checkpoint of a run, as greedily as it did, and write its curve."""
    import torch

    from mesotron.config import TaskConfig
    from mesotron.evaluate.evaluate import evaluate
    from mesotron.evaluate.subject import find_subject
    from mesotron.runs import list_checkpoints
    from mesotron.tasks.load import load_fresh, load_task

    path = Path(run)
    torch.set_num_threads(1)
    config = TaskConfig(num_eval=NUM_CHOOSING)
    task = load_task(config)
    many = TaskConfig(num_eval=NUM_CHOOSING + NUM_FRESH)
    problems = [*task.eval, *load_task(many).eval[NUM_CHOOSING:]]
    assert {one.id for one in load_fresh(config, task)} <= {one.id for one in problems}

    curve = {}
    for step, checkpoint in list_checkpoints(path / "checkpoints"):
        model, tokenizer = find_subject(str(checkpoint)).load(torch.device("cpu"))
        result = evaluate(model, tokenizer, problems, config, samples=0, max_tokens=32)
        curve[step] = "".join(str(int(one.correct)) for one in result.transcripts)

    best = read_json(path / "best.json")
    entry = {"curve": curve, "chosen": best["step"], "fresh": best["fresh"]["value"]}
    write_json(entry, path / "curve.json")


# Rules of choice, on the same curves


def one_standard_error(evaluations: Sequence[HeldOut]) -> int:
    """Ours."""
    best = BestCheckpoint()
    for one in evaluations:
        if best.observe(one):
            best.written(one.step)

    assert best.kept is not None
    return best.kept.step


def highest(evaluations: Sequence[HeldOut]) -> int:
    return max(evaluations, key=lambda one: one.score).step


def last(evaluations: Sequence[HeldOut]) -> int:
    return evaluations[-1].step


RULES: dict[str, Rule] = {
    "last": last,
    "highest": highest,
    "one standard error": one_standard_error,
}


def choosing_of(run: Row) -> list[HeldOut]:
    evaluations = []
    for step, bits in sorted(run["curve"].items(), key=lambda item: int(item[0])):
        outcomes = tuple(float(bit) for bit in bits[:NUM_CHOOSING])
        evaluations.append(HeldOut(int(step), mean(outcomes), outcomes))

    return evaluations


def fresh_of(run: Row, step: int) -> np.ndarray:
    return np.array([float(bit) for bit in run["curve"][str(step)][NUM_CHOOSING:]])


def table(runs: Sequence[Row]) -> list[str]:
    """By setting, seed and rule: the step, its score on the problems that chose, and on others."""
    lines = [
        "| setting | seed | rule | step | chose by | fresh | chosen - last | bias |",
        "|---" * 8 + "|",
    ]
    sums: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run in runs:
        evaluations = choosing_of(run)
        by_step = {one.step: one.score for one in evaluations}
        last_fresh = fresh_of(run, last(evaluations))
        assert one_standard_error(evaluations) == run["chosen"]

        for name, rule in RULES.items():
            step = rule(evaluations)
            fresh = fresh_of(run, step)
            difference = fresh - last_fresh
            error = difference.std(ddof=1) / len(fresh) ** 0.5
            gain = f"{difference.mean():+.3f} ± {1.96 * error:.3f}"
            bias = by_step[step] - fresh.mean()
            sums.setdefault((run["setting"], name), []).append((difference.mean(), bias))
            lines.append(
                f"| {run['setting']} | {run['seed']} | {name} | {step} | {by_step[step]:.2f} | "
                f"{fresh.mean():.3f} | {gain} | {bias:+.3f} |"
            )

    for (setting, name), pairs in sums.items():
        gains, biases = np.array(pairs).T
        lines.append(f"| {setting} | all | {name} | | | | {spread(gains)} | {spread(biases)} |")

    return lines


def resampled(runs: Sequence[Row], splits: int = 200) -> list[str]:
    """The bias and what was lost to the best step, if other problems had chosen: means over random
    splits of all problems into as many that choose and others that judge."""
    rng = np.random.default_rng(0)
    lines = ["| setting | rule | bias | behind the best step |", "|---" * 4 + "|"]
    for setting in SETTINGS:
        own = [run for run in runs if run["setting"] == setting]
        sums: dict[str, list[tuple[float, float]]] = {name: [] for name in RULES}
        for run in own:
            steps, right = matrix_of(run)
            for _ in range(splits):
                order = rng.permutation(right.shape[1])
                chosen_by = right[:, order[:NUM_CHOOSING]]
                judged = right[:, order[NUM_CHOOSING:]].mean(axis=1)
                evaluations = [
                    HeldOut(step, row.mean(), tuple(row)) for step, row in zip(steps, chosen_by)
                ]
                for name, rule in RULES.items():
                    k = steps.index(rule(evaluations))
                    bias = evaluations[k].score - judged[k]
                    sums[name].append((bias, right.mean(axis=1).max() - right[k].mean()))

        for name, pairs in sums.items():
            bias, behind = np.array(pairs).mean(axis=0)
            lines.append(f"| {setting} | {name} | {bias:+.4f} | {behind:.4f} |")

    return lines


def matrix_of(run: Row) -> tuple[list[int], np.ndarray]:
    """Steps, and [steps, problems] of right and wrong."""
    steps = sorted(int(step) for step in run["curve"])
    right = [[float(bit) for bit in run["curve"][str(step)]] for step in steps]
    return steps, np.array(right)


def ends(runs: Sequence[Row]) -> list[str]:
    """Where `--steps auto` would have ended each run, by its rule on what was logged until then."""
    lines = ["| setting | seed | would end at | fresh, best so far | fresh, best of all |"]
    lines.append("|---" * 5 + "|")
    for run in runs:
        end = end_of(run)
        evaluations = choosing_of(run)
        seen = [one for one in evaluations if end is None or one.step <= end]
        scores = [fresh_of(run, one_standard_error(part)).mean() for part in (seen, evaluations)]
        lines.append(
            f"| {run['setting']} | {run['seed']} | {end or 'not in 30'} | {scores[0]:.3f} | "
            f"{scores[1]:.3f} |"
        )

    return lines


def end_of(run: Row) -> int | None:
    best = BestCheckpoint()
    for one in choosing_of(run):
        is_new = best.observe(one)
        rows = [{"step": k, "reward": x} for k, x in run["rewards"] if k <= one.step]
        if why_end(best, rows, one.step) is not None:
            return one.step
        if is_new:
            best.written(one.step)

    return None


def spread(values: np.ndarray) -> str:
    """Mean and 95% half-width over seeds, by Student's t."""
    from scipy import stats

    if len(values) < 2:
        return f"{values.mean():+.3f}"

    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():+.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()

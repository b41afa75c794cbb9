"""What rollback saves: provoked collapses of the optimizer with `--guard rollback`, and without.

    python -m benchmarks.watch.rescues

A run is rescued if it came to its last step and its final reward (mean of the last ten rollouts) to
nine tenths of that of the healthy setting with the same optimizer and reward, at the same seed.
Runs that do not fail when they are left alone are not counted: there is nothing to rescue. Where
the guard has changed the reward, right answers are compared instead. Held-out accuracy, which is
the goal, stands beside it. Reads the packed files alone.
"""

import json
from typing import Any

from benchmarks.watch.evaluate import HERE, load
from benchmarks.watch.labels import label, mean
from benchmarks.watch.runs import RESCUES, rescue_runs
from mesotron.watch.detectors import TWO_PART

ENOUGH = 0.9
CORPORA = [name for name in ("tuning", "held_out") if (HERE / f"{name}.json.gz").exists()]
SEEDS = {"seeds 0 and 1": (0, 1), "seed 100, held out": (100,)}
Packed = dict[str, Any]


def main() -> None:
    corpus = {run["name"]: run for name in CORPORA for run in load(name)}
    made = {run["name"]: run for run in load("rescues")}
    ready = [
        run
        for run in rescue_runs()
        if run.name in made
        and {run.name, healthy_twin(run.setting.name, run.seed)} <= corpus.keys()
    ]

    found = [compare(made[run.name], corpus, run.setting.steps) for run in ready]
    for one in found:
        print(line(one))

    summary = {words: count(found, seeds) for words, seeds in SEEDS.items()}
    missing = [run.name for run in rescue_runs() if run not in ready]
    print(
        summary,
        "not made:",
        missing,
        "no collapse:",
        sorted(sound(found)),
    )

    (HERE / "rescues.json").write_text(json.dumps({"summary": summary, "runs": found}, indent=1))


def count(found: list[Packed], seeds: tuple[int, ...]) -> str:
    """How many of the planned collapses with these seeds were rescued; missing runs are lost."""
    planned = {run.name for run in rescue_runs() if run.seed in seeds} - sound(found)
    return f"{sum(one['rescued'] for one in found if one['run'] in planned)} of {len(planned)}"


def sound(found: list[Packed]) -> set[str]:
    """Runs that were meant to collapse and did not."""
    return {one["run"] for one in found if one["alone"] != "failed"}


def line(one: Packed) -> str:
    """A row of the page's table."""
    reward, greedy = ([f"{x:.3f}" for x in one[key].values()] for key in ("reward", "greedy"))
    acts = ", ".join(f"{act['step']} to {act['checkpoint']}" for act in one["rollbacks"])
    word = "yes" if one["rescued"] else "no"

    return f"| {one['run']} | {' | '.join(reward)} | {', '.join(greedy)} | {acts} | {word} |"


def compare(run: Packed, corpus: dict[str, Packed], steps: int) -> Packed:
    """A run with rollback next to the same run without, and to a healthy one.

    Args:
        run: the packed rescue.
        corpus: the runs of both corpora by name.
        steps: of the whole rescue; one that ended before was given up, or crashed.
    """
    twin = corpus[healthy_twin(run["setting"], run["seed"])]
    alone = corpus[run["name"]]
    changed = [change["field"] for act in run["guarded"] for change in act["changes"]]

    # A changed reward has another scale.
    judged_by = "facts/correct" if TWO_PART.field in changed else "reward"
    rewards = [final(one, judged_by, 10) for one in (run, alone, twin)]
    accuracies = [final(one, "eval/greedy", 1) for one in (run, alone, twin)]

    return {
        "run": run["name"],
        "steps": run["columns"]["step"][-1],
        "alone": label(alone).outcome,
        "judged by": judged_by,
        "reward": named(rewards),
        "greedy": named(accuracies),
        "rollbacks": [
            {key: act[key] for key in ("step", "action", "detector", "checkpoint", "changes")}
            for act in run["guarded"]
        ],
        "rescued": run["columns"]["step"][-1] >= steps and rewards[0] >= ENOUGH * rewards[2],
    }


def healthy_twin(setting: str, seed: int) -> str:
    """The healthy counterpart of a failing setting."""
    return f"{RESCUES[setting]}-{seed}"


def final(run: Packed, name: str, rows: int) -> float:
    """The mean of a column's last values."""
    return mean([value for value in run["columns"][name] if value is not None][-rows:])


def named(values: list[float]) -> dict[str, float]:
    """Three numbers with their names."""
    return {k: round(v, 3) for k, v in zip(("rollback", "alone", "healthy"), values, strict=True)}


if __name__ == "__main__":
    main()

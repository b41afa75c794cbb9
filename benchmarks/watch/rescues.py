"""What rollback saves: provoked collapses of the optimizer with `--guard rollback`, and without.

    python benchmarks/watch/rescues.py

A run is rescued if its final reward (mean of the last ten rollouts) comes to nine tenths of that of
the healthy setting with the same optimizer and reward, at the same seed. Held-out accuracy, which
is what one wants, stands beside it. Reads the packed files alone.
"""

import json
from typing import Any

from evaluate import HERE, load
from labels import mean
from runs import RESCUES, rescue_runs

ENOUGH = 0.9
CORPORA = [name for name in ("tuning", "held_out") if (HERE / f"{name}.json.gz").exists()]
SEEDS = {"seeds 0 and 1": (0, 1), "seed 100, met by nobody": (100,)}
Packed = dict[str, Any]


def main() -> None:
    corpus = {run["name"]: run for name in CORPORA for run in load(name)}
    made = {run["name"]: run for run in load("rescues")}
    found = [compare(made[run.name], corpus) for run in rescue_runs() if run.name in made]
    for one in found:
        print(line(one))
    summary = {words: count(found, seeds) for words, seeds in SEEDS.items()}
    print(summary, "not made:", [run.name for run in rescue_runs() if run.name not in made])
    (HERE / "rescues.json").write_text(json.dumps({"summary": summary, "runs": found}, indent=1))


def count(found: list[dict[str, Any]], seeds: tuple[int, ...]) -> str:
    """How many of the planned runs with these seeds were rescued; one not made was not."""
    planned = [run.name for run in rescue_runs() if run.seed in seeds]
    return f"{sum(one['rescued'] for one in found if one['run'] in planned)} of {len(planned)}"


def line(one: dict[str, Any]) -> str:
    """A row of the page's table."""
    reward, greedy = ([f"{x:.3f}" for x in one[key].values()] for key in ("reward", "greedy"))
    acts = ", ".join(f"{act['step']} to {act['checkpoint']}" for act in one["rollbacks"])
    word = "yes" if one["rescued"] else "no"
    return f"| {one['run']} | {' | '.join(reward)} | {', '.join(greedy)} | {acts} | {word} |"


def compare(run: Packed, corpus: dict[str, Packed]) -> dict[str, Any]:
    """A run with rollback beside itself without and beside a healthy one."""
    twin = corpus[f"{RESCUES[run['setting']]}-{run['seed']}"]
    alone = corpus[run["name"]]
    rewards = [final(one, "reward", 10) for one in (run, alone, twin)]
    accuracies = [final(one, "eval/greedy", 1) for one in (run, alone, twin)]
    return {
        "run": run["name"],
        "steps": run["columns"]["step"][-1],
        "reward": named(rewards),
        "greedy": named(accuracies),
        "rollbacks": [
            {key: act[key] for key in ("step", "action", "detector", "checkpoint", "changes")}
            for act in run["guarded"]
        ],
        "rescued": rewards[0] >= ENOUGH * rewards[2],
    }


def final(run: Packed, name: str, rows: int) -> float:
    """The mean of a column's last values."""
    return mean([value for value in run["columns"][name] if value is not None][-rows:])


def named(values: list[float]) -> dict[str, float]:
    """Three numbers with their names."""
    return {k: round(v, 3) for k, v in zip(("rollback", "alone", "healthy"), values, strict=True)}


if __name__ == "__main__":
    main()

"""What rollback saves: provoked collapses of the optimizer with `--guard rollback`, and without.

    python -m benchmarks.watch.rescues

A run is rescued if it came to its last step and its final reward (mean of the last ten rollouts) to
nine tenths of that of the healthy setting with the same optimizer and reward, at the same seed.
Runs that do not fail when they are left alone are not counted: there is nothing to rescue. Where
the guard has changed the reward, right answers are compared instead. Held-out accuracy, which is
the goal, stands beside it. Reads the packed files alone.
"""

from typing import Any

from benchmarks._lib.results import write_json
from benchmarks._lib.rows import by_key, listed
from benchmarks.watch.evaluate import HERE, load
from benchmarks.watch.labels import label, mean
from benchmarks.watch.runs import RESCUES, Run, rescue_runs
from mesotron.watch.detectors import TWO_PART

ENOUGH = 0.9
CORPORA = ("tuning", "held_out")
SEEDS = {"seeds 0 and 1": (0, 1), "seed 100, held out": (100,)}
SHOWN = ("step", "action", "detector", "checkpoint", "changes")  # of a rollback
Packed = dict[str, Any]


def main() -> None:
    corpus: dict[str, Packed] = {}
    for name in CORPORA:
        corpus |= by_key(load(name), name_of)
    made = by_key(load("rescues"), name_of)

    ready = [run for run in rescue_runs() if is_ready(run, made, corpus)]
    found = [compare(made[run.name], corpus, run.setting.steps) for run in ready]
    for one in found:
        print(line(one))

    summary = {words: count(found, seeds) for words, seeds in SEEDS.items()}
    missing = [run.name for run in rescue_runs() if run not in ready]
    print(summary, "not made:", missing, "no collapse:", sorted(sound(found)))
    write_json({"summary": summary, "runs": found}, HERE / "rescues.json", indent=1)


def name_of(run: Packed) -> str:
    return run["name"]


def is_ready(run: Run, made: dict[str, Packed], corpus: dict[str, Packed]) -> bool:
    """Whether a rescue and both runs that it is compared with were made."""
    twin = healthy_twin(run.setting.name, run.seed)
    return run.name in made and run.name in corpus and twin in corpus


def count(found: list[Packed], seeds: tuple[int, ...]) -> str:
    """How many of the planned collapses with these seeds were rescued; missing runs are lost."""
    planned = {run.name for run in rescue_runs() if run.seed in seeds} - sound(found)
    rescued = []
    for one in found:
        if one["run"] in planned and one["rescued"]:
            rescued.append(one)

    return f"{len(rescued)} of {len(planned)}"


def sound(found: list[Packed]) -> set[str]:
    """Runs that were meant to collapse and did not."""
    return {one["run"] for one in found if one["alone"] != "failed"}


def line(one: Packed) -> str:
    """A row of the page's table."""
    rewards = [f"{reward:.3f}" for reward in one["reward"].values()]
    greedy = listed(one["greedy"].values(), ".3f")
    acts = ", ".join(f"{act['step']} to {act['checkpoint']}" for act in one["rollbacks"])
    word = "yes" if one["rescued"] else "no"
    return f"| {one['run']} | {' | '.join(rewards)} | {greedy} | {acts} | {word} |"


def compare(run: Packed, corpus: dict[str, Packed], steps: int) -> Packed:
    """A run with rollback next to the same run without, and to a healthy one.

    Args:
        run: the packed rescue.
        corpus: the runs of both corpora by name.
        steps: of the whole rescue; one that ended before was given up, or crashed.
    """
    twin = corpus[healthy_twin(run["setting"], run["seed"])]
    alone = corpus[run["name"]]

    # A changed reward has another scale.

    if TWO_PART.field in changed_fields(run):
        judged_by = "facts/correct"
    else:
        judged_by = "reward"

    three = {"rollback": run, "alone": alone, "healthy": twin}
    rewards = {name: final(one, judged_by, 10) for name, one in three.items()}
    greedy = {name: final(one, "eval/greedy", 1) for name, one in three.items()}

    last = run["columns"]["step"][-1]
    return {
        "run": run["name"],
        "steps": last,
        "alone": label(alone).outcome,
        "judged by": judged_by,
        "reward": rounded(rewards),
        "greedy": rounded(greedy),
        "rollbacks": [{key: act[key] for key in SHOWN} for act in run["guarded"]],
        "rescued": last >= steps and rewards["rollback"] >= ENOUGH * rewards["healthy"],
    }


def changed_fields(run: Packed) -> set[str]:
    """The settings that the guard changed."""
    fields = set()
    for act in run["guarded"]:
        fields |= {change["field"] for change in act["changes"]}
    return fields


def healthy_twin(setting: str, seed: int) -> str:
    """The healthy counterpart of a failing setting."""
    return f"{RESCUES[setting]}-{seed}"


def final(run: Packed, name: str, rows: int) -> float:
    """The mean of a column's last values."""
    known = []
    for value in run["columns"][name]:
        if value is not None:
            known.append(value)

    return mean(known[-rows:])


def rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(number, 3) for name, number in numbers.items()}


if __name__ == "__main__":
    main()

"""How often the watch names the right cause: on our corpora the defect of every run is known.

    python -m benchmarks.watch.causes                  the runs that were stopped, by kind of defect

`CAUSES` says which detectors describe a kind of defect: its source, or the sign by which it shows
first. `accuracy_collapse` and `reward_collapse` say that a run failed, not why. Where steps are too
large and no logged metric shows it, they count as cured, not as named: their remedy is the right
one, half the learning rate.
"""

import argparse
from collections import defaultdict

from benchmarks.watch import evaluate
from benchmarks.watch.labels import label
from mesotron.watch.diagnosis import diagnose_run
from mesotron.watch.engine import Monitor

# Steps that are too large ruin a policy in many ways, and the first sign is the best name for it.
RUINED = {
    "update_explosion",
    "length_explosion",
    "length_collapse",
    "repetition",
    "entropy_explosion",
    "entropy_collapse",
    "structural_collapse",
    "constant_answer",
    "parser_drift",
    "sampler_mismatch",
    "nonfinite",
}
HACKED = {
    "self_reward_hacking",
    "one_part_gain",
    "constant_answer",
    "repetition",
    "length_explosion",
    "length_collapse",
}
FAILED = {"accuracy_collapse", "reward_collapse"}
OF_STEP_SIZE = {"huge_step", "rising_step", "slow_decay", "reuse", "negative_kl", "sparse_collapse"}
CAUSES: dict[str, set[str]] = {
    "huge_step": RUINED,
    "rising_step": RUINED,
    "slow_decay": RUINED,
    "reuse": RUINED | HACKED,
    "negative_kl": RUINED,
    "sparse_collapse": RUINED,
    "weight_decay": RUINED,
    "gamed": HACKED | {"structural_collapse"},
    "self_reward": HACKED,
    "wrong_sign": HACKED,
    "parser_trap": {"structural_collapse", "parser_drift"} | HACKED,
    "noise": FAILED | RUINED,
    "hot": FAILED | RUINED | {"temperature_trap"},
    "cold": FAILED | RUINED,
    "constant_reward": {"constant_reward"},
    "broken_reward": {"constant_reward", "reward_collapse", "reward_starvation"},
    "nonfinite": {"nonfinite"},
    "starvation": {"reward_starvation"},
    "dead_optimizer": {"dead_optimizer"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="How often the right cause is named")
    parser.add_argument("--without", default="", help="leave out metrics that begin so (eval/)")
    parser.add_argument("--corpora", nargs="+", default=["tuning", "held_out"])
    given = parser.parse_args()
    without = given.without

    right: list[bool] = []
    cured: list[bool] = []
    named: dict[str, list[str]] = defaultdict(list)
    for corpus in given.corpora:
        for run in evaluate.load(corpus):
            if label(run).outcome != "failed":
                continue

            monitor = Monitor()
            for row in evaluate.rows_of(run, without):
                monitor.update(row)
            diagnosis = diagnose_run(monitor)

            if diagnosis.condition == "dead" and diagnosis.cause:
                is_right = diagnosis.cause in CAUSES[run["kind"]]
                right.append(is_right)
                is_cured = run["kind"] in OF_STEP_SIZE and diagnosis.cause in FAILED
                cured.append(is_right or is_cured)
                named[run["kind"]].append(("" if is_right else "WRONG ") + diagnosis.cause)

    for kind, causes in named.items():
        print(f"{kind}: {', '.join(causes)}")
    print(f"named {evaluate.share(right)}")
    print(f"named or cured {evaluate.share(cured)}")


if __name__ == "__main__":
    main()

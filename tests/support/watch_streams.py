"""Synthetic metric streams for the tests of the watch: a healthy run, and one for each failure.

A stream is a list of rows by our own logged names. The noise is that of a batch of 16 prompts.
"""

import random
from collections.abc import Callable
from functools import partial

from mesotron.watch.diagnosis import Diagnosis, diagnose_run
from mesotron.watch.engine import Monitor

Row = dict[str, float]
STEPS = 130
TURN = 65  # where a failing run starts to fail

# Metric -> level at the start, level at the end of a healthy run, noise.
HEALTHY = {
    "reward": (0.35, 0.75, 0.06),
    "groups/zero_signal": (0.25, 0.35, 0.08),
    "groups/all_right": (0.05, 0.3, 0.05),
    "groups/all_wrong": (0.2, 0.05, 0.05),
    "facts/correct": (0.3, 0.7, 0.06),
    "facts/correct_unformatted": (0.05, 0.02, 0.02),
    "facts/formatted": (0.8, 0.98, 0.03),
    "facts/parsed": (0.85, 0.98, 0.03),
    "facts/truncated": (0.05, 0.02, 0.02),
    "completions/mean_length": (40.0, 48.0, 2.0),
    "completions/repetition": (0.08, 0.06, 0.02),
    "entropy": (0.9, 0.55, 0.05),
    "answers/top_share": (0.12, 0.12, 0.03),
    "answers/distinct_in_group": (3.5, 2.5, 0.3),
    "votes/share": (0.55, 0.7, 0.05),
    "votes/label_accuracy": (0.6, 0.75, 0.05),
    "loss": (0.0, 0.0, 0.01),
    "grad_norm": (0.5, 0.6, 0.1),
    "kl": (0.001, 0.02, 0.001),
    "ratio/log_max": (0.3, 0.4, 0.1),
    "optim/muon/update_rms": (2e-6, 2e-6, 1e-8),
    "optim/muon/dead_blocks": (0.0, 0.0, 0.0),
    "optim/skipped": (0.0, 0.0, 0.0),
    "learning_rate": (1e-5, 1e-5, 0.0),
    "reward_std": (0.4, 0.35, 0.03),
    "reward/largest_part": (0.6, 0.7, 0.03),
    "sampling/sampling_logp_difference/mean": (0.011, 0.012, 0.001),
    "async/staleness_mean": (1.0, 1.2, 0.2),
    "tools/call_frequency": (1.0, 1.5, 0.1),
    "tools/failure_frequency": (0.05, 0.02, 0.02),
    "tools/turns": (2.0, 2.5, 0.1),
    "tools/unfinished": (0.05, 0.02, 0.02),
    "time/step": (2.0, 2.2, 0.2),
    "votes/abstained": (0.1, 0.1, 0.02),
}
EVALS = {
    "eval/greedy": (0.4, 0.75, 0.02),
    "eval/sampled": (0.35, 0.7, 0.02),
    "eval/problems": (400.0, 400.0, 0.0),
}


def healthy(seed: int, steps: int = STEPS) -> list[Row]:
    draw = random.Random(seed)
    rows = []
    for step in range(steps):
        levels = HEALTHY | (EVALS if step % 16 == 0 else {})
        share = step / steps
        row = {
            name: a + (b - a) * share + draw.gauss(0, noise)
            for name, (a, b, noise) in levels.items()
        }
        rows.append({"step": step, **row} | ({"forgetting/nll": 3.0} if step % 16 == 0 else {}))

    return rows


def failing(seed: int, ends: dict[str, float], turn: int = TURN, over: int = 25) -> list[Row]:
    """A healthy run in which, from `turn` on, metrics move to other levels over some steps."""
    rows = healthy(seed)
    for row in rows[turn:]:
        share = min((row["step"] - turn + 1) / over, 1.0)
        for name, end in ends.items():
            if name in row:
                a, b, _ = (HEALTHY | EVALS)[name]
                row[name] += (end - (a + (b - a) * row["step"] / STEPS)) * share

    return rows


def constant(rows: list[Row], **values: float) -> list[Row]:
    pinned = {name.replace("__", "/"): value for name, value in values.items()}
    return [row | {k: v for k, v in pinned.items() if k in row} for row in rows]


def diagnosis_of(rows: list[Row]) -> Diagnosis:
    monitor = Monitor()
    monitor.replay(rows, ())
    return diagnose_run(monitor)


LOST = {"reward": 0.05, "facts/correct": 0.03}

# Detector -> the levels to which metrics move in a run that it must stop, or warn of.
MOVED: dict[str, dict[str, float]] = {
    "parser_drift": {
        "completions/mean_length": 110.0,
        "facts/parsed": 0.3,
        "facts/formatted": 0.3,
        "facts/correct_unformatted": 0.5,
        **LOST,
    },
    "sampler_mismatch": {"sampling/sampling_logp_difference/mean": 0.3, **LOST},
    "stale_samples": {"async/staleness_mean": 9.0, **LOST},
    "tool_failures": {"tools/failure_frequency": 0.8, "reward": 0.3},
    "unfinished_episodes": {"tools/unfinished": 0.8, "reward": 0.3},
    "tools_abandoned": {"tools/call_frequency": 0.1, "reward": 0.3},
    "structural_collapse": {
        "facts/formatted": 0.1,
        "facts/correct_unformatted": 0.6,
        **LOST,
    },
    "constant_answer": {
        "answers/top_share": 0.97,
        "answers/distinct_in_group": 1.0,
        "votes/share": 1.0,
        "reward": 0.99,
    },
    "self_reward_hacking": {
        "eval/greedy": 0.2,
        "eval/sampled": 0.2,
        "reward": 0.95,
        "votes/share": 0.95,
    },
    "repetition": {"completions/repetition": 0.8, **LOST},
    "length_explosion": {
        "completions/mean_length": 200.0,
        "facts/truncated": 0.9,
        **LOST,
    },
    "length_collapse": {"completions/mean_length": 6.0, "facts/correct": 0.02},
    "entropy_explosion": {"entropy": 5.0, **LOST},
    "entropy_collapse": {"entropy": 0.02, **LOST},
    "temperature_trap": {"eval/sampled": 0.1, **LOST},
    "reward_saturation": {
        "groups/zero_signal": 0.97,
        "groups/all_right": 0.95,
        "reward": 1.05,
    },
    "lost_exploration": {
        "groups/zero_signal": 0.85,
        "groups/all_wrong": 0.5,
        "groups/all_right": 0.35,
        "entropy": 0.1,
    },
    "lying_loss": LOST,
    "reward_collapse": LOST,
}
FAILURES: dict[str, Callable[[int], list[Row]]] = {
    **{name: partial(failing, ends=ends) for name, ends in MOVED.items()},
    "update_explosion": partial(failing, ends={"grad_norm": 30.0, **LOST}, over=5),
    "stalled_throughput": partial(failing, ends={"time/step": 20.0}, over=3),
    "nonfinite": lambda seed: [
        row | ({"loss": float("nan")} if row["step"] >= TURN else {}) for row in healthy(seed)
    ],
    "zero_gradient": lambda seed: [
        row | ({"grad_norm": 0.0} if row["step"] >= TURN else {}) for row in healthy(seed)
    ],
    "dead_optimizer": lambda seed: constant(healthy(seed), optim__muon__update_rms=0.0),
    "one_part_gain": lambda seed: constant(
        failing(seed, {"reward": 0.95, "reward/largest_part": 0.99}), facts__correct=0.3
    ),
    "no_labels": lambda seed: constant(
        healthy(seed), votes__abstained=1.0, reward=0.0, groups__zero_signal=1.0
    ),
    "reward_starvation": lambda seed: [
        row | {"reward": 0.02 * (row["step"] % 7 == 0)}
        for row in constant(
            healthy(seed),
            groups__zero_signal=1.0,
            groups__all_wrong=1.0,
            groups__all_right=0.0,
        )
    ],
    "constant_reward": lambda seed: constant(
        healthy(seed),
        reward=1.0,
        groups__zero_signal=1.0,
        groups__all_wrong=0.4,
        groups__all_right=0.3,
    ),
    "accuracy_collapse": lambda seed: constant(
        failing(seed, {"facts/correct": 0.05, "eval/greedy": 0.05, "eval/sampled": 0.05}),
        reward=0.5,
        votes__share=0.6,
    ),
    "forgetting": lambda seed: [
        row | ({"forgetting/nll": 3.0 + 0.02 * k} if k % 16 == 0 else {})
        for k, row in enumerate(healthy(seed))
    ],
}
ONLY_WARN = {
    "reward_saturation",
    "lost_exploration",
    "lying_loss",
    "stalled_throughput",
    "zero_gradient",
    "one_part_gain",
    "forgetting",
    "tool_failures",
    "unfinished_episodes",
    "tools_abandoned",
}

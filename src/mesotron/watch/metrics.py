"""One vocabulary for the numbers of a run, whoever logged them.

A detector reads `reward` and `length`; TRL, verl, OpenRLHF and this library each have their own
words for those. The table below is the whole translation: names in order of preference, `*` for
any part of a name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Row = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that detectors read.

    Args:
        name: our word for it.
        meaning: what it is, for who reads the table below.
        names: what it is called in logs, the best source first.
        several: how to combine several matches of one name with a `*`.
        sparse: it comes a few times a run (an evaluation): each value counts by itself.
        share: it lies between 0 and 1.
    """

    name: str
    meaning: str
    names: tuple[str, ...]
    several: Literal["mean", "max"] = "mean"
    sparse: bool = False
    share: bool = False


_TABLE = (
    Metric(
        name="reward",
        meaning="mean reward",
        names=("reward", "rewards/mean", "critic/score/mean", "critic/rewards/mean",
               "objective/scores", "reward/mean", "mean_reward", "rollout/ep_rew_mean",
               "train_reward", "policy/reward", "reward_mean", "episode/fruit"),
    ),
    Metric(
        name="zero_signal",
        meaning="groups whose rewards are all alike",
        names=("groups/zero_signal", "frac_reward_zero_std", "batch/solve_none_or_all",
               "zero_std_ratio"),
        share=True,
    ),
    Metric(
        name="filled",
        meaning="places of a batch whose group has a signal, where groups are chosen",
        names=("dynamic/filled",),
        share=True,
    ),
    Metric(
        name="all_right",
        meaning="groups with right answers alone",
        names=("groups/all_right", "batch/solve_all"),
        share=True,
    ),
    Metric(
        name="all_wrong",
        meaning="groups with wrong answers alone",
        names=("groups/all_wrong", "batch/solve_none"),
        share=True,
    ),
    Metric(
        name="correct",
        meaning="right answers in the right format",
        names=("facts/correct", "rewards/*accuracy*/mean", "rewards/*correct*/mean", "accuracy"),
        share=True,
    ),
    Metric(
        name="correct_unformatted",
        meaning="right answers that lost the format",
        names=("facts/correct_unformatted",),
        share=True,
    ),
    Metric(
        name="formatted",
        meaning="completions in the format",
        names=("facts/formatted", "rewards/*format*/mean", "format_reward", "format_rate"),
        share=True,
    ),
    Metric(
        name="parsed",
        meaning="completions with an answer that can be read",
        names=("facts/parsed",),
        share=True,
    ),
    Metric(
        name="truncated",
        meaning="completions cut by the limit",
        names=("facts/truncated", "completions/clipped_ratio", "response_length/clip_ratio",
               "completions/truncated", "episode/truncated"),
        share=True,
    ),
    Metric(
        name="length",
        meaning="tokens of a completion",
        names=("completions/mean_length", "completion_length", "response_length/mean",
               "response_length", "mean_length", "val/num_generated_tokens"),
    ),
    Metric(
        name="repetition",
        meaning="n-grams said before",
        names=("completions/repetition", "repetition_rate", "repetition"),
        share=True,
    ),
    Metric(
        name="entropy",
        meaning="entropy of a token in nats",
        names=("entropy", "actor/entropy", "actor/entropy_loss", "policy/entropy_avg",
               "objective/entropy", "losses/entropy", "entropy/mean", "policy/entropy"),
    ),
    Metric(
        name="top_share",
        meaning="share of the commonest answer over all prompts",
        names=("answers/top_share",),
        share=True,
    ),
    Metric(
        name="distinct",
        meaning="different answers to one prompt",
        names=("answers/distinct_in_group",),
    ),
    Metric(
        name="vote_share",
        meaning="share of the majority",
        names=("votes/share", "majority_ratio", "train/majority_ratio"),
        share=True,
    ),
    Metric(
        name="label_accuracy",
        meaning="self-made labels that are right",
        names=("votes/label_accuracy", "label_accuracy"),
        share=True,
    ),
    Metric(
        name="heldout",
        meaning="accuracy on held-out problems",
        names=("eval/greedy", "eval/accuracy", "eval_accuracy", "eval/facts/correct",
               "eval_facts/correct", "val-core/*/mean@*", "val/test_score/*", "val-core/*/acc/*",
               "eval/reward", "eval_reward", "validation/accuracy", "heldout_accuracy"),
        sparse=True,
    ),
    Metric(
        name="heldout_problems",
        meaning="how many problems are held out",
        names=("eval/problems",),
        sparse=True,
    ),
    Metric(
        name="greedy",
        meaning="accuracy of greedy decoding",
        names=("eval/greedy", "eval_greedy_accuracy", "eval/greedy_accuracy"),
        sparse=True,
        share=True,
    ),
    Metric(
        name="sampled",
        meaning="accuracy of sampling",
        names=("eval/sampled", "eval_sampled_accuracy", "eval/sampled_accuracy"),
        sparse=True,
        share=True,
    ),
    Metric(
        name="loss",
        meaning="loss",
        names=("loss", "actor/pg_loss", "policy_loss", "actor/loss", "loss/policy_avg", "act_loss",
               "losses/policy_loss", "loss/policy"),
    ),
    Metric(
        name="grad_norm",
        meaning="norm of the gradient",
        names=("grad_norm", "actor/grad_norm", "optim/grad_norm", "train_grad_norm",
               "optim/gradient_norm"),
    ),
    Metric(
        name="kl",
        meaning="distance to the start in nats a token",
        names=("kl", "kl/start", "actor/kl_loss", "objective/kl", "losses/approxkl",
               "actor/ppo_kl", "policy/kl"),
    ),
    Metric(
        name="ratio_high",
        meaning="largest log-ratio of new to old policy",
        names=("ratio/log_max",),
        several="max",
    ),
    Metric(
        name="update_rms",
        meaning="change of a weight in one step",
        names=("optim/*/update_rms", "optim/update_rms", "update_rms"),
        several="max",
    ),
    Metric(
        name="dead_blocks",
        meaning="weight blocks that the optimizer does not move",
        names=("optim/*/dead_blocks", "optim/dead_blocks", "dead_blocks"),
        share=True,
    ),
    Metric(
        name="skipped",
        meaning="parameters whose gradient was not finite",
        names=("optim/skipped", "skipped"),
    ),
    Metric(
        name="lr",
        meaning="learning rate",
        names=("learning_rate", "actor/lr", "lr", "optim/lr"),
    ),
    Metric(
        name="step_time",
        meaning="seconds of a step",
        names=("time/step", "step_time", "timing_s/step", "timing/step", "perf/time_per_step"),
    ),
    Metric(
        name="tokens",
        meaning="tokens so far",
        names=("num_tokens", "num_input_tokens_seen"),
    ),
)  # fmt: skip

# Computed by the engine from the numbers of a row, and read by detectors like any other.
_DERIVED = (
    Metric(name="nonfinite", meaning="numbers that are not finite", names=(), sparse=True),
    Metric(name="greedy_gap", meaning="greedy and sampled accuracy apart", names=(), sparse=True),
    Metric(name="update_ratio", meaning="change of a weight over the learning rate", names=()),
)
METRICS = {metric.name: metric for metric in (*_TABLE, *_DERIVED)}

STEP_NAMES = ("step", "global_step", "_step", "training/global_step", "train/global_step")
# A longer name is nobody's: patterns with two `*` would take minutes over one of a million letters.
MAX_NAME = 500
# Loggers put the phase in front of everything that is logged in training.
_PREFIXES = ("train/", "trainer/", "train-")


def canonical(row: Row) -> dict[str, float]:
    """The numbers of a row by our names; what no detector reads is left out.

    Args:
        row: numbers as they were logged.

    Returns:
        Our name -> number, not finite ones too.

    Example:
        >>> canonical({"train/reward": 0.5, "completions/mean_length": 80.0, "my/thing": 1.0})
        {'reward': 0.5, 'length': 80.0}
    """
    best: dict[str, tuple[int, list[float]]] = {}
    for key, value in row.items():
        for name, rank in _homes(key):
            kept = best.get(name)
            if kept is None or rank < kept[0]:
                best[name] = (rank, [value])
            elif rank == kept[0]:
                kept[1].append(value)
    return {
        name: max(found) if METRICS[name].several == "max" else sum(found) / len(found)
        for name, (_, found) in best.items()
    }


@lru_cache(maxsize=65536)
def _homes(key: str) -> tuple[tuple[str, int], ...]:
    """Every (metric, rank of the matching name) for a logged name; rank 0 is the best source."""
    if len(key) > MAX_NAME:
        return ()
    plain = plain_name(key)
    return tuple(
        (name, rank) for name, patterns in _PATTERNS.items()
        if (rank := next((k for k, p in enumerate(patterns) if p.fullmatch(plain)), None))
        is not None
    )  # fmt: skip


def plain_name(key: str) -> str:
    """A logged name without what loggers add: `run-7 - train/reward` is `reward`.

    Example:
        >>> plain_name("run-7 - train/reward"), plain_name("eval/greedy")
        ('reward', 'eval/greedy')
    """
    plain = key.rsplit(" - ", 1)[-1].strip()
    for prefix in _PREFIXES:
        plain = plain.removeprefix(prefix)
    return plain


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in name.split("*")), re.IGNORECASE)


def own_name(name: str) -> str:
    """What to log a metric as so that it is taken for it before anything else."""
    return f"watch/{name}"


_PATTERNS = {
    metric.name: [_pattern(plain_name(name)) for name in (own_name(metric.name), *metric.names)]
    for metric in METRICS.values()
}

"""Our names for the numbers of a run, and what TRL, verl, OpenRLHF and others call them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Row = Mapping[str, float]


@dataclass(frozen=True)
class Metric:
    """A number that detectors read."""

    name: str
    meaning: str
    names: tuple[str, ...] = ()  # in logs, the best source first; * matches anything
    combine: Literal["mean", "max"] = "mean"  # several matches of one name with a *
    sparse: bool = False  # logged a few times per run (an evaluation): each value counts by itself


_TABLE = (
    Metric("reward", "mean reward",
           ("reward", "rewards/mean", "critic/score/mean", "critic/rewards/mean",
            "objective/scores", "reward/mean", "mean_reward", "rollout/ep_rew_mean",
            "train_reward", "policy/reward", "reward_mean", "episode/fruit")),
    Metric("zero_signal", "share of groups with equal rewards",
           ("groups/zero_signal", "frac_reward_zero_std", "batch/solve_none_or_all",
            "zero_std_ratio")),
    Metric("reward_std", "standard deviation of the reward, usually within groups",
           ("reward_std", "reward/std", "critic/score/std")),
    Metric("filled", "share of the batch that has a signal, with dynamic sampling",
           ("dynamic/filled",)),
    Metric("all_right", "share of groups with only correct answers",
           ("groups/all_right", "batch/solve_all")),
    Metric("all_wrong", "share of groups with only wrong answers",
           ("groups/all_wrong", "batch/solve_none")),
    Metric("correct", "share of correct answers in the right format",
           ("facts/correct", "rewards/*accuracy*/mean", "rewards/*correct*/mean", "accuracy")),
    Metric("correct_unformatted", "share of correct answers outside the format",
           ("facts/correct_unformatted",)),
    Metric("formatted", "share of completions in the format",
           ("facts/formatted", "rewards/*format*/mean", "format_reward", "format_rate")),
    Metric("parsed", "share of completions with a readable answer", ("facts/parsed",)),
    Metric("truncated", "share of completions cut by the token limit",
           ("facts/truncated", "completions/clipped_ratio", "response_length/clip_ratio",
            "completions/truncated", "episode/truncated")),
    Metric("length", "tokens per completion",
           ("completions/mean_length", "completion_length", "response_length/mean",
            "response_length", "mean_length", "val/num_generated_tokens")),
    Metric("repetition", "share of repeated n-grams",
           ("completions/repetition", "repetition_rate", "repetition")),
    Metric("entropy", "entropy per token in nats",
           ("entropy", "actor/entropy", "actor/entropy_loss", "policy/entropy_avg",
            "objective/entropy", "losses/entropy", "entropy/mean", "policy/entropy")),
    Metric("top_share", "share of the most common answer over all prompts",
           ("answers/top_share",)),
    Metric("distinct", "distinct answers per prompt", ("answers/distinct_in_group",)),
    Metric("vote_share", "share of the majority answer",
           ("votes/share", "majority_ratio", "train/majority_ratio")),
    Metric("label_accuracy", "share of correct pseudo-labels",
           ("votes/label_accuracy", "label_accuracy")),
    Metric("heldout", "accuracy on held-out problems",
           ("eval/greedy", "eval/accuracy", "eval_accuracy", "eval/facts/correct",
            "eval_facts/correct", "val-core/*/mean@*", "val/test_score/*", "val-core/*/acc/*",
            "eval/reward", "eval_reward", "validation/accuracy", "heldout_accuracy"),
           sparse=True),
    Metric("heldout_problems", "number of held-out problems", ("eval/problems",), sparse=True),
    Metric("greedy", "accuracy of greedy decoding",
           ("eval/greedy", "eval_greedy_accuracy", "eval/greedy_accuracy"), sparse=True),
    Metric("sampled", "accuracy of sampling",
           ("eval/sampled", "eval_sampled_accuracy", "eval/sampled_accuracy"), sparse=True),
    Metric("loss", "loss",
           ("loss", "actor/pg_loss", "policy_loss", "actor/loss", "loss/policy_avg", "act_loss",
            "losses/policy_loss", "loss/policy")),
    Metric("grad_norm", "gradient norm",
           ("grad_norm", "actor/grad_norm", "optim/grad_norm", "train_grad_norm",
            "optim/gradient_norm")),
    Metric("kl", "KL divergence from the start in nats per token",
           ("kl", "kl/start", "actor/kl_loss", "objective/kl", "losses/approxkl",
            "actor/ppo_kl", "policy/kl")),
    Metric("ratio_high", "largest log-ratio of new to old policy", ("ratio/log_max",), "max"),
    Metric("gap_logp", "mean absolute difference of trainer and sampler log-probabilities",
           ("sampling/sampling_logp_difference/mean",)),
    Metric("gap_kl", "KL divergence of sampler and trainer in nats per token",
           ("rollout_corr/kl", "mismatch_kl")),
    Metric("gap_ratio", "mean importance ratio of trainer to sampler",
           ("sampling/importance_sampling_ratio/mean",)),
    Metric("gap_ratio_max", "largest importance ratio of trainer to sampler",
           ("sampling/importance_sampling_ratio/max",)),
    Metric("gap_prob", "mean absolute difference of trainer and sampler probabilities",
           ("training/rollout_probs_diff_mean",)),
    Metric("gap_cut", "share clipped or masked for the difference of trainer and sampler",
           ("is_masked/mean",)),
    Metric("staleness", "policy versions between sampling and training", ("staleness",)),
    Metric("update_rms", "RMS change of a weight in one step",
           ("optim/*/update_rms", "optim/update_rms", "update_rms"), "max"),
    Metric("dead_blocks", "share of weight blocks that the optimizer does not move",
           ("optim/*/dead_blocks", "optim/dead_blocks", "dead_blocks")),
    Metric("skipped", "parameters with a non-finite gradient", ("optim/skipped", "skipped")),
    Metric("lr", "learning rate", ("learning_rate", "actor/lr", "lr", "optim/lr")),
    Metric("step_time", "seconds per step",
           ("time/step", "step_time", "timing_s/step", "timing/step", "perf/time_per_step")),
    Metric("tokens", "tokens so far", ("num_tokens", "num_input_tokens_seen")),
    # Computed by the engine from the others.
    Metric("nonfinite", "non-finite numbers", sparse=True),
    Metric("greedy_gap", "difference of greedy and sampled accuracy", sparse=True),
    Metric("update_ratio", "RMS change of a weight over the learning rate"),
)  # fmt: skip
METRICS = {metric.name: metric for metric in _TABLE}

STEP_NAMES = ("step", "global_step", "_step", "training/global_step", "train/global_step")
# Matching a pattern with two * against a name of a million letters would take minutes.
MAX_NAME = 500
# Loggers prefix training metrics with the phase.
_PREFIXES = ("train/", "trainer/", "train-")


def canonical(row: Row) -> dict[str, float]:
    """The numbers of a row by our names, non-finite ones included; unknown names are left out.

    Example:
        >>> canonical({"train/reward": 0.5, "completions/mean_length": 80.0, "my/thing": 1.0})
        {'reward': 0.5, 'length': 80.0}
    """
    best: dict[str, tuple[int, list[float]]] = {}
    for key, value in row.items():
        for name, rank in _matches(key):
            kept = best.get(name)
            if kept is None or rank < kept[0]:
                best[name] = (rank, [value])
            elif rank == kept[0]:
                kept[1].append(value)
    return {
        name: max(values) if METRICS[name].combine == "max" else sum(values) / len(values)
        for name, (_, values) in best.items()
    }


@lru_cache(maxsize=65536)
def _matches(key: str) -> tuple[tuple[str, int], ...]:
    """The metrics that a logged name stands for, each with the rank of the source; 0 is best."""
    if len(key) > MAX_NAME:
        return ()
    plain = plain_name(key)
    ranks = {name: next((k for k, p in enumerate(patterns) if p.fullmatch(plain)), None)
             for name, patterns in _PATTERNS.items()}  # fmt: skip
    return tuple((name, rank) for name, rank in ranks.items() if rank is not None)


def plain_name(key: str) -> str:
    """A logged name without what loggers add: `run-7 - train/reward` is `reward`."""
    plain = key.rsplit(" - ", 1)[-1].strip()
    for prefix in _PREFIXES:
        plain = plain.removeprefix(prefix)
    return plain


def own_name(name: str) -> str:
    """The logged name that takes precedence over all others of a metric."""
    return f"watch/{name}"


def _pattern(name: str) -> re.Pattern[str]:
    parts = (re.escape(part) for part in plain_name(name).split("*"))
    return re.compile(".*".join(parts), re.IGNORECASE)


_PATTERNS = {
    metric.name: [_pattern(name) for name in (own_name(metric.name), *metric.names)]
    for metric in METRICS.values()
}

"""Probes: pure functions from arrays to named floats.

A probe keeps no state and returns finite numbers for finite input; an undefined quantity (no
answer was parsed) is 0.
"""

from mesotron.probes.gradients import (
    effective_rank,
    gradient_snr,
    head_heterogeneity,
    snr_from_norms,
)
from mesotron.probes.rollouts import (
    answer_diversity,
    clip_fractions,
    entropy_quartiles,
    group_signal,
    group_spreads,
    kl_to_start,
    lengths,
    log_ratio_extremes,
    repetition,
    trajectory_entropy,
)

__all__ = [
    "answer_diversity",
    "clip_fractions",
    "effective_rank",
    "entropy_quartiles",
    "gradient_snr",
    "group_signal",
    "group_spreads",
    "head_heterogeneity",
    "kl_to_start",
    "lengths",
    "log_ratio_extremes",
    "repetition",
    "snr_from_norms",
    "trajectory_entropy",
]

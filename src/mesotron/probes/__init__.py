"""Probes: pure functions from arrays to named floats, and what a run is watched by.

A probe knows no trainer, keeps nothing, and never returns a number that is not finite for input
that is: a quantity that is not defined (no answer was parsed) is 0, and its docstring says so.
"""

from mesotron.probes.answers import answer_diversity
from mesotron.probes.gradients import (
    effective_rank,
    gradient_snr,
    head_heterogeneity,
    snr_from_norms,
)
from mesotron.probes.groups import group_signal, group_spreads
from mesotron.probes.policy import (
    clip_fractions,
    entropy_quartiles,
    kl_to_start,
    log_ratio_extremes,
    trajectory_entropy,
)
from mesotron.probes.text import lengths, repetition

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

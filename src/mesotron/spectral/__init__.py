"""Spectral filters as data, without a framework: what the torch and the JAX optimizers both apply.

A filter maps the singular values of a matrix and keeps its singular vectors. `filters` holds the
coefficient schedules, `response` their scalar map and cost, `scale` the unit of the learning rate.
"""

from mesotron.spectral.filters import (
    FILTERS,
    Filter,
    Triple,
    cubic,
    high_pass,
    low_rank,
    make_filter,
    muon,
    noise_edge,
    pion,
    polar_express,
)
from mesotron.spectral.response import (
    PLAIN,
    SYMMETRIC,
    SYRK,
    Cost,
    Segment,
    cheapest_plan,
    gram_plan,
    limit_cutoff,
    plan_flops,
    response,
    slope_at_zero,
    standard_flops,
    threshold,
)
from mesotron.spectral.scale import SCALES, check_scale, step_scale

__all__ = [
    "FILTERS",
    "PLAIN",
    "SCALES",
    "SYMMETRIC",
    "SYRK",
    "Cost",
    "Filter",
    "Segment",
    "Triple",
    "cheapest_plan",
    "check_scale",
    "cubic",
    "gram_plan",
    "high_pass",
    "limit_cutoff",
    "low_rank",
    "make_filter",
    "muon",
    "noise_edge",
    "pion",
    "plan_flops",
    "polar_express",
    "response",
    "slope_at_zero",
    "standard_flops",
    "step_scale",
    "threshold",
]

"""Muon and Pion as optax transformations, and the routing of parameter trees for them.

Needs the extra `jax` (jax and optax). Works with flax, Equinox and plain trees.
"""

from mesotron.jax.filter import apply_filter
from mesotron.jax.labels import LabelTable, label
from mesotron.jax.partition import (
    chain_with_muon,
    chain_with_pion,
    multi_transform_with_muon,
    multi_transform_with_pion,
    muon,
    normuon,
    pion,
)
from mesotron.jax.safety import clip_by_global_norm, skip_nonfinite
from mesotron.jax.stats import read_stats
from mesotron.jax.step import SpectralState
from mesotron.jax.transforms import scale_by_muon, scale_by_pion
from mesotron.spectral.routing import Row

__all__ = [
    "LabelTable",
    "Row",
    "SpectralState",
    "apply_filter",
    "chain_with_muon",
    "chain_with_pion",
    "clip_by_global_norm",
    "label",
    "multi_transform_with_muon",
    "multi_transform_with_pion",
    "muon",
    "normuon",
    "pion",
    "read_stats",
    "scale_by_muon",
    "scale_by_pion",
    "skip_nonfinite",
]

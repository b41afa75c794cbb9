"""The JAX side: Muon and Pion as optax transformations, and labels that sort a tree for them.

Needs the extra `jax` (jax and optax); flax, Equinox and plain trees are read by their paths.
"""

from mesotron.jax.filter import apply_filter
from mesotron.jax.labels import LabelTable, Row, label
from mesotron.jax.partition import (
    chain_with_muon,
    chain_with_pion,
    clip_by_global_norm,
    multi_transform_with_muon,
    multi_transform_with_pion,
    skip_nonfinite,
)
from mesotron.jax.spectral_step import SpectralState
from mesotron.jax.stats import read_stats
from mesotron.jax.transforms import muon, pion, scale_by_muon, scale_by_pion

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
    "pion",
    "read_stats",
    "scale_by_muon",
    "scale_by_pion",
    "skip_nonfinite",
]

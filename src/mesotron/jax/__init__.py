"""The JAX side: Muon and Pion as optax transformations, and labels that sort a tree for them.

Needs the extra `jax` (jax and optax); flax, Equinox and plain trees are read by their paths.
"""

from mesotron.jax.filter import apply_filter
from mesotron.jax.spectral_step import SpectralState
from mesotron.jax.transforms import muon, pion, scale_by_muon, scale_by_pion

__all__ = [
    "SpectralState",
    "apply_filter",
    "muon",
    "pion",
    "scale_by_muon",
    "scale_by_pion",
]

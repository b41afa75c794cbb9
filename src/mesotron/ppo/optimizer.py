"""The hyperparameters that may differ between runs of one program, and the optimizer they define.

They are traced numbers, so one compiled program trains every combination side by side.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from mesotron import jax as mesotron_jax
from mesotron.config import SnakeConfig
from mesotron.ppo.policy import HIDDEN

# The usual value in PPO code; it keeps Adam stable where a gradient was zero for long.
_ADAM_EPS = 1e-5


class Hyper(NamedTuple):
    """Traced numbers of a `SnakeConfig`: scalars, or one per run."""

    lr: Array
    muon_lr: Array
    aux_adam_lr: Array
    gamma: Array
    gae_lambda: Array
    clip_eps: Array
    ent_coef: Array
    vf_coef: Array
    kl_coef: Array
    num_gradient_steps: Array


def make_hyper(config: SnakeConfig) -> Hyper:
    return Hyper(*(jnp.float32(getattr(config, name)) for name in Hyper._fields))


def anneal(rate: float | Array, num_gradient_steps: float | Array | None) -> Callable[[Any], Array]:
    """A schedule: linear to zero after the last of `num_gradient_steps` (None: constant)."""

    def at(count: Any) -> Array:
        if num_gradient_steps is None:
            return jnp.asarray(rate, jnp.float32)
        left = 1 - jnp.asarray(count, jnp.float32) / num_gradient_steps
        return jnp.asarray(rate * jnp.maximum(left, 0), jnp.float32)

    return at


def make_optimizer(config: SnakeConfig, hyper: Hyper) -> optax.GradientTransformation:
    """Clip by the global norm, then Adam for all, or Muon or Pion for the hidden matrices."""
    end = hyper.num_gradient_steps if config.anneal_lr else None
    if config.rule == "adam":
        rule = optax.adam(anneal(hyper.lr, end), eps=_ADAM_EPS)
    else:
        rate = anneal(hyper.muon_lr, end)
        shared = {
            "aux_lr": anneal(hyper.aux_adam_lr, end),
            "max_grad_norm": None,
            "weight_decay": 0.0,
            "eps": _ADAM_EPS,
            "scale": "spectral",  # the unit of published rates such as 0.02
            "overrides": HIDDEN,
        }
        if config.rule == "muon":
            rule = mesotron_jax.chain_with_muon(rate, **shared)
        else:
            rule = mesotron_jax.chain_with_pion(rate, cutoff="noise", **shared)

    if not config.max_grad_norm:
        return rule

    # The clipping of `chain_with_muon` is safe at 1e30 but costs 3% of a small update.
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), rule)

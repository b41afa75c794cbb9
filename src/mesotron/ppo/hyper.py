"""Hyper-parameters that may differ between runs of one program, and the optimizer built of them.

They are traced numbers, so one compiled program trains every combination side by side. Learning
rates are annealed over gradient steps (updates x epochs x minibatches), not over updates.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from mesotron import jax as mesotron_jax
from mesotron.config import SnakeConfig
from mesotron.ppo.policy import HIDDEN

# The usual value of PPO codes; it keeps Adam calm where a gradient has been zero for long.
_ADAM_EPS = 1e-5


class Hyper(NamedTuple):
    """Numbers of `SnakeConfig` that are traced; each a scalar, or one for each run."""

    lr: Array
    muon_lr: Array
    aux_adam_lr: Array
    gamma: Array
    gae_lambda: Array
    clip_eps: Array
    ent_coef: Array
    vf_coef: Array
    kl_coef: Array


def make_hyper(config: SnakeConfig) -> Hyper:
    """The config's own values.

    Example:
        >>> round(float(make_hyper(SnakeConfig(gamma=0.9)).gamma), 3)
        0.9
    """
    return Hyper(*(jnp.float32(getattr(config, name)) for name in Hyper._fields))


def read_sweep(config: SnakeConfig) -> tuple[list[dict[str, float]], Hyper]:
    """The runs that `config.sweep` and `config.num_seeds` ask for.

    Returns:
        For each run the values that differ, its seed among them, and `Hyper` with an axis of runs.

    Example:
        >>> runs, hyper = read_sweep(SnakeConfig(sweep=("lr=0.1,0.2",), num_seeds=2))
        >>> len(runs), runs[2]
        (4, {'lr': 0.2, 'seed': 0})
        >>> hyper.gamma.shape
        (4,)
    """
    axes = dict(_read_axis(item) for item in config.sweep)
    seeds = [config.seed + k for k in range(config.num_seeds)]
    combinations = [dict(zip(axes, values)) for values in product(*axes.values())]
    runs = [{**values, "seed": seed} for values in combinations for seed in seeds]
    base = make_hyper(config)
    columns = [
        jnp.array([run.get(name, getattr(config, name)) for run in runs], jnp.float32)
        for name in base._fields
    ]
    return runs, Hyper(*columns)


def _read_axis(item: str) -> tuple[str, list[float]]:
    name, equals, values = item.partition("=")
    name = name.strip("-").replace("-", "_")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    if not equals or not numbers or name not in Hyper._fields:
        raise ValueError(
            f"--sweep {item!r} must look like lr=0.001,0.003; "
            f"what can be swept: {', '.join(Hyper._fields)}"
        )
    return name, numbers


def anneal(rate: float | Array, config: SnakeConfig) -> Callable[[Any], Array]:
    """The learning rate at each gradient step: constant, or down to zero at the run's last one.

    Example:
        >>> config = SnakeConfig(total_timesteps=64 * 64 * 2)  # 2 updates, 64 gradient steps
        >>> [round(float(anneal(1.0, config)(jnp.array(step))), 3) for step in (0, 32, 63, 64)]
        [1.0, 0.5, 0.016, 0.0]
    """

    def at(count: Any) -> Array:
        if not config.anneal_lr:
            return jnp.asarray(rate, jnp.float32)
        left = 1 - count / config.num_gradient_steps
        return jnp.asarray(rate * jnp.maximum(left, 0), jnp.float32)

    return at


def make_optimizer(config: SnakeConfig, hyper: Hyper) -> optax.GradientTransformation:
    """Clip by the global norm, then Adam for all, or Muon or Pion for the hidden matrices.

    Example:
        >>> import jax
        >>> from mesotron.ppo.policy import init_policy
        >>> config = SnakeConfig(optim="pion")
        >>> tx = make_optimizer(config, make_hyper(config))
        >>> state = tx.init(init_policy(jax.random.PRNGKey(0), config))
    """
    clip = config.max_grad_norm or None
    if config.rule == "adam":
        adam = optax.adam(anneal(hyper.lr, config), eps=_ADAM_EPS)
        return optax.chain(mesotron_jax.clip_by_global_norm(clip), adam) if clip else adam
    shared = {
        "aux_lr": anneal(hyper.aux_adam_lr, config),
        "max_grad_norm": clip,
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "weight_decay": 0.0,
        "eps": _ADAM_EPS,
        # The unit in which rates like 0.02 have been published.
        "scale": "spectral",
        "overrides": HIDDEN,
    }
    rate = anneal(hyper.muon_lr, config)
    if config.rule == "muon":
        return mesotron_jax.chain_with_muon(rate, **shared)
    return mesotron_jax.chain_with_pion(rate, cutoff=config.cutoff, **shared)

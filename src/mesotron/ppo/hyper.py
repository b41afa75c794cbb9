"""Hyper-parameters that may differ between runs of one program, and the optimizer built of them.

They are traced numbers, so one compiled program trains every combination side by side. Learning
rates are annealed over gradient steps (updates x epochs x minibatches), not over updates.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import jax
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
    num_gradient_steps: Array


class Runs(NamedTuple):
    """R runs of one program.

    Args:
        values: of each run, what differs from the config, and its seed.
        keys: [R, 2] of their seeds.
        hyper: [R] each.
    """

    values: list[dict[str, float]]
    keys: Array
    hyper: Hyper


def make_hyper(config: SnakeConfig) -> Hyper:
    """The config's own values.

    Example:
        >>> round(float(make_hyper(SnakeConfig(gamma=0.9)).gamma), 3)
        0.9
    """
    return Hyper(*(jnp.float32(getattr(config, name)) for name in Hyper._fields))


def read_runs(config: SnakeConfig) -> Runs:
    """The runs that `config.sweep` and `config.num_seeds` ask for: every combination.

    Example:
        >>> runs = read_runs(SnakeConfig(sweep=("lr=0.1,0.2",), num_seeds=2))
        >>> len(runs.values), runs.values[2], runs.hyper.gamma.shape
        (4, {'lr': 0.2, 'seed': 0}, (4,))
    """
    axes = dict(_read_axis(item) for item in config.sweep)
    seeds = [config.seed + k for k in range(config.num_seeds)]
    combinations = [dict(zip(axes, values)) for values in product(*axes.values())]
    return make_runs(config, [{**rest, "seed": seed} for rest in combinations for seed in seeds])


def make_runs(config: SnakeConfig, values: list[dict[str, float]]) -> Runs:
    """Runs with these values in place of the config's; each has a seed."""
    columns = [
        jnp.array([run.get(name, getattr(config, name)) for run in values], jnp.float32)
        for name in Hyper._fields
    ]
    keys = jnp.stack([jax.random.PRNGKey(int(run["seed"])) for run in values])
    return Runs(values, keys, Hyper(*columns))


def _read_axis(item: str) -> tuple[str, list[float]]:
    name, equals, values = item.partition("=")
    name = name.strip("-").replace("-", "_")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    known = [field for field in Hyper._fields if field != "num_gradient_steps"]
    if not equals or not numbers or name not in known:
        raise ValueError(
            f"--sweep {item!r} must look like lr=0.001,0.003; what can be swept: {', '.join(known)}"
        )
    return name, numbers


def anneal(rate: float | Array, num_gradient_steps: float | Array | None) -> Callable[[Any], Array]:
    """The learning rate at each gradient step: down to zero after the run's last one.

    Args:
        rate: at the start.
        num_gradient_steps: of the run; None keeps the rate.

    Example:
        >>> at = anneal(1.0, 64)
        >>> [round(float(at(step)), 3) for step in (0, 32, 63, 64, 1000)]
        [1.0, 0.5, 0.016, 0.0, 0.0]
    """

    def at(count: Any) -> Array:
        if num_gradient_steps is None:
            return jnp.asarray(rate, jnp.float32)
        left = 1 - jnp.asarray(count, jnp.float32) / num_gradient_steps
        return jnp.asarray(rate * jnp.maximum(left, 0), jnp.float32)

    return at


def make_optimizer(config: SnakeConfig, hyper: Hyper) -> optax.GradientTransformation:
    """Clip by the global norm, then Adam for all, or Muon or Pion for the hidden matrices.

    Example:
        >>> from mesotron.ppo.policy import init_policy
        >>> config = SnakeConfig(optim="pion")
        >>> tx = make_optimizer(config, make_hyper(config))
        >>> params = jax.eval_shape(lambda: init_policy(jax.random.PRNGKey(0), config))
        >>> state = jax.eval_shape(tx.init, params)
    """
    end = hyper.num_gradient_steps if config.anneal_lr else None
    rule = _make_rule(config, hyper, end)
    # Plain clipping, whose one norm the loop logs too; that of `chain_with_muon` is sound at 1e30,
    # takes four rounds over the weights, and with them three hundredths of a small update.
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    return optax.chain(clip, rule) if config.max_grad_norm else rule


def _make_rule(
    config: SnakeConfig, hyper: Hyper, end: Array | None
) -> optax.GradientTransformation:
    """The optimizer without clipping; its rates end at gradient step `end`."""
    if config.rule == "adam":
        return optax.adam(anneal(hyper.lr, end), eps=_ADAM_EPS)
    shared = {
        "aux_lr": anneal(hyper.aux_adam_lr, end),
        "max_grad_norm": None,
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "weight_decay": 0.0,
        "eps": _ADAM_EPS,
        # The unit in which rates like 0.02 have been published.
        "scale": "spectral",
        "overrides": HIDDEN,
    }
    rate = anneal(hyper.muon_lr, end)
    if config.rule == "muon":
        return mesotron_jax.chain_with_muon(rate, **shared)
    return mesotron_jax.chain_with_pion(rate, cutoff=config.cutoff, **shared)

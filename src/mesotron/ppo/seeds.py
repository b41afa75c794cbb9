"""Whole runs side by side: one program, vmapped over seeds and hyper-parameters.

Everything has a leading axis of runs, also where there is one run alone: metrics, checkpoints and
evaluation then have one form. Buffers are donated, so a chunk of updates needs no second copy.

Legend: R runs, K updates of the longest chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesotron.config import SnakeConfig
from mesotron.ppo.hyper import Hyper, read_sweep
from mesotron.ppo.loop import Metrics, TrainState, init_state, run_updates
from mesotron.ppo.mesh import make_mesh, shardings_of
from mesotron.ppo.policy import Params


class Program(NamedTuple):
    """The compiled pieces of a training.

    Args:
        runs: the values in which each of the R runs differs from the config, with its seed.
        hyper: the same as arrays, [R].
        start: () -> the states before the first update.
        advance: (states, number of updates) -> (states, metrics [R, K]); takes the states over:
            those given are gone.
    """

    runs: list[dict[str, float]]
    hyper: Hyper
    start: Callable[[], TrainState]
    advance: Callable[[TrainState, int], tuple[TrainState, Metrics]]


def make_program(config: SnakeConfig, pretrained: Params | None = None) -> Program:
    """The runs of a config, ready to be advanced.

    Args:
        config: of all runs; `num_seeds` and `sweep` say how many there are.
        pretrained: weights to start from, and to stay close to if `kl_coef` is not 0.

    Example:
        >>> config = SnakeConfig(num_envs=4, num_steps=8, num_minibatches=2, num_seeds=2, chunk=3)
        >>> program = make_program(config)
        >>> states, metrics = program.advance(program.start(), 1)
        >>> states.update.tolist(), metrics["loss/value"].shape
        ([1, 1], (2, 3))
    """
    config.check()
    runs, hyper = read_sweep(config)
    keys = jnp.stack([jax.random.PRNGKey(int(run["seed"])) for run in runs])
    reference = pretrained if config.kl_coef else None

    def begin(key: Array, hyper: Hyper) -> TrainState:
        state = init_state(key, config, hyper)
        return state if pretrained is None else state._replace(params=pretrained)

    def go_on(states: TrainState, hyper: Hyper, count: Array) -> tuple[TrainState, Metrics]:
        run = partial(run_updates, config=config, most=config.chunk, pretrained=reference)
        return jax.vmap(run, in_axes=(0, 0, None))(states, hyper, count)

    mesh = make_mesh(config)
    placed = shardings_of(jax.eval_shape(jax.vmap(begin), keys, hyper), config, mesh)
    init = jax.jit(jax.vmap(begin), out_shardings=placed)
    chunk = jax.jit(go_on, donate_argnums=0, out_shardings=(placed, None))
    return Program(
        runs,
        hyper,
        start=lambda: init(keys, hyper),
        advance=lambda states, count: chunk(states, hyper, jnp.int32(count)),
    )

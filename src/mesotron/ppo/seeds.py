"""Whole runs side by side: one program, vmapped over seeds and hyper-parameters.

Everything has a leading axis of runs, also where there is one run alone: metrics, checkpoints and
evaluation then have one form. Buffers are donated, so a chunk of updates needs no second copy.

Legend: R runs, K updates of the longest chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesotron.config import SnakeConfig
from mesotron.ppo.hyper import Hyper, Runs, make_runs
from mesotron.ppo.loop import Metrics, TrainState, init_state, run_updates
from mesotron.ppo.mesh import make_mesh, shardings_of
from mesotron.ppo.policy import Params


class Program(NamedTuple):
    """The compiled pieces of a training; any R runs of its config go through them.

    Args:
        start: runs -> their states before the first update.
        advance: (states, runs, number of updates) -> (states, metrics [R, K]); takes the states
            over: those given are gone.
    """

    start: Callable[[Runs], TrainState]
    advance: Callable[[TrainState, Runs, int], tuple[TrainState, Metrics]]


def make_program(config: SnakeConfig, num_runs: int, pretrained: Params | None = None) -> Program:
    """Compile nothing yet, but say how runs begin and go on.

    Args:
        config: of all runs.
        num_runs: R.
        pretrained: weights to start from, and to stay close to if `kl_coef` is not 0.

    Example:
        >>> from mesotron.ppo.hyper import read_runs
        >>> config = SnakeConfig(num_envs=4, num_steps=8, num_minibatches=2, num_seeds=2, chunk=3)
        >>> runs, program = read_runs(config), make_program(config, num_runs=2)
        >>> train = lambda: program.advance(program.start(runs), runs, 1)
        >>> states, metrics = jax.eval_shape(train)
        >>> states.update.shape, metrics["loss/value"].shape
        ((2,), (2, 3))
    """
    config.check()
    reference = pretrained if config.kl_coef else None

    def begin(key: Array, hyper: Hyper) -> TrainState:
        state = init_state(key, config, hyper)
        return state if pretrained is None else state._replace(params=pretrained)

    def go_on(states: TrainState, hyper: Hyper, count: Array) -> tuple[TrainState, Metrics]:
        run = partial(run_updates, config=config, most=config.chunk, pretrained=reference)
        return over_runs(lambda state, hyper: run(state, hyper, count))(states, hyper)

    like = make_runs(config, [{"seed": 0}] * num_runs)
    shapes = jax.eval_shape(jax.vmap(begin), like.keys, like.hyper)
    placed = shardings_of(shapes, config, make_mesh(config))
    init = jax.jit(jax.vmap(begin), out_shardings=placed)
    chunk = jax.jit(go_on, donate_argnums=0, out_shardings=(placed, None))
    return Program(
        start=lambda runs: init(runs.keys, runs.hyper),
        advance=lambda states, runs, count: chunk(states, runs.hyper, jnp.int32(count)),
    )


def over_runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.vmap`, but a single run goes through the function itself.

    An axis of one turns every product into a batch of products, which takes a CPU 1.2 times as
    long and which the compiler does not undo.

    Example:
        >>> over_runs(jnp.sum)(jnp.ones((1, 3))).shape
        (1,)
    """

    def mapped(*trees: Any) -> Any:
        if jax.tree.leaves(trees)[0].shape[0] > 1:
            return jax.vmap(function)(*trees)
        made = function(*jax.tree.map(lambda x: x[0], trees))
        return jax.tree.map(lambda x: x[None], made)

    return mapped

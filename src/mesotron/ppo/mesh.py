"""Several devices: seeds spread over them, or the games of one run.

Only the placement of arrays differs. Games that a device holds are shuffled among themselves
(`loop.by_group`), so minibatches need no exchange; the gradient's mean over a minibatch is the
one sum over devices, and the compiler puts it in.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mesotron.config import SnakeConfig
from mesotron.ppo.loop import TrainState


def make_mesh(config: SnakeConfig) -> Mesh:
    """A line of `num_shards` devices."""
    count = jax.device_count()
    if config.num_shards > count:
        raise ValueError(
            f"num_shards={config.num_shards}, but there are {count} devices: give --num-shards "
            f"{count} or less"
        )
    devices = jax.devices()[: config.num_shards]
    return jax.make_mesh((config.num_shards,), ("shard",), (AxisType.Auto,), devices=devices)


def shardings_of(states: TrainState, config: SnakeConfig, mesh: Mesh) -> Any:
    """Where each leaf [R, ...] lies: runs over the devices, or games over them and the rest whole.

    Args:
        states: of all runs, or their shapes.
        config: of the runs.
        mesh: from `make_mesh`.

    Returns:
        A tree like `states` of shardings.
    """
    whole: Any = NamedSharding(mesh, PartitionSpec())
    games = NamedSharding(mesh, PartitionSpec(None, "shard"))
    if config.num_groups == 1:
        runs = NamedSharding(mesh, PartitionSpec("shard"))
        num_runs = states.update.shape[0]
        if num_runs % config.num_shards:
            raise ValueError(
                f"{num_runs} runs do not divide over {config.num_shards} devices: change "
                "--num-seeds or --num-shards"
            )
        return jax.tree.map(lambda _: runs, states)

    def fill(sharding: NamedSharding, tree: Any) -> Any:
        return jax.tree.map(lambda _: sharding, tree)

    return TrainState(
        params=fill(whole, states.params),
        opt_state=fill(whole, states.opt_state),
        env=fill(games, states.env),
        observation=fill(games, states.observation),
        key=whole,
        update=whole,
    )

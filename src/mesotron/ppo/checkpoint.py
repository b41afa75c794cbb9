"""Checkpoints of PPO runs: orbax arrays inside the run folder's atomic, listed checkpoints.

A checkpoint is the whole `TrainState`, so a resumed run has the bits of one left alone. Arrays
alone are written and read, never a pickle.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from mesotron.ppo.loop import TrainState
from mesotron.ppo.policy import Params
from mesotron.runs.checkpoints import newest_whole, prune, writing

KEEP = 2


def save(root: Path, step: int, states: TrainState) -> None:
    """Write the states after `step` updates; older checkpoints but one are removed."""
    with writing(root, step) as draft, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((draft / "state").absolute(), _as_tree(states))
        checkpointer.wait_until_finished()
    prune(root, KEEP, newest=step)


def restore(root: Path, like: TrainState) -> tuple[TrainState, int, list[str]]:
    """Read the newest whole checkpoint.

    Args:
        root: the folder of checkpoints.
        like: states of the same shapes, placed as the result is to be.

    Returns:
        The states, the updates they have behind them, and what is wrong with newer checkpoints.
        Without any whole checkpoint: `like` itself and 0.
    """
    newest, damaged = newest_whole(root)
    if newest is None:
        return like, 0, damaged
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _as_tree(like)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        leaves = checkpointer.restore((newest.path / "state").absolute(), target)
    structure = jax.tree.structure(like)
    return jax.tree.unflatten(structure, jax.tree.leaves(leaves)), newest.step, damaged


def load_params(root: Path, like: Params) -> Params:
    """The policy of another run's newest whole checkpoint, of its first run.

    Args:
        root: the folder of checkpoints.
        like: weights of the shapes wanted.
    """
    newest, damaged = newest_whole(root)
    if newest is None:
        raise ValueError(f"{root} has no whole checkpoint; {'; '.join(damaged) or 'it is empty'}")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore((newest.path / "state").absolute())
    params = [np.asarray(found[name])[0] for name in sorted(found) if name.startswith("0000.")]
    shapes = [leaf.shape for leaf in jax.tree.leaves(like)]
    if [leaf.shape for leaf in params] != shapes:
        raise ValueError(
            f"the network in {newest.path} has other shapes than this one: give the same board, "
            "--d-model, --num-layers and --num-heads"
        )
    return jax.tree.unflatten(jax.tree.structure(like), params)


def _as_tree(states: TrainState) -> dict[str, jax.Array]:
    """The leaves in order under plain names, whatever classes they lie in: 0000.* are params."""
    fields = [jax.tree.leaves(field) for field in states]
    return {
        f"{place:04d}.{number:04d}": leaf
        for place, leaves in enumerate(fields)
        for number, leaf in enumerate(leaves)
    }

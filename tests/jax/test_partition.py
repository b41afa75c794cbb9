"""Whole-tree transformations: routing, clipping, schedules and per-group updates."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy
from mesotron import jax as mj  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401


def network(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    sizes = {"input": (3, 6), "Dense_0": (6, 6), "value": (6, 1)}
    shapes = {name: {"kernel": size, "bias": size[1:]} for name, size in sizes.items()}
    draw = lambda size: jnp.asarray(rng.normal(size=size), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("rule", ["muon", "pion"])
def test_chain_equals_its_parts(rule):
    """After clipping: matrices as by Muon or Pion alone, the rest as by `optax.adamw`."""
    params, grads = network(0), network(1)
    tx = getattr(mj, f"chain_with_{rule}")(0.02, 1e-3, max_grad_norm=0.5)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    clipped, _ = optax.clip_by_global_norm(0.5).update(grads, optax.EmptyState())
    of = lambda tree: tree["Dense_0"]["kernel"]  # noqa: E731
    alone = getattr(mj, rule)(0.02)
    step = jax.jit(alone.update)
    expected, _ = step(of(clipped), alone.init(of(params)), of(params))
    np.testing.assert_allclose(of(updates), expected, atol=1e-6)
    unclipped, _ = step(of(grads), alone.init(of(params)), of(params))
    np.testing.assert_allclose(expected, unclipped, atol=1e-4)  # clipping shrinks no matrix's step
    for decay, path in ((0.01, ("value", "kernel")), (0.0, ("value", "bias"))):
        g, p, u = (tree[path[0]][path[1]] for tree in (clipped, params, updates))
        adam = optax.adamw(1e-3, weight_decay=decay)
        np.testing.assert_allclose(u, adam.update(g, adam.init(p), p)[0], atol=1e-7)


def test_decay_and_clipping_follow_schedules():
    params, zero = network(0), jax.tree.map(jnp.zeros_like, network(0))
    tx = mj.chain_with_muon(0.1, 0.01, weight_decay=optax.linear_schedule(0.0, 1.0, 2))
    update, state = jax.jit(tx.update), tx.init(params)
    for decay in (0.0, 0.5):
        updates, state = update(zero, state, params)
        for place, rate in (("Dense_0", 0.1), ("value", 0.01)):
            step, p = updates[place]["kernel"], params[place]["kernel"]
            np.testing.assert_allclose(step, -rate * decay * p, atol=1e-7)
    clip = mj.clip_by_global_norm(lambda count: 0.5 * 2**count)
    state = clip.init(params)
    for norm in (0.5, 1.0):
        clipped, state = clip.update(params, state)
        assert float(optax.tree.norm(clipped)) == pytest.approx(norm, rel=1e-5)


def test_clipping_equals_optax_and_handles_huge_gradients():
    grads = {"a": jnp.asarray([3.0, 4.0]), "b": jnp.asarray([12.0])}
    clip = mj.clip_by_global_norm(1.3)
    expected, _ = optax.clip_by_global_norm(1.3).update(grads, optax.EmptyState())
    for size in (1.0, 1e30, 1e-3):
        scaled = {k: g * size for k, g in grads.items()}
        clipped, _ = clip.update(scaled, clip.init(grads))
        wanted = expected if size > 0.5 else scaled
        for k in grads:
            np.testing.assert_allclose(clipped[k], wanted[k], rtol=1e-5)


def test_tree_without_hidden_matrices_is_refused():
    tree = [{"w": jnp.ones((3, 8))}, {"w": jnp.ones((8, 2))}]
    with pytest.raises(ValueError, match="overrides"):
        mj.chain_with_muon(0.1).init(tree)
    with pytest.raises(TypeError, match="mometum"):
        mj.chain_with_muon(0.1, mometum=0.9)

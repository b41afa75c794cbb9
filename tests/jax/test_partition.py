"""Whole-tree transformations: routing, clipping, schedules and per-group updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from mesotron import jax as mj
from mesotron.jax.lora import find_pairs
from mesotron.optim import Muon


def network(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    sizes = {
        "input": (3, 6),
        "Dense_0": (6, 6),
        "value": (6, 1),
    }

    shapes = {name: {"kernel": size, "bias": size[1:]} for name, size in sizes.items()}
    draw = lambda size: jnp.asarray(rng.normal(size=size), jnp.float32)  # noqa: E731

    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def test_chain_equals_its_parts():
    """After clipping: matrices as by Muon alone, the rest as by `optax.adamw`."""
    params = network(0)
    grads = network(1)
    tx = mj.chain_with_muon(0.02, 1e-3, max_grad_norm=0.5, steps=2)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    clipped, _ = optax.clip_by_global_norm(0.5).update(grads, optax.EmptyState())
    of = lambda tree: tree["Dense_0"]["kernel"]  # noqa: E731
    alone = mj.muon(0.02, steps=2)
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
    params = network(0)
    zero = jax.tree.map(jnp.zeros_like, network(0))
    tx = mj.chain_with_muon(0.1, 0.01, weight_decay=optax.linear_schedule(0.0, 1.0, 2), steps=1)
    update = jax.jit(tx.update)

    state = tx.init(params)
    for decay in (0.0, 0.5):
        updates, state = update(zero, state, params)
        for place, rate in (("Dense_0", 0.1), ("value", 0.01)):
            step = updates[place]["kernel"]
            p = params[place]["kernel"]
            np.testing.assert_allclose(step, -rate * decay * p, atol=1e-7)

    clip = mj.clip_by_global_norm(lambda count: 0.5 * 2**count)
    state = clip.init(params)

    update = jax.jit(clip.update)
    for norm in (0.5, 1.0):
        clipped, state = update(params, state)
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


def test_tree_without_hidden_matrices_warns_or_is_refused():
    tree = [{"w": jnp.ones((3, 8)), "b": jnp.ones(8)}, {"w": jnp.ones((8, 2))}]
    with pytest.raises(ValueError, match="overrides"):
        mj.chain_with_muon(0.1, strict=True).init(tree)

    with pytest.warns(UserWarning, match="AdamW"):
        mj.muon(0.1).init(tree)

    with pytest.raises(TypeError, match="mometum"):
        mj.chain_with_muon(0.1, mometum=0.9)


def test_muon_routes_a_whole_tree_as_the_chain_does():
    params = network(0)
    for ours, theirs in ((mj.muon, mj.chain_with_muon), (mj.pion, mj.chain_with_pion)):
        both = ours(0.1), theirs(0.1, max_grad_norm=None)
        programs = [jax.make_jaxpr(tx.update)(params, tx.init(params), params) for tx in both]
        assert str(programs[0]) == str(programs[1])


def test_a_tree_of_matrices_alone_is_filtered_by_its_layouts():
    """As optax.multi_transform hands them over."""
    shapes = {
        "query": (16, 2, 8),
        "key": (16, 2, 8),
        "value": (16, 2, 8),
        "out": (2, 8, 16),
    }

    grads = {
        name: {"kernel": jax.random.normal(jax.random.key(k), shape)}
        for k, (name, shape) in enumerate(shapes.items())
    }

    rest = {"head": {"kernel": jnp.ones((16, 3)), "bias": jnp.ones(3)}}
    alone, whole = (
        mj.muon(0.1).update(tree, mj.muon(0.1).init(tree), tree)[0]
        for tree in (grads, grads | rest)
    )
    for name in grads:
        assert jnp.allclose(alone[name]["kernel"], whole[name]["kernel"], atol=1e-6)


@pytest.mark.parametrize(("make", "torch_order"), [(mj.muon, False), (mj.pion, True)])
def test_lora_product_equals_torch(make, torch_order):
    """Five steps with momentum and decay from B = 0, next to a bias."""
    rng = np.random.default_rng(0)
    A = rng.normal(size=(4, 12)).astype("float32")
    B = np.zeros((10, 4), "float32")
    rule, extra = ("muon", {"steps": 2}) if make is mj.muon else ("pion", {"promote": 4})
    pair = [torch.nn.Parameter(torch.tensor(x)) for x in (A, B)]

    group = {
        "params": pair,
        "rule": rule,
        "pairs": [2.0],
        **extra,
    }

    optimizer = Muon(
        [group],
        lr=0.02,
        weight_decay=0.5,
        dtype="float32",
    )

    turn = (lambda x: x) if torch_order else (lambda x: x.T)
    params = {"layer": {"lora_a": turn(A), "lora_b": turn(B)}, "norm": {"bias": np.ones(3, "f4")}}
    params = jax.tree.map(jnp.asarray, params)

    tx = make(
        0.02,
        weight_decay=0.5,
        lora="product",
        lora_scale=2.0,
        **extra,
    )

    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(5):
        G = rng.normal(size=(10, 12)).astype("float32")
        a, b = (p.detach().numpy() for p in pair)
        g = 2 * b.T @ G, 2 * G @ a.T
        pair[0].grad, pair[1].grad = map(torch.tensor, g)
        optimizer.step()

        grads = {
            "layer": {"lora_a": turn(g[0]), "lora_b": turn(g[1])},
            "norm": {"bias": np.ones(3)},
        }

        updates, state = update(jax.tree.map(jnp.asarray, grads), state, params)
        params = optax.apply_updates(params, updates)

    product = (pair[1] @ pair[0]).detach().numpy()
    left, right = (turn(np.asarray(params["layer"][x])) for x in ("lora_b", "lora_a"))
    np.testing.assert_allclose(left @ right, product, atol=2e-4 * np.abs(product).max())

    assert not np.array_equal(params["norm"]["bias"], np.ones(3))


@pytest.mark.parametrize("inputs_first", [True, False])
def test_the_order_of_lora_factors_of_a_square_weight(inputs_first):
    """Both orders fit (2, 6) and (6, 2): the rank is the smaller side."""
    a, b = ((6, 2), (2, 6)) if inputs_first else ((2, 6), (6, 2))
    params = {"lora_a": jnp.ones(a), "lora_b": jnp.ones(b)}
    assert find_pairs(params) == {"lora_a": ("lora_b", inputs_first)}


def test_lora_products_are_filtered_in_the_given_type():
    rng = np.random.default_rng(0)
    params = {"lora_a": rng.normal(size=(8, 2)), "lora_b": rng.normal(size=(2, 6))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)

    steps = []
    for dtype in (None, "float32", "bfloat16"):
        tx = mj.muon(0.1, lora="product", dtype=dtype)
        steps.append(tx.update(params, tx.init(params), params)[0]["lora_a"])

    assert (steps[0] == steps[1]).all()
    assert (steps[0] != steps[2]).any()


def test_lora_products_take_injected_numbers():
    params = {"lora_a": jnp.ones((4, 2)), "lora_b": jnp.eye(2, 4)}
    for options in ({}, {"promote": 2}, {"cutoff": "aligned"}):
        plain = mj.pion(0.1, lora="product", **options)
        injected = optax.inject_hyperparams(mj.pion)(
            learning_rate=0.1,
            lora="product",
            **options,
        )

        a, b = (tx.update(params, tx.init(params), params)[0] for tx in (plain, injected))
        np.testing.assert_allclose(a["lora_a"], b["lora_a"], rtol=1e-3)


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"lora_a": jnp.ones((4, 2)), "b": jnp.ones(3)}, "lora_b"),
        ({"q": {"lora_A": {"kernel": jnp.ones((4, 2))}}}, "lora_a"),
        ({"lora_a": jnp.ones((4, 2)), "lora_b": jnp.ones((3, 5))}, "ranks"),
    ],
)
def test_lora_factors_come_in_pairs(tree, match):
    with pytest.raises(ValueError, match=match):
        mj.muon(lora="product").init(tree)
    nested = {"lora_adapter": {"lora_a": jnp.ones((4, 2)), "lora_b": jnp.ones((2, 4))}}
    mj.muon(lora="product").init(nested)

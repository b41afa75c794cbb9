"""A table of JAX optimizers times a list of contracts: add a row to test a new optimizer.

Each row is compiled once; all contracts share its step.
"""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mesotron import jax as mj

RATE = 0.1
DECAY = 0.5
# Two equal shapes, one of them transposed, and a stack; a network for the rows that route one.
MATRICES = {"tall": (8, 6), "wide": (6, 8), "stack": (2, 5, 5)}
HIDDEN = {"kernel": (6, 6), "bias": (6,)}
NETWORK = {
    "input": {"kernel": (3, 6)},
    "Dense_0": HIDDEN,
    "head": {"kernel": (6, 2)},
}


def _with(make: Callable, **fixed) -> Callable:
    return lambda **options: make(RATE, **{"weight_decay": DECAY, **fixed, **options})


# Few steps of the filter compile sooner.
OPTIMIZERS = {
    "muon": _with(mj.muon, steps=3),
    "normuon": _with(mj.normuon, steps=3),
    "low_rank": _with(mj.muon, filter="low_rank", rank=3),
    "pion_promote": _with(mj.pion, promote=2, steps=3),
    "pion_noise": _with(mj.pion, cutoff="noise"),
    "chain_with_muon": _with(mj.chain_with_muon, aux_lr=RATE),
}
NETWORKS = {"chain_with_muon"}  # those that route a whole tree and do not just take matrices
SPECTRAL = [name for name in OPTIMIZERS if name not in NETWORKS]
every = pytest.mark.parametrize("name", OPTIMIZERS)
spectral = pytest.mark.parametrize("name", SPECTRAL)


def tree(name: str, seed: int, dtype: str = "float32") -> dict:
    """Random numbers in the shape of the row's parameters."""
    rng = np.random.default_rng(seed)
    shapes = NETWORK if name in NETWORKS else MATRICES
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731

    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


@cache
def compiled(name: str) -> tuple:
    """The row's transformation and its jitted step: (params, state, grads) -> (params, state)."""
    tx = OPTIMIZERS[name]()

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx, step


def run(name: str, seeds: range, params=None, state=None) -> tuple:
    tx, step = compiled(name)
    params = tree(name, 0) if params is None else params

    state = tx.init(params) if state is None else state
    for seed in seeds:
        params, state = step(params, state, tree(name, seed))

    return params, state


def assert_equal(result, expected, atol: float = 0.0) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=atol), result, expected)


@every
def test_resume_is_bit_equal(name):
    """Through plain numpy arrays, as in any checkpoint."""
    params, state = jax.tree.map(np.array, run(name, range(1, 3)))
    assert_equal(run(name, range(3, 5), params, state), run(name, range(1, 5)))


@every
def test_zero_gradients_apply_only_the_decoupled_decay(name):
    tx, step = compiled(name)
    params = tree(name, 0)
    result, _ = step(params, tx.init(params), jax.tree.map(jnp.zeros_like, params))
    expected = jax.tree_util.tree_map_with_path(
        lambda path, p: p if "bias" in str(path) else (1 - RATE * DECAY) * p, params
    )
    assert_equal(result, expected, atol=1e-6)


@spectral
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_gradient_scale_does_not_matter(name, size):
    ends = []
    for factor in (1.0, size):
        tx, step = compiled(name)
        params = tree(name, 0)

        state = tx.init(params)
        for seed in (1, 2):
            params, state = step(params, state, optax.tree.scale(factor, tree(name, seed)))

        ends.append(params)

    assert_equal(ends[1], ends[0], atol=1e-4)


@every
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nonfinite_gradient_skips_its_matrix_and_the_next_step_recovers(name, bad):
    _, step = compiled(name)
    network = name in NETWORKS
    params, state = run(name, range(1, 2))
    good = tree(name, 2)
    broken = tree(name, 2)
    holder, key = (broken["Dense_0"], "kernel") if network else (broken, "wide")
    holder[key] = holder[key].at[1, 2].set(bad)
    result, kept = step(params, state, broken)
    expected, _ = step(params, state, good)

    leaves = map(jax.tree.leaves, (broken, result, params, expected))
    for g, new, old, clean in zip(*leaves, strict=True):
        hit = not jnp.isfinite(g).all()
        if not hit and network:
            assert (new != old).any()  # the clipping norm changes without the bad leaf
        else:
            np.testing.assert_allclose(new, old if hit else clean, atol=0 if hit else 1e-5)

    after, _ = step(result, kept, good)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((after, kept)))

    moved = jax.tree.map(lambda a, b: bool((a != b).any()), after, result)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize("name", ["pion_noise", "chain_with_muon"])
def test_bfloat16_weights_keep_their_dtype_and_float32_momentum(name):
    tx = OPTIMIZERS[name](dtype="float32")
    params, grads = (tree(name, k, "bfloat16") for k in (0, 1))
    update = jax.jit(tx.update)

    state = tx.init(params)
    for _ in range(2):  # the second would fail if a state changed its dtype
        updates, new = update(grads, state, params)
        assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("bfloat16")}
        assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, state)
        state = new

    momenta = [x for x in jax.tree.leaves(state, is_leaf=is_spectral) if is_spectral(x)]
    assert {m.dtype for m in jax.tree.leaves(momenta[0].momentum)} == {jnp.dtype("float32")}


def is_spectral(node) -> bool:
    return isinstance(node, mj.SpectralState)


RATES = {
    "pion_promote": ("learning_rate", mj.pion, {"promote": 2, "steps": 3}),
    "chain_with_muon": ("muon_lr", mj.chain_with_muon, {"aux_lr": RATE}),
}


@pytest.mark.parametrize("name", RATES)
def test_injected_and_vmapped_rates(name):
    """Two rates in one program; the second is the row's own."""
    key, factory, options = RATES[name]
    static = ("steps",) if "steps" in options else ()
    make = optax.inject_hyperparams(factory, static_args=static)
    tx = make(**{key: 0.0}, **options, weight_decay=DECAY)
    params = tree(name, 0)
    grads = tree(name, 1)

    @jax.jit
    @jax.vmap
    def first_step(rate):
        state = tx.init(params)
        state.hyperparams[key] = rate
        return tx.update(grads, state, params)[0]

    updates = first_step(jnp.array([0.03, RATE]))
    plain, step = compiled(name)
    expected, _ = step(params, plain.init(params), grads)
    own = jax.tree.map(lambda u: u[1], updates)
    assert_equal(optax.apply_updates(params, own), expected, atol=1e-5)
    matrix = lambda u: u["Dense_0"]["kernel"] if "Dense_0" in u else u["wide"]  # noqa: E731
    np.testing.assert_allclose(matrix(updates)[0], 0.3 * matrix(updates)[1], atol=1e-6)

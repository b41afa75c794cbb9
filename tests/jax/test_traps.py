"""The traps that other Muons fell into, on the JAX side; numbers as in test_traps.

Not here: 2 arrays cannot be written; 3, 4, 6, 19, 22 and 23 hold for every row of
test_jax_contracts; 7 is about numbers that both sides read in `mesotron.spectral`; 13 is
test_jax_labels, 15 the comparison with torch in test_jax_steps, 21 test_jax_sharding. 17 stays
open: weights in bfloat16 are rounded to nearest here.
"""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy
from mesotron import jax as mj  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def step(tx, grads, params=None):
    """The first update."""
    return jax.jit(tx.update)(grads, tx.init(grads), params)[0]


def rms(x: jax.Array) -> float:
    return float(jnp.sqrt(jnp.square(x).mean()))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_trap_01_momentum_stays_raw(kept, nesterov):
    """The filtered direction is never written back (defect 4 of the code that had this API)."""
    tx = mj.muon(0.1, nesterov=nesterov, weight_decay=0.0, momentum_dtype=kept)
    grads = {"w": 1e-3 * draw(6, 10)}
    state, update = tx.init(grads), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(grads, state)
    found = state[0].momentum["w"]
    assert found.dtype == kept
    expected = (1 - 0.95**2) * grads["w"]
    np.testing.assert_allclose(found.astype("float32"), expected, rtol=0.02, atol=1e-8)


def test_trap_05_an_expert_without_tokens_gets_no_step_and_harms_no_other():
    grads = draw(4, 6, 10)
    full = step(mj.scale_by_muon(), {"experts": grads})["experts"]
    found = step(mj.scale_by_muon(), {"experts": grads.at[2].set(0)})["experts"]
    assert not found[2].any()
    keep = np.array([0, 1, 3])
    np.testing.assert_allclose(found[keep], full[keep], atol=1e-6)


def test_trap_06_one_bad_expert_skips_its_whole_leaf():
    grads = {"experts": draw(4, 6, 10).at[1, 0, 0].set(jnp.inf)}
    assert not step(mj.muon(0.1, weight_decay=0.0), grads)["experts"].any()


def test_trap_08_steps_are_as_many_as_asked_for():
    """A short list of coefficients must not be run short in silence."""

    def num_products(steps: int) -> int:
        tx, grads = mj.scale_by_muon(steps=steps), {"w": jnp.ones((8, 8))}
        return str(jax.make_jaxpr(tx.update)(grads, tx.init(grads))).count("dot_general")

    counts = [num_products(steps) for steps in (3, 5, 10)]
    assert counts[0] < counts[1] < counts[2]
    per_step = (counts[1] - counts[0]) / 2
    assert counts[2] - counts[1] == 5 * per_step


def test_trap_08_masked_places_are_passed_over():
    """Inside `optax.masked` a leaf is a node without leaves; naive code stumbles over it."""
    grads = {"w": draw(6, 10), "b": draw(10, seed=1)}
    tx = optax.masked(mj.muon(0.1, weight_decay=0.0), {"w": True, "b": False})
    updates, _ = tx.update(grads, tx.init(grads))
    alone = step(mj.muon(0.1, weight_decay=0.0), {"w": grads["w"]})
    np.testing.assert_array_equal(updates["w"], alone["w"])
    np.testing.assert_array_equal(updates["b"], grads["b"])


def test_trap_09_the_scale_counts_outputs_in_the_last_axis():
    """sqrt(max(1, out / in)) flips its meaning between torch's (out, in) and JAX's (in, out)."""
    G = jnp.asarray(np.linalg.qr(np.random.default_rng(0).normal(size=(32, 8)))[0], jnp.float32)
    tx = mj.scale_by_muon(scale="spectral", ns="cubic")
    to_eight, to_many = step(tx, {"w": G})["w"], step(tx, {"w": G.T})["w"]
    assert float(jnp.linalg.norm(to_eight, 2)) == pytest.approx(1, abs=1e-3)
    assert float(jnp.linalg.norm(to_many, 2)) == pytest.approx(2, abs=1e-3)
    torch_order = step(mj.scale_by_muon(scale="spectral", ns="cubic", views="oi"), {"w": G})
    np.testing.assert_allclose(torch_order["w"], 2 * to_eight, atol=1e-5)


def test_trap_10_a_convolution_is_scaled_by_its_flattened_shape():
    kernel = {"kernel": draw(3, 3, 4, 36)}  # 36 inputs and offsets to 36 outputs
    found = step(mj.muon(0.1, ns="cubic", steps=16, weight_decay=0.0, views="iiio"), kernel)
    assert rms(found["kernel"]) == pytest.approx(0.2 * 0.1, rel=0.03)


@pytest.mark.parametrize(
    ("view", "shape", "matrices"),
    [
        ("sio", (3, 6, 4), lambda x: list(x)),  # trap 12: experts are separate matrices
        ("iso", (6, 3, 4), lambda x: [x[:, k] for k in range(3)]),
        ("ioo", (6, 3, 4), lambda x: [x.reshape(6, 12)]),
        ("iio", (3, 4, 6), lambda x: [x.reshape(12, 6)]),
        ("isoo", (6, 3, 2, 2), lambda x: [x[:, k].reshape(6, 4) for k in range(3)]),
        ("oi", (6, 4), lambda x: [x.T]),
    ],
)
def test_trap_11_a_view_filters_the_matrices_it_names(view, shape, matrices):
    G = draw(*shape)
    whole = step(mj.scale_by_muon(scale="spectral", views=view), {"w": G})["w"]
    for found, G_one in zip(matrices(whole), matrices(G), strict=True):
        alone = step(mj.scale_by_muon(scale="spectral"), {"w": G_one})["w"]
        np.testing.assert_allclose(found, alone, atol=1e-4)


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16)])
def test_trap_14_the_rate_means_the_same_for_every_shape(shape):
    found = step(mj.muon(1e-2, filter="polar_express", weight_decay=0.0), {"w": draw(*shape)})
    assert rms(found["w"]) == pytest.approx(0.2 * 1e-2, rel=0.05)


def test_trap_16_the_momentum_dtype_is_a_choice_with_small_drift():
    exact, grads = np.zeros((8, 8)), {"w": jnp.zeros((8, 8))}
    tx = mj.scale_by_muon(momentum_dtype="bfloat16")
    state, update = tx.init(grads), jax.jit(tx.update)
    for seed in range(100):
        G = draw(8, 8, seed=seed)
        exact = 0.95 * exact + 0.05 * np.asarray(G, np.float64)
        _, state = update({"w": G}, state)
    drift = np.asarray(state.momentum["w"], np.float64) - exact
    assert np.linalg.norm(drift) < 0.02 * np.linalg.norm(exact)


def test_trap_18_clipping_does_not_shrink_a_matrixs_step():
    grads = {"input": {"w": draw(3, 6)}, "Dense_0": {"w": draw(6, 6)}, "head": {"w": draw(6, 2)}}
    for clip in (1e-6, None):
        tx = mj.chain_with_muon(0.1, 0.1, max_grad_norm=clip, weight_decay=0.0)
        found = step(tx, grads)["Dense_0"]["w"]
        alone = step(mj.muon(0.1, weight_decay=0.0), grads["Dense_0"])["w"]
        np.testing.assert_allclose(found, alone, atol=1e-4)


def test_trap_20_a_leaf_that_is_not_trained_is_left_out():
    """None, as `equinox.filter` leaves it, is no leaf: neither stepped nor decayed."""
    params = {"w": draw(6, 10), "frozen": None}
    updates = step(mj.muon(0.1), params, params)
    assert updates["frozen"] is None
    assert updates["w"].any()


def test_trap_24_batching_keeps_a_tolerance_and_can_be_turned_off():
    grads = {"a": draw(6, 10), "turned": draw(10, 6, seed=1), "b": draw(6, 10, seed=2)}
    together = step(mj.muon(0.1, weight_decay=0.0), grads)
    apart = step(mj.muon(0.1, weight_decay=0.0, batched=False), grads)
    for name, G in grads.items():
        np.testing.assert_allclose(together[name], apart[name], atol=1e-5)
        alone = step(mj.muon(0.1, weight_decay=0.0), {"w": G})["w"]
        np.testing.assert_array_equal(apart[name], alone)


def test_equal_shapes_share_one_batch():
    """Three leaves of one shape, one of them turned, cost as many products as one leaf."""
    tx = mj.scale_by_muon()

    def num_products(*shapes) -> int:
        grads = {str(k): jnp.ones(s) for k, s in enumerate(shapes)}
        return str(jax.make_jaxpr(tx.update)(grads, tx.init(grads))).count("dot_general")

    assert num_products((8, 6)) == num_products((8, 6), (6, 8), (8, 6))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mj.muon(momentum=1.0), "momentum=1.0"),
        (lambda: mj.muon(scale=-1.0), "scale=-1.0"),
        (lambda: mj.muon(scale="rsm"), "rsm"),
        (lambda: mj.muon(filter="nadam"), "nadam"),
        (lambda: mj.muon(rank=2), "low_rank"),
        (lambda: mj.muon(ns="septic"), "quintic"),
        (lambda: mj.muon(ns="cubic", filter="polar_express"), "give one of the two"),
        (lambda: mj.pion(promote=9), "promote=9"),
        (lambda: mj.pion(promote=2, cutoff=0.3), "cutoff=0.3"),
        (lambda: mj.pion(cutoff="edge"), "edge"),
        (lambda: mj.muon().init({"b": jnp.ones(3)}), "chain_with_muon"),
        (lambda: mj.muon(views="sxo").init({"w": jnp.ones((2, 3, 4))}), "one letter for each"),
        (lambda: mj.muon(views="io").init({"w": jnp.ones((2, 3, 4))}), "one letter for each"),
        (lambda: mj.read_stats(mj.muon().init({"w": jnp.ones((2, 2))})), "stats=True"),
    ],
)
def test_refusals_name_the_value(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (mj.muon, {"steps": 3}),
        (mj.pion, {"cutoff": 0.3}),
        (mj.muon, {"filter": "low_rank", "rank": 2}),
    ],
)
def test_what_shapes_the_computation_must_be_static(make, options):
    """optax turns every number into an array; the sentence gives the exact argument."""
    name = list(options)[-1]
    params = {"w": draw(6, 10)}
    with pytest.raises(ValueError, match=rf"static_args=\('{name}',\)"):
        optax.inject_hyperparams(make)(learning_rate=0.1, **options).init(params)
    tx = optax.inject_hyperparams(make, static_args=(name,))(learning_rate=0.1, **options)
    found = step(tx, params, params)["w"]
    np.testing.assert_allclose(found, step(make(0.1, **options), params, params)["w"], atol=1e-6)


def test_the_strength_and_a_scale_in_numbers_may_be_traced():
    """Runs of several strengths in one program."""
    grads = {"w": jnp.asarray(np.diag([1.0, 0.5, 0.2, 0.05]), jnp.float32)}

    @jax.jit
    @jax.vmap
    def direction(promote, scale):
        return step(mj.scale_by_pion(promote=promote, scale=scale), grads)["w"]

    found = direction(jnp.array([0, 2, 4]), jnp.array([0.2, 1.0, 2.0]))
    for k, (promote, scale) in enumerate([(0, 0.2), (2, 1.0), (4, 2.0)]):
        alone = step(mj.scale_by_pion(promote=promote, scale=scale), grads)["w"]
        np.testing.assert_allclose(found[k], alone, atol=1e-5)

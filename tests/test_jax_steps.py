"""Steps of the JAX optimizers: against torch and optax, and the traps that Muon code falls into."""

import inspect

import numpy as np
import pytest
import torch

import mesotron

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy
from mesotron import jax as mj  # noqa: E402

SHAPES = ((16, 16), (12, 96), (40, 8), (1, 7), (3, 10, 6))
RULES = {
    "muon": ("Muon", {}),
    "muon_plain": ("Muon", {"nesterov": False, "weight_decay": 0.0}),
    "spectral": ("Muon", {"scale": "spectral", "momentum": 0.8}),
    "cubic": ("Muon", {"filter": "cubic"}),
    "polar_express": ("Muon", {"filter": "polar_express"}),
    "low_rank": ("Muon", {"filter": "low_rank", "rank": 2}),
    "promote_0": ("Pion", {}),
    "promote_2": ("Pion", {"promote": 2, "scale": 2.0}),
    "noise": ("Pion", {"cutoff": "noise"}),
    "cutoff": ("Pion", {"cutoff": 0.3}),
}


def arrays(seed: int, shapes=SHAPES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {str(k): rng.normal(size=s).astype(np.float32) for k, s in enumerate(shapes)}


def to_jax(tree: dict) -> dict:
    return {k: jnp.asarray(x) for k, x in tree.items()}


def train(tx, params: dict, gradients: list[dict]) -> dict:
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for grads in gradients:
        params, state = step(params, state, to_jax(grads))
    return params


def train_torch(cls: str, options: dict, params: dict, gradients: list[dict], lr: float) -> dict:
    """The same training in torch, whose weights are (out, in): JAX's, transposed."""
    weights = {k: torch.nn.Parameter(turned(x)) for k, x in params.items()}
    groups = [{"params": [w], "view": "stack" if w.ndim > 2 else None} for w in weights.values()]
    optimizer = getattr(mesotron, cls)(groups, lr=lr, dtype="float32", **options)
    for grads in gradients:
        for k, w in weights.items():
            w.grad = turned(grads[k])
        optimizer.step()
    return {k: w.detach().mT.numpy() for k, w in weights.items()}


def turned(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.swapaxes(x, -1, -2).copy())


@pytest.mark.parametrize("name", RULES)
def test_five_steps_equal_those_of_torch(name):
    """In Frobenius norm, within 1e-4 of the change made and 1e-6 of the weights.

    Worst measured: 4e-5 of a change that is more than decay, 2e-7 of the weights."""
    cls, options = RULES[name]
    params, gradients = arrays(0), [arrays(k) for k in range(1, 6)]
    ours = train(getattr(mj, cls.lower())(0.02, **options), to_jax(params), gradients)
    theirs = train_torch(cls, options, params, gradients, 0.02)
    for k, start in params.items():
        made = np.linalg.norm(theirs[k] - start)
        assert made > 0
        assert np.linalg.norm(ours[k] - theirs[k]) < 1e-4 * made + 1e-6 * np.linalg.norm(start)


@pytest.mark.parametrize("consistent_rms", [None, 0.2])
@pytest.mark.parametrize("shape", [(16, 16), (12, 96), (40, 8)])
def test_equal_to_optax_where_the_settings_coincide(shape, consistent_rms):
    """Without Nesterov, whose bias correction ours has not; within 1e-5 of weights of size 1."""
    rms = {} if consistent_rms is None else {"consistent_rms": consistent_rms}
    peer = optax.contrib.muon(0.02, nesterov=False, weight_decay=0.01, **rms)
    scale = "spectral" if consistent_rms is None else "rms"
    tx = mj.muon(0.02, nesterov=False, weight_decay=0.01, scale=scale)
    params, gradients = to_jax(arrays(0, [shape])), [arrays(k, [shape]) for k in range(1, 6)]
    ours, theirs = train(tx, params, gradients), train(peer, params, gradients)
    np.testing.assert_allclose(ours["0"], theirs["0"], atol=1e-5)


@pytest.mark.parametrize(("ours", "theirs"), [(mj.muon, mesotron.Muon), (mj.pion, mesotron.Pion)])
def test_the_twins_share_names_and_defaults(ours, theirs):
    jax_side, torch_side = (inspect.signature(f).parameters for f in (ours, theirs))
    both = set(jax_side) & set(torch_side)
    assert {"momentum", "nesterov", "weight_decay", "scale", "steps", "dtype", "batched"} <= both
    for name in both:
        assert jax_side[name].default == torch_side[name].default, name
    assert jax_side["learning_rate"].default == torch_side["lr"].default
    torch_alone = set(torch_side) - both - {"self", "params", "lr"}
    assert torch_alone == {"betas", "eps", "aux", "fused"}


def one_update(tx, grads, params=None):
    return jax.jit(tx.update)(grads, tx.init(grads if params is None else params), params)


@pytest.mark.parametrize("make", [mj.muon, mj.pion])
def test_no_params_are_needed_without_decay(make):
    grads = to_jax(arrays(1))
    updates, _ = one_update(make(0.1, weight_decay=0.0), grads)
    assert all(jnp.isfinite(u).all() for u in jax.tree.leaves(updates))
    with pytest.raises(ValueError, match="weight_decay=0"):
        one_update(make(0.1), grads)


def test_the_size_of_a_gradient_does_not_matter():
    tx, grads = mj.muon(0.1, weight_decay=0.0), to_jax(arrays(1))
    update, state = jax.jit(tx.update), tx.init(grads)
    usual, _ = update(grads, state)
    for size in (1e-30, 1e-12, 1e12, 1e30):
        found, _ = update({k: g * size for k, g in grads.items()}, state)
        for k in grads:
            np.testing.assert_allclose(found[k], usual[k], atol=1e-4)


def test_zero_gradients_decay_alone():
    params = to_jax(arrays(0))
    updates, state = one_update(mj.muon(0.1), jax.tree.map(jnp.zeros_like, params), params)
    for k in params:
        np.testing.assert_allclose(updates[k], -0.1 * 0.01 * params[k], rtol=1e-6)
    assert not any(m.any() for m in jax.tree.leaves(state[0].momentum))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_leaf_that_is_not_finite_is_left_alone(bad):
    tx, params, grads = mj.muon(0.1), to_jax(arrays(0)), to_jax(arrays(1))
    _, before = one_update(tx, grads, params)
    broken = {**grads, "0": grads["0"].at[0, 0].set(bad)}
    update = jax.jit(tx.update)
    updates, after = update(broken, before, params)
    expected, _ = update(grads, before, params)
    assert not updates["0"].any()
    np.testing.assert_array_equal(after[0].momentum["0"], before[0].momentum["0"])
    for k in ("1", "2", "3", "4"):
        np.testing.assert_allclose(updates[k], expected[k], atol=1e-6)


def test_momentum_stays_raw():
    """The filtered direction is never written back (defect 4 of the code that had this API)."""
    grads = to_jax(arrays(1))
    tx = mj.muon(0.1, weight_decay=0.0)
    state = tx.init(grads)
    for _ in range(2):
        _, state = jax.jit(tx.update)(grads, state)
    np.testing.assert_allclose(
        state[0].momentum["0"], (1 - 0.95**2) * grads["0"], rtol=1e-5, atol=1e-7
    )


def test_the_scale_counts_outputs_in_the_last_axis():
    """sqrt(max(1, out / in)) flips its meaning between torch's (out, in) and JAX's (in, out)."""
    G = jnp.asarray(np.linalg.qr(np.random.default_rng(0).normal(size=(32, 8)))[0], jnp.float32)
    tx = mj.scale_by_muon(scale="spectral", ns="cubic")
    to_eight, to_many = one_update(tx, {"w": G})[0]["w"], one_update(tx, {"w": G.T})[0]["w"]
    assert float(jnp.linalg.norm(to_eight, 2)) == pytest.approx(1, abs=1e-3)
    assert float(jnp.linalg.norm(to_many, 2)) == pytest.approx(2, abs=1e-3)
    torch_order, _ = one_update(
        mj.scale_by_muon(scale="spectral", ns="cubic", views="oi"), {"w": G}
    )
    np.testing.assert_allclose(torch_order["w"], 2 * to_eight, atol=1e-5)


@pytest.mark.parametrize(
    ("view", "shape", "matrices"),
    [
        ("sio", (3, 6, 4), lambda x: list(x)),
        ("iso", (6, 3, 4), lambda x: [x[:, k] for k in range(3)]),
        ("ioo", (6, 3, 4), lambda x: [x.reshape(6, 12)]),
        ("iio", (3, 4, 6), lambda x: [x.reshape(12, 6)]),
        ("oi", (6, 4), lambda x: [x.T]),
    ],
)
def test_a_view_filters_the_matrices_it_names(view, shape, matrices):
    G = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    tx = mj.scale_by_muon(scale="spectral", views=view)
    whole = one_update(tx, {"w": G})[0]["w"]
    for found, G_one in zip(matrices(whole), matrices(G), strict=True):
        alone = one_update(mj.scale_by_muon(scale="spectral"), {"w": G_one})[0]["w"]
        np.testing.assert_allclose(found, alone, atol=1e-4)


@pytest.mark.parametrize("view", ["io", "sxo", "sii"])
def test_a_view_that_does_not_fit_is_refused(view):
    with pytest.raises(ValueError, match="one letter for each axis"):
        mj.muon(views=view).init({"w": jnp.ones((2, 3, 4))})


def test_vectors_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="chain_with_muon"):
        mj.muon().init({"b": jnp.ones(3)})


def test_batching_changes_no_more_than_rounding():
    grads = to_jax({**arrays(1), "turned": arrays(2)["1"].T})
    together, _ = one_update(mj.muon(0.1, weight_decay=0.0), grads)
    apart, _ = one_update(mj.muon(0.1, weight_decay=0.0, batched=False), grads)
    for k in grads:
        np.testing.assert_allclose(together[k], apart[k], atol=1e-5)


def test_equal_shapes_share_one_batch():
    """Three leaves of one shape, one of them turned, cost as many products as one leaf."""
    tx = mj.scale_by_muon()

    def num_products(*shapes) -> int:
        grads = {str(k): jnp.ones(s) for k, s in enumerate(shapes)}
        return str(jax.make_jaxpr(tx.update)(grads, tx.init(grads))).count("dot_general")

    assert num_products((8, 6)) == num_products((8, 6), (6, 8), (8, 6))


def test_schedules_count_steps():
    """The rate of step k is schedule(k), for learning rate, momentum and decay alike."""
    grads, params = to_jax(arrays(1, [(6, 4)])), to_jax(arrays(0, [(6, 4)]))

    def line(count):
        return 0.1 * (1 - count / 4)

    tx = mj.muon(line, momentum=lambda count: 0.5 + 0.1 * count, weight_decay=line)
    state = tx.init(params)
    momentum = jax.tree.map(jnp.zeros_like, params)
    for k in range(3):
        updates, state = jax.jit(tx.update)(grads, state, params)
        fixed = mj.muon(line(k), momentum=0.5 + 0.1 * k, weight_decay=line(k))
        start = fixed.init(params)
        start = (start[0]._replace(momentum=momentum), *start[1:])
        expected, kept = jax.jit(fixed.update)(grads, start, params)
        momentum = kept[0].momentum
        for name in params:
            np.testing.assert_allclose(updates[name], expected[name], atol=1e-6)


def test_the_cubic_is_another_name_and_converges():
    G = {"w": jnp.asarray(np.diag([1.0, 0.3, 0.01]), jnp.float32)}
    found = one_update(mj.scale_by_muon(scale="spectral", ns="cubic", steps=15), G)[0]["w"]
    np.testing.assert_allclose(found, np.eye(3), atol=1e-4)
    default = one_update(mj.scale_by_muon(scale="spectral", ns="cubic"), G)[0]["w"]
    assert 0.85 < float(default[2, 2]) < 0.95
    five = one_update(mj.scale_by_muon(scale="spectral", ns="cubic", steps=5), G)[0]["w"]
    assert 0.05 < float(five[2, 2]) < 0.1
    with pytest.raises(ValueError, match="quintic"):
        mj.muon(ns="septic")


def test_jit_makes_no_difference():
    tx = mj.pion(0.1, cutoff="noise")
    params, grads = (to_jax(arrays(k, [(8, 6), (2, 4, 3)])) for k in (0, 1))
    state = tx.init(params)
    plain, jitted = tx.update(grads, state, params), jax.jit(tx.update)(grads, state, params)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_vmap_over_seeds_is_each_seed_alone():
    tx = mj.muon(0.1)
    seeds = [(to_jax(arrays(k)), to_jax(arrays(k + 10))) for k in range(3)]
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    params, grads = stack([p for p, _ in seeds]), stack([g for _, g in seeds])
    updates, _ = jax.jit(jax.vmap(tx.update))(grads, jax.vmap(tx.init)(params), params)
    for k, (p, g) in enumerate(seeds):
        alone, _ = one_update(tx, g, p)
        for name in alone:
            np.testing.assert_allclose(updates[name][k], alone[name], atol=1e-5)


def test_hyperparameters_can_be_injected():
    params, grads = to_jax(arrays(0)), to_jax(arrays(1))
    tx = optax.inject_hyperparams(mj.muon)(learning_rate=0.1)
    state = tx.init(params)
    state.hyperparams["learning_rate"] = jnp.asarray(0.3)
    updates, _ = jax.jit(tx.update)(grads, state, params)
    expected, _ = one_update(mj.muon(0.3), grads, params)
    for k in params:
        np.testing.assert_allclose(updates[k], expected[k], atol=1e-6)
    with pytest.raises(ValueError, match=r"static_args=\('promote',\)"):
        optax.inject_hyperparams(mj.pion)(learning_rate=0.1).init(params)
    optax.inject_hyperparams(mj.pion, static_args=("promote",))(promote=2).init(params)


def test_accumulated_gradients_make_one_step():
    params = to_jax(arrays(0))
    halves = [to_jax(arrays(k)) for k in (1, 2)]
    tx = optax.MultiSteps(mj.muon(0.1), every_k_schedule=2)
    state = tx.init(params)
    update = jax.jit(tx.update)
    first, state = update(halves[0], state, params)
    second, state = update(halves[1], state, params)
    assert not any(u.any() for u in jax.tree.leaves(first))
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
    expected, _ = one_update(mj.muon(0.1), mean, params)
    for k in params:
        np.testing.assert_allclose(second[k], expected[k], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_are_kept(dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), to_jax(arrays(0)))
    tx = mj.muon(0.1, dtype="float32")
    state = tx.init(params)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(params, state, params)
        assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
        assert {m.dtype for m in jax.tree.leaves(state[0].momentum)} == {jnp.dtype("float32")}
    short = mj.muon(0.1, dtype="float32", momentum_dtype="bfloat16").init(params)
    assert {m.dtype for m in jax.tree.leaves(short[0].momentum)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"scale": -1.0}, {"filter": "nadam"}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        mj.muon(**options)

"""Steps of the JAX optimizers against those of torch and of optax; schedules and views."""

import inspect

import numpy as np
import pytest
import torch

import mesotron

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy
from mesotron import jax as mj  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

# The standard form, the Gram form turned, and a stack.
SHAPES = ((16, 16), (96, 12), (3, 10, 6))
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
def test_equal_to_optax_where_the_settings_coincide(consistent_rms):
    """Without Nesterov, whose bias correction ours has not; within 1e-5 of weights of size 1."""
    rms = {} if consistent_rms is None else {"consistent_rms": consistent_rms}
    peer = optax.contrib.muon(0.02, nesterov=False, weight_decay=0.01, **rms)
    scale = "spectral" if consistent_rms is None else "rms"
    tx = mj.muon(0.02, nesterov=False, weight_decay=0.01, scale=scale)
    shapes = [(16, 16), (12, 96), (40, 8)]
    params, gradients = to_jax(arrays(0, shapes)), [arrays(k, shapes) for k in range(1, 6)]
    ours, theirs = train(tx, params, gradients), train(peer, params, gradients)
    for k in params:
        np.testing.assert_allclose(ours[k], theirs[k], atol=1e-5)


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
    grads = to_jax(arrays(1, [(8, 6)]))
    updates, _ = one_update(make(0.1, weight_decay=0.0), grads)
    assert all(jnp.isfinite(u).all() for u in jax.tree.leaves(updates))
    with pytest.raises(ValueError, match="weight_decay=0"):
        one_update(make(0.1), grads)


def test_schedules_count_steps():
    """The rate of step k is schedule(k), for learning rate, momentum and decay alike."""
    grads, params = to_jax(arrays(1, [(6, 4)])), to_jax(arrays(0, [(6, 4)]))

    def line(count):
        return 0.1 * (1 - count / 4)

    tx = mj.muon(line, momentum=lambda count: 0.5 + 0.1 * count, weight_decay=line)
    state = tx.init(params)
    momentum = jax.tree.map(jnp.zeros_like, params)
    for k in range(3):
        updates, state = tx.update(grads, state, params)
        fixed = mj.muon(line(k), momentum=0.5 + 0.1 * k, weight_decay=line(k))
        start = fixed.init(params)
        start = (start[0]._replace(momentum=momentum), *start[1:])
        expected, kept = fixed.update(grads, start, params)
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


def test_jit_makes_no_difference():
    tx = mj.pion(0.1, cutoff="noise")
    params, grads = (to_jax(arrays(k, [(8, 6)])) for k in (0, 1))
    state = tx.init(params)
    plain, jitted = tx.update(grads, state, params), jax.jit(tx.update)(grads, state, params)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)

"""Steps of the JAX optimizers: equal to torch and optax; schedules, views, scales and errors."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import mesotron
from mesotron import jax as mj

# The standard form, the transposed Gram form, and a stack.
SHAPES = ((16, 16), (96, 12), (3, 10, 6))
RULES = {
    "muon": ("Muon", {}),
    "spectral": (
        "Muon",
        {
            "scale": "spectral",
            "momentum": 0.8,
            "nesterov": False,
        },
    ),
    "low_rank": ("Muon", {"filter": "low_rank", "rank": 2}),
    "normuon": ("NorMuon", {}),
    "promote_2": ("Pion", {"promote": 2, "scale": 2.0}),
    "noise": ("Pion", {"cutoff": "noise"}),
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
    """The same training in torch, whose weights are (out, in)."""
    weights = {k: torch.nn.Parameter(transposed(x)) for k, x in params.items()}
    groups = [{"params": [w], "view": "stack" if w.ndim > 2 else None} for w in weights.values()]

    optimizer = getattr(mesotron, cls)(
        groups,
        lr=lr,
        dtype="float32",
        **options,
    )
    for grads in gradients:
        for k, w in weights.items():
            w.grad = transposed(grads[k])
        optimizer.step()

    return {k: w.detach().mT.numpy() for k, w in weights.items()}


def transposed(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.swapaxes(x, -1, -2).copy())


@pytest.mark.parametrize("name", RULES)
def test_five_steps_equal_those_of_torch(name):
    """In Frobenius norm, within 1e-4 of the change and 1e-6 of the weights; the worst measured were
    4e-5 and 2e-7."""
    cls, options = RULES[name]
    params = arrays(0)
    gradients = [arrays(k) for k in range(1, 6)]
    result = train(getattr(mj, cls.lower())(0.02, **options), to_jax(params), gradients)

    expected = train_torch(
        cls,
        options,
        params,
        gradients,
        0.02,
    )
    for k, start in params.items():
        change = np.linalg.norm(expected[k] - start)
        assert change > 0
        error = np.linalg.norm(result[k] - expected[k])

        assert error < 1e-4 * change + 1e-6 * np.linalg.norm(start)


def test_equal_to_optax_with_the_same_settings():
    """Without Nesterov, for which optax has a bias correction."""
    peer = optax.contrib.muon(
        0.02,
        nesterov=False,
        weight_decay=0.01,
        consistent_rms=0.2,
    )

    tx = mj.muon(0.02, nesterov=False, weight_decay=0.01)
    shapes = [(16, 16), (12, 96)]
    params = to_jax(arrays(0, shapes))
    gradients = [arrays(k, shapes) for k in range(1, 6)]
    ours = train(tx, params, gradients)

    theirs = train(peer, params, gradients)
    for k in params:
        np.testing.assert_allclose(ours[k], theirs[k], atol=1e-5)


@pytest.mark.parametrize(("ours", "theirs"), [(mj.muon, mesotron.Muon), (mj.pion, mesotron.Pion)])
def test_torch_and_jax_share_names_and_defaults(ours, theirs):
    jax_side, torch_side = (inspect.signature(f).parameters for f in (ours, theirs))
    both = set(jax_side) & set(torch_side)
    assert {"momentum", "nesterov", "weight_decay", "scale", "steps", "dtype", "batched"} <= both

    for name in both:
        assert jax_side[name].default == torch_side[name].default, name

    assert jax_side["learning_rate"].default == torch_side["lr"].default

    # The torch classes hold auxiliary groups too, and take the arguments of either filter.
    torch_only = set(torch_side) - both - {"params", "lr", "filter", "rank", "promote", "cutoff"}
    contract = {"capturable", "foreach", "differentiable", "maximize"}  # of torch.optim
    assert torch_only - contract == {"aux", "fused", "beta2", "leash"}


def test_params_are_not_needed_without_decay():
    grads = to_jax(arrays(1, [(8, 6)]))
    assert jnp.isfinite(first_step(mj.muon(0.1, weight_decay=0.0), grads)["0"]).all()

    with pytest.raises(ValueError, match="weight_decay=0"):
        first_step(mj.muon(0.1), grads)


def test_schedules():
    """Learning rate, momentum and decay of step k are schedule(k)."""
    grads = to_jax(arrays(1, [(6, 4)]))
    params = to_jax(arrays(0, [(6, 4)]))

    def line(count):
        return 0.1 * (1 - count / 4)

    tx = mj.muon(
        line,
        momentum=lambda count: 0.5 + 0.1 * count,
        weight_decay=line,
        steps=1,
    )

    state = tx.init(params)
    update = jax.jit(tx.update)
    for k in range(2):
        fixed = mj.muon(
            line(k),
            momentum=0.5 + 0.1 * k,
            weight_decay=line(k),
            steps=1,
        )

        start = fixed.init(params)
        start = (start[0]._replace(momentum=state[0].momentum), *start[1:])
        expected, _ = jax.jit(fixed.update)(grads, start, params)
        updates, state = update(grads, state, params)
        np.testing.assert_allclose(updates["0"], expected["0"], atol=1e-6)


def test_cubic_iteration_converges():
    G = {"w": jnp.asarray(np.diag([1.0, 0.3, 0.01]), jnp.float32)}
    step = first_step(mj.scale_by_muon(scale="spectral", ns="cubic"), G)["w"]
    np.testing.assert_allclose(step, np.diag([1.0, 1.0, 0.878]), atol=1e-3)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def first_step(tx, grads, params=None):
    state = tx.init(grads if params is None else params)
    return jax.jit(tx.update)(grads, state, params)[0]


def num_matmuls(tx, *shapes: tuple[int, ...]) -> int:
    grads = {str(k): jnp.ones(s) for k, s in enumerate(shapes)}
    return str(jax.make_jaxpr(tx.update)(grads, tx.init(grads))).count("dot_general")


def test_momentum_stays_raw_and_drifts_little_in_bfloat16():
    """The filtered direction is never written back."""
    exact = np.zeros((8, 8))
    grads = {"w": jnp.zeros((8, 8))}
    tx = mj.scale_by_muon(momentum_dtype="bfloat16")
    state = tx.init(grads)

    update = jax.jit(tx.update)
    for seed in range(100):
        G = draw(8, 8, seed=seed)
        exact = 0.95 * exact + 0.05 * np.asarray(G, np.float64)
        _, state = update({"w": G}, state)

    assert state.momentum["w"].dtype == jnp.bfloat16
    drift = np.asarray(state.momentum["w"], np.float64) - exact
    assert np.linalg.norm(drift) < 0.02 * np.linalg.norm(exact)


def test_experts_without_tokens_make_no_step_and_nonfinite_ones_skip_their_leaf():
    grads = draw(4, 6, 10)
    tx = mj.scale_by_muon(steps=1)
    idle = grads.at[2].set(0)
    bad = grads.at[1, 0, 0].set(jnp.inf)

    steps = first_step(
        tx,
        {
            "full": grads,
            "idle": idle,
            "bad": bad,
        },
    )

    assert not steps["idle"][2].any()
    keep = np.array([0, 1, 3])
    np.testing.assert_allclose(steps["idle"][keep], steps["full"][keep], atol=1e-6)

    assert not steps["bad"].any()


def test_equal_shapes_share_a_batch_that_can_be_turned_off():
    tx = mj.scale_by_muon(steps=1)
    shapes = ((6, 10), (10, 6), (6, 10))
    assert num_matmuls(tx, shapes[0]) == num_matmuls(tx, *shapes)

    grads = to_jax(arrays(0, shapes))
    here = jax.tree.map(lambda g: g.sharding, grads)  # several devices: test_sharding
    together = first_step(mj.scale_by_muon(steps=1, shardings=here), grads)

    apart = first_step(mj.scale_by_muon(steps=1, batched=False), grads)
    for name in grads:
        np.testing.assert_allclose(together[name], apart[name], atol=1e-5)


def test_masked_and_missing_leaves_are_passed_over():
    grads = {"w": draw(6, 10), "b": draw(10, seed=1)}
    plain = mj.muon(0.1, weight_decay=0.0, steps=1)
    updates = first_step(optax.masked(plain, {"w": True, "b": False}), grads)
    np.testing.assert_allclose(updates["w"], first_step(plain, {"w": grads["w"]})["w"], atol=1e-6)
    np.testing.assert_array_equal(updates["b"], grads["b"])
    params = {"w": grads["w"], "frozen": None}  # as `equinox.filter` leaves it
    updates = first_step(mj.muon(0.1, steps=1), params, params)

    assert updates["frozen"] is None
    assert updates["w"].any()

    # A gradient missing where there are weights must not shift the pairs.
    tx = mj.scale_by_muon(weight_decay=0.1)
    full = {"frozen": grads["w"], "w": grads["w"]}
    with pytest.raises(ValueError, match="None"):
        tx.update(params, tx.init(full), full)


def test_views_filter_the_matrices_they_name():
    cases = {  # view: (shape, its matrices)
        "sio": ((3, 6, 4), lambda x: list(x)),
        "iso": ((6, 3, 4), lambda x: [x[:, k] for k in range(3)]),
        "ioo": ((6, 3, 4), lambda x: [x.reshape(6, 12)]),
        "iio": ((3, 4, 6), lambda x: [x.reshape(12, 6)]),
        "isoo": ((6, 3, 2, 2), lambda x: [x[:, k].reshape(6, 4) for k in range(3)]),
        "oi": ((6, 4), lambda x: [x.T]),
    }

    grads = {view: np.asarray(draw(*shape)) for view, (shape, _) in cases.items()}
    few = {"scale": "spectral", "steps": 1}
    whole = first_step(mj.scale_by_muon(views={view: view for view in cases}, **few), grads)
    blocks = {view: np.stack(cases[view][1](G)) for view, G in grads.items()}

    alone = first_step(mj.scale_by_muon(**few), blocks)
    for view, (_, matrices) in cases.items():
        found = np.stack(matrices(np.asarray(whole[view])))
        np.testing.assert_allclose(found, alone[view], atol=1e-4)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: mj.muon(momentum=1.0), "momentum=1.0"),
        (lambda: mj.normuon(beta2=1.5), "beta2=1.5"),
        (lambda: mj.muon(float("nan")), "learning_rate=nan"),
        (lambda: mj.chain_with_pion(-0.1), "pion_lr=-0.1"),
        (lambda: mj.muon(aux_lr=-0.1), "aux_lr=-0.1"),
        (lambda: mj.muon(betas=(0.9, 1.0)), "beta 2=1.0"),
        (lambda: mj.scale_by_pion(weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda: mj.chain_with_muon(max_grad_norm=-1.0), "max_norm=-1.0"),
        (lambda: mj.muon(lora="product", lora_scale=0.0), "lora_scale=0.0"),
        (lambda: mj.muon(lora="B"), "lora"),
        (lambda: mj.muon(scale="rsm"), "rsm"),
        (lambda: mj.muon(ns="septic"), "septic"),
        (lambda: mj.muon(ns="cubic", filter="polar_express"), "polar_express"),
        (lambda: mj.pion(promote=2, cutoff=0.3), "cutoff=0.3"),
        (lambda: mj.scale_by_muon().init({"b": jnp.ones(3)}), "chain_with_muon"),
        (lambda: mj.muon(views="sxo").init({"w": jnp.ones((2, 3, 4))}), "sxo"),
        (lambda: mj.muon(views="io").init({"w": jnp.ones((2, 3, 4))}), "'io'"),
        (lambda: mj.read_stats(mj.muon().init({"w": jnp.ones((2, 2))})), "stats=True"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(("make", "options"), [(mj.muon, {"steps": 1}), (mj.pion, {"cutoff": 0.5})])
def test_options_that_shape_the_computation_must_be_static(make, options):
    """optax turns every number into an array; the error names the argument."""
    name = list(options)[-1]
    params = {"w": draw(6, 10)}
    with pytest.raises(ValueError, match=rf"static_args=\('{name}',\)"):
        optax.inject_hyperparams(make)(learning_rate=0.1, **options).init(params)

    tx = optax.inject_hyperparams(make, static_args=(name,))(learning_rate=0.1, **options)
    expected = first_step(make(0.1, **options), params, params)["w"]
    np.testing.assert_allclose(first_step(tx, params, params)["w"], expected, atol=1e-6)


def test_promote_and_numeric_scale_may_be_traced():
    grads = {"w": jnp.asarray(np.diag([1.0, 0.5, 0.2, 0.05]), jnp.float32)}

    @jax.jit
    @jax.vmap
    def direction(promote, scale):
        return first_step(mj.scale_by_pion(promote=promote, scale=scale), grads)["w"]

    result = direction(jnp.array([0, 2]), jnp.array([0.2, 1.0]))
    for k, (promote, scale) in enumerate([(0, 0.2), (2, 1.0)]):
        alone = first_step(mj.scale_by_pion(promote=promote, scale=scale), grads)["w"]
        np.testing.assert_allclose(result[k], alone, atol=1e-5)

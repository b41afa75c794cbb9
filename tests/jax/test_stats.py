"""Step statistics: hand-worked cases and equality with torch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import mesotron
from mesotron import jax as mj
from mesotron.jax.stats import ELEMENTWISE, SPECTRAL


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def network(seed: int) -> dict:
    layer = lambda i, o, k: {"kernel": draw(i, o, seed=seed + k), "bias": draw(o, seed=k)}  # noqa: E731
    return {
        "input": layer(3, 6, 0),
        "Dense_0": layer(6, 6, 1),
        "head": layer(6, 2, 2),
    }


def transposed(x: jax.Array) -> torch.Tensor:
    """Torch's (out, in) of JAX's (in, out)."""
    return torch.tensor(np.asarray(x).T.copy())


@pytest.mark.parametrize("rule", ["muon", "pion"])
def test_statistics_equal_those_of_torch(rule):
    """Two steps of a schedule; torch takes the cosine over up to 16 rows. Pion filters the even
    block out."""
    options = {"promote": 1} if rule == "pion" else {}
    tx = getattr(mj, rule)(optax.linear_schedule(0.0, 0.2, 2), stats=True, **options)
    params = {"strong": draw(6, 10, seed=5), "even": draw(8, 8, seed=6)}
    weights = {k: torch.nn.Parameter(transposed(p)) for k, p in params.items()}
    # On CPUs with fast bfloat16 torch's filter would use it, and JAX's does not.
    make = getattr(mesotron, rule.capitalize())
    optimizer = make(list(weights.values()), dtype="float32", **options)
    state = tx.init(params)
    update = jax.jit(tx.update)

    assert set(mj.read_stats(state)) == {*(f"{rule}/{key}" for key in SPECTRAL), "skipped"}
    for k in range(2):
        grads = {"strong": draw(6, 1, seed=k) * draw(1, 10) + 0.1 * draw(6, 10, seed=k)}
        grads["even"] = jnp.eye(8)
        _, state = update(grads, state, params)

        for name, w in weights.items():
            w.grad = transposed(grads[name])

        optimizer.param_groups[0]["lr"] = 0.1 * k
        optimizer.step()

    stats = mj.read_stats(state)
    expected = optimizer.stats()
    assert set(stats) == set(expected)

    for name, value in stats.items():
        assert float(value) == pytest.approx(expected[name], rel=2e-3, abs=1e-5), name

    assert expected[f"{rule}/dead_blocks"] == (0.5 if rule == "pion" else 0.0)


def test_chain_reports_every_group_and_its_real_update():
    tx = mj.chain_with_muon(
        0.02,
        3e-3,
        weight_decay=0.1,
        stats=True,
        steps=1,
    )

    params = network(0)
    grads = network(10)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    stats = mj.read_stats(state)

    groups = {
        "muon": SPECTRAL,
        "adamw": ELEMENTWISE,
        "adamw_vectors": ELEMENTWISE,
    }

    assert set(stats) == {f"{g}/{key}" for g, keys in groups.items() for key in keys} | {"skipped"}
    step = updates["Dense_0"]["kernel"] + 0.02 * 0.1 * params["Dense_0"]["kernel"]
    assert float(stats["muon/update_rms"]) == pytest.approx(rms([step]), rel=1e-4)

    ends = [updates[k]["kernel"] + 3e-3 * 0.1 * params[k]["kernel"] for k in ("input", "head")]
    assert float(stats["adamw/update_rms"]) == pytest.approx(rms(ends), rel=1e-4)

    vectors = [updates[k]["bias"] for k in params]
    assert float(stats["adamw_vectors/update_rms"]) == pytest.approx(rms(vectors), rel=1e-4)

    for group in groups:
        assert 0 < float(stats[f"{group}/cosine"]) <= 1


def rms(leaves) -> float:
    flat = np.concatenate([np.asarray(x).ravel() for x in leaves])
    return float(np.sqrt(np.square(flat).mean()))


def test_skipped_leaves_are_counted_and_count_nowhere_else():
    tx = mj.multi_transform_with_muon(
        0.02,
        3e-3,
        weight_decay=0.0,
        stats=True,
        steps=1,
    )

    grads = network(10)
    grads["head"]["bias"] = grads["head"]["bias"].at[0].set(jnp.nan)
    grads["Dense_0"]["kernel"] = grads["Dense_0"]["kernel"].at[0, 0].set(jnp.inf)
    _, state = jax.jit(tx.update)(grads, tx.init(grads))
    stats = {key: float(value) for key, value in mj.read_stats(state).items()}

    assert stats["skipped"] == 2
    assert stats["muon/skipped"] == stats["adamw_vectors/skipped"] == 1
    assert stats["adamw/skipped"] == 0
    assert stats["muon/update_rms"] == stats["muon/blocks"] == stats["muon/concentration"] == 0
    assert stats["adamw_vectors/update_rms"] == stats["adamw_vectors/cosine"] == 0
    assert stats["adamw/update_rms"] > 0


def test_each_run_of_a_vmap_has_its_own_statistics():
    tx = mj.muon(0.1, weight_decay=0.0, stats=True, steps=1)
    grads = {"w": jnp.stack([jnp.eye(4), jnp.ones((4, 4))])}
    _, state = jax.jit(jax.vmap(tx.update))(grads, jax.vmap(tx.init)(grads))
    found = mj.read_stats(state)["muon/concentration"]
    np.testing.assert_allclose(found, [0.25, 1.0], rtol=1e-5)


def test_duplicate_groups_are_refused():
    parts = {"a": mj.muon(0.1, stats=True), "b": mj.muon(0.2, stats=True)}
    tx = optax.partition(parts, {"x": "a", "y": "b"})
    with pytest.raises(ValueError, match="muon/"):
        mj.read_stats(tx.init({"x": draw(6, 10), "y": draw(6, 10)}))

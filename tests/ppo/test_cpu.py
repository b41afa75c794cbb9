"""What PPO does to be quick on a CPU changes nothing that it computes."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("jumanji")
jax = pytest.importorskip("jax")
jnp = jax.numpy
from mesotron.config import SnakeConfig  # noqa: E402
from mesotron.ppo import policy  # noqa: E402
from mesotron.ppo.hyper import make_runs  # noqa: E402
from mesotron.ppo.seeds import make_program, over_runs  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

CONFIG = SnakeConfig(width=3, height=2, d_model=16, num_heads=2, num_layers=1, max_steps=64)
ON_CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="JAX's own is used elsewhere")


def assert_close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6)


@ON_CPU
@pytest.mark.parametrize("queries", [5, 1])
def test_attention_on_a_cpu_is_jax_s_own(queries):
    draw = np.random.default_rng(0)
    Q = jnp.asarray(draw.normal(size=(3, queries, 2, 8)), jnp.float32)
    K, V = jnp.asarray(draw.normal(size=(2, 3, 5, 2, 8)), jnp.float32)

    def with_gradients(attend):
        return jax.jit(jax.value_and_grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2)))(Q, K, V)

    ours = with_gradients(lambda *x: policy._mix(*x, CONFIG))
    assert_close(ours, with_gradients(jax.nn.dot_product_attention))


def test_a_layer_is_its_product_over_any_leading_axes():
    draw = np.random.default_rng(0)
    layer = {"kernel": draw.normal(size=(3, 5)), "bias": draw.normal(size=5)}
    layer = jax.tree.map(lambda x: x.astype(np.float32), layer)
    for lead in ((), (2,), (2, 4)):
        X = draw.normal(size=(*lead, 3)).astype(np.float32)
        assert_close(policy._apply(layer, jnp.asarray(X)), X @ layer["kernel"] + layer["bias"])


def test_one_run_alone_has_the_axis_of_runs():
    def halve(tree, number):
        return {"made": tree["x"] / number}

    for num_runs in (1, 3):
        tree = {"x": jnp.arange(4.0 * num_runs).reshape(num_runs, 4)}
        numbers = 2.0 + jnp.arange(num_runs)
        assert_close(over_runs(halve)(tree, numbers), jax.vmap(halve)(tree, numbers))


@pytest.mark.slow
def test_a_run_alone_is_the_run_beside_another():
    """Up to rounding, which the first update has not yet let grow."""
    config = dataclasses.replace(CONFIG, num_envs=4, num_steps=8, num_minibatches=2, chunk=1)
    made = []
    for values in ([{"seed": 3}], [{"seed": 3}, {"seed": 4}]):
        runs, program = make_runs(config, values), make_program(config, len(values))
        _, metrics = program.advance(program.start(runs), runs, 1)
        made.append({name: x[:1] for name, x in metrics.items()})
    assert_close(*made)

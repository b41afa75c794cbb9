"""On four devices a jitted step keeps shardings and equals the step of one device."""

import pytest
from ppo.test_sharding import run_on_four_devices

SCRIPT = """
import jax, numpy as np, optax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from mesotron import jax as mj

assert jax.device_count() == 4
jax.config.update("jax_disable_most_optimizations", True)  # compiles in a third of the time
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
specs = {"rows": P("x", None), "cols": P(None, "x"), "stack": P("x", None, None), "whole": P()}
shapes = {"rows": (8, 12), "cols": (12, 8), "stack": (4, 8, 12), "whole": (8, 12)}
draw = np.random.default_rng(0).normal
fill = lambda: {k: jnp.asarray(draw(size=s), jnp.float32) for k, s in shapes.items()}
params, every = fill(), fill()
place = lambda tree: {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in tree.items()}

wanted = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
alike = {k: x for k, x in params.items() if k != "whole"}
cases = [
    (mj.muon(0.1, steps=1), alike),
    (mj.muon(0.1, steps=1, shardings=wanted), params),
]

for tx, params in cases:
    grads = {k: every[k] for k in params}
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    alone, _ = step(params, tx.init(params), grads)
    spread = place(params)
    state = tx.init(spread)
    for count in range(2):
        for tree in (spread, state[0].momentum):
            for k, x in tree.items():
                assert x.sharding.is_equivalent_to(wanted[k], x.ndim), (k, count, x.sharding)
        if count == 1:
            for k in params:
                np.testing.assert_allclose(spread[k], alone[k], atol=1e-5)
        spread, state = step(spread, state, place(grads))
"""


@pytest.mark.slow
def test_shardings_are_kept_under_jit():
    run_on_four_devices(SCRIPT)

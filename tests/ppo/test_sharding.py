"""Four devices that share the games of a run compute the gradient of one, and exchange no data.

Gradients are compared and not weights: a spectral step is scale-free, so weights would hide a
gradient that is four times too large.
"""

import os
import subprocess
import sys

import pytest

GRADIENTS = """
import dataclasses
import jax, numpy as np
import jax.numpy as jnp
jax.config.update("jax_disable_most_optimizations", True)
from mesotron.config import SnakeConfig
from mesotron.ppo.env import NUM_FEATURES, Observation
from mesotron.ppo.optimizer import make_hyper
from mesotron.ppo.loop import by_group, shuffled, take
from mesotron.ppo.loss import Minibatch, ppo_loss
from mesotron.ppo.program import make_mesh
from mesotron.ppo.policy import init_policy
from jax.sharding import NamedSharding, PartitionSpec as P

assert jax.device_count() == 4
config = SnakeConfig(width=3, height=2, num_envs=8, num_steps=6, num_minibatches=2, d_model=8,
                     num_heads=1, mlp_ratio=1, num_shards=4)
key, S, N = jax.random.PRNGKey(0), 6, 8
draw = np.random.default_rng(0).normal
cells = np.abs(draw(size=(S, N, 6, NUM_FEATURES))).astype(np.float32)
one = lambda: jnp.asarray(draw(size=(S, N)), jnp.float32)
batch = Minibatch(Observation(jnp.asarray(cells), jnp.ones((S, N, 4), bool)), jnp.ones((S, N), int),
              one() - 1.4, one(), one(), jnp.zeros((S, N, 2), jnp.uint32))
params = jax.jit(lambda: init_policy(key, config))()

@jax.jit
def gradient(params, batch, key):
    data = jax.tree.map(lambda x: by_group(x, 4), batch)
    minibatch = take(data, shuffled(key, config)[0])
    grads, metrics = jax.grad(ppo_loss, has_aux=True)(params, minibatch, config, make_hyper(config))
    return grads, metrics, minibatch.advantages

alone, _, order = gradient(params, batch, key)
mesh = make_mesh(config)
spread = jax.device_put(batch, NamedSharding(mesh, P(None, "shard")))
shared, _, placed = gradient(jax.device_put(params, NamedSharding(mesh, P())), spread, key)
np.testing.assert_array_equal(np.asarray(order), np.asarray(placed))
largest = 0.0
for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(shared)):
    assert len(b.sharding.device_set) == 4
    np.testing.assert_allclose(a, b, atol=2e-6)
    largest = max(largest, float(jnp.abs(a).max()))
assert largest > 1e-3
text = gradient.lower(params, spread, key).compile().as_text()
assert "all-reduce" in text
assert "all-to-all" not in text
"""

WHOLE_RUNS = """
import jax, numpy as np
from dataclasses import replace
jax.config.update("jax_disable_most_optimizations", True)
from mesotron.config import SnakeConfig
from mesotron.ppo.program import make_program, read_runs

base = SnakeConfig(width=3, height=3, num_envs=8, num_steps=8, num_minibatches=2, update_epochs=1,
                   d_model=8, num_heads=1, mlp_ratio=1, chunk=2, total_timesteps=512)
for config in (replace(base, num_shards=4), replace(base, num_shards=4, num_seeds=4)):
    runs = read_runs(config)
    program = make_program(config, len(runs.values))
    states, metrics = program.advance(program.start(runs), runs, 2)
    boards = states.observation.cells
    assert len(boards.sharding.device_set) == 4
    share = boards.addressable_shards[0].data.shape
    assert share[0] * share[1] * 4 == boards.shape[0] * boards.shape[1], share
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics))
"""


def run_on_four_devices(script: str) -> None:
    flags = "--xla_force_host_platform_device_count=4"
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
    }

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=900, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("script", [GRADIENTS, WHOLE_RUNS], ids=["gradients", "whole runs"])
def test_four_devices_share_games_or_seeds(script):
    run_on_four_devices(script)

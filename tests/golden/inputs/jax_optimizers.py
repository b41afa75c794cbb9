"""The optax twins, under several settings, on one tree and one sequence of gradients."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file

from mesotron import jax as mj

CHAINS = {
    "muon": lambda: mj.muon(0.02, stats=True),
    "muon_decay": lambda: mj.muon(0.02, aux_lr=1e-3, weight_decay=0.1, scale="spectral"),
    "pion": lambda: mj.pion(0.02, cutoff="noise"),
    "pion_promote": lambda: mj.pion(0.02, promote=2),
    "normuon": lambda: mj.normuon(0.02),
    "chain_muon": lambda: mj.chain_with_muon(muon_lr=0.02, aux_lr=1e-3, max_grad_norm=0.5),
    "chain_pion": lambda: mj.chain_with_pion(pion_lr=0.02, aux_lr=1e-3, max_grad_norm=0.5),
    "transform_muon": lambda: mj.multi_transform_with_muon(muon_lr=0.02, aux_lr=1e-3),
}


def make_params():
    draw = np.random.default_rng(0)
    sizes = [(3, 16), (16, 24), (24, 16), (16, 2)]
    params = {}
    for number, (inputs, outputs) in enumerate(sizes):
        kernel = draw.normal(size=(inputs, outputs)) / inputs**0.5
        params[f"layer_{number}"] = {"kernel": jnp.array(kernel), "bias": jnp.zeros(outputs)}
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


def loss(params, inputs, targets):
    hidden = inputs
    for number in range(4):
        layer = params[f"layer_{number}"]
        hidden = jnp.tanh(hidden @ layer["kernel"] + layer["bias"])
    return jnp.square(hidden - targets).mean()


def train(tx, steps=4):
    params = make_params()
    state = tx.init(params)
    draw = np.random.default_rng(1)

    @jax.jit
    def step(params, state, inputs, targets):
        grads = jax.grad(loss)(params, inputs, targets)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        inputs = draw.normal(size=(8, 3)).astype(np.float32)
        targets = np.sign(inputs[:, :2])
        params, state = step(params, state, inputs, targets)
    return params, state


def main():
    for name, make in CHAINS.items():
        params, state = train(make())
        weights = {}
        for path, leaf in jax.tree.leaves_with_path(params):
            weights[jax.tree_util.keystr(path)] = np.asarray(leaf)
        save_file(weights, f"{name}.safetensors")

        if name == "muon":
            stats = {key: float(value) for key, value in mj.read_stats(state).items()}
    with open("stats.json", "w") as file:
        json.dump(stats | {"labels": str(mj.label(make_params()))}, file)


sys.exit(main())

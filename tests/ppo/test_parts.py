"""The parts of PPO against hand-worked cases and plain loops."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("jumanji")
jax = pytest.importorskip("jax")
jnp = jax.numpy
from mesotron import jax as mesotron_jax  # noqa: E402
from mesotron.config import SnakeConfig  # noqa: E402
from mesotron.ppo.env import HEAD, NUM_FEATURES, Observation  # noqa: E402
from mesotron.ppo.gae import estimate_advantages  # noqa: E402
from mesotron.ppo.hyper import make_hyper, read_runs  # noqa: E402
from mesotron.ppo.loop import by_group, shuffled, take  # noqa: E402
from mesotron.ppo.loss import Batch, divergence, ppo_loss  # noqa: E402
from mesotron.ppo.policy import HIDDEN, apply_policy, entropy, init_policy, log_probs, mask_logits  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

CONFIG = SnakeConfig(width=3, height=2, d_model=16, num_heads=2, num_layers=2, max_steps=64)
KEY = jax.random.PRNGKey(0)
BATCH = 16
# Compiled once for each config: op by op, JAX compiles every operation on its own.
init = jax.jit(init_policy, static_argnames="config")
apply = jax.jit(apply_policy, static_argnames="config")
loss_of = jax.jit(ppo_loss, static_argnames="config")


def observe(batch: int = BATCH, config: SnakeConfig = CONFIG) -> Observation:
    """Positions with a head each; what else is on the board does not matter here."""
    draw = np.random.default_rng(0)
    cells = draw.uniform(size=(batch, config.num_cells, NUM_FEATURES)).astype(np.float32)
    cells[..., HEAD] = np.eye(config.num_cells)[draw.integers(config.num_cells, size=batch)]
    mask = draw.uniform(size=(batch, 4)) < 0.6
    return Observation(jnp.asarray(cells), jnp.asarray(mask | ~mask.any(1, keepdims=True)))


def plain_advantages(rewards, values, terminated, truncated, last, cut, gamma, lam):
    """The definition, sum by sum: discounted deltas up to the end of the game."""
    S, N = rewards.shape
    result = np.zeros((S, N))
    for n in range(N):
        for t in range(S):
            weight = 1.0
            for k in range(t, S):
                after = values[k + 1, n] if k + 1 < S else last[n]
                after = 0.0 if terminated[k, n] else cut[n] if truncated[k, n] else after
                result[t, n] += weight * (rewards[k, n] + gamma * after - values[k, n])
                weight *= gamma * lam
                if terminated[k, n] or truncated[k, n]:
                    break
    return result


def test_advantages_are_the_sums_of_the_definition():
    draw = np.random.default_rng(0)
    S, N = 9, 5
    rewards, values = draw.normal(size=(2, S, N))
    last, cut = draw.normal(size=(2, N))
    terminated = draw.uniform(size=(S, N)) < 0.2
    truncated = np.zeros((S, N), bool)
    truncated[4, 1:3] = ~terminated[4, 1:3]
    assert truncated.any()
    assert terminated.any()
    rest = (terminated, truncated, last, cut, 0.9, 0.8)
    found = estimate_advantages(*map(jnp.asarray, (rewards, values, *rest)))
    np.testing.assert_allclose(found, plain_advantages(rewards, values, *rest), atol=1e-5)


@jax.jit
def make_batch(params) -> Batch:
    """A minibatch that this very policy has acted."""
    seen = observe()
    keys = jax.random.split(KEY, BATCH)
    logits, values = apply_policy(params, seen, CONFIG, keys)
    moves = jax.random.categorical(KEY, logits)
    advantages = jnp.linspace(-1.0, 2.0, BATCH)
    return Batch(seen, moves, log_probs(logits, moves), advantages, values + 1.0, keys)


def test_the_loss_of_the_policy_that_acted_is_known():
    params = init(KEY, CONFIG)
    batch = make_batch(params)
    hyper = make_hyper(CONFIG)._replace(vf_coef=0.25, ent_coef=0.5)
    loss, metrics = loss_of(params, batch, CONFIG, hyper)
    assert float(metrics["loss/policy"]) == pytest.approx(0.0, abs=1e-5)  # -mean of standardised A
    assert float(metrics["loss/value"]) == pytest.approx(0.5, abs=1e-5)  # targets are one too high
    bonus = float(entropy(apply(params, batch.observation, CONFIG)[0]).mean())
    assert float(loss) == pytest.approx(0.25 * 0.5 - 0.5 * bonus, abs=1e-5)
    assert float(metrics["policy/kl"]) == pytest.approx(0.0, abs=1e-6)
    assert float(metrics["policy/clip_fraction"]) == 0.0


def test_a_step_down_the_gradient_makes_good_moves_likelier():
    params = init(KEY, CONFIG)
    batch = make_batch(params)
    hyper = make_hyper(CONFIG)._replace(vf_coef=0.0, ent_coef=0.0)

    @jax.jit
    def step(params):
        grads = jax.grad(lambda p: ppo_loss(p, batch, CONFIG, hyper)[0])(params)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)

    logits, _ = apply(step(params), batch.observation, CONFIG)
    gain = log_probs(logits, batch.actions) - batch.rollout_log_probs
    assert float((gain * batch.advantages).mean()) > 0


def test_the_pull_to_the_pretrained_policy():
    logits = jnp.log(jnp.array([[0.5, 0.5, 1e-9, 1e-9]]))
    other = jnp.log(jnp.array([[0.25, 0.75, 1e-9, 1e-9]]))
    by_hand = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert float(divergence(logits, other)) == pytest.approx(by_hand, abs=1e-5)
    assert float(divergence(logits, logits)) == pytest.approx(0.0, abs=1e-6)


def test_forbidden_moves_are_never_drawn_and_add_no_entropy():
    mask = jnp.array([[True, False, True, False], [False] * 4])
    logits = mask_logits(jnp.zeros((2, 4)), mask)
    np.testing.assert_allclose(entropy(logits), [np.log(2), np.log(4)], atol=1e-6)
    drawn = jax.random.categorical(KEY, logits[0], shape=(200,))
    assert set(np.asarray(drawn).tolist()) == {0, 2}


def test_the_policy_reads_the_heads_cell():
    params = init(KEY, CONFIG)
    params["actor"]["kernel"] *= 100  # a fresh actor is nearly silent
    seen = observe()
    moved = np.array(seen.cells)
    moved[..., HEAD] = np.roll(moved[..., HEAD], 1, axis=1)
    here, _ = apply(params, seen, CONFIG)
    there, _ = apply(params, Observation(jnp.asarray(moved), seen.mask), CONFIG)
    free = np.asarray(seen.mask)
    assert np.abs(np.asarray(here - there))[free].max() > 0.01


def test_a_fresh_policy_is_nearly_uniform():
    logits, _ = apply(init(KEY, CONFIG), observe(), CONFIG)
    normal = np.asarray(jax.nn.log_softmax(logits))
    legal = np.asarray(observe().mask)
    even = -np.log(legal.sum(1, keepdims=True))
    assert np.abs(normal - even)[legal].max() < 0.1


@pytest.mark.parametrize("mode", ["replace", "append"])
def test_a_convolution_may_come_first(mode):
    config = dataclasses.replace(CONFIG, use_cnn=True, cnn_features=8, cnn_mode=mode, num_layers=1)
    params = init(KEY, config)
    inputs = 8 if mode == "replace" else 8 + NUM_FEATURES
    assert params["input"]["kernel"].shape == (inputs, 16)
    _, values = apply(params, observe(), config)
    params["conv"]["kernel"] *= -1
    assert float(jnp.abs(apply(params, observe(), config)[1] - values).max()) > 1e-3


def test_hidden_matrices_alone_go_to_the_filter():
    config = dataclasses.replace(CONFIG, use_cnn=True)
    params = jax.eval_shape(lambda: init_policy(KEY, config))
    table = mesotron_jax.label(params, overrides=HIDDEN)
    layers = ("query", "key", "value", "out", "up", "down")
    hidden = {f"layers/{name}/kernel": "sio" for name in layers} | {"trunk/kernel": "io"}
    assert table.views() == hidden


def test_minibatches_hold_every_step_once_and_groups_stay_apart():
    config = SnakeConfig(num_envs=8, num_steps=6, num_minibatches=3, num_shards=4)
    places = jnp.arange(48).reshape(6, 8)
    index = jax.jit(shuffled, static_argnames="config")(KEY, config)
    assert index.shape == (3, 4, 4)
    data = by_group(places, 4)
    drawn = np.stack([take(data, one) for one in index])
    assert sorted(drawn.ravel().tolist()) == list(range(48))
    # Of each minibatch, the k-th quarter comes from the games of the k-th group.
    groups = drawn.reshape(3, 4, 4) % 8 // 2
    assert (groups == np.arange(4)[None, :, None]).all()


def test_runs_are_every_combination_of_values_and_seeds():
    config = SnakeConfig(sweep=("lr=0.1,0.2", "ent-coef=0,0.5,1"), num_seeds=2, seed=7)
    runs = read_runs(config)
    assert len(runs.values) == len({tuple(run.items()) for run in runs.values}) == 12
    np.testing.assert_allclose(runs.hyper.lr, [0.1] * 6 + [0.2] * 6)
    assert {run["seed"] for run in runs.values} == {7, 8}
    assert len({tuple(key) for key in np.asarray(runs.keys).tolist()}) == 2


@pytest.mark.parametrize("sweep", ["lr", "lr=", "lr=a", "width=4,5", "num_gradient_steps=3"])
def test_a_sweep_that_cannot_be_read_is_a_sentence(sweep):
    with pytest.raises(ValueError, match="must look like"):
        read_runs(SnakeConfig(sweep=(sweep,)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_envs": 0}, "num_envs=0 must be at least 1"),
        ({"width": 1}, "1x4"),
        ({"max_steps": 10}, "longer than a game"),
        ({"num_minibatches": 7}, "divide into 7"),
        ({"num_shards": 3}, "3 shards"),
        ({"d_model": 30}, "multiple of 4"),
        ({"death_penalty": 1.0}, "negative"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"kl_coef": 0.1}, "--pretrained-model"),
        ({"use_muon": True, "optim": "pion"}, "two optimizers"),
        ({"pion_cutoff": "loud"}, "'loud'"),
    ],
)
def test_a_config_that_would_be_silently_wrong_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SnakeConfig(), **change).check()


@pytest.mark.parametrize("readout", ["all", "head"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_played_is_what_is_learned_from(dtype, readout):
    """Two programs, one alone and one with its gradient: a GPU's compiler once made them differ in
    all boards but the first of every two or four, on 36 cells and from some hundred boards on."""
    gpu = jax.default_backend() == "gpu"
    width, boards = (64, 2048) if gpu else (8, 6)
    config = SnakeConfig(width=6, height=6, d_model=width, num_heads=width // 8, num_layers=2,
                         mlp_ratio=1, dtype=dtype, readout=readout)  # fmt: skip
    params = init(KEY, config)
    seen = observe(boards, config)

    def judge(params):
        return apply_policy(params, seen, config)[1]

    def learn(params):
        values, pull = jax.vjp(judge, params)
        return values, pull(jnp.ones_like(values))

    played, learned = jax.jit(judge)(params), jax.jit(learn)(params)[0]
    assert np.ptp(played) > 0.05
    np.testing.assert_allclose(played, learned, atol=0.06 if dtype == "bfloat16" else 0.005)

"""Advantages, loss, minibatches and learning rates against hand-worked cases and plain loops."""

import numpy as np
import pytest

pytest.importorskip("jumanji")
jax = pytest.importorskip("jax")
jnp = jax.numpy
from ppo.test_policy import CONFIG, KEY, observe  # noqa: E402

from mesotron.config import SnakeConfig  # noqa: E402
from mesotron.ppo.loop import by_group, shuffled, take  # noqa: E402
from mesotron.ppo.loss import Batch, estimate_advantages, kl_divergence, ppo_loss  # noqa: E402
from mesotron.ppo.optimizer import anneal, make_hyper, make_optimizer  # noqa: E402
from mesotron.ppo.policy import apply_policy, entropy, init_policy, log_probs  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

BATCH = 16


def advantages_by_definition(rewards, values, terminated, truncated, last, cut, gamma, lam):
    """Sum by sum: discounted deltas up to the end of the game."""
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


def test_advantages_equal_their_definition():
    rng = np.random.default_rng(0)
    S, N = 9, 5
    rewards, values = rng.normal(size=(2, S, N))
    last, cut = rng.normal(size=(2, N))
    terminated = rng.uniform(size=(S, N)) < 0.2
    truncated = np.zeros((S, N), bool)
    truncated[4, 1:3] = ~terminated[4, 1:3]
    assert truncated.any()
    assert terminated.any()
    rest = (terminated, truncated, last, cut, 0.9, 0.8)
    result = estimate_advantages(*map(jnp.asarray, (rewards, values, *rest)))
    expected = advantages_by_definition(rewards, values, *rest)
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.fixture(scope="module")
def acted():
    """A policy, a minibatch it has acted, its entropy, the loss with gradient."""

    @jax.jit
    def act():
        params, observation = init_policy(KEY, CONFIG), observe(BATCH)
        logits, values = apply_policy(params, observation, CONFIG)
        moves = jax.random.categorical(KEY, logits)
        advantages = jnp.linspace(-1.0, 2.0, BATCH)
        old = log_probs(logits, moves)
        batch = Batch(observation, moves, old, advantages, values + 1.0, None)
        return params, batch, entropy(logits).mean()

    loss = jax.jit(jax.value_and_grad(ppo_loss, has_aux=True), static_argnames="config")
    return *act(), loss


def test_loss_of_the_policy_that_acted(acted):
    params, batch, mean_entropy, loss_of = acted
    hyper = make_hyper(CONFIG)._replace(vf_coef=0.25, ent_coef=0.5)
    (loss, metrics), _ = loss_of(params, batch, config=CONFIG, hyper=hyper)
    assert float(metrics["loss/policy"]) == pytest.approx(0.0, abs=1e-5)  # standardized advantages
    assert float(metrics["loss/value"]) == pytest.approx(0.5, abs=1e-5)  # targets are one too high
    assert float(loss) == pytest.approx(0.25 * 0.5 - 0.5 * float(mean_entropy), abs=1e-5)
    assert float(metrics["policy/kl"]) == pytest.approx(0.0, abs=1e-6)
    assert float(metrics["policy/clip_fraction"]) == 0.0


def test_gradient_step_makes_good_moves_likelier(acted):
    params, batch, _, loss_of = acted
    hyper = make_hyper(CONFIG)._replace(vf_coef=0.0, ent_coef=0.0)
    _, grads = loss_of(params, batch, config=CONFIG, hyper=hyper)
    stepped = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
    logits, _ = jax.jit(lambda p: apply_policy(p, batch.observation, CONFIG))(stepped)
    gain = log_probs(logits, batch.actions) - batch.rollout_log_probs
    assert float((gain * batch.advantages).mean()) > 0


def test_kl_divergence_by_hand():
    logits = jnp.log(jnp.array([[0.5, 0.5, 1e-9, 1e-9]]))
    other = jnp.log(jnp.array([[0.25, 0.75, 1e-9, 1e-9]]))
    by_hand = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert float(kl_divergence(logits, other)) == pytest.approx(by_hand, abs=1e-5)
    assert float(kl_divergence(logits, logits)) == pytest.approx(0.0, abs=1e-6)


def test_minibatches_hold_every_step_once_and_keep_groups_apart():
    config = SnakeConfig(num_envs=8, num_steps=6, num_minibatches=3, num_shards=4)
    index = jax.jit(shuffled, static_argnames="config")(KEY, config)
    assert index.shape == (3, 4, 4)
    data = by_group(jnp.arange(48).reshape(6, 8), 4)
    drawn = np.stack([take(data, one) for one in index])
    assert sorted(drawn.ravel().tolist()) == list(range(48))
    # The k-th quarter of each minibatch comes from the games of the k-th group.
    groups = drawn.reshape(3, 4, 4) % 8 // 2
    assert (groups == np.arange(4)[None, :, None]).all()


def test_rates_are_annealed_over_gradient_steps_and_never_negative():
    config = SnakeConfig(
        num_envs=2048, num_steps=128, num_minibatches=32, max_steps=1000, total_timesteps=5_000_000
    )
    assert config.num_updates == 20
    assert config.num_gradient_steps == 20 * 4 * 32
    rates = np.asarray(anneal(0.02, config.num_gradient_steps)(np.arange(3000)))
    assert rates[20] > 0.98 * 0.02
    assert 0 <= rates[config.num_gradient_steps - 1] < 1e-3 * 0.02
    assert (rates >= 0).all()
    assert (np.diff(rates) <= 0).all()


@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_optimizer_stands_still_after_the_last_step(rule):
    config = SnakeConfig(optim=rule)
    tx = make_optimizer(config, make_hyper(config)._replace(num_gradient_steps=2.0))
    sizes = {"input": (3, 4), "trunk": (4, 4), "actor": (4, 2)}
    params = {name: {"kernel": jnp.ones(size)} for name, size in sizes.items()}
    state, update, sizes = tx.init(params), jax.jit(tx.update), []
    for _ in range(4):
        updates, state = update(params, state, params)
        sizes.append(max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(updates)))
    assert sizes[0] > sizes[1] > 0
    assert sizes[2:] == [0.0, 0.0]

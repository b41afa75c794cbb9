"""Advantages, loss, minibatches and learning rates against hand-worked cases and plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ppo.test_policy import CONFIG, KEY, apply, init, observe

from mesotron.config import SnakeConfig
from mesotron.ppo.loop import by_group, shuffled, take
from mesotron.ppo.loss import Minibatch, estimate_advantages, kl_divergence, ppo_loss
from mesotron.ppo.optimizer import make_hyper, make_optimizer

BATCH = 16


def advantages_by_definition(rewards, values, terminated, truncated, last, cut, gamma, lam):  # noqa: PLR0913  # those of the function under test
    """Sum by sum: discounted deltas up to the end of the game."""
    S, N = rewards.shape
    result = np.zeros((S, N))
    for n in range(N):
        for t in range(S):
            weight = 1.0
            for k in range(t, S):
                after = values[k + 1, n] if k + 1 < S else last[n]

                if terminated[k, n]:
                    after = 0.0
                elif truncated[k, n]:
                    after = cut[n]
                else:
                    after = after

                result[t, n] += weight * (rewards[k, n] + gamma * after - values[k, n])
                weight *= gamma * lam
                if terminated[k, n] or truncated[k, n]:
                    break

    return result


def test_advantages_equal_their_definition():
    rng = np.random.default_rng(0)
    S = 9
    N = 5
    rewards, values = rng.normal(size=(2, S, N))
    last, cut = rng.normal(size=(2, N))
    terminated = rng.uniform(size=(S, N)) < 0.2
    truncated = np.zeros((S, N), bool)
    truncated[4, 1:3] = ~terminated[4, 1:3]

    assert truncated.any()
    assert terminated.any()

    rest = (terminated, truncated, last, cut, 0.9, 0.8)
    result = jax.jit(estimate_advantages)(rewards, values, *rest)
    expected = advantages_by_definition(rewards, values, *rest)
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_loss_and_gradient_of_the_policy_that_acted():
    params = init(KEY, CONFIG)
    seen = observe(BATCH)
    logits, values = map(np.asarray, apply(params, seen, CONFIG))
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    moves = seen.mask.argmax(1)
    advantages = np.linspace(-1, 2, BATCH, dtype=np.float32)
    entropies = -(probabilities * np.log(probabilities + 1e-30)).sum(1)
    old = np.log(probabilities[np.arange(BATCH), moves])

    batch = Minibatch(
        seen,
        moves,
        old,
        advantages,
        values + 1,
        None,
    )

    loss_of = jax.jit(jax.value_and_grad(ppo_loss, has_aux=True), static_argnames="config")
    hyper = make_hyper(CONFIG)._replace(vf_coef=np.float32(0.25), ent_coef=np.float32(0.5))
    (loss, metrics), _ = loss_of(params, batch, config=CONFIG, hyper=hyper)

    assert float(metrics["loss/policy"]) == pytest.approx(0.0, abs=1e-5)  # standardized advantages
    assert float(metrics["loss/value"]) == pytest.approx(0.5, abs=1e-5)  # targets are one too high
    assert float(loss) == pytest.approx(0.25 * 0.5 - 0.5 * entropies.mean(), abs=1e-5)
    assert float(metrics["policy/kl"]) == pytest.approx(0.0, abs=1e-6)
    assert float(metrics["policy/clip_fraction"]) == 0.0

    # A step along the gradient of the policy's loss makes good moves likelier.
    hyper = hyper._replace(vf_coef=np.float32(0), ent_coef=np.float32(0))
    _, grads = loss_of(params, batch, config=CONFIG, hyper=hyper)
    stepped = jax.tree.map(lambda p, g: np.asarray(p) - 0.05 * np.asarray(g), params, grads)
    (loss, _), _ = loss_of(stepped, batch, config=CONFIG, hyper=hyper)

    assert loss < -1e-4


def test_kl_divergence_by_hand():
    logits, other = np.log([[[0.5, 0.5, 1e-9, 1e-9]], [[0.25, 0.75, 1e-9, 1e-9]]])
    by_hand = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    kl = jax.jit(kl_divergence)

    assert float(kl(logits, other)) == pytest.approx(by_hand, abs=1e-5)
    assert float(kl(logits, logits)) == pytest.approx(0.0, abs=1e-6)


def test_minibatches_hold_every_step_once_and_keep_groups_apart():
    config = SnakeConfig(
        num_envs=8,
        num_steps=6,
        num_minibatches=3,
        num_shards=4,
    )

    @jax.jit
    def draw():
        data = by_group(jnp.arange(48).reshape(6, 8), 4)
        return jnp.stack([take(data, one) for one in shuffled(KEY, config)])

    drawn = np.asarray(draw())
    assert sorted(drawn.ravel().tolist()) == list(range(48))

    # The k-th quarter of each minibatch comes from the games of the k-th group.
    groups = drawn.reshape(3, 4, 4) % 8 // 2
    assert (groups == np.arange(4)[None, :, None]).all()


def test_optimizer_stands_still_after_the_last_step():
    config = SnakeConfig(optim="muon")  # the trunk has Muon, the others Adam
    tx = make_optimizer(config, make_hyper(config)._replace(num_gradient_steps=2.0))
    sizes = {"input": (3, 4), "trunk": (4, 4), "actor": (4, 2)}
    params = {name: {"kernel": np.ones(size, np.float32)} for name, size in sizes.items()}
    state = jax.jit(tx.init)(params)
    update = jax.jit(tx.update)

    sizes = []
    for _ in range(4):
        updates, state = update(params, state, params)
        sizes.append(max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(updates)))

    assert sizes[0] > sizes[1] > 0
    assert sizes[2:] == [0.0, 0.0]

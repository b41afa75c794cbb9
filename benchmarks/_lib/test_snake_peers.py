"""The competitors of PPO have the same game, network, loss and routing as `mesotron.ppo`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import mesotron

jax = pytest.importorskip("jax")
pytest.importorskip("jumanji")
pytest.importorskip("stable_baselines3")
jnp = jax.numpy
from benchmarks._lib import plain_ppo  # noqa: E402
from benchmarks._lib.snake_gym import SnakeVecEnv  # noqa: E402
from benchmarks._lib.snake_numpy import SnakeNumpy  # noqa: E402
from benchmarks._lib.snake_sb3 import ENDS, SnakeNetwork, make_sb3  # noqa: E402
from mesotron.config import SnakeConfig  # noqa: E402
from mesotron.jax import label  # noqa: E402
from mesotron.ppo.env import HEAD, NUM_FEATURES, EnvState, Observation, SnakeEnv  # noqa: E402
from mesotron.ppo.loss import Minibatch, estimate_advantages, ppo_loss  # noqa: E402
from mesotron.ppo.optimizer import make_hyper  # noqa: E402
from mesotron.ppo.policy import HIDDEN, apply_policy, init_policy  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

pytestmark = pytest.mark.slow
TINY = SnakeConfig(
    width=3,
    height=3,
    num_envs=4,
    num_steps=8,
    num_minibatches=2,
    update_epochs=1,
    d_model=8,
    num_layers=2,
    num_heads=2,
    dtype="float32",
    lr=3e-3,
    total_timesteps=64,
)


def observations(count: int) -> Observation:
    rng = np.random.default_rng(0)
    cells = rng.uniform(size=(count, TINY.num_cells, NUM_FEATURES)).astype(np.float32)
    cells[..., HEAD] = np.eye(TINY.num_cells)[rng.integers(TINY.num_cells, size=count)]
    mask = rng.uniform(size=(count, 4)) < 0.6
    mask[0] = False  # no legal move: all stay open

    return Observation(jnp.asarray(cells), jnp.asarray(mask))


@pytest.mark.parametrize("readout", ["all", "head"])
def test_networks_agree(readout):
    config = replace(TINY, readout=readout)
    seen = observations(5)
    params = jax.jit(lambda key: init_policy(key, config))(jax.random.PRNGKey(0))
    params = jax.tree.map(lambda x: np.asarray(x) + 0.1, params)
    network = SnakeNetwork(config)
    network.load_jax(params)

    with torch.no_grad():
        torch_logits, torch_values = network(*(torch.tensor(np.asarray(x)) for x in seen))

    logits, values = jax.jit(lambda params: apply_policy(params, seen, config))(params)
    np.testing.assert_allclose(torch_logits.numpy(), logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(torch_values.numpy()[:, 0], values, rtol=1e-4, atol=1e-4)


def test_torch_and_jax_send_the_same_layers_to_muon():
    params = init_policy(jax.random.PRNGKey(0), TINY)
    in_jax = {
        path.removesuffix("/kernel").rpartition("/")[2]
        for path in label(params, overrides=HIDDEN).views()
    }

    rows = mesotron.route(SnakeNetwork(TINY), overrides=ENDS).rows
    in_torch = set()
    for row in rows:
        if row.rule == "muon":
            in_torch.add(row.name.split(".")[-2])

    assert in_torch == in_jax == {"query", "key", "value", "out", "up", "down", "trunk"}


def test_batched_games_restart_and_tell_death_from_the_time_limit():
    config = SnakeConfig(
        width=3,
        height=3,
        num_envs=6,
        num_steps=8,
        max_steps=8,
        seed=1,
    )

    env = SnakeVecEnv(config)
    seen = env.reset()
    rng = np.random.default_rng(0)

    ended = {True: 0, False: 0}
    for _ in range(40):
        moves = (seen["mask"] * rng.uniform(0.5, 1, seen["mask"].shape)).argmax(1)
        moves[0] = 0  # the first snake runs into the wall

        seen, _, dones, infos = env.step(moves)
        for k in np.flatnonzero(dones):
            info = infos[k]
            cut = info["TimeLimit.truncated"]
            ended[cut] += 1

            assert seen["cells"][k, :, 0].sum() == 1, "a new snake has one cell"
            if cut:  # the last observation shows the whole snake
                length = info["terminal_observation"]["cells"][:, 0].sum()
                assert length == 1 + info["episode"]["r"]
                assert info["episode"]["l"] == 8

    assert min(ended.values()) > 0


def test_numpy_game_equals_jax_game():
    config = SnakeConfig(
        width=3,
        height=4,
        num_steps=8,
        max_steps=40,
    )

    env = SnakeEnv(config)
    game = SnakeNumpy(config)
    game.reset(seed=0)
    step_in_jax = jax.jit(env.step)
    rng = np.random.default_rng(0)

    ends = set()
    for number in range(8):
        state, _ = env.reset(jax.random.PRNGKey(number))
        game.reset()
        game.place(tuple(map(int, state.game.head_position)), fruit_of(state))

        for k in range(config.time_limit):
            mask = np.asarray(state.game.action_mask)

            if mask.any() and k != 9 * number:
                legal = np.flatnonzero(mask)
            else:
                legal = np.arange(4)

            move = int(rng.choice(legal))
            state, step = step_in_jax(state, move)
            _, reward, terminated, truncated, info = game.step(move)

            assert (reward, terminated, truncated) == (step.reward, step.terminated, step.truncated)
            assert info["fruit"] == step.fruit

            if terminated or truncated:
                ends.add((terminated, truncated))
                break

            game.fruit = fruit_of(state)
            expected = step.final_observation
            np.testing.assert_allclose(game.observe()["cells"], expected.cells, rtol=1e-6)
            np.testing.assert_array_equal(game.observe()["mask"], expected.mask)

    assert ends == {(True, False), (False, True)}


def fruit_of(state: EnvState) -> tuple[int, int]:
    row, column = state.game.fruit_position
    return int(row), int(column)


def test_plain_loop_has_our_advantages_and_loss():
    rng = np.random.default_rng(1)
    S = 8
    N = 4
    numbers = lambda: jnp.asarray(rng.normal(size=(S, N)), jnp.float32)  # noqa: E731
    done = jnp.asarray(rng.uniform(size=(S, N)) < 0.2)
    action = jnp.asarray(rng.integers(4, size=S * N))
    memory = plain_ppo.Memory(
        observations(S * N), action, -jnp.exp(numbers()), numbers(), numbers(), done, {}
    )
    last = jnp.arange(4.0)
    never = jnp.zeros_like(done)
    ours = estimate_advantages(
        memory.reward, memory.value, done, never, last, last, TINY.gamma, TINY.gae_lambda
    )
    plain = plain_ppo.estimate(memory, last, TINY)
    np.testing.assert_allclose(plain, ours, rtol=1e-5, atol=1e-5)
    params = init_policy(jax.random.PRNGKey(0), TINY)
    advantages = plain.ravel()
    log_prob = memory.log_prob.ravel()
    targets = advantages + memory.value.ravel()
    keys = jnp.zeros((32, 2), jnp.uint32)

    batch = Minibatch(
        memory.observation,
        memory.action,
        log_prob,
        advantages,
        targets,
        keys,
    )

    flat = memory._replace(log_prob=log_prob)
    plain_loss = plain_ppo.loss_of(params, (flat, advantages, targets), TINY)
    our_loss, _ = ppo_loss(params, batch, TINY, make_hyper(TINY))

    assert float(plain_loss) == pytest.approx(float(our_loss), rel=1e-5)


@pytest.mark.parametrize("games", ["batched", "in_turn", "processes"])
def test_sb3_learns_with_a_routed_optimizer(games):
    model = make_sb3(replace(TINY, anneal_lr=False), "cpu", games)
    network = model.policy.network
    optimizer = mesotron.pion(
        network,
        lr=TINY.lr,
        weight_decay=0.0,
        overrides=ENDS,
        cutoff="noise",
    )

    model.policy.optimizer = optimizer
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    model.learn(TINY.batch_size)

    assert all(not torch.equal(p, before[name]) for name, p in network.named_parameters())
    assert optimizer.stats()["pion/update_rms"] > 0

    # Stable-Baselines3 sets one rate for all groups.
    assert {group["lr"] for group in optimizer.param_groups} == {TINY.lr}
    model.get_env().close()


def test_unsupported_settings_are_refused():
    with pytest.raises(ValueError, match="dropout"):
        make_sb3(SnakeConfig(dropout=0.1))

"""The peers of PPO: the same game, network, loss and routing outside of `mesotron.ppo`."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import mesotron

jax = pytest.importorskip("jax")
pytest.importorskip("jumanji")
pytest.importorskip("stable_baselines3")
jnp = jax.numpy
from mesotron.bench import plain_ppo, ppo_speed  # noqa: E402
from mesotron.bench.snake_gym import SnakeGym, SnakeVecEnv  # noqa: E402
from mesotron.bench.snake_numpy import SnakeNumpy  # noqa: E402
from mesotron.bench.snake_sb3 import ENDS, SnakeNetwork, make_sb3  # noqa: E402
from mesotron.config import BenchPpoConfig, SnakeConfig  # noqa: E402
from mesotron.jax import label  # noqa: E402
from mesotron.ppo.env import HEAD, NUM_FEATURES, EnvState, Observation, SnakeEnv  # noqa: E402
from mesotron.ppo.gae import estimate_advantages  # noqa: E402
from mesotron.ppo.hyper import make_hyper  # noqa: E402
from mesotron.ppo.loss import Batch, ppo_loss  # noqa: E402
from mesotron.ppo.policy import HIDDEN, apply_policy, init_policy  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

TINY = SnakeConfig(
    width=3, height=3, num_envs=4, num_steps=8, num_minibatches=2, update_epochs=1,
    d_model=8, num_layers=2, num_heads=2, dtype="float32", lr=3e-3, total_timesteps=64,
)  # fmt: skip


def observations(count: int) -> Observation:
    rng = np.random.default_rng(0)
    cells = rng.uniform(size=(count, TINY.num_cells, NUM_FEATURES)).astype(np.float32)
    cells[..., HEAD] = np.eye(TINY.num_cells)[rng.integers(TINY.num_cells, size=count)]
    mask = rng.uniform(size=(count, 4)) < 0.6
    mask[0] = False  # no legal move: all stay open
    return Observation(jnp.asarray(cells), jnp.asarray(mask))


@pytest.mark.parametrize("readout", ["all", "head"])
def test_the_networks_are_the_same(readout):
    config = replace(TINY, readout=readout)
    seen = observations(5)
    params = jax.jit(lambda key: init_policy(key, config))(jax.random.PRNGKey(0))
    params = jax.tree.map(lambda x: np.asarray(x) + 0.1, params)
    network = SnakeNetwork(config)
    network.load_jax(params)
    with torch.no_grad():
        found = network(*(torch.tensor(np.asarray(x)) for x in seen))
    logits, values = jax.jit(lambda params: apply_policy(params, seen, config))(params)
    np.testing.assert_allclose(found[0].numpy(), logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1].numpy()[:, 0], values, rtol=1e-4, atol=1e-4)


def test_torch_and_jax_send_the_same_layers_to_muon():
    params = init_policy(jax.random.PRNGKey(0), TINY)
    ours = {
        path.removesuffix("/kernel").rpartition("/")[2]
        for path in label(params, overrides=HIDDEN).views()
    }
    rows = mesotron.route(SnakeNetwork(TINY), overrides=ENDS).rows
    theirs = {row.name.split(".")[-2] for row in rows if row.rule == "muon"}
    assert theirs == ours == {"query", "key", "value", "out", "up", "down", "trunk"}


def test_games_end_start_again_and_tell_death_from_the_time_limit():
    config = SnakeConfig(width=3, height=3, num_envs=6, num_steps=8, max_steps=8, seed=1)
    env = SnakeVecEnv(config)
    seen = env.reset()
    assert seen["cells"].shape == (6, 9, NUM_FEATURES)
    rng = np.random.default_rng(0)
    ended = {True: 0, False: 0}
    for _ in range(40):
        moves = (seen["mask"] * rng.uniform(0.5, 1, seen["mask"].shape)).argmax(1)
        moves[0] = 0  # the first snake runs into the wall
        seen, _, dones, infos = env.step(moves)
        for k, (done, info) in enumerate(zip(dones, infos, strict=True)):
            assert bool(info) == bool(done)
            if done:
                cut = info["TimeLimit.truncated"]
                ended[cut] += 1
                assert info["episode"]["l"] == 8 if cut else info["episode"]["l"] <= 8
                assert seen["cells"][k, :, 0].sum() == 1, "a new snake has one cell"
                if cut:  # the game went on: its last picture has every cell of the snake
                    length = info["terminal_observation"]["cells"][:, 0].sum()
                    assert length == 1 + info["episode"]["r"]
    assert min(ended.values()) > 0
    with pytest.raises(ValueError, match="one program"):
        env.set_attr("seed", 3)


def test_one_game_in_gymnasiums_form():
    env = SnakeGym(TINY)
    first, _ = env.reset(seed=3)
    again, _ = env.reset(seed=3)
    np.testing.assert_array_equal(first["cells"], again["cells"])
    assert env.observation_space.contains(first)
    fruit = total = 0
    for _ in range(100):
        first, reward, terminated, truncated, info = env.step(int(first["mask"].argmax()))
        total, fruit = total + reward, info["fruit"]
        if terminated or truncated:
            break
    assert total == fruit


def test_the_game_in_numpy_is_the_game_in_jax():
    config = SnakeConfig(width=3, height=4, num_steps=8, max_steps=40)
    env, game = SnakeEnv(config), SnakeNumpy(config)
    game.reset(seed=0)
    step_in_jax = jax.jit(env.step)
    rng, ends = np.random.default_rng(0), set()
    for number in range(8):
        state, _ = env.reset(jax.random.PRNGKey(number))
        game.reset()
        game.place(tuple(map(int, state.game.head_position)), fruit_of(state))
        for k in range(config.time_limit):
            mask = np.asarray(state.game.action_mask)
            legal = np.flatnonzero(mask) if mask.any() and k != 9 * number else np.arange(4)
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


@pytest.mark.parametrize("games", ["in_turn", pytest.param("processes", marks=pytest.mark.slow)])
def test_stable_baselines3_takes_the_game_in_numpy(games):
    """As its users have games: one after the other, and each in a process of its own."""
    config = replace(TINY, num_envs=2, num_minibatches=2)
    model = make_sb3(config, "cpu", games)
    model.learn(config.batch_size)
    assert model.num_timesteps == config.batch_size
    assert model.get_env().num_envs == 2
    model.get_env().close()


def rollout(num_steps: int, num_games: int) -> plain_ppo.Memory:
    rng = np.random.default_rng(1)
    numbers = lambda: jnp.asarray(rng.normal(size=(num_steps, num_games)), jnp.float32)  # noqa: E731
    done = jnp.asarray(rng.uniform(size=(num_steps, num_games)) < 0.2)
    seen = observations(num_steps * num_games)
    action = jnp.asarray(rng.integers(4, size=num_steps * num_games))
    return plain_ppo.Memory(seen, action, -jnp.exp(numbers()), numbers(), numbers(), done, {})


def test_the_plain_loop_estimates_and_scores_as_ours():
    """Where nothing is cut off, the two differ in their loops alone."""
    memory, last = rollout(8, 4), jnp.arange(4.0)
    never = jnp.zeros_like(memory.done)
    ours = estimate_advantages(
        memory.reward, memory.value, memory.done, never, last, last, TINY.gamma, TINY.gae_lambda
    )
    plain = plain_ppo.estimate(memory, last, TINY)
    np.testing.assert_allclose(plain, ours, rtol=1e-5, atol=1e-5)

    params = init_policy(jax.random.PRNGKey(0), TINY)
    advantages, log_prob = plain.ravel(), memory.log_prob.ravel()
    targets = advantages + memory.value.ravel()
    flat = memory._replace(log_prob=log_prob)
    keys = jnp.zeros((32, 2), jnp.uint32)
    batch = Batch(memory.observation, memory.action, log_prob, advantages, targets, keys)
    found = plain_ppo.loss_of(params, (flat, advantages, targets), TINY)
    expected, _ = ppo_loss(params, batch, TINY, make_hyper(TINY))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("rule", ["muon", "pion"])
def test_stable_baselines3_learns_with_a_routed_optimizer(rule):
    model = make_sb3(replace(TINY, anneal_lr=False), device="cpu")
    network = model.policy.network
    make = {"muon": mesotron.muon, "pion": mesotron.pion}[rule]
    strength = {"cutoff": "noise"} if rule == "pion" else {}
    optimizer = make(network, lr=TINY.lr, weight_decay=0.0, overrides=ENDS, **strength)
    model.policy.optimizer = optimizer
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    model.learn(TINY.batch_size)
    assert all(not torch.equal(p, before[name]) for name, p in network.named_parameters())
    assert optimizer.stats()[f"{rule}/update_rms"] > 0
    # Stable-Baselines3 sets one rate for all groups.
    assert {group["lr"] for group in optimizer.param_groups} == {TINY.lr}


def test_what_the_peer_has_not_is_refused():
    with pytest.raises(ValueError, match="dropout"):
        make_sb3(SnakeConfig(dropout=0.1))


def test_ratios_and_shares():
    speeds = {"mesotron_adam": 90.0, "mesotron_muon": 81.0, "sb3_adam": 30.0}
    rows = [{"kind": k, "num_envs": 8, "speed": speed} for k, speed in speeds.items()]
    rows += [{"kind": "mesotron_adam", "num_envs": 64, "speed": 600.0}]
    found = ppo_speed.ratios(rows, "speed")
    assert found == {
        "ours_over_sb3@8": 3.0,
        "muon_share_of_step@8": pytest.approx(0.1),
        "fastest_ours_over_fastest_sb3": 20.0,
    }


def test_bench_ppo_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="mesotron_muon"):
        ppo_speed.run(BenchPpoConfig(contenders=("sb3_addam",)))
    with pytest.raises(ValueError, match="sb3_adam@64"):
        ppo_speed.run(BenchPpoConfig(contenders=("sb3_adam@many",)))
    with pytest.raises(ValueError, match="one repeat"):
        ppo_speed.run(BenchPpoConfig(repeats=0))


@pytest.mark.slow
def test_bench_ppo_times_everything(tmp_path, capsys):
    out = tmp_path / "result.json"
    config = BenchPpoConfig(
        board=3, num_envs=4, num_steps=8, num_minibatches=2, update_epochs=1, d_model=8,
        num_layers=1, num_heads=2, updates=2, repeats=1, out=out,
    )  # fmt: skip
    assert ppo_speed.run(config) == 0
    result = json.loads(out.read_text())
    assert [row["name"] for row in result["contenders"]] == list(ppo_speed.CONTENDERS)
    assert all(row["steps_per_second"] > 0 for row in result["contenders"])
    wanted = {"ours_over_sb3@4", "ours_over_plain_jax@4", "muon_share_of_step@4"}
    assert wanted <= set(result["ratios"])
    assert "steps/s" in capsys.readouterr().out

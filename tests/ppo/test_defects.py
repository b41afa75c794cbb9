"""Eleven defects that a Snake trainer with this interface once had, and that kept it from learning.

Each has a test by its number; the eleventh, on what a run writes, is in test_ppo_guard.
"""

import numpy as np
import pytest

pytest.importorskip("jumanji")
jax = pytest.importorskip("jax")
jnp = jax.numpy
from mesotron import jax as mesotron_jax  # noqa: E402
from mesotron.arguments import parse  # noqa: E402
from mesotron.config import SnakeConfig  # noqa: E402
from mesotron.jax import apply_filter  # noqa: E402
from mesotron.ppo.env import HEAD, SnakeEnv  # noqa: E402
from mesotron.ppo.evaluate import play_games  # noqa: E402
from mesotron.ppo.hyper import anneal, make_hyper, make_optimizer  # noqa: E402
from mesotron.ppo.policy import HIDDEN, apply_policy, init_policy  # noqa: E402
from mesotron.spectral import make_filter  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

KEY = jax.random.PRNGKey(0)
SMALL = SnakeConfig(width=4, height=3, d_model=8, num_heads=1, mlp_ratio=1)
ORDER, BODY, FRUIT = 4, 0, 3


@pytest.fixture(scope="module")
def random_game():
    """400 legal moves of one board at a time: what each step showed."""
    env = SnakeEnv(SMALL)

    @jax.jit
    def play(key):
        def one_more(carry, key):
            state, mask = carry
            move = jax.random.categorical(key, jnp.where(mask, 0.0, -1e9))
            state, step = env.step(state, move)
            return (state, step.observation.mask), step

        state, seen = env.reset(key)
        return jax.lax.scan(one_more, (state, seen.mask), jax.random.split(key, 400))[1]

    return jax.tree.map(np.asarray, play(KEY))


def test_defect_1_a_finished_game_starts_again(random_game):
    ended = random_game.terminated | random_game.truncated
    assert ended.sum() > 3
    after = np.flatnonzero(ended)[:-1] + 1
    assert (random_game.length[after] == 1).all()
    assert random_game.reward[after[0] :].sum() > 0  # games after the first are worth playing


def test_defect_2_rates_are_annealed_over_gradient_steps_and_never_negative():
    config = SnakeConfig(num_envs=2048, num_steps=128, num_minibatches=32, max_steps=1000,
                         total_timesteps=5_000_000)  # fmt: skip
    assert config.num_updates == 20
    assert config.num_gradient_steps == 20 * 4 * 32
    rates = np.asarray(anneal(0.02, config.num_gradient_steps)(np.arange(3000)))
    assert rates[20] > 0.98 * 0.02
    last = rates[config.num_gradient_steps - 1]
    assert 0 <= last < 1e-3 * 0.02
    assert (rates >= 0).all()
    assert (np.diff(rates) <= 0).all()


@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_defect_2_the_optimizer_stands_still_after_the_last_step(rule):
    config = SnakeConfig(width=2, height=2, d_model=4, num_heads=1, mlp_ratio=1, optim=rule)
    tx = make_optimizer(config, make_hyper(config)._replace(num_gradient_steps=2.0))
    params = jax.jit(lambda: init_policy(KEY, config))()
    update = jax.jit(tx.update)
    state, sizes = tx.init(params), []
    for _ in range(4):
        updates, state = update(params, state, params)
        sizes.append(max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(updates)))
    assert sizes[0] > sizes[1] > 0
    assert sizes[2:] == [0.0, 0.0]


def test_defect_3_head_and_direction_are_seen(random_game):
    cells = random_game.final_observation.cells
    long = cells[cells[..., BODY].sum(1) >= 3]
    assert len(long) > 10
    for board in long:
        assert board[:, HEAD].sum() == 1
        order = board[board[:, BODY] > 0, ORDER]
        assert len(set(order.tolist())) == len(order)  # every cell knows its place in the body
        assert board[:, ORDER].argmax() == board[:, HEAD].argmax()


def test_defect_4_momentum_stays_raw_and_the_update_is_orthogonal():
    grad = {"w": jax.random.normal(KEY, (6, 9))}
    tx = mesotron_jax.scale_by_muon(0.9, nesterov=True, scale="spectral")
    step = jax.jit(tx.update)
    updates, state = step(grad, tx.init(grad))
    np.testing.assert_allclose(state.momentum["w"], 0.1 * grad["w"], rtol=1e-5)
    updates, state = step(grad, state)
    np.testing.assert_allclose(state.momentum["w"], 0.19 * grad["w"], rtol=1e-5)
    sigma = np.linalg.svd(updates["w"], compute_uv=False) / np.sqrt(9 / 6)
    assert (sigma > 0.6).all()
    assert (sigma < 1.25).all()


def test_defect_5_small_singular_values_are_raised_too():
    U, _, V = np.linalg.svd(np.random.default_rng(0).normal(size=(64, 256)), full_matrices=False)
    X = jnp.asarray((U * np.geomspace(1, 1e-3, 64)) @ V, jnp.float32)[None]
    quintic = np.linalg.svd(apply_filter(X, make_filter("muon"))[0], compute_uv=False)
    short = np.linalg.svd(apply_filter(X, make_filter("cubic", steps=5))[0], compute_uv=False)
    assert np.median(quintic) > 0.7
    assert np.median(short) < 0.2  # what the five cubic steps had given


def test_defect_6_wide_and_tall_matrices_get_one_step_and_no_params_are_needed():
    W = jax.random.normal(KEY, (5, 20))
    tx = mesotron_jax.muon(0.1, weight_decay=0.0, scale=1.0)
    wide, _ = jax.jit(tx.update)({"w": W}, tx.init({"w": W}))
    tall, _ = jax.jit(tx.update)({"w": W.T}, tx.init({"w": W.T}))
    np.testing.assert_allclose(wide["w"], tall["w"].T, atol=1e-6)


def test_defect_7_input_positions_and_heads_are_left_to_adam():
    params = jax.eval_shape(lambda: init_policy(KEY, SMALL))
    table = mesotron_jax.label(params, overrides=HIDDEN)
    rules = {row.path: row.rule for row in table.rows}
    for path in ("input/kernel", "position/rows", "position/columns", "actor/kernel",
                 "critic/kernel", "final_norm/scale"):  # fmt: skip
        assert rules[path] == "adamw", path
    assert rules["layers/query/kernel"] == rules["layers/up/kernel"] == "matrix"


def test_defect_8_dropout_drops_the_same_units_when_acting_and_when_scoring():
    config = SnakeConfig(width=3, height=3, d_model=8, num_heads=1, mlp_ratio=1, dropout=0.4)
    params = jax.jit(lambda: init_policy(KEY, config))()
    env = SnakeEnv(config)
    _, seen = jax.jit(jax.vmap(env.reset))(jax.random.split(KEY, 6))
    score = jax.jit(lambda seen, keys: apply_policy(params, seen, config, keys)[1])
    keys = jax.random.split(KEY, 6)
    acted = score(seen, keys)
    order = jnp.array([3, 0, 5, 1, 4, 2])  # as a shuffled minibatch has them
    shuffled = jax.tree.map(lambda x: x[order], seen)
    np.testing.assert_allclose(score(shuffled, keys[order]), acted[order], atol=1e-6)
    assert float(jnp.abs(score(seen, keys[order]) - acted).max()) > 1e-3  # it does drop


def test_defect_9_fruit_lies_on_free_cells(random_game):
    alive = ~random_game.terminated
    cells = random_game.final_observation.cells[alive]
    assert not (cells[..., FRUIT] * cells[..., BODY]).any()


def test_defect_9_a_game_is_counted_up_to_its_own_end():
    play = jax.jit(lambda key: play_games(lambda key, seen: jnp.zeros(32, int), key, SMALL, 32))
    games = play(KEY)  # always up: at most as many steps as there are rows
    lengths = np.asarray(games.length)
    assert set(lengths.tolist()) == {1, 2, 3}
    assert (np.asarray(games.fruit) < lengths).all()
    assert not np.asarray(games.cut).any()


@pytest.mark.parametrize("flag", ["anneal-lr", "muon-nesterov", "action-mask"])
def test_defect_10_switches_can_be_switched_off(flag):
    name = flag.replace("-", "_")
    assert getattr(parse(SnakeConfig, [], "x"), name) is True
    for words in (
        [f"--no-{flag}"],
        [f"--{flag}=false"],
        [f"--{name}=False"],
        [f"--{name}", "False"],
    ):
        assert getattr(parse(SnakeConfig, words, "x"), name) is False, words
    for words in ([f"--{flag}"], [f"--{name}=True"], [f"--{name}", "true"]):
        assert getattr(parse(SnakeConfig, words, "x"), name) is True, words

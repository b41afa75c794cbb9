"""The adapter of Snake: Jumanji's rules, games that go on, a time limit that is not death."""

import numpy as np
import pytest

pytest.importorskip("jumanji")
jax = pytest.importorskip("jax")
jnp = jax.numpy
from mesotron.config import SnakeConfig  # noqa: E402
from mesotron.ppo.env import HEAD, SnakeEnv  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

CONFIG = SnakeConfig(width=4, height=3, max_steps=20, death_penalty=-2.0, step_penalty=-0.25)
GAMES, STEPS = 24, 120
BODY, FRUIT, TIMED = 0, 3, 5


@pytest.fixture(scope="module")
def record():
    """Random play, half of the games among legal moves: every state, move and step."""
    env = SnakeEnv(CONFIG)

    def one_more(carry, key):
        state, mask = carry
        legal = mask | ~(jnp.arange(GAMES) % 2 == 0)[:, None]
        moves = jax.random.categorical(key, jnp.where(legal, 0.0, -1e9))
        # Jumanji itself, from the same position: what the rules say.
        plain, told = jax.vmap(env.game.step)(state.game, moves)
        state, step = jax.vmap(env.step)(state, moves)
        return (state, step.observation.mask), (moves, step, state, plain, told)

    @jax.jit
    def play(key):
        state, seen = jax.vmap(env.reset)(jax.random.split(key, GAMES))
        keys = jax.random.split(key, STEPS)
        return jax.lax.scan(one_more, (state, seen.mask), keys)[1]

    return jax.tree.map(np.asarray, play(jax.random.PRNGKey(1)))


def test_a_step_is_jumanjis_own(record):
    _, step, state, plain, told = record
    ended = step.terminated | step.truncated
    assert 0 < ended.sum() < ended.size
    for ours, theirs in zip(jax.tree.leaves(state.game), jax.tree.leaves(plain)):
        np.testing.assert_array_equal(ours[~ended], theirs[~ended])
    planes = step.final_observation.cells.reshape(STEPS, GAMES, 3, 4, 6)
    np.testing.assert_array_equal(planes[..., :5], told.observation.grid)
    np.testing.assert_array_equal(step.final_observation.mask, told.observation.action_mask)
    np.testing.assert_array_equal(step.terminated, told.step_type == 2)


def test_the_time_limit_is_not_death(record):
    _, step, _, _, _ = record
    assert step.truncated.any()
    assert not (step.truncated & step.terminated).any()
    assert (step.length[step.truncated] == CONFIG.time_limit).all()
    assert (step.length <= CONFIG.time_limit).all()


def test_the_observation_before_the_reset_is_kept(record):
    _, step, _, _, _ = record
    cut = step.truncated
    grown = step.fruit[cut] > 0
    assert grown.any()
    bodies = step.final_observation.cells[cut][..., BODY].sum(-1)
    np.testing.assert_array_equal(bodies, step.fruit[cut] + 1)
    assert (step.observation.cells[cut][..., BODY].sum(-1) == 1).all()


def test_shaped_reward_and_true_fruit(record):
    _, step, _, _, told = record
    eaten = told.reward > 0
    died = step.terminated & (step.fruit < CONFIG.most_fruit)
    np.testing.assert_allclose(step.reward, eaten - 2.0 * died - 0.25)
    games = np.cumsum(step.terminated | step.truncated, axis=0)
    assert games.max() > 2
    first = np.concatenate([np.zeros((1, GAMES), int), games[:-1]]) == 0
    np.testing.assert_array_equal(step.fruit[first], np.cumsum(eaten, axis=0)[first])


def test_the_last_plane_counts_the_steps_until_a_cell_is_free(record):
    _, step, _, plain, _ = record
    timed = step.final_observation.cells[..., TIMED] * CONFIG.num_cells
    np.testing.assert_allclose(timed, plain.body_state.reshape(timed.shape), atol=1e-5)


def test_head_and_fruit_are_seen_and_apart(record):
    _, step, _, _, _ = record
    alive = ~step.terminated
    cells = step.final_observation.cells[alive]
    assert (cells[..., HEAD].sum(-1) == 1).all()
    assert (cells[..., FRUIT].sum(-1) == 1).all()
    assert not (cells[..., FRUIT] * cells[..., BODY]).any()


def test_games_differ_after_a_reset(record):
    """A reset that reused its key would play the same game for ever."""
    _, step, _, _, _ = record
    ended = step.terminated | step.truncated
    game = int(np.argmax(ended.sum(0)))
    starts = step.observation.cells[:, game][ended[:, game]]
    assert len({start.tobytes() for start in starts}) > 1

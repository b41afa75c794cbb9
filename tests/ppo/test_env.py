"""The Snake adapter against Jumanji: rules, resets, the time limit, observations, rewards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesotron.config import SnakeConfig
from mesotron.ppo.env import HEAD, SnakeEnv

CONFIG = SnakeConfig(
    width=4, height=3, max_steps=20, num_steps=8, death_penalty=-2.0, step_penalty=-0.25
)
GAMES = 24
STEPS = 120
BODY = 0
ORDER = 4
STEPS_LEFT = 5


@pytest.fixture(scope="module")
def record():
    """Random play, half of the games with legal moves only: our steps and Jumanji's own."""
    env = SnakeEnv(CONFIG)

    def advance(carry, key):
        state, mask = carry
        legal = mask | ~(jnp.arange(GAMES) % 2 == 0)[:, None]
        moves = jax.random.categorical(key, jnp.where(legal, 0.0, -1e9))
        game, timestep = jax.vmap(env.game.step)(state.game, moves)
        state, step = jax.vmap(env.step)(state, moves)

        return (state, step.observation.mask), (step, state, game, timestep)

    @jax.jit
    def play(key):
        state, observation = jax.vmap(env.reset)(jax.random.split(key, GAMES))
        keys = jax.random.split(key, STEPS)
        return jax.lax.scan(advance, (state, observation.mask), keys)[1]

    return jax.tree.map(np.asarray, play(jax.random.PRNGKey(1)))


def test_steps_equal_jumanji(record):
    step, state, game, timestep = record
    ended = step.terminated | step.truncated
    assert 0 < ended.sum() < ended.size

    for ours, theirs in zip(jax.tree.leaves(state.game), jax.tree.leaves(game)):
        np.testing.assert_array_equal(ours[~ended], theirs[~ended])

    cells = step.final_observation.cells
    planes = cells.reshape(STEPS, GAMES, 3, 4, 6)
    np.testing.assert_array_equal(planes[..., :5], timestep.observation.grid)
    np.testing.assert_array_equal(step.final_observation.mask, timestep.observation.action_mask)
    np.testing.assert_array_equal(step.terminated, timestep.step_type == 2)
    alive = cells[~step.terminated]

    assert (alive[..., HEAD].sum(-1) == 1).all()
    np.testing.assert_array_equal(alive[..., HEAD].argmax(-1), alive[..., ORDER].argmax(-1))
    steps_left = cells[..., STEPS_LEFT] * CONFIG.num_cells
    np.testing.assert_allclose(steps_left, game.body_state.reshape(steps_left.shape), atol=1e-5)


def test_time_limit_truncates_and_keeps_the_observation_before_the_reset(record):
    step = record[0]
    cut = step.truncated
    assert not (cut & step.terminated).any()
    assert (step.length[cut] == CONFIG.time_limit).all()
    assert (step.length <= CONFIG.time_limit).all()
    assert (step.fruit[cut] > 0).any()

    bodies = step.final_observation.cells[cut][..., BODY].sum(-1)
    np.testing.assert_array_equal(bodies, step.fruit[cut] + 1)
    assert (step.observation.cells[cut][..., BODY].sum(-1) == 1).all()


def test_finished_games_restart_with_a_new_board(record):
    step = record[0]
    ended = step.terminated | step.truncated
    assert (step.length[1:][ended[:-1]] == 1).all()

    game = int(np.argmax(ended.sum(0)))
    starts = step.observation.cells[:, game][ended[:, game]]
    assert len({start.tobytes() for start in starts}) > 1  # a reused key would repeat one game


def test_shaped_reward_and_fruit_count(record):
    step, _, _, timestep = record
    ate = timestep.reward > 0
    died = step.terminated & (step.fruit < CONFIG.most_fruit)
    np.testing.assert_allclose(step.reward, ate - 2.0 * died - 0.25)
    games = np.cumsum(step.terminated | step.truncated, axis=0)

    assert games.max() > 2
    first = np.concatenate([np.zeros((1, GAMES), int), games[:-1]]) == 0
    np.testing.assert_array_equal(step.fruit[first], np.cumsum(ate, axis=0)[first])

"""The policy network, and the games played with it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesotron import jax as mesotron_jax
from mesotron.config import SnakeConfig
from mesotron.ppo import evaluate, policy
from mesotron.ppo.env import HEAD, NUM_FEATURES, Observation
from mesotron.ppo.evaluate import bootstrap_band, draw_board, draw_game, play_games
from mesotron.ppo.policy import HIDDEN, apply_policy, entropy, init_policy, mask_logits

CONFIG = SnakeConfig(
    width=3, height=2, num_steps=8, d_model=8, num_heads=2, num_layers=1, mlp_ratio=1
)
KEY = jax.random.PRNGKey(0)
# Compiled once per config: without jit JAX compiles every operation separately.
init = jax.jit(init_policy, static_argnames="config")
apply = jax.jit(apply_policy, static_argnames="config")


def observe(batch: int = 16, config: SnakeConfig = CONFIG) -> Observation:
    rng = np.random.default_rng(0)
    cells = rng.uniform(size=(batch, config.num_cells, NUM_FEATURES)).astype(np.float32)
    cells[..., HEAD] = np.eye(config.num_cells)[rng.integers(config.num_cells, size=batch)]
    mask = rng.uniform(size=(batch, 4)) < 0.6

    return Observation(cells, mask | ~mask.any(1, keepdims=True))  # pyright: ignore


@pytest.fixture(scope="module")
def params():
    return init(KEY, CONFIG)


def test_illegal_moves_are_never_sampled_and_add_no_entropy():
    mask = np.array([[True, False, True, False], [False] * 4])

    @jax.jit
    def play():
        logits = mask_logits(jnp.zeros((2, 4)), mask)
        return entropy(logits), jax.random.categorical(KEY, logits[0], shape=(200,))

    entropies, sampled = play()
    np.testing.assert_allclose(entropies, [np.log(2), np.log(4)], atol=1e-6)
    assert set(np.asarray(sampled).tolist()) == {0, 2}


def test_policy_starts_nearly_uniform_and_depends_on_the_head(params):
    seen = observe()
    logits, _ = apply(params, seen, CONFIG)
    legal = np.asarray(seen.mask)

    assert np.ptp(np.asarray(logits)[legal]) < 0.1
    louder = {**params, "actor": {name: 100 * np.asarray(x) for name, x in params["actor"].items()}}
    moved = np.array(seen.cells)
    moved[..., HEAD] = np.roll(moved[..., HEAD], 1, axis=1)
    here, _ = apply(louder, seen, CONFIG)
    there, _ = apply(louder, seen._replace(cells=moved), CONFIG)

    assert np.abs(np.asarray(here) - there)[legal].max() > 0.01


def test_convolution_in_front():
    for mode, inputs in (("replace", 8), ("append", 8 + NUM_FEATURES)):
        config = replace(
            CONFIG,
            use_cnn=True,
            cnn_features=8,
            cnn_mode=mode,
        )

        shapes = jax.eval_shape(lambda config=config: init_policy(KEY, config))
        assert shapes["input"]["kernel"].shape == (inputs, 8)

    config = replace(config, readout="head", dtype="bfloat16")
    draw = np.random.default_rng(0).normal
    params = jax.tree.map(lambda x: draw(size=x.shape).astype(np.float32), shapes)
    _, values = apply(params, observe(), config)
    params["conv"] = {**params["conv"], "kernel": -params["conv"]["kernel"]}  # a new array

    assert np.abs(np.asarray(apply(params, observe(), config)[1]) - values).max() > 1e-3


def test_dropout_is_reproduced_from_the_keys(params):
    config = replace(CONFIG, dropout=0.4)
    seen = observe(6)
    keys = np.arange(12, dtype=np.uint32).reshape(6, 2)
    acted = np.asarray(apply(params, seen, config, keys)[1])
    order = np.array([3, 0, 5, 1, 4, 2])  # like a shuffled minibatch
    shuffled = Observation(*(x[order] for x in seen))
    scored = apply(params, shuffled, config, keys[order])[1]
    np.testing.assert_allclose(scored, acted[order], atol=1e-6)

    assert np.abs(apply(params, seen, config, keys[order])[1] - acted).max() > 1e-3


def test_only_hidden_matrices_go_to_the_spectral_rule():
    params = jax.eval_shape(lambda: init_policy(KEY, replace(CONFIG, use_cnn=True)))
    layers = ("query", "key", "value", "out", "up", "down")
    hidden = {f"layers/{name}/kernel": "sio" for name in layers} | {"trunk/kernel": "io"}

    assert mesotron_jax.label(params, overrides=HIDDEN).views() == hidden


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the special attention is for CPUs")
def test_cpu_attention_equals_jax():
    rng = np.random.default_rng(0)
    Q = rng.normal(size=(3, 4, 2, 8)).astype(np.float32)  # fewer queries than keys
    K, V = rng.normal(size=(2, 3, 5, 2, 8)).astype(np.float32)

    def with_gradients(attend):
        return jax.jit(jax.value_and_grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2)))(Q, K, V)

    ours = with_gradients(lambda *x: policy._attention(*x, CONFIG))
    theirs = with_gradients(jax.nn.dot_product_attention)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="tests the GPU compiler")
@pytest.mark.parametrize("readout", ["all", "head"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_the_same_with_and_without_the_gradient(dtype, readout):
    # The two programs once differed, on 36 cells and a few hundred boards.
    config = SnakeConfig(
        width=6,
        height=6,
        d_model=64,
        num_heads=8,
        num_layers=2,
        mlp_ratio=1,
        dtype=dtype,
        readout=readout,
    )

    params = init(KEY, config)
    seen = observe(2048, config)

    def value(params):
        return apply_policy(params, seen, config)[1]

    def value_and_gradient(params):
        values, pull = jax.vjp(value, params)
        return values, pull(jnp.ones_like(values))

    played = jax.jit(value)(params)
    learned = jax.jit(value_and_gradient)(params)[0]
    assert np.ptp(played) > 0.05

    np.testing.assert_allclose(played, learned, atol=0.06 if dtype == "bfloat16" else 0.005)


def test_evaluation_counts_a_game_up_to_its_own_end():
    config = SnakeConfig(width=4, height=3)
    play = jax.jit(lambda key: play_games(lambda key, seen: jnp.zeros(32, int), key, config, 32))
    games = play(KEY)  # always up: at most as many steps as there are rows
    lengths = np.asarray(games.length)

    assert set(lengths.tolist()) == {1, 2, 3}
    assert (np.asarray(games.fruit) < lengths).all()
    assert not np.asarray(games.cut).any()


def test_game_drawing(tmp_path):
    from PIL import Image

    config = SnakeConfig(width=3, height=3)
    cells = np.zeros((3, 9, 6), np.float32)
    cells[:, 4, [0, 1, 4]] = 1
    cells[:, 7, 3] = 1
    draw_game(cells, config, tmp_path / "game.gif")

    with Image.open(tmp_path / "game.gif") as image:
        assert image.size == (72, 72)

    board = draw_board(cells[0], config)
    assert tuple(board[36, 36]) != tuple(board[60, 36]) != tuple(board[12, 12])

    cells = np.eye(1, 400**2)[0][:, None].repeat(6, 1)
    board = draw_board(cells, SnakeConfig(width=400, height=400))
    assert max(board.shape) <= 480  # a cell of 24 pixels would make 70 MB of a frame
    assert len(np.unique(board)) > 3


def test_long_games_are_recorded_in_few_frames(monkeypatch):
    config = SnakeConfig(
        max_steps=40,
        num_steps=8,
        d_model=8,
        num_heads=1,
    )

    params = init_policy(KEY, config)
    whole = evaluate.record_game(params, config)
    monkeypatch.setattr(evaluate, "_MAX_FRAMES", 4)
    few = evaluate.record_game(params, config)

    assert len(whole) == 41  # it circles until the time limit
    np.testing.assert_array_equal(few, whole[[0, 16, 32, 40]])


def test_bootstrap_band_contains_the_mean_and_follows_the_spread():
    values = np.random.default_rng(0).normal(size=(8, 3)) * [1.0, 2.0, 0.0]
    low, high = bootstrap_band(values)
    assert ((low <= values.mean(0)) & (values.mean(0) <= high)).all()
    assert high[2] == low[2] == 0
    assert 1.2 < (high[1] - low[1]) / (2 * values[:, 1].std() / np.sqrt(8)) < 2.2

    np.testing.assert_array_equal(bootstrap_band(values[:1]), (values[0], values[0]))

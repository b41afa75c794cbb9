"""The policy network, and the games played with it."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("jumanji")
jax = pytest.importorskip("jax")
jnp = jax.numpy
from mesotron import jax as mesotron_jax  # noqa: E402
from mesotron.config import SnakeConfig  # noqa: E402
from mesotron.ppo import policy  # noqa: E402
from mesotron.ppo.env import HEAD, NUM_FEATURES, Observation  # noqa: E402
from mesotron.ppo.evaluate import bootstrap_band, draw_board, draw_game, play_games  # noqa: E402
from mesotron.ppo.policy import HIDDEN, apply_policy, entropy, init_policy, mask_logits  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

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
    return Observation(jnp.asarray(cells), jnp.asarray(mask | ~mask.any(1, keepdims=True)))


@pytest.fixture(scope="module")
def params():
    return init(KEY, CONFIG)


def test_illegal_moves_are_never_sampled_and_add_no_entropy():
    mask = jnp.array([[True, False, True, False], [False] * 4])
    logits = mask_logits(jnp.zeros((2, 4)), mask)
    np.testing.assert_allclose(entropy(logits), [np.log(2), np.log(4)], atol=1e-6)
    sampled = jax.random.categorical(KEY, logits[0], shape=(200,))
    assert set(np.asarray(sampled).tolist()) == {0, 2}


def test_policy_starts_nearly_uniform_and_depends_on_the_head(params):
    seen = observe()
    logits, _ = apply(params, seen, CONFIG)
    legal = np.asarray(seen.mask)
    even = -np.log(legal.sum(1, keepdims=True))
    assert np.abs(np.asarray(jax.nn.log_softmax(logits)) - even)[legal].max() < 0.1
    louder = {**params, "actor": jax.tree.map(lambda x: 100 * x, params["actor"])}
    moved = np.array(seen.cells)
    moved[..., HEAD] = np.roll(moved[..., HEAD], 1, axis=1)
    here, _ = apply(louder, seen, CONFIG)
    there, _ = apply(louder, Observation(jnp.asarray(moved), seen.mask), CONFIG)
    assert np.abs(np.asarray(here - there))[legal].max() > 0.01


def test_convolution_in_front():
    for mode, inputs in (("replace", 8), ("append", 8 + NUM_FEATURES)):
        config = replace(CONFIG, use_cnn=True, cnn_features=8, cnn_mode=mode)
        shapes = jax.eval_shape(lambda config=config: init_policy(KEY, config))
        assert shapes["input"]["kernel"].shape == (inputs, 8)
    params = init(KEY, config)
    _, values = apply(params, observe(), config)
    params["conv"]["kernel"] *= -1
    assert float(jnp.abs(apply(params, observe(), config)[1] - values).max()) > 1e-3


def test_dropout_is_reproduced_from_the_keys():
    config = replace(CONFIG, dropout=0.4)
    params, seen, keys = init(KEY, config), observe(6, config), jax.random.split(KEY, 6)
    acted = apply(params, seen, config, keys)[1]
    order = jnp.array([3, 0, 5, 1, 4, 2])  # like a shuffled minibatch
    shuffled = jax.tree.map(lambda x: x[order], seen)
    scored = apply(params, shuffled, config, keys[order])[1]
    np.testing.assert_allclose(scored, acted[order], atol=1e-6)
    assert float(jnp.abs(apply(params, seen, config, keys[order])[1] - acted).max()) > 1e-3


def test_only_hidden_matrices_go_to_the_spectral_rule():
    params = jax.eval_shape(lambda: init_policy(KEY, replace(CONFIG, use_cnn=True)))
    layers = ("query", "key", "value", "out", "up", "down")
    hidden = {f"layers/{name}/kernel": "sio" for name in layers} | {"trunk/kernel": "io"}
    assert mesotron_jax.label(params, overrides=HIDDEN).views() == hidden


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the special attention is for CPUs")
@pytest.mark.parametrize("queries", [5, 1])
def test_cpu_attention_equals_jax(queries):
    rng = np.random.default_rng(0)
    Q = jnp.asarray(rng.normal(size=(3, queries, 2, 8)), jnp.float32)
    K, V = jnp.asarray(rng.normal(size=(2, 3, 5, 2, 8)), jnp.float32)

    def with_gradients(attend):
        return jax.jit(jax.value_and_grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2)))(Q, K, V)

    ours = with_gradients(lambda *x: policy._attention(*x, CONFIG))
    theirs = with_gradients(jax.nn.dot_product_attention)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


ON_GPU = pytest.mark.skipif(jax.default_backend() == "cpu", reason="tests the GPU compiler")


@pytest.mark.parametrize("readout", [pytest.param("all", marks=ON_GPU), "head"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=ON_GPU), "bfloat16"])
def test_values_are_the_same_with_and_without_the_gradient(dtype, readout):
    # A GPU compiler once made the two programs differ, on 36 cells and a few hundred boards.
    gpu = jax.default_backend() == "gpu"
    width, boards = (64, 2048) if gpu else (8, 6)
    config = SnakeConfig(
        width=6, height=6, d_model=width, num_heads=width // 8, num_layers=2, mlp_ratio=1,
        dtype=dtype, readout=readout,
    )  # fmt: skip
    params, seen = init(KEY, config), observe(boards, config)

    def value(params):
        return apply_policy(params, seen, config)[1]

    def value_and_gradient(params):
        values, pull = jax.vjp(value, params)
        return values, pull(jnp.ones_like(values))

    played, learned = jax.jit(value)(params), jax.jit(value_and_gradient)(params)[0]
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


def test_bootstrap_band_contains_the_mean_and_follows_the_spread():
    values = np.random.default_rng(0).normal(size=(8, 3)) * [1.0, 2.0, 0.0]
    low, high = bootstrap_band(values)
    assert ((low <= values.mean(0)) & (values.mean(0) <= high)).all()
    assert high[2] == low[2] == 0
    assert 1.2 < (high[1] - low[1]) / (2 * values[:, 1].std() / np.sqrt(8)) < 2.2
    np.testing.assert_array_equal(bootstrap_band(values[:1]), (values[0], values[0]))

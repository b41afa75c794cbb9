"""Whole games from the first step to the end: greedy, sampled and random play, and their pictures.

Scores are fruit, never the shaped reward. A game counts up to its own end. E games, R runs.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mesotron.config import SnakeConfig
from mesotron.ppo.env import EnvState, Observation, SnakeEnv
from mesotron.ppo.policy import Params, apply_policy, mask_logits
from mesotron.runs.links import open_own

Act = Callable[[Array, Observation], Array]  # (key, observations [E]) -> moves [E]

_BASELINE_GAMES = 512
_PIXELS = 24
_MAX_SIDE = 480  # of a cell, and of a picture
_MAX_FRAMES = 800
_BOARD = (24, 28, 34)
_FRUIT = (214, 69, 65)
_HEAD = (250, 220, 120)
_TAIL_TO_NECK = np.array([(44, 86, 74), (92, 196, 150)], float)


class Games(NamedTuple):
    """The outcome of E games: fruit and steps (int32), board filled, stopped by the time limit."""

    fruit: Any
    length: Any
    won: Any
    cut: Any

    def summarize(self, prefix: str) -> dict[str, float]:
        return {f"{prefix}_{name}": float(np.mean(x)) for name, x in self._asdict().items()}


class _Playing(NamedTuple):
    env: EnvState
    observation: Observation
    key: Array
    ended: Array
    games: Games


def play_games(act: Act, key: Array, config: SnakeConfig, episodes: int) -> Games:
    """Play `episodes` games at once until the last of them has ended."""
    env = SnakeEnv(config)
    env_step = jax.vmap(env.step)

    def advance(now: _Playing) -> _Playing:
        key, act_key = jax.random.split(now.key)
        state, step = env_step(now.env, act(act_key, now.observation))
        latest = Games(step.fruit, step.length, step.fruit == config.most_fruit, step.truncated)
        games = jax.tree.map(lambda a, b: jnp.where(now.ended, a, b), now.games, latest)
        ended = now.ended | step.terminated | step.truncated

        return _Playing(
            state,
            step.observation,
            key,
            ended,
            games,
        )

    key, start = jax.random.split(key)
    state, observation = jax.vmap(env.reset)(jax.random.split(start, episodes))
    count = jnp.zeros(episodes, jnp.int32)
    no = jnp.zeros(episodes, bool)

    first = _Playing(
        state,
        observation,
        key,
        no,
        Games(count, count, no, no),
    )
    return jax.lax.while_loop(lambda now: ~now.ended.all(), advance, first).games


def act_by_policy(params: Params, config: SnakeConfig, greedy: bool | Array) -> Act:
    def act(key: Array, observation: Observation) -> Array:
        logits, _ = apply_policy(params, observation, config)
        return jnp.where(greedy, logits.argmax(-1), jax.random.categorical(key, logits))

    return act


def make_evaluation(config: SnakeConfig) -> Callable[[Params, int], dict[str, Games]]:
    """Evaluate R policies on the same `eval_episodes` games; the function returned is
    `evaluate(params [R], seed) -> {"greedy": Games [R, E], "sampled": Games [R, E]}`."""

    @jax.jit
    def play(params: Params, key: Array) -> Games:
        def one(params: Params, greedy: Array) -> Games:
            act = act_by_policy(params, config, greedy)
            return play_games(act, key, config, config.eval_episodes)

        both_modes = jax.vmap(one, in_axes=(None, 0))
        return jax.vmap(both_modes, in_axes=(0, None))(params, jnp.array([True, False]))

    def evaluate(params: Params, seed: int) -> dict[str, Games]:
        games = play(params, jax.random.PRNGKey(seed))
        modes = enumerate(("greedy", "sampled"))
        return {mode: Games(*(np.asarray(x)[:, k] for x in games)) for k, mode in modes}

    return evaluate


def measure_baselines(config: SnakeConfig) -> dict[str, float]:
    """Mean fruit of random play on this board, with and without the mask, and the maximum."""

    @jax.jit
    @jax.vmap
    def play(masked: Array) -> Array:
        def act(key: Array, observation: Observation) -> Array:
            allowed = observation.mask | jnp.logical_not(masked)
            return jax.random.categorical(key, mask_logits(jnp.zeros(allowed.shape), allowed))

        return play_games(act, jax.random.PRNGKey(0), config, _BASELINE_GAMES).fruit.mean()

    masked, unmasked = (float(x) for x in play(jnp.array([True, False])))
    most = float(config.most_fruit)

    return {
        "maximum": most,
        "random_masked": masked,
        "random_unmasked": unmasked,
    }


def record_game(params: Params, config: SnakeConfig) -> np.ndarray:
    """The cells of one greedy game, [frames, T, F]; of a long one not every move."""
    env = SnakeEnv(config)
    act = act_by_policy(params, config, greedy=True)
    key = jax.random.PRNGKey(0)

    def move(now: Any) -> Any:
        batch = jax.tree.map(lambda x: x[None], now[1])
        state, new = env.step(now[0], act(key, batch)[0])
        return state, new.observation, new.final_observation.cells, new.terminated | new.truncated

    @jax.jit
    def play(now: Any, last: Array) -> Any:
        return jax.lax.while_loop(lambda now: ~now[3] & (now[0].length < last), move, now)

    state, observation = jax.jit(env.reset)(key)
    now: Any = (state, observation, observation.cells, jnp.zeros((), bool))
    cells = [np.asarray(observation.cells)]

    stride = 1
    while not now[3]:
        if len(cells) > _MAX_FRAMES:  # of a long game every second move, or fourth, or eighth
            cells = cells[::2]
            stride = 2 * stride

        now = play(now, now[0].length + stride)
        cells.append(np.asarray(now[2]))

    return np.stack(cells)


def draw_game(cells: np.ndarray, config: SnakeConfig, path: Path) -> None:
    """Write a game, [frames, T, F] from `record_game`, as an animated GIF."""
    from PIL import Image

    shown = [*cells, *[cells[-1]] * 7]  # pause on the last frame
    frames = (Image.fromarray(draw_board(frame, config)) for frame in shown)

    with open_own(path, "wb") as file:
        next(frames).save(
            file,
            "gif",
            save_all=True,
            append_images=frames,
            duration=80,
            loop=0,
        )


def draw_board(cells: np.ndarray, config: SnakeConfig) -> np.ndarray:
    """One position as pixels, [height, width, 3]; the body gets darker toward its tail."""
    body, head, _, fruit, order = (cells[:, k] for k in range(5))
    colors = np.tile(np.array(_BOARD, float), (len(cells), 1))
    shade = order[:, None]
    snake = _TAIL_TO_NECK[0] * (1 - shade) + _TAIL_TO_NECK[1] * shade
    colors = np.where(body[:, None] > 0, snake, colors)
    colors[fruit > 0] = np.where(body[fruit > 0][:, None] > 0, colors[fruit > 0], _FRUIT)
    colors[head > 0] = _HEAD
    board = colors.reshape(config.height, config.width, 3).astype(np.uint8)
    pixels = max(1, min(_PIXELS, _MAX_SIDE // max(config.width, config.height)))

    large = board.repeat(pixels, 0).repeat(pixels, 1)
    if pixels > 2:
        large[::pixels] = large[:, ::pixels] = _BOARD  # a line between cells

    return large


class Curve(NamedTuple):
    """Training fruit: environment steps [n] and seconds [n] of a seed, fruit [seeds, n]."""

    steps: np.ndarray
    seconds: np.ndarray
    fruit: np.ndarray


def draw_curves(
    curves: Mapping[str, Curve], baselines: Mapping[str, float], path: Path, title: str
) -> None:
    """Mean fruit over seeds with a 95% bootstrap band, against steps and against seconds, with the
    baselines: the mask alone is worth forty times random play."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")

    panels: Sequence[Any] = figure.subplots(1, 2, sharey=True)
    for panel, axis in zip(panels, ("steps", "seconds")):
        for name, curve in curves.items():
            x = getattr(curve, axis)
            low, high = bootstrap_band(curve.fruit)
            (line,) = panel.plot(x, curve.fruit.mean(0), label=name)

            panel.fill_between(
                x,
                low,
                high,
                alpha=0.2,
                color=line.get_color(),
                linewidth=0,
            )

        for name, value in baselines.items():
            panel.axhline(
                value,
                color="grey",
                linestyle="--",
                linewidth=0.8,
            )

            style = {
                "transform": panel.get_yaxis_transform(),
                "ha": "right",
                "va": "bottom",
            }

            panel.text(
                0.99,
                value,
                name.replace("_", " "),
                fontsize=7,
                **style,
            )

        panel.set_xlabel({"steps": "environment steps", "seconds": "seconds"}[axis])

    panels[0].set_ylabel("fruit per game")
    panels[0].legend(loc="upper left", fontsize=8)
    figure.suptitle(title)
    with open_own(path, "wb") as file:
        figure.savefig(file, format=path.suffix[1:], dpi=120)


def bootstrap_band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% bootstrap interval of the mean over the first axis: [seeds, n] -> two of [n]."""
    from scipy.stats import bootstrap

    if len(values) == 1:
        return values[0], values[0]

    rng = np.random.default_rng(0)
    result = bootstrap(
        (values,),
        np.mean,
        n_resamples=2000,
        method="percentile",
        rng=rng,
    )

    return result.confidence_interval.low, result.confidence_interval.high

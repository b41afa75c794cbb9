"""A training of Snake from start to end: a run folder, live metrics, checkpoints, games at the end.

The device works in chunks of updates; between two chunks metrics are written, Ctrl-C is heard and
checkpoints are made, so memory does not grow with the run.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from mesotron.config import SnakeConfig
from mesotron.ppo import checkpoint
from mesotron.ppo.draw import draw_curves, draw_game
from mesotron.ppo.evaluate import Games, make_evaluation, measure_baselines, record_game
from mesotron.ppo.guard import Guard
from mesotron.ppo.hyper import read_runs
from mesotron.ppo.loop import TrainState
from mesotron.ppo.mirrors import Mirrors
from mesotron.ppo.policy import Params, init_policy
from mesotron.ppo.records import Session, curve_of, describe, write_chunk, write_evaluation
from mesotron.ppo.seeds import make_program
from mesotron.runs import RunFolder, check_free, describe_environment, new_run_path
from mesotron.runs.console import LiveView
from mesotron.runs.continuation import continued_settings
from mesotron.runs.lines import cut_rows_after
from mesotron.runs.signals import StopRequest

# Evaluation draws its games from here, far from the seeds that people give to training.
EVALUATION_SEED = 1_000_003
_WATCHED = {
    "episode/fruit": "fruit",
    "policy/entropy": "entropy",
    "value/explained": "value explained",
    "time/steps_per_second": "steps/s",
}


def train_snake(config: SnakeConfig) -> int:
    """Train, or go on training, and say how it ended."""
    folder, config = open_run(config)
    with folder:
        runs = read_runs(config)
        program = make_program(config, len(runs.values), load_pretrained(config))
        with (
            LiveView(config.num_updates, _WATCHED) as view,
            Mirrors(config, folder.path) as mirrors,
        ):
            guard = Guard(config, folder, view.say)
            evaluate = make_evaluation(config)
            session = Session(config, folder, runs, program, evaluate, view, mirrors, guard)
            how = f"go on with mesotron ppo snake --resume {folder.path}"
            with StopRequest(view.say, how) as stop:
                states, done = take_up(session)
                states, done = train(session, states, done, stop)
            found = evaluate_end(session, states) if done == config.num_updates else None
        if found is None:
            ended = guard.stopped_by
            why = f" by the watch ({ended.detector.replace('_', ' ')})" if ended else ""
            print(f"stopped{why} at update {done} of {config.num_updates}; {how}")
            return 0
        print(finish(session, states, found))
    return 0


def open_run(config: SnakeConfig) -> tuple[RunFolder, SnakeConfig]:
    """A new run folder, or the one to resume with the config that it began with."""
    if config.resume is not None:
        folder = RunFolder(config.resume)
        instead = f"start a new run (from its weights: --pretrained-model {folder.path})"
        config = continued_settings(config, folder, instead)
        config.check()
        return folder, config
    config.check()
    named = config.save_dir / config.run_name if config.run_name else None
    path = named or new_run_path("snake", config.save_dir)
    check_free(path, flag="--run-name")
    device = jax.devices()[0].device_kind
    environment = describe_environment(device, config.seed, num_devices=config.num_shards)
    return RunFolder.create(path, config, environment), config


def load_pretrained(config: SnakeConfig) -> Params | None:
    """The weights that a run starts from, if it is told any."""
    if config.pretrained_model is None:
        return None
    shapes = jax.eval_shape(lambda: init_policy(jax.random.PRNGKey(0), config))
    return checkpoint.load_params(RunFolder(config.pretrained_model).checkpoints, shapes)


def take_up(session: Session) -> tuple[TrainState, int]:
    """The states to go on from and their update: the newest checkpoint's, or the start."""
    folder, program, view = session.folder, session.program, session.view
    states = program.start(session.runs)
    if session.config.resume is None:
        return states, 0
    states, done, damaged = checkpoint.restore(folder.checkpoints, states)
    for sentence in damaged:
        view.say(f"{sentence}; the checkpoint before it is used")
    folder.cut_after(done)
    cut_rows_after(session.by_run, done)
    session.guard.take_up()
    return states, done


def train(
    session: Session, states: TrainState, done: int, stop: StopRequest
) -> tuple[TrainState, int]:
    """Advance chunk by chunk to the end, or until somebody or the watch asks to stop."""
    config, folder = session.config, session.folder
    before = time.perf_counter()
    states, _ = session.program.advance(states, session.runs, 0)  # compiles, and changes nothing
    jax.block_until_ready(states.update)
    session.view.say(f"compiled in {time.perf_counter() - before:.0f} s")
    rows = folder.rows("metrics")
    session.view.start_at(done, rows)  # the time left is reckoned without the compilation
    began = time.perf_counter() - (rows[-1]["time/seconds"] if rows else 0.0)
    while done < config.num_updates and not stop.requested and session.guard.stopped_by is None:
        count = next_chunk(config, done)
        before = time.perf_counter()
        states, metrics = session.program.advance(states, session.runs, count)
        metrics = {name: np.asarray(values) for name, values in metrics.items()}
        now = time.perf_counter()
        write_chunk(session, metrics, done, count, before - began, now - began)
        done += count
        if is_due(config.eval_freq, done) and done < config.num_updates:
            write_evaluation(session, session.evaluate(states.params, EVALUATION_SEED), done)
        ends = done == config.num_updates or stop.requested or session.guard.stopped_by
        if is_due(config.save_freq, done) or ends:
            checkpoint.save(folder.checkpoints, done, states)
    return states, done


def next_chunk(config: SnakeConfig, done: int) -> int:
    """Updates until the chunk is full or something is due.

    Example:
        >>> next_chunk(SnakeConfig(chunk=10, eval_freq=8, total_timesteps=1_000_000), 4)
        4
    """
    room = [config.chunk, config.num_updates - done]
    room += [every - done % every for every in (config.eval_freq, config.save_freq) if every]
    return min(room)


def is_due(every: int, done: int) -> bool:
    """Whether something that happens each so many updates happens now; never if `every` is 0."""
    return bool(every) and done % every == 0


def evaluate_end(session: Session, states: TrainState) -> dict[str, Games]:
    """Whole games of the trained policies, which the result is made of; mirrors get them too."""
    found = session.evaluate(states.params, EVALUATION_SEED)
    last = session.config.num_updates
    if all(row["step"] != last for row in session.folder.rows("samples")):
        write_evaluation(session, found, last)
    return found


def finish(session: Session, states: TrainState, found: dict[str, Games]) -> str:
    """Draw, write the result; returns the last words."""
    config, folder = session.config, session.folder
    baselines = measure_baselines(config)
    rows = folder.rows("metrics")
    result: dict[str, Any] = {"baselines": baselines, "runs": session.runs.values}
    for way, games in found.items():
        result |= games.summarise(way)
        result[f"{way}_fruit_each"] = games.fruit.mean(1).tolist()
        result[f"{way}_games"] = games.fruit.tolist()
    result["env_steps"], result["seconds"] = rows[-1]["time/env_steps"], rows[-1]["time/seconds"]
    result["steps_per_second"] = float(np.median([row["time/steps_per_second"] for row in rows]))
    if config.gif:
        best = int(np.argmax(result["greedy_fruit_each"]))
        params = jax.tree.map(lambda x: x[best], states.params)
        draw_game(record_game(params, config), config, folder.path / "game.gif")
    draw_curves({config.rule: curve_of(session)}, baselines, folder.path / "curves.png",
                f"Snake {config.width}x{config.height}, training games")  # fmt: skip
    story = session.guard.story()
    result["condition"] = story.condition
    words = f"{describe(result, config)}\nwatch    {story.text()}"
    folder.finish(result, words)
    return f"{words}\n{folder.path}"

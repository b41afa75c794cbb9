"""`mesotron ppo snake`: one training from start to end, in a run folder.

The device works in chunks of updates, between which metrics and checkpoints are written.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from mesotron.config import SnakeConfig
from mesotron.config.base import to_plain
from mesotron.ppo import evaluate, program
from mesotron.ppo.evaluate import Curve, Games
from mesotron.ppo.loop import TrainState
from mesotron.ppo.policy import Params, init_policy
from mesotron.ppo.program import Program, Runs
from mesotron.runs import RunFolder, check_free, describe_environment, new_run_path
from mesotron.runs.console import LiveView
from mesotron.runs.extras import require
from mesotron.runs.files import Row, append_row, cut_rows_after, read_rows
from mesotron.runs.folder import warn_of_failure
from mesotron.runs.markdown import fill_template
from mesotron.runs.process import StopRequest
from mesotron.runs.resume import resumed_settings
from mesotron.watch.diagnosis import diagnose_run
from mesotron.watch.guard import LoopWatch

EVALUATION_SEED = 1_000_003  # far away from those users give to training
MAX_MISMATCH = 0.01  # rounding to bfloat16 makes a few ten thousandths
SCORES = ("episode/fruit", "episode/length", "episode/truncated")  # of games that ended
_LIVE_METRICS = {
    "episode/fruit": "fruit",
    "policy/entropy": "entropy",
    "value/explained": "value explained",
    "time/steps_per_second": "steps/s",
}


class Guard(LoopWatch):
    """Runs the watch on every row. Runs side by side are judged by their means and never stopped:
    one bad rate of a sweep says nothing about the others."""

    def __init__(self, config: SnakeConfig, run: RunFolder, say: Callable[[str], None]) -> None:
        can_stop = config.is_single or config.guard != "stop"
        super().__init__(run, config.guard if can_stop else "warn", say)
        self._reported_mismatch = False  # a broken device or compiler, whatever the guard setting

    def update(self, row: Row) -> None:
        mismatch = row.get("policy/mismatch", 0.0)
        if mismatch > MAX_MISMATCH and not self._reported_mismatch:
            self._reported_mismatch = True
            self.say(
                f"policy/mismatch is {mismatch:.2g} at update {row['step']}, a bug of the device "
                "or its compiler: try another --dtype, --attention xla or another jax"
            )

        super().update(row)


class Mirrors:
    """Copies each row of metrics to Weights & Biases and TensorBoard, as configured."""

    def __init__(self, config: SnakeConfig, path: Path) -> None:
        self._wandb: Any = None
        self._board: Any = None

        if "wandb" in config.report_to:
            import wandb

            where = {"project": config.wandb_project, "entity": config.wandb_entity}
            where |= {"name": path.name, "dir": str(path)}
            self._wandb = wandb.init(**where, config=to_plain(config))

        if "tensorboard" in config.report_to:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(path / "tensorboard"))

    def write(self, row: dict[str, Any]) -> None:
        values = {name: value for name, value in row.items() if name != "step"}
        if self._wandb is not None:
            self._wandb.log(values, step=row["step"])

        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, row["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._wandb is not None:
            self._wandb.finish()
        if self._board is not None:
            self._board.close()


class SnakeSession(NamedTuple):
    config: SnakeConfig
    folder: RunFolder
    runs: Runs
    program: Program
    evaluate: Callable[[Params, int], dict[str, Games]]
    view: LiveView
    mirrors: Mirrors
    guard: Guard

    @property
    def runs_file(self) -> Path:  # one row per run, if there are several
        return self.folder.path / "runs.jsonl"


def run(config: SnakeConfig) -> int:
    """The command `mesotron ppo snake`: train or resume; returns the exit code."""
    for name in config.report_to:
        extra = "tensorboard" if name == "tensorboard" else None
        require(extra, [name], f"--report-to {name}")

    folder, config = open_run(config)
    with folder:
        runs = program.read_runs(config)
        pretrained = None
        if config.pretrained_model is not None:
            shapes = jax.eval_shape(lambda: init_policy(jax.random.PRNGKey(0), config))
            pretrained = program.load_params(RunFolder(config.pretrained_model).checkpoints, shapes)

        compiled = program.make_program(config, len(runs.values), pretrained)
        with (
            LiveView(config.num_updates, _LIVE_METRICS) as view,
            Mirrors(config, folder.path) as mirrors,
        ):
            guard = Guard(config, folder, view.say)
            play = evaluate.make_evaluation(config)
            session = SnakeSession(
                config,
                folder,
                runs,
                compiled,
                play,
                view,
                mirrors,
                guard,
            )

            how = f"resume with: mesotron ppo snake --resume {folder.path}"
            with StopRequest(view.say, how) as stop:
                states, done = train(session, stop)

            if done == config.num_updates:
                games = final_evaluation(session, states)
            else:
                games = None

        if games is None:
            event = guard.stopped_by

            if event:
                why = f" by the watch ({event.detector.replace('_', ' ')})"
            else:
                why = ""

            print(f"stopped{why} at update {done} of {config.num_updates}; {how}")
        else:
            print(finish(session, states, games))

    return 0


def open_run(config: SnakeConfig) -> tuple[RunFolder, SnakeConfig]:
    if config.resume is not None:
        folder = RunFolder(config.resume)
        instead = f"start a new run (from its weights: --pretrained-model {folder.path})"
        return folder, resumed_settings(config, folder, instead)

    program.read_runs(config)  # refuses a wrong --sweep before there is a folder
    named = config.save_dir / config.run_name if config.run_name else None
    path = named or new_run_path("snake", config.save_dir)
    check_free(path, flag="--run-name")
    device = jax.devices()[0].device_kind
    environment = describe_environment(device, config.seed, num_devices=config.num_shards)

    return RunFolder.create(path, config, environment), config


def train(session: SnakeSession, stop: StopRequest) -> tuple[TrainState, int]:
    """The states at the end of this call, and the updates behind them."""
    config = session.config
    folder = session.folder
    states = session.program.start(session.runs)

    done = 0
    if config.resume is not None:
        states, done = restore(session, states)

    before = time.perf_counter()
    states, _ = session.program.advance(states, session.runs, 0)  # compiles, and changes nothing
    jax.block_until_ready(states.update)
    session.view.say(f"compiled in {time.perf_counter() - before:.0f} s")

    began = start_clock(session, done)
    while done < config.num_updates and not stop.requested and session.guard.stopped_by is None:
        stop.announce()
        count = next_chunk(config, done)
        before = time.perf_counter()
        states, metrics = session.program.advance(states, session.runs, count)
        metrics = {name: np.asarray(values) for name, values in metrics.items()}

        write_chunk(
            session,
            metrics,
            done,
            count,
            before - began,
            time.perf_counter() - began,
        )

        done += count
        is_last = done == config.num_updates
        if is_due(config.eval_freq, done) and not is_last:
            write_evaluation(session, session.evaluate(states.params, EVALUATION_SEED), done)

        ends = is_last or stop.requested or session.guard.stopped_by
        if ends or is_due(config.save_freq, done):
            program.save_states(folder.checkpoints, done, states)

    return states, done


def start_clock(session: SnakeSession, done: int) -> float:
    """When the run would have begun without breaks; the time left excludes the compilation."""
    rows = session.folder.rows("metrics")
    session.view.start_at(done, rows)
    seconds = rows[-1]["time/seconds"] if rows else 0.0
    return time.perf_counter() - seconds


def is_due(every: int, done: int) -> bool:
    return every > 0 and done % every == 0


def restore(session: SnakeSession, states: TrainState) -> tuple[TrainState, int]:
    """The states of the last whole checkpoint and the updates behind them. Later rows are cut."""
    folder = session.folder
    states, done, damaged = program.restore_states(folder.checkpoints, states)
    for problem in damaged:
        session.view.say(f"{problem}; using the checkpoint before it")

    folder.cut_after(done)
    cut_rows_after(session.runs_file, done)
    session.guard.replay()

    return states, done


def next_chunk(config: SnakeConfig, done: int) -> int:
    """Updates until the chunk is full or an evaluation or checkpoint is due."""
    limits = [config.chunk, config.num_updates - done]
    limits += [every - done % every for every in (config.eval_freq, config.save_freq) if every]
    return min(limits)


def write_chunk(
    session: SnakeSession,
    metrics: dict[str, np.ndarray],
    done: int,
    count: int,
    start: float,
    end: float,
) -> None:
    """Write one row per update (means over the runs), and one per run if there are several."""
    config = session.config
    runs = session.runs.values
    for k in range(count):
        step = done + k + 1
        times = {
            "time/seconds": start + (end - start) * (k + 1) / count,
            "time/step": (end - start) / count,
            "time/steps_per_second": config.batch_size * len(runs) * count / (end - start),
            "time/env_steps": float(step * config.batch_size),
        }

        values = {name: column[:, k] for name, column in metrics.items()}
        row = {"step": step, **mean_over_runs(values), **times}
        session.folder.append("metrics", row)
        session.view.update(step, row)
        session.mirrors.write(row)
        session.guard.update(row)

        if len(runs) > 1:
            for number, run in enumerate(runs):
                own = mean_over_runs({name: v[number : number + 1] for name, v in values.items()})
                append_row(
                    session.runs_file,
                    {
                        "step": step,
                        "run": number,
                        **run,
                        **own,
                        **times,
                    },
                )


def mean_over_runs(values: dict[str, np.ndarray]) -> dict[str, float]:
    """Means over runs; scores only over the runs in which games ended."""
    ended = values["episode/finished"] > 0
    counted = {name: each[ended] if name in SCORES else each for name, each in values.items()}
    return {name: float(each.mean()) for name, each in counted.items() if len(each)}


def write_evaluation(session: SnakeSession, games: dict[str, Games], done: int) -> None:
    """Write a row of samples.jsonl: the means over all games, and each run's own."""
    each = {f"{mode}_fruit": g.fruit.mean(1).round(4).tolist() for mode, g in games.items()}
    means = {k: v for mode, g in games.items() for k, v in g.summarize(mode).items()}
    session.folder.append(
        "samples",
        {
            "step": done,
            "kind": "evaluation",
            **means,
            "each": each,
        },
    )

    session.mirrors.write({"step": done, **{f"eval/{k}": v for k, v in means.items()}})
    session.view.say(
        f"update {done}: fruit {means['greedy_fruit']:.2f} greedy, "
        f"{means['sampled_fruit']:.2f} sampled, of {session.config.most_fruit}"
    )


def final_evaluation(session: SnakeSession, states: TrainState) -> dict[str, Games]:
    games = session.evaluate(states.params, EVALUATION_SEED)
    last = session.config.num_updates
    if all(row["step"] != last for row in session.folder.rows("samples")):
        write_evaluation(session, games, last)

    return games


def finish(session: SnakeSession, states: TrainState, games: dict[str, Games]) -> str:
    config = session.config
    folder = session.folder
    baselines = evaluate.measure_baselines(config)
    rows = folder.rows("metrics")

    result: dict[str, Any] = {"baselines": baselines, "runs": session.runs.values}
    for mode, played in games.items():
        result |= played.summarize(mode)
        result[f"{mode}_fruit_each"] = played.fruit.mean(1).tolist()
        result[f"{mode}_games"] = played.fruit.tolist()

    result["env_steps"], result["seconds"] = rows[-1]["time/env_steps"], rows[-1]["time/seconds"]
    result["steps_per_second"] = float(np.median([row["time/steps_per_second"] for row in rows]))
    diagnosis = diagnose_run(session.guard.monitor)
    result["condition"] = diagnosis.condition
    template = Path(__file__).with_name("report.txt.j2")

    text = fill_template(
        template,
        config=config,
        diagnosis=diagnosis.text(),
        **result,
    ).rstrip()

    folder.finish(result, lambda: text)
    with warn_of_failure("curves.png", folder.path):
        title = f"Snake {config.width}x{config.height}, training games"
        curves = {config.rule: read_curve(session)}
        evaluate.draw_curves(curves, baselines, folder.path / "curves.png", title)

    if config.gif:
        best = int(np.argmax(result["greedy_fruit_each"]))
        params = jax.tree.map(lambda x: x[best], states.params)
        with warn_of_failure("game.gif", folder.path):
            cells = evaluate.record_game(params, config)
            evaluate.draw_game(cells, config, folder.path / "game.gif")

    return f"{text}\n{folder.path}"


def read_curve(session: SnakeSession) -> Curve:
    """Training fruit per run; an update without a finished game repeats the value before it."""
    num_runs = len(session.runs.values)

    if num_runs > 1:
        rows = read_rows(session.runs_file)
    else:
        rows = session.folder.rows("metrics")

    times = [row for row in rows if row.get("run", 0) == 0]

    fruit = np.full((num_runs, len(times)), np.nan)
    for row in rows:
        fruit[row.get("run", 0), row["step"] - 1] = row.get("episode/fruit", np.nan)

    for k in range(fruit.shape[1]):
        before = fruit[:, k - 1] if k else np.zeros(num_runs)
        fruit[:, k] = np.where(np.isnan(fruit[:, k]), before, fruit[:, k])

    steps = np.array([row["time/env_steps"] for row in times])
    return Curve(steps, np.array([row["time/seconds"] for row in times]), fruit)

"""One training session: load, evaluate, train until done or stopped, evaluate again, report.

The trainer is built after the first evaluation and seeds everything, so a resumed run, which skips
that evaluation, draws the same numbers.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote
from typing import Any

from rich.console import Console

from mesotron.answers.verify import Verifier
from mesotron.config import TrainConfig
from mesotron.config.base import spell
from mesotron.probes.forgetting import read_text, text_blocks
from mesotron.rewards.call import score_texts
from mesotron.rewards.constant import explain_constant
from mesotron.rlvr.callbacks import (
    WATCHED,
    EvalEvery,
    ForgettingProbe,
    GracefulStop,
    RunLog,
    SayVerdict,
    SnrProbe,
    Spending,
)
from mesotron.rlvr.heats import train_searching
from mesotron.rlvr.lifecycle import (
    explain_failure,
    fit,
    live_view,
    open_folder,
    quiet_libraries,
    resume_command,
    say_stopped,
)
from mesotron.rlvr.live_settings import live_settings
from mesotron.rlvr.optimizer import OptimizerLog
from mesotron.rlvr.own_end import OwnEnd
from mesotron.rlvr.parts import Parts, build_trainer, evaluate_part, load
from mesotron.rlvr.run_report import compare, main_score, show, write_report
from mesotron.rlvr.together import together
from mesotron.rlvr.trackers import Tracked
from mesotron.rlvr.trl_trainer import GRPOTrainer
from mesotron.runs import RunFolder, process
from mesotron.runs.best import NAME as BEST
from mesotron.runs.best import BestCheckpoint, Chosen, HeldOut, describe, outcomes_of
from mesotron.runs.console import LiveView, SafeConsole, print_line
from mesotron.runs.deadline import Deadline
from mesotron.runs.files import Row
from mesotron.runs.folder import warn_of_failure
from mesotron.runs.own_runs import is_own
from mesotron.runs.resume import Plan
from mesotron.runs.trust import code_names
from mesotron.tasks.load import load_fresh
from mesotron.watch.budget import Budget, limits_of, sampling_time
from mesotron.watch.callback import Watch, broadcast

HANGS_AFTER = 60.0  # seconds in which a reward function should return


def train(plan: Plan[TrainConfig], budget: Budget) -> int:
    quiet_libraries()
    console = SafeConsole(quiet=not process.is_main())
    for note in plan.notes:
        print_line(console, note)

    model = plan.config.model.name
    task = plan.config.task.title
    print_line(console, f"loading the model {model} and the task {task}")

    with (
        Verifier(plan.config.reward.timeout) as verifier,
        closing(load(plan.config, verifier)) as parts,
        open_folder(plan, parts.device) as run,
        process.explain_interrupt(f"continue with {resume_command(plan)}"),
        explain_failure(plan),
    ):
        budget.loaded(run)
        return train_in(run, plan, parts, budget, console)


def train_in(
    run: RunFolder, plan: Plan[TrainConfig], parts: Parts, budget: Budget, console: Console
) -> int:
    config = parts.config
    parts.reward.waiting = lambda name: budget.deadline.own_code()
    before = evaluate_before(run, parts, budget, console)
    budget.calibrate(least_step_time(before, budget, config))
    say_start(before, config, console)
    explain_zeros(before, parts, console)

    trainer = build_trainer(parts, run)
    with live_view(run, plan, console, WATCHED) as (view, stop):
        parts.reward.waiting = partial(wait_for, stop=stop, deadline=budget.deadline)
        if trainer.ahead is not None:
            trainer.ahead.waiting = parts.reward.waiting

        def open_here(folder: RunFolder, shown: Any, is_fork: bool) -> Session:
            return open_session(folder, parts, trainer, budget, before, shown, stop, is_fork)

        if config.lr_auto:
            session, limit = train_searching(run, plan, trainer, budget, view, open_here)
        else:
            session = open_here(run, view, False)
            limit = fit(trainer, plan, budget)

    watch = session.watch
    spending = session.spending
    step = trainer.state.global_step
    if session.own_end is not None and session.own_end.reason is not None:
        print_line(console, f"ended at step {step}: {session.own_end.reason}")
        config = parts.config = replace(config, steps=step)

    if step < config.steps and watch.stopped_by is not None:
        say_stopped_by_watch(watch, trainer.best, step, console)
    elif step < config.steps:
        reason = limit or spending.stopped_by or session.verdict.stopped_by
        say_stopped(console, run, plan, step, reason)
    else:
        after = together(lambda: evaluate_part(parts, trainer.model, "after"))
        best = evaluate_best(session, after)
        budget.deadline.obey()
        report(session, before, after, best, console)

    return 0


@dataclass(frozen=True)
class Session:
    """What the steps of a session share."""

    run: RunFolder
    parts: Parts
    trainer: GRPOTrainer
    watch: Watch
    spending: Spending
    budget: Budget
    verdict: SayVerdict
    stop: process.StopRequest
    is_fork: bool = False
    own_end: OwnEnd | None = None

    def is_interrupted(self) -> bool:
        return self.stop.requested

    def is_over(self) -> bool:
        """Whether anything has ended the run before its last step."""
        ends_itself = self.own_end is not None and self.own_end.reason is not None
        stopped = self.watch.stopped_by or self.spending.stopped_by or self.verdict.stopped_by
        return self.is_interrupted() or ends_itself or stopped is not None


@contextmanager
def wait_for(name: str, stop: process.StopRequest, deadline: Deadline) -> Iterator[None]:
    """Surrounds a call of the user's reward: signals and limits end it if it hangs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # what waits for the other thread is surrounded
        return

    with deadline.own_code(), stop.waiting_for(name, HANGS_AFTER):
        yield


# Before training


def evaluate_before(run: RunFolder, parts: Parts, budget: Budget, console: Console) -> Row:
    """The evaluation of the model as loaded; a resumed run has it already."""
    before = run.load("before")
    if before is not None:
        return before

    print_line(console, f"evaluating it on {len(parts.task.eval)} held-out problems")
    with budget.evaluation():
        before = together(lambda: evaluate_part(parts, parts.model, "before"))

    if process.is_main():
        run.save("before", before)

    return before


def least_step_time(before: Row, budget: Budget, config: TrainConfig) -> float:
    """Seconds that a step takes at least, by the time of the first evaluation."""
    completions = config.rollout.prompts * config.rollout.generations
    return sampling_time(budget.slowest_evaluation, before["problems"], completions)


def say_start(before: Row, config: TrainConfig, console: Console) -> None:
    if main_score(before) is None:
        return

    greedy = before["greedy"]
    if is_by_reward(before):
        scores = f"{greedy['reward']['value']:.3f}"
    else:
        values = [f"{greedy[name]['value']:.3f} {name}" for name in ("strict", "lenient")]
        scores = ", ".join(values)

    print_line(console, f"{measure_of(before)} before: {scores}; training for {config.steps} steps")


def explain_zeros(before: Row, parts: Parts, console: Console) -> None:
    """Say why every held-out reward is 0, if the types of the data explain it."""
    rewards = [transcript.get("reward") for transcript in before.get("transcripts", ())]
    if not is_by_reward(before) or not rewards or any(rewards):
        return

    try:
        why = explain_constant(partial(score_texts, parts.reward), parts.task.eval[0])
    except ValueError:  # the reward raised on a text that no model wrote
        return

    if why is not None:
        print_line(console, f"all {len(rewards)} held-out rewards are 0: {why}")


def is_by_reward(result: Row) -> bool:
    return result.get("measure") == "reward"


def measure_of(result: Row) -> str:
    if is_by_reward(result):
        return "mean reward"

    return "greedy accuracy"


# During training


def open_session(  # noqa: PLR0913  # what the stretches of a run share, by name
    run: RunFolder,
    parts: Parts,
    trainer: GRPOTrainer,
    budget: Budget,
    before: Row,
    view: Any,
    stop: process.StopRequest,
    is_fork: bool = False,
) -> Session:
    """The watch, the limits and the callbacks of a run, or of a fork of it, which only records."""
    watch = make_watch(trainer, parts, run, is_fork)
    config = parts.config
    chooses = config.final == "best" and config.eval_every > 0
    spending = Spending(budget, trainer, config.eval_every, evaluations_at_end=1 + chooses)
    verdict = make_verdict(watch, config, run)
    own_end = None
    if config.steps_auto and not is_fork:
        own_end = OwnEnd(config.eval_every, trainer, watch, run)

    session = Session(run, parts, trainer, watch, spending, budget, verdict, stop, is_fork, own_end)

    view.watch_state = watch.state
    add_callbacks(session, before, view)

    return session


def make_watch(trainer: GRPOTrainer, parts: Parts, run: RunFolder, is_fork: bool = False) -> Watch:
    if is_fork:
        return Watch("off", run.path, detectors=parts.config.watch.detectors or ())

    watch = parts.config.watch
    return Watch(
        parts.config.guard,
        run.path,
        trainer=trainer,
        tries=watch.tries,
        more=live_settings(trainer, parts),
        precision=watch.precision,
        detectors=watch.detectors or (),
        alerts=watch.alerts,
        price=limits_of(parts.config).price,
    )


def make_verdict(watch: Watch, config: TrainConfig, run: RunFolder) -> SayVerdict:
    return SayVerdict(
        config.verdict_after,
        config.stop_if == "hopeless",
        watch,
        run,
        limits_of(config).price,
    )


def add_callbacks(session: Session, before: Row, view: LiveView) -> None:
    config = session.parts.config
    trainer = session.trainer
    undoes = config.guard == "rollback" or session.is_fork

    callbacks: list[Any] = [
        RunLog(session.run, view, trainer, refuse=not undoes),
        OptimizerLog(session.run),
        GracefulStop(session.stop),
    ]

    start = main_score(before)
    if start is not None:
        view.notes[measure_of(before)] = f"{start['value']:.3f} before"

    if start is not None and config.eval_every:
        callbacks.append(make_evaluation(session, before, start["value"], view))

    if config.watch.forgetting_every:
        text = read_text(config.watch.forgetting_file)
        blocks = text_blocks(session.parts.tokenizer, text)
        callbacks.append(ForgettingProbe(config.watch.forgetting_every, trainer, blocks))

    callbacks.append(session.spending)

    # A watch sees a non-finite loss before the log, but a row is written before it is undone.
    callbacks.insert(len(callbacks) if undoes else 0, session.watch)
    if config.verdict_after and not session.is_fork:  # it reads the watch's rows
        callbacks.append(session.verdict)
    if session.own_end is not None:
        callbacks.append(session.own_end)
    if config.report_to and not session.is_fork:
        tracked = Tracked(config.report_to, trainer, session.watch, session.run.path.name, view.say)
        callbacks.append(tracked)
    for callback in callbacks:
        trainer.add_callback(callback)

    if config.watch.snr_every:
        # First of all callbacks: the trainer's own times the optimizer from here.
        probe = SnrProbe(config.watch.snr_every, trainer)
        trainer.callback_handler.callbacks.insert(0, probe)


def make_evaluation(session: Session, before: Row, start: float, view: LiveView) -> EvalEvery:
    config = session.parts.config
    trainer = session.trainer
    if config.final == "best":
        trainer.best = trainer.best or BestCheckpoint()

    return EvalEvery(
        config.eval_every,
        trainer,
        HeldOutScorer(session, view).score,
        start,
        before["problems"],
        "eval/reward" if is_by_reward(before) else "eval/greedy",
        session.run,
    )


class HeldOutScorer:
    """Evaluates the model during training, and shows its score beside the first one."""

    def __init__(self, session: Session, view: LiveView) -> None:
        self.session = session
        self.view = view
        self.first_notes = dict(view.notes)

    def score(self) -> HeldOut:
        trainer = self.session.trainer
        step = trainer.state.global_step
        with self.session.budget.evaluation(), trainer.averaged():
            result = evaluate_part(self.session.parts, trainer.model, f"step {step}")

        evaluated = held_out(step, result)
        measure = measure_of(result)
        score = f"{evaluated.score:.3f} at step {step}"
        self.view.notes[measure] = f"{self.first_notes[measure]}, {score}"
        return evaluated


def held_out(step: int, result: Row) -> HeldOut:
    score = main_score(result)
    value = score["value"] if score else math.nan
    return HeldOut(step, value, outcomes_of(result), result.get("measure", "accuracy"))


# After training


def evaluate_best(session: Session, after: Row) -> Row | None:
    """What is known of the best checkpoint, with its score on problems that did not choose it; None
    if there was nothing to choose. The trainer has its weights from here on."""
    trainer = session.trainer
    best = trainer.best
    if best is None:
        return None

    last = trainer.state.global_step
    is_new = last % session.parts.config.eval_every != 0
    if is_new and best.observe(broadcast(held_out(last, after))):
        best.written(last)  # long ago: the last step is always saved

    record = best.record()
    if record["step"] is None:
        return None

    if best.evaluations > 1:
        fresh = evaluate_fresh(session, record["step"])
        record |= {"fresh": fresh} if fresh is not None else {}

    if process.is_main():
        session.run.save(BEST, record)

    return record


def evaluate_fresh(session: Session, step: int) -> Row | None:
    """The score of a step's checkpoint on held-out problems that no evaluation has used; None if
    there are none."""
    parts = session.parts
    problems = load_fresh(parts.config.task, parts.task)
    if not problems:
        return None

    trainer = session.trainer
    if step != trainer.state.global_step:
        checkpoint = Chosen(session.run.checkpoints / f"checkpoint-{step}")
        trainer.take_weights(checkpoint.weights)

    others = replace(parts, task=replace(parts.task, eval=problems))
    result = together(lambda: evaluate_part(others, trainer.model, f"step {step}"))
    score = main_score(result)
    return None if score is None else {**score, "problems": len(problems)}


def say_stopped_by_watch(
    watch: Watch, best: BestCheckpoint | None, step: int, console: Console
) -> None:
    assert watch.stopped_by is not None

    if watch.actions:
        why = watch.actions[-1].sentence()
    else:
        why = watch.stopped_by.sentence()

    sentence = f"stopped at step {step}: {why}"

    healthy = watch.last_healthy_checkpoint
    if healthy is not None:
        sentence += f"; the last healthy checkpoint is checkpoint-{healthy}"
    if best is not None and best.name is not None:
        sentence += f"; {best.name} is the best by the held-out evaluations, and the run's model"

    if watch.guard != "rollback":
        sentence += "; start again with --guard rollback"

    print_line(console, sentence)


def report(session: Session, before: Row, after: Row, best: Row | None, console: Console) -> None:
    run = session.run
    config = session.parts.config
    result = compare(before, after)
    if best is not None:
        result["best"] = best

    if session.trainer.is_world_process_zero():
        run.save("after", after)
        text = partial(write_report, run, config, before, after, result)
        run.finish({"steps": config.steps, **result}, text)

        with warn_of_failure("the table of results", run.path):
            show(before, after, result, console)

    if best is not None:
        print_line(console, f"the run's model: {describe(best, config.steps)}")

    # A reward of the user's own is named again, unless the run was noted as theirs.
    more = f"mesotron eval {run.path}"
    names = code_names(config.reward)
    if names and not is_own(run.path, names):
        own = tuple(quote(part) for part in config.reward.parts)
        more += f" {spell('reward', own)}"

    print_line(console, f"report: {run.path / 'report.md'}; more: {more}")

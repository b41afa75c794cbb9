"""One training session: load, evaluate, train until done or stopped, evaluate again, report.

The trainer is built after the first evaluation and seeds everything, so a resumed run, which skips
that evaluation, draws the same numbers.
"""

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import PrinterCallback, TrainerState, set_seed
from transformers.utils.logging import disable_progress_bar
from trl.trainer.grpo_config import GRPOConfig

from mesotron.answers.facts import Judge
from mesotron.answers.verify import Verifier
from mesotron.config import SftConfig, TrainConfig
from mesotron.config.base import spell
from mesotron.evaluate.evaluate import evaluate
from mesotron.models.adapters import lora_config
from mesotron.models.load import load_model
from mesotron.models.precision import choose_precision, supports_bfloat16
from mesotron.models.sharded import as_loaded
from mesotron.models.speed import choose_speed
from mesotron.optim.device import choose_device, name_device, use_one_thread_if_small
from mesotron.probes.forgetting import read_text, text_blocks
from mesotron.rewards.call import Reward, as_reward_function, make_reward, reads_answers
from mesotron.rlvr.anchor import Anchor
from mesotron.rlvr.callbacks import (
    WATCHED,
    EvalEvery,
    ForgettingProbe,
    GracefulStop,
    RunLog,
    SnrProbe,
    Spending,
)
from mesotron.rlvr.objectives import check_enough, resolve, sampler_arguments, trl_arguments
from mesotron.rlvr.optimizer import OptimizerLog, check_settings
from mesotron.rlvr.run_report import compare, main_score, show, write_report
from mesotron.rlvr.trl_options import trl_options
from mesotron.rlvr.trl_trainer import GRPOTrainer
from mesotron.runs import RunFolder, process
from mesotron.runs.checkpoints import newest_whole, prune
from mesotron.runs.console import LiveView, SafeConsole, print_line
from mesotron.runs.folder import warn_of_failure
from mesotron.runs.resume import Plan
from mesotron.runs.trust import code_names, code_settings
from mesotron.sampling.decoder import FusedSampler
from mesotron.sampling.tools import Toolbox, load_toolbox
from mesotron.tasks.load import load_task
from mesotron.tasks.problem import Task
from mesotron.tasks.prompts import check_prompts
from mesotron.tasks.rows import first_level, make_curriculum, make_rows
from mesotron.watch.budget import Budget, limits_of, sampling_time
from mesotron.watch.callback import Watch
from mesotron.watch.settings import Setting, Settings, has_adapters

# An alarm may come three checkpoints late, and one from before its evidence must remain.
KEPT_FOR_ROLLBACK = 4
HANGS_AFTER = 60.0  # seconds in which a reward function should return
REWARDS_FORMAT = ("two_part", "format")


@dataclass
class Parts:
    config: TrainConfig
    device: torch.device
    model: Any
    tokenizer: Any
    task: Task
    judge: Judge  # of evaluations
    reward: Reward
    objective_arguments: dict[str, Any]  # of `GRPOConfig`
    toolbox: Toolbox | None = None


def train(plan: Plan[TrainConfig], budget: Budget) -> int:
    quiet_libraries()
    console = SafeConsole(quiet=not process.is_main())
    for note in plan.notes:
        print_line(console, note)

    model = plan.config.model.name
    task = plan.config.task.title
    print_line(console, f"loading the model {model} and the task {task}")

    with Verifier(plan.config.reward.timeout) as verifier:
        parts = load(plan.config, verifier)
        with (
            open_folder(plan, parts.device) as run,
            process.explain_interrupt(f"continue with {resume_command(plan)}"),
        ):
            budget.loaded(run)
            return train_in(run, plan, parts, budget, console)


def resume_command(plan: Plan[Any]) -> str:
    if isinstance(plan.config, SftConfig):
        return f"mesotron sft --resume {plan.path}"

    # Code is named again: the folder alone is not believed.
    named = ((name.removesuffix(".parts"), own) for name, own in code_settings(plan.config))
    own = [spell(name, tuple(map(quote, values))) for name, values in named]
    return " ".join([f"mesotron train --resume {plan.path}", *own])


def load(config: TrainConfig, verifier: Verifier) -> Parts:
    device = choose_device(config.device, config.threads)
    world = process.num_processes()
    arguments = trl_arguments(config.objective, config.rollout, config.optim, world)
    check_settings(config.optim)
    toolbox = load_toolbox(config)
    task = load_task(config.task)
    check_enough(len(task.train), config)
    judge = Judge(task.format, verifier)
    reward = make_reward(config.reward, judge, config.rollout.max_tokens)
    config = choose_precision(config, supports_bfloat16(device))

    model, tokenizer = load_model(config.model, device)
    if toolbox is not None:
        tokenizer = toolbox.prepare(tokenizer, config.model.name)
        config = replace(config, rollout=replace(config.rollout, fast=False))

    options = trl_options(config)
    tokenizer.template_kwargs = options.get("chat_template_kwargs") or {}
    check_prompts(
        task,
        config.task,
        tokenizer,
        model,
        config.rollout.max_tokens,
    )

    use_one_thread_if_small(model, device, config.threads)
    fuses = FusedSampler.obstacle(model) is None
    config = choose_speed(config, device.type == "cuda", model.num_parameters(), fuses)
    arguments |= sampler_arguments(config.rollout, config.objective.name) | options

    return Parts(
        config,
        device,
        model,
        tokenizer,
        task,
        judge,
        reward,
        arguments,
        toolbox,
    )


@contextmanager
def open_folder(plan: Plan[Any], device: torch.device) -> Iterator[RunFolder]:
    if process.num_processes() > 1 and not process.is_main():
        PartialState().wait_for_everyone()
        yield RunFolder(plan.path)
        return

    with plan.open_folder(name_device(device), torch.get_num_threads()) as run:
        run.cut_after(plan.checkpoint.step if plan.checkpoint else 0)
        if process.num_processes() > 1:
            PartialState().wait_for_everyone()
        yield run


def train_in(
    run: RunFolder, plan: Plan[TrainConfig], parts: Parts, budget: Budget, console: Console
) -> int:
    config = plan.config
    before = run.load("before")
    if before is None:
        print_line(console, f"evaluating it on {len(parts.task.eval)} held-out problems")
        with budget.evaluation():
            before = evaluate_part(parts, parts.model, "before")

        if process.is_main():
            run.save("before", before)

    completions = config.rollout.prompts * config.rollout.generations
    budget.calibrate(sampling_time(budget.slowest_evaluation, before["problems"], completions))
    kinds = ("reward",) if before.get("measure") == "reward" else ("strict", "lenient")
    scores = {name: before["greedy"][name]["value"] for name in kinds if before["greedy"][name]}
    spelled = ", ".join(f"{value:.3f} {name}" for name, value in scores.items())
    first = main_score(before)

    measure_name = "mean reward" if "reward" in scores else "greedy accuracy"
    if first is not None:
        spelled = spelled.removesuffix(" reward")
        print_line(console, f"{measure_name} before: {spelled}; training for {config.steps} steps")

    start = "unknown" if first is None else f"{first['value']:.3f} before"
    trainer = build_trainer(parts, run)
    watch = make_watch(trainer, parts, run)
    spending = Spending(budget, trainer, config.eval_every, evaluates_at_end=True)

    def score() -> float:
        step = trainer.state.global_step
        with budget.evaluation(), trainer.averaged():
            result = evaluate_part(parts, trainer.model, f"step {step}")

        value = (main_score(result) or {"value": math.nan})["value"]
        view.notes[measure_name] = f"{start}, {value:.3f} at step {step}"

        return value

    with live_view(run, plan, console) as (view, stop):
        parts.reward.waiting = partial(stop.waiting_for, seconds=HANGS_AFTER)
        view.notes |= {} if first is None else {measure_name: start}
        view.watch_state = watch.state
        undoes = config.guard == "rollback"
        log = RunLog(run, view, trainer, refuse=not undoes)

        callbacks: list[Any] = [log, OptimizerLog(run), GracefulStop(stop)]
        if config.eval_every and first is not None:
            every = config.eval_every
            problems = before["problems"]
            name = "eval/reward" if before.get("measure") == "reward" else "eval/greedy"

            callbacks.append(
                EvalEvery(
                    every,
                    trainer,
                    score,
                    first["value"],
                    problems,
                    name,
                )
            )

        if config.watch.forgetting_every:
            text = text_blocks(parts.tokenizer, read_text(config.watch.forgetting_file))
            callbacks.append(ForgettingProbe(config.watch.forgetting_every, trainer, text))

        callbacks.append(spending)

        # A watch sees a non-finite loss before the log, but a row is written before it is undone.
        callbacks.insert(len(callbacks) if undoes else 0, watch)
        for callback in callbacks:
            trainer.add_callback(callback)

        if config.watch.snr_every:
            # First of all callbacks: the trainer's own times the optimizer from here.
            probe = SnrProbe(config.watch.snr_every, trainer)
            trainer.callback_handler.callbacks.insert(0, probe)

        fit(trainer, plan)

    step = trainer.state.global_step
    if step < config.steps:
        why = spending.stopped_by
        if watch.stopped_by is not None:
            why = (watch.actions[-1] if watch.actions else watch.stopped_by).sentence()
            healthy = watch.last_healthy_checkpoint
            if healthy is not None:
                why += f"; the last healthy checkpoint is checkpoint-{healthy}"

            advice = "" if undoes else "; start again with --guard rollback"
            print_line(console, f"stopped at step {step}: {why}{advice}")
            return 0

        say_stopped(console, run, plan, step, why)
        return 0

    after = evaluate_part(parts, trainer.model, "after")
    result = compare(before, after)
    if trainer.is_world_process_zero():
        run.save("after", after)
        report = partial(
            write_report,
            run,
            config,
            before,
            after,
            result,
        )

        run.finish({"steps": config.steps, **result}, report)
        with warn_of_failure("the table of results", run.path):
            show(before, after, result, console)

    own = tuple(map(quote, config.reward.parts)) if code_names(config.reward) else ()
    more = f"mesotron eval {run.path} {spell('reward', own) if own else ''}".strip()
    print_line(console, f"report: {run.path / 'report.md'}; more: {more}")

    return 0


def make_watch(trainer: GRPOTrainer, parts: Parts, run: RunFolder) -> Watch:
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


def evaluate_part(parts: Parts, model: Any, name: str) -> dict[str, Any]:
    config = parts.config
    task = parts.task

    own = parts.reward if code_names(config.reward) else None
    with as_loaded(model):
        result = evaluate(
            model,
            parts.tokenizer,
            task.eval,
            config.task,
            examples=task.examples,
            name=name,
            samples=0,
            max_tokens=config.rollout.max_tokens,
            seed=config.seed,
            judge=parts.judge,
            reward=own,
            toolbox=parts.toolbox,
        )

    return result.to_json()


def build_trainer(parts: Parts, run: RunFolder) -> GRPOTrainer:
    config = parts.config
    set_seed(config.seed)  # LoRA is initialized before the trainer seeds

    try:
        args = GRPOConfig(**trainer_arguments(parts, run))
    except (TypeError, ValueError) as error:
        if not config.trl:
            raise
        raise ValueError(f"TRL refuses --trl {' '.join(config.trl)}: {error}") from error

    trainer = GRPOTrainer(
        model=parts.model,
        reward_funcs=as_reward_function(parts.reward),
        args=args,
        train_dataset=make_rows(first_level(parts.task, config.task), config.task, parts.tokenizer),
        processing_class=parts.tokenizer,
        peft_config=lora_config(config.model),
        optim=config.optim,
        objective=resolve(config.objective, config.rollout.generations),
        # Own rewards alone read no answers, and what is logged of answers would mislead the watch.
        judge=Judge(parts.judge.format, parts.judge.verifier, reads=reads_answers(config)),
        fast=bool(config.rollout.fast),
        average=config.average,
        tools=parts.toolbox and parts.toolbox.tools,
        environment_factory=parts.toolbox and parts.toolbox.environment,
    )
    if config.task.curriculum is not None:
        trainer.use_curriculum(make_curriculum(parts.task, config.task, parts.tokenizer))

    if process.asks_for_sharding() and not trainer.is_fsdp_enabled:
        raise ValueError("FSDP needs GPUs here: launch with examples/scaling/ddp.yaml instead")

    trainer.remove_callback(PrinterCallback)
    return trainer


def trainer_arguments(parts: Parts, run: RunFolder) -> dict[str, Any]:
    config = parts.config
    keep = max(config.keep, KEPT_FOR_ROLLBACK * (config.guard == "rollback"))
    arguments = parts.objective_arguments | common_arguments(config, parts.device, parts.model, run)

    return arguments | {"save_total_limit": keep, "report_to": list(config.report_to) or "none"}


def common_arguments(
    config: TrainConfig | SftConfig, device: torch.device, model: Any, run: RunFolder
) -> dict[str, Any]:
    on_cpu = device.type == "cpu"
    return {
        "output_dir": str(run.checkpoints),
        "max_steps": config.steps,
        "seed": config.seed,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # a NaN must be visible
        "save_steps": config.save_every or config.steps,
        "save_total_limit": config.keep,
        "use_cpu": on_cpu,
        "bf16": model.dtype == torch.bfloat16 or config.model.dtype == "mixed",
        "dataloader_pin_memory": not on_cpu,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "report_to": "none",
        "disable_tqdm": True,
    }


def fit(trainer: Any, plan: Plan[Any]) -> None:
    checkpoint = plan.checkpoint
    if checkpoint is None or checkpoint.step < plan.config.steps:
        try:
            trainer.train(str(checkpoint.path) if checkpoint else None)
        except ValueError as error:  # such as a reward function that raised
            trainer.save_last_step()
            saved, _ = newest_whole(plan.path / "checkpoints")
            if saved is None:
                raise

            after = f"once that is fixed, {resume_command(plan)} continues from step {saved.step}"
            raise ValueError(f"{error}; {after}") from error
    else:  # the run stopped after its last step
        trainer._load_from_checkpoint(str(checkpoint.path))
        trainer.state = TrainerState.load_from_json(str(checkpoint.path / "trainer_state.json"))

        if trainer.args.should_save:  # maybe killed before it had pruned
            keep = trainer.args.save_total_limit
            best = trainer.state.best_model_checkpoint
            best = best if keep > 1 else None  # as at the end of `train`
            prune(checkpoint.path.parent, keep, checkpoint.step, best)


def live_settings(trainer: GRPOTrainer, parts: Parts) -> Settings:
    """Settings that a guard may change after a rollback, beyond those of any TRL trainer."""
    config = parts.config
    now = config.reward

    def set_reward(names: Any) -> None:
        nonlocal now
        now = replace(now, parts=tuple(names), weights=())
        reward = make_reward(now, parts.judge, config.rollout.max_tokens)
        reward.waiting = parts.reward.waiting
        place = trainer.reward_func_names.index("reward")  # beside votes and an environment's own
        trainer.reward_funcs[place] = as_reward_function(reward)

    def reward_obstacle() -> str | None:
        if trainer.self_labeled:
            return f"{trainer.objective.name} trains on its votes, not on rewards"
        if not reads_answers(config):
            return "your own rewards need no format"

        # A new reward is prescribed to reward the format.
        paying = [name for name in now.parts if name in REWARDS_FORMAT]
        return f"its part {paying[0]} already rewards the format" if paying else None

    def set_beta(beta: float) -> None:
        if trainer.ref_model is None and not has_adapters(trainer.policy):
            start, _ = load_model(config.model, parts.device)
            trainer.ref_model = Anchor(dtype=None).start(start)
        trainer.beta = trainer.args.beta = beta

    return {
        "reward.parts": Setting(lambda: now.parts, set_reward, reward_obstacle),
        "objective.beta": Setting(lambda: trainer.beta, set_beta),
    }


@contextmanager
def live_view(
    run: RunFolder, plan: Plan[Any], console: Console, watched: dict[str, str] | None = None
) -> Iterator[tuple[LiveView, process.StopRequest]]:
    view = LiveView(plan.config.steps, watched or WATCHED, console)

    class ToView(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            show_line = view.alarm if record.name == "mesotron.watch" else view.say
            show_line(record.getMessage())

    handler = ToView()
    logger = logging.getLogger("mesotron")
    with view:
        logger.addHandler(handler)
        try:
            with process.StopRequest(view.say, f"continue with {resume_command(plan)}") as stop:
                view.start_at(plan.checkpoint.step if plan.checkpoint else 0, run.rows("metrics"))
                yield view, stop
        finally:
            logger.removeHandler(handler)


def say_stopped(
    console: Console, run: RunFolder, plan: Plan[Any], step: int, why: str | None
) -> None:
    # A guard that gives up on broken weights does not save them.
    saved = " and saved" * (run.checkpoints / f"checkpoint-{step}").exists()
    stopped = f"stopped{saved} at step {step}{f': {why}' if why else ''}"
    print_line(console, f"{stopped}; continue with {resume_command(plan)}")


def quiet_libraries() -> None:
    disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(torch|transformers|trl|accelerate|peft)\b")

    for name in ("transformers", "trl", "accelerate", "peft", "datasets", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)

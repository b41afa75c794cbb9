"""`mesotron train` and `mesotron sft` up to where torch is needed: inputs, folder, variables."""

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mesotron.config import (
    GPUS,
    PRICES_AS_OF,
    PlanConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TaskConfig,
    TrainConfig,
    find_gpu,
)
from mesotron.models.names import check_cached, check_name, find_smollm2
from mesotron.models.variables import set_library_variables
from mesotron.rewards.call import (
    check_reward,
    needs_gold,
    own_parts,
    reads_answers,
    try_reward,
)
from mesotron.rlvr.plan.memory import least_memory
from mesotron.rlvr.plan.shapes import GIB
from mesotron.rlvr.trl_arguments import check_enough, trl_arguments
from mesotron.rlvr.trl_options import trl_options
from mesotron.runs import RunFolder, new_run_path, newest_whole
from mesotron.runs.best import choose_checkpoint
from mesotron.runs.doctor import list_gpus
from mesotron.runs.extras import require
from mesotron.runs.folder import run_name
from mesotron.runs.process import go_offline_without_network, is_main, num_processes, started
from mesotron.runs.resume import Plan, plan_new, plan_resume
from mesotron.tasks.load import check_task, load_task
from mesotron.tasks.own import read_own
from mesotron.tasks.problem import Task, assemble
from mesotron.tasks.registry import find_source
from mesotron.watch.budget import open_budget, open_limits

log = logging.getLogger("mesotron")
SMALL = 1.0  # GiB that every machine has
MOST_STEPS = 10  # of --steps auto, times the recipe's
EVALUATIONS = 10  # in the recipe's steps, where --steps auto must choose
MICRO_BATCH = 16  # completions per forward pass with --data, if it divides the batch
Training = TypeVar("Training", bound=TrainConfig)
Limited = TypeVar("Limited", TrainConfig, SftConfig)
Checked = TypeVar("Checked", bound=TrainConfig | SftConfig)


def run(config: Limited, then: Callable[[Path], None] | None = None) -> int:
    """Train or resume; the main process calls `then` with the folder. Returns the exit code."""
    began = started()
    check_installed(config)

    if config.task.has_own_data:  # a hub dataset is read before the rest is imported
        set_library_variables(config.task, config.model.name)

    plan: Plan[Any] = resume_plan(config) if config.resume else new_run(config, began)
    with open_budget(plan, began) as budget:
        set_library_variables(plan.config.task, plan.config.model.name)
        go_offline_without_network()
        check_cached(plan.config.model.name)

        if is_main():
            print(f"{plan.path}: loading PyTorch, Transformers and TRL", flush=True)

        # Only now: Hugging Face libraries read the variables at import.
        if isinstance(config, SftConfig):
            from mesotron.rlvr.sft import train
        else:
            from mesotron.rlvr.session import train

            if plan.config.sft.steps:
                from mesotron.rlvr.warm_start import warm_up

                warmed = warm_up(plan, budget)
                if warmed is None:
                    return 0

                plan = warmed

        code = train(plan, budget)
        if then is not None and is_main() and not budget.deadline.has_passed:
            then(plan.path)

    if is_main():
        say_how_to_load(plan.path)

    return code


def say_how_to_load(run: Path) -> None:
    newest, _ = newest_whole(run / "checkpoints")
    if newest is None:
        return

    weights = choose_checkpoint(RunFolder(run), str(run)).weights
    is_adapter = (weights / "adapter_config.json").is_file()

    if is_adapter:
        loader = "peft.AutoPeftModelForCausalLM"
    else:
        loader = "AutoModelForCausalLM"

    print(f'model: {weights}; load it with {loader}.from_pretrained("{weights}")')


def new_run(config: Limited, began: float) -> Plan[Limited]:
    config, notes_on_ends = with_price(config)
    if isinstance(config, TrainConfig):
        config, more = resolve_steps(config)
        notes_on_ends += more

    if is_main():
        with open_limits(config, began):
            config, notes = check(config, downloads=True)

        for note in [*notes_on_ends, *notes]:
            print(note, flush=True)

    if isinstance(config, TrainConfig):
        config = resolve_own(config)

    return plan_new(config, config.out or new_run_path(run_name(config)))


def resolve_own(config: Training) -> Training:
    """Fill in what depends on several settings of a run on own data."""
    config = replace(config, task=replace(config.task, format=config.task.answer_format))
    if not reads_answers(config) and config.task.system is None:
        # A format is requested for answers that are checked; own rewards get the prompts as is.
        config = replace(config, task=replace(config.task, system=""))

    rollout = config.rollout
    if config.recipe == "own" and rollout.micro_batch is None:
        sizes = trl_arguments(config.objective, rollout, config.optim, num_processes())
        rows = sizes["per_device_train_batch_size"]  # of one update: all that train
        micro = next(size for size in range(MICRO_BATCH, 0, -1) if rows % size == 0)
        config = replace(config, rollout=replace(rollout, micro_batch=micro))

    return config


def resolve_steps(config: Training) -> tuple[Training, list[str]]:
    """The settings of a run that ends by itself (`rlvr.own_end`), and a line about them."""
    if not config.steps_auto:
        return config, []

    every = config.eval_every or max(config.steps // EVALUATIONS, 1)
    steps = MOST_STEPS * config.steps
    warmup = config.optim.warmup / MOST_STEPS
    optim = replace(config.optim, schedule="constant", warmup=warmup)
    note = (
        f"--steps auto: at most {steps} steps at a rate that does not fall, with an evaluation "
        f"every {every}"
    )
    return replace(config, steps=steps, eval_every=every, optim=optim), [note]


def with_price(config: Limited) -> tuple[Limited, list[str]]:
    """The typical price of this machine's GPU, where a budget needs one and none is given."""
    is_known = config.price is not None or config.gpu is not None
    if config.budget is None or is_known or config.device == "cpu":
        return config, []

    names = [find_gpu(gpu.name) for gpu in list_gpus()]
    name = names[0] if names else None
    if name is None or GPUS[name].price is None:
        return config, []

    note = f"--gpu {name}: {GPUS[name].price:g} dollars per hour, as of {PRICES_AS_OF}"
    return replace(config, gpu=name), [note]


def resume_plan(config: Limited) -> Plan[Limited]:
    instead = "start a new run (from its weights: --model CHECKPOINT)"
    plan: Plan[Any] = plan_resume(config, "mesotron eval", instead)
    if plan.is_longer and isinstance(config, TrainConfig):
        # It trains on to the step that was given; `extend` says so to later sessions.
        plan = replace(plan, config=replace(plan.config, steps_auto=False))

    if config.gpu is not None and config.price is None:
        # The run's old price was for another machine.
        return replace(plan, config=replace(plan.config, price=None))

    return plan


def check_installed(config: TrainConfig | SftConfig) -> None:
    require("rlvr", what="training")
    if config.model.name == "smollm2":
        find_smollm2()

    if config.model.lora:
        require("rlvr", ["peft"], "--lora")

    if config.model.load != "full":
        require("quant", ["bitsandbytes"], f"--model.load {config.model.load}")

    if isinstance(config, TrainConfig):
        for name in config.report_to:
            require(None, [name], f"--report-to {name}")
        if config.rollout.vllm in ("colocate", "server"):
            require(None, ["vllm"], f"--vllm {config.rollout.vllm}")


def check(config: Checked, downloads: bool = False) -> tuple[Checked, list[str]]:
    """Refuse what depends on files, installed packages and processes, before torch is imported.

    Returns:
        The config, with a smaller batch for few problems, and what was guessed about each data
        file (those on the hub: only if it `downloads`).
    """
    check_name(config.model.name)
    is_of_another_machine = isinstance(config, PlanConfig) and config.gpu
    if not is_of_another_machine:
        check_memory(config)

    check_task(config.task)
    task, notes = read_data(config.task, downloads)
    if isinstance(config, SftConfig):
        check_warm_start(config)
    else:
        if config.sft.steps:
            check_warm_start(config)

        config = with_environment_reward(config)
        config = fit_batch(config, task)
        check_rl(config, task)

    return config, notes


def with_environment_reward(config: Training) -> Training:
    """The reward that an environment pays, where no other is given."""
    if not config.task.env or config.reward.parts != RewardConfig().parts:
        return config

    return replace(config, reward=replace(config.reward, parts=("environment",)))


def fit_batch(config: Training, task: Task | None) -> Training:
    """A batch of own data that its training problems fill; other tasks refuse a batch too large."""
    problems = count_problems(config, task)
    size = config.rollout.prompts
    if config.recipe != "own" or num_processes() > 1 or problems >= size:
        return config

    for prompts in range(int(problems), 0, -1):
        smaller = replace(config, rollout=replace(config.rollout, prompts=prompts))
        try:
            trl_arguments(smaller.objective, smaller.rollout, smaller.optim)
            check_enough(problems, smaller)
        except ValueError:
            continue

        log.warning("%d training problems: --batch %d instead of %d", problems, prompts, size)
        return smaller

    return config


def check_warm_start(config: SftConfig | TrainConfig) -> None:
    if num_processes() > 1:
        what = "mesotron sft" if isinstance(config, SftConfig) else "--sft-steps"
        raise ValueError(f"{what} runs in one process, not WORLD_SIZE={num_processes()}")

    trl_arguments(TrainConfig().objective, RolloutConfig(), config.optim)


def check_rl(config: TrainConfig, task: Task | None) -> None:
    if num_processes() > 1 and config.out is None:
        raise ValueError("several processes must agree on the run's folder: give it with --out")
    if num_processes() > 1 and config.lr_auto:
        raise ValueError(f"--lr auto runs in one process, not WORLD_SIZE={num_processes()}")

    if num_processes() > 1 and config.task.env:
        raise ValueError(f"--env runs in one process, not WORLD_SIZE={num_processes()}")

    check_reward(config.reward)
    text = config.watch.forgetting_file
    if text is not None and not text.is_file():
        raise ValueError(
            f"--watch.forgetting-file {text} does not exist: give a file of plain text"
        )

    trl_arguments(config.objective, config.rollout, config.optim, num_processes())
    trl_options(config)
    check_enough(count_problems(config, task), config)

    if task is None:
        task = sample_to_score(config)
    if task is not None:
        check_rewards_on(task, config)

    warn_of_unused_reward(config)


def count_problems(config: TrainConfig, task: Task | None) -> float:
    """Training problems; infinitely many where they are not counted yet."""
    if task is not None:
        return len(task.train)

    if config.task.num_train is None:
        return math.inf

    return config.task.num_train


def sample_to_score(config: TrainConfig) -> Task | None:
    """One generated problem, to try the user's own rewards on; None if there is no need or way."""
    is_generated = (
        not config.task.data and not config.task.env and not find_source(config.task).reads_data
    )
    if not is_generated or not own_parts(config.reward):
        return None

    return load_task(replace(config.task, num_train=1, num_eval=1))


def warn_of_unused_reward(config: TrainConfig) -> None:
    default = RewardConfig()
    is_given = config.reward.parts != default.parts or config.reward.weights
    if config.objective.is_self_labeled and is_given:
        log.warning(
            "%s trains on its votes only: the reward %s is logged as rewards/reward, not used",
            config.objective.name,
            " + ".join(config.reward.parts),
        )


def check_memory(config: TrainConfig | SftConfig) -> None:
    """Refuse a model whose weights, gradients and momentum alone exceed the machine's memory."""
    if num_processes() > 1:
        return

    gpus = () if config.device == "cpu" else list_gpus()
    needed = least_memory(config, has_gpu=bool(gpus))

    if gpus:
        machine = "GPU"
        memory = max(gpu.memory for gpu in gpus)
    else:
        machine = "machine"
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB

    if needed < SMALL or needed <= memory:
        return

    model = config.model
    remedies = ["a smaller --model"]
    if not model.lora:
        remedies.insert(0, "--lora 16")
    elif model.load == "full":
        remedies.append("--model.load 4bit")

    raise ValueError(
        f"training {model.name} takes at least {needed:,.0f} GiB, and this {machine} has "
        f"{memory:,.0f}: use {' or '.join(remedies)}"
    )


def read_data(config: TaskConfig, downloads: bool) -> tuple[Task | None, list[str]]:
    """The task if its data lie here or are the user's, and what was guessed about them."""
    is_local = bool(config.data) and all(Path(path).expanduser().exists() for path in config.data)
    if config.env and downloads:
        task = load_task(config)
        names = ", ".join(config.env)
        return task, [f"{names}: {len(task.train):,} problems, {len(task.eval):,} held out"]

    if config.has_own_data and (is_local or downloads):
        train, held_out, sources = read_own(config)
        return assemble(train, held_out, config), [source.describe() for source in sources]

    if is_local and not config.has_own_data:
        return load_task(config), []

    return None, []


def check_rewards_on(task: Task, config: TrainConfig) -> None:
    """Refuse rewards that cannot score these data, by calling the user's own on one row."""
    problem = task.train[0]
    compares = needs_gold(config.reward) and not config.objective.is_self_labeled
    if compares and problem.gold is None:
        parts = " ".join(config.reward.parts)
        raise ValueError(
            f"--reward {parts} compares with gold answers, and {config.task.title} has rows "
            "without one that can be checked: name their column with --data.columns gold=NAME, or "
            "give your own --reward"
        )

    try_reward(config.reward, problem, config.rollout.max_tokens)

"""`mesotron plan`: steps, tokens, hours, dollars and memory of a run before it starts.

Nothing is downloaded: sizes of common datasets and models are known, the rest is read from disk.
The hours do not count evaluations and further rounds of dynamic sampling.
"""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mesotron.answers.formats import FORMATS
from mesotron.config import PRICES_AS_OF, GpuName, PlanConfig, TaskConfig, TrainConfig
from mesotron.config.base import from_plain
from mesotron.rlvr import train
from mesotron.rlvr.objectives import first_round_prompts, resolve
from mesotron.rlvr.plan.estimate import (
    DATASETS,
    DEVICES,
    Lengths,
    Prediction,
    find_device,
    find_shape,
    predict,
)
from mesotron.runs import RunFolder
from mesotron.runs.console import SafeConsole, print_line, spell_time
from mesotron.runs.doctor import list_gpus
from mesotron.runs.files import read_json, read_rows
from mesotron.runs.process import num_processes
from mesotron.tasks.load import load_task
from mesotron.tasks.prompts import SYSTEM
from mesotron.tasks.registry import find_source
from mesotron.watch.budget import Limits, limits_of

CALIBRATION_STEPS = 3
LENGTH = "completions/mean_length"
MATH_LEVELS = {
    1: 564,
    2: 1348,
    3: 1592,
    4: 1690,
    5: 2304,
}  # of the 7,500
QUESTION_TOKENS = 80  # where nothing is known
CHARACTERS_PER_TOKEN = 3.5
CHAT_TOKENS = 20  # marks of a chat around its messages
RUNS_READ = 12  # newest runs that may calibrate an estimate


class Pace(NamedTuple):
    seconds_per_step: float | None  # of one optimizer step; None if unknown
    completion_tokens: float  # of a typical completion
    source: str  # where both come from, in words


class StepMath(NamedTuple):
    prompts_per_update: float
    completions_per_update: float
    updates_per_epoch: int
    completions_per_epoch: int


class Estimate(NamedTuple):
    num_prompts: int  # training problems
    maths: StepMath  # of a step and of an epoch
    sampled: float  # completions per update, without further rounds of dynamic sampling
    tokens: tuple[float, float, float]  # sampled in the run: at least, expected, at most
    pace: Pace
    limits: Limits  # price and budget

    def dollars(self, steps: float) -> float | None:
        seconds = self.pace.seconds_per_step
        price = self.limits.price
        return None if seconds is None or price is None else steps * seconds / 3600 * price

    @property
    def affordable_steps(self) -> int | None:
        """Steps within budget and time limit; None without a pace or a limit."""
        limits = self.limits
        seconds = self.pace.seconds_per_step
        pairs = ((limits.dollars, self.dollars(1)), (limits.seconds, seconds))
        fits = [limit / step for limit, step in pairs if limit is not None and step]

        return math.floor(min(fits) * (1 + 1e-9)) if fits else None


class Problems(NamedTuple):
    number: int
    question_tokens: float


def run(config: PlanConfig) -> int:
    if config.calibrate:
        train.check_installed(config)

    train.check(config)
    config = train.resolve_own(config)
    limits_of(config)
    problems = find_problems(config.task)
    train.set_library_variables(config.task, config.model.name)
    plan = Estimator(config, problems.question_tokens)
    pace = find_pace(config, problems.number, plan)
    show(estimate(config, problems.number, pace), plan, SafeConsole(highlight=False))

    return 0


def find_problems(task: TaskConfig) -> Problems:
    if task.has_own_data:
        hub = [name for name in task.data if not Path(name).expanduser().exists()]
        local = tuple(name for name in task.data if name not in hub)
        parts = [_count(replace(task, data=local, weights=()))] if local else []

        parts += [count_on_hub(name.partition(":")[0], task) for name in hub]
        return Problems(sum(x.number for x in parts), mean(x.question_tokens for x in parts))

    source = find_source(task)
    if source.num_train is not None:
        number = source.num_train if task.num_train is None else task.num_train
        return Problems(number, source.question_tokens or QUESTION_TOKENS)

    name = task.data[0] if task.data else task.name
    is_unknown = not task.data and name not in DATASETS
    if is_unknown or Path(name).expanduser().exists():
        return _count(task)

    return count_on_hub(name, task)


def count_on_hub(hub: str, task: TaskConfig) -> Problems:
    """The problems of a dataset on the hub, from a table: plan downloads nothing."""
    number, question = DATASETS.get(hub, (task.num_train, QUESTION_TOKENS))
    if number is None:
        raise ValueError(
            f"the size of {hub} is not known here and plan downloads nothing: give the number "
            "of its problems with --task.num-train"
        )

    if task.levels and number == sum(MATH_LEVELS.values()) + 2:  # two rows have no level
        number = sum(MATH_LEVELS[level] for level in task.levels)

    number -= task.few_shot
    return Problems(min(number, task.num_train or number), question)


def _count(task: TaskConfig) -> Problems:
    lengths = [len(problem.question) for problem in load_task(task).train]
    return Problems(len(lengths), mean(lengths or [0]) / CHARACTERS_PER_TOKEN)


class Estimator:
    """The arithmetic of `estimate.py` for one config, calibrated by earlier runs.

    `prediction` is None if the model's shape or the GPU is unknown; `problem` then says which.
    """

    def __init__(self, config: PlanConfig, question_tokens: float, root: Path = Path("runs")):
        self.config = config
        self.question_tokens = question_tokens
        self.shape = find_shape(config.model.name)
        self.problem = ""
        self.gpu: GpuName | None = config.gpu
        self.prediction: Prediction | None = None

        gpus = () if self.gpu or config.device == "cpu" else list_gpus()
        if gpus:
            self.gpu = find_device(gpus[0].name)

        if self.shape is None:
            self.problem = f"the shape of {config.model.name} is unknown: give its folder"
        elif gpus and self.gpu is None:
            self.problem = f"{gpus[0].name} is not in the table: give a similar one by --gpu"
        else:
            self.prediction = self.predict(config, self.gpu)
            self.factor, self.runs = calibration(config, self.gpu, root)

    def predict(self, config: PlanConfig, gpu: GpuName | None) -> Prediction:
        assert self.shape is not None
        lengths = lengths_of(config, self.question_tokens, config.completion_tokens)
        return predict(config, self.shape, gpu, lengths)


def lengths_of(config: TrainConfig, question: float, completion: float | None = None) -> Lengths:
    task = config.task
    most = config.rollout.max_tokens
    system = task.system
    if system is None:
        system = f"{SYSTEM} {FORMATS[task.answer_format].instruction}"

    prompt = CHAT_TOKENS + len(system) / CHARACTERS_PER_TOKEN + question
    prompt += task.few_shot * (question + min(100, most))  # a solution within the limit
    completion = min(completion or most / 2, most)

    # Among many completions the longest is often cut off at the limit.
    return Lengths(
        prompt=prompt,
        completion=completion,
        longest=min(most, 2 * completion),
    )


def calibration(config: TrainConfig, gpu: GpuName | None, root: Path) -> tuple[float, list[str]]:
    """How many times as long as estimated earlier runs took, and which: those with the same model
    on the same device, else any on that device, else any on a GPU."""
    ranked: dict[int, list[tuple[float, str]]] = {}
    files = [path for path in root.glob("*/config.json") if not path.parent.is_symlink()]
    for file in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)[:RUNS_READ]:
        try:
            run = from_plain(TrainConfig, read_json(file), str(file))
            name = str(read_json(file.with_name("env.json")).get("device", ""))
            rows = read_rows(file.with_name("metrics.jsonl"))
            device = find_device(name)
            shape = find_shape(run.model.name)
        except (OSError, ValueError):
            continue  # of another command or version, or without a step

        times, sampled = (
            [x for row in rows if isinstance(x := row.get(name), int | float) and 0 < x < math.inf]
            for name in ("time/step", LENGTH)
        )

        comparable = name == "cpu" if gpu is None else device is not None
        if shape is None or len(times) < 4 or not comparable:
            continue

        question = DATASETS.get(next(iter(run.task.data), run.task.name), (0, QUESTION_TOKENS))[1]
        lengths = lengths_of(run, question, mean(sampled) if sampled else None)
        ratio = median(times[2:]) / predict(run, shape, device, lengths).step
        rank = (device != gpu) * 2 + (run.model.name != config.model.name)
        ranked.setdefault(rank, []).append((ratio, str(file.parent)))

    best = ranked[min(ranked)] if ranked else []
    return geometric_mean([ratio for ratio, _ in best] or [1.0]), [name for _, name in best]


def find_pace(config: PlanConfig, num_prompts: int, plan: Estimator) -> Pace:
    length = lengths_of(config, 0, config.completion_tokens).completion
    if config.calibrate:
        return calibrate(config)

    if config.tokens_per_second:
        sampled = estimate(config, num_prompts, Pace(None, length, "")).sampled
        source = f"{config.tokens_per_second:g} tokens per second, as given"
        return Pace(sampled * length / config.tokens_per_second, length, source)

    if config.seconds_per_step:
        return Pace(config.seconds_per_step, length, "as given")

    if plan.prediction is None:
        source = f"unknown: {plan.problem}; or add --calibrate or --seconds-per-step"
        return Pace(None, length, source)

    source = f"estimate for {plan.gpu or 'one CPU core'}"
    if plan.runs:
        source += f" times {plan.factor:.2g}, measured in {', '.join(plan.runs[:2])}"
        source += f" and {len(plan.runs) - 2} more" if len(plan.runs) > 2 else ""

    return Pace(plan.prediction.step * plan.factor, length, source)


def calibrate(config: PlanConfig) -> Pace:
    """Time a few whole rollouts on this machine; the first, a warm-up, is not counted."""
    from mesotron.answers.verify import Verifier
    from mesotron.rlvr.lifecycle import quiet_libraries
    from mesotron.rlvr.parts import build_trainer, load

    quiet_libraries()
    steps = CALIBRATION_STEPS * config.rollout.updates

    short = replace(
        config,
        steps=steps,
        save_every=0,
        guard="off",
        report_to=(),
    )
    with tempfile.TemporaryDirectory() as folder, Verifier(config.reward.timeout) as verifier:
        run = RunFolder.create(Path(folder) / "run", short, {})
        trainer = build_trainer(load(short, verifier), run)
        trainer.train()

    rows = trainer.state.log_history
    times = [row["time/step"] for row in rows if "time/step" in row][config.rollout.updates :]
    length = config.completion_tokens or mean(row[LENGTH] for row in rows if LENGTH in row)
    source = f"{steps} steps on this machine, {length:.3g} tokens per completion"

    return Pace(mean(times), length, source)


def maths_of(config: PlanConfig, num_prompts: int) -> StepMath:
    train.check_enough(num_prompts, config)
    rollout = config.rollout
    objective = resolve(config.objective, config.rollout.generations)

    # A corewarding anchor samples beside the policy.
    beside = (objective.momentum_generations or 0) if objective.name == "corewarding" else 0
    completions = rollout.prompts * (rollout.generations + beside)
    rollouts = num_prompts // rollout.prompts  # an incomplete batch is dropped, as in TRL

    return StepMath(
        prompts_per_update=rollout.prompts / rollout.updates,
        completions_per_update=completions / rollout.updates,
        updates_per_epoch=rollouts * rollout.updates,
        completions_per_epoch=rollouts * completions,
    )


def estimate(config: PlanConfig, num_prompts: int, pace: Pace) -> Estimate:
    maths = maths_of(config, num_prompts)
    rollout = config.rollout
    objective = config.objective
    first_round = first_round_prompts(objective, rollout, num_processes())
    sampled = maths.completions_per_update * first_round / rollout.prompts

    # The last rollout is sampled whole, though the run may end within its updates.
    updates = rollout.updates * math.ceil(config.steps / rollout.updates)
    rounds = objective.dynamic_max_rounds - 1 if objective.dynamic_sampling == "resample" else 0
    first = sampled * updates
    further = maths.completions_per_update * updates * rounds
    tokens = (first, first * pace.completion_tokens, (first + further) * rollout.max_tokens)

    return Estimate(
        num_prompts,
        maths,
        sampled,
        tokens,
        pace,
        limits_of(config),
    )


def show(result: Estimate, plan: Estimator, console: Console) -> None:
    config = plan.config
    maths = result.maths
    pace = result.pace
    prediction = plan.prediction

    completions = f"{maths.completions_per_update:,g}"
    if result.sampled != maths.completions_per_update:
        further = " or more" if config.objective.dynamic_max_rounds > 1 else ""
        completions += f", chosen from {result.sampled:,g}{further}"

    speed = pace.source
    if pace.seconds_per_step is not None:
        speed = f"{spell(pace.seconds_per_step)} s per step ({speed})"

    tokens = " / ".join(f"{number:,.0f}" for number in result.tokens)
    rows = [
        ("training problems", f"{result.num_prompts:,}"),
        ("prompts per update", f"{maths.prompts_per_update:,g}"),
        ("completions per update", completions),
        ("updates per epoch", f"{maths.updates_per_epoch:,}"),
        ("completions per epoch", f"{maths.completions_per_epoch:,}"),
        ("epochs of this run", f"{config.steps / maths.updates_per_epoch:.3g}"),
        ("tokens sampled, at least / expected / at most", tokens),
        ("pace", speed),
        *_time_and_money(result, config),
    ]
    if prediction and plan.shape:
        part = f"LoRA of rank {config.model.lora}" if config.model.lora else "all trained"
        millions = plan.shape.parameters / 1e6
        size = f"{millions:,.{0 if millions >= 10 else 1}f} M weights, {part}"
        seconds = {name: took * plan.factor for name, took in prediction.seconds.items()}
        phases = [f"{name} {spell(took)} s" for name, took in seconds.items()]
        rows = [("model", f"{config.model.name}: {size}"), *rows]
        rows.append(("estimated phases of a step", ", ".join(phases)))

        if plan.gpu:
            verdict = "fits" if prediction.fits else "does not fit"
            rest = {"allocator": prediction.needed - sum(prediction.memory.values())}
            held = (prediction.memory | rest).items()
            parts = ", ".join(f"{name} {size:.1f}" for name, size in held)
            total = f"{prediction.needed:.1f} of {prediction.capacity:g} GiB"
            rows.append((f"memory of one {plan.gpu}", f"{verdict}: {total} (estimate: {parts})"))

    table = Table(title=f"{train.run_name(config)}: {config.steps:,} steps", show_header=False)
    for row in rows:
        table.add_row(*map(Text, row))  # names are no markup

    console.print(table)
    for line in advise(plan):
        print_line(console, line)

    if config.gpu and config.price is None:
        console.print(f"price of {config.gpu} as of {PRICES_AS_OF}; --price sets your own")

    console.print("evaluations and start-up are not in the hours")


def advise(plan: Estimator) -> list[str]:
    config = plan.config
    now = plan.prediction
    gpu = plan.gpu
    rollout = plan.config.rollout
    if now is None or gpu is None:
        return []

    if now.fits:
        share = now.seconds["generate"] / now.step
        if share <= 0.5 or rollout.fast or rollout.vllm != "off" or config.model.load != "full":
            return []

        faster = plan.predict(replace(config, rollout=replace(rollout, fast=True)), gpu)
        if faster.step >= now.step:  # it is already on
            return []

        pace = spell(faster.step * plan.factor)
        return [f"sampling takes {share:.0%} of a step; with --rollout.fast {pace} s per step"]

    fitting: list[str] = []
    for family in smaller(config):
        found = ((flags, plan.predict(changed, gpu)) for flags, changed in family)
        flags, other = next((one for one in found if one[1].fits), ("", None))
        if other and not any(f"{flags} ".startswith(one.split("(")[0]) for one in fitting):
            pace = spell(other.step * plan.factor)
            fitting.append(f"{flags} ({other.needed:.0f} GiB, {pace} s per step)")

    by_memory: list[GpuName] = sorted(DEVICES, key=lambda name: DEVICES[name].memory)
    enough = [name for name in by_memory if plan.predict(config, name).fits]
    fitting += [f"--gpu {name}" for name in enough[:1]]
    fitting = fitting or ["several GPUs (docs/scaling.md), or a smaller --model"]

    return ["it would fit with one of:", *(f"  {one}" for one in fitting)]


# Flags that save memory, and what they set.
MODEL_CHANGES: dict[str, dict[str, Any]] = {
    "--model.dtype bfloat16": {"dtype": "bfloat16"},
    "--model.gradient-checkpointing": {"gradient_checkpointing": True},
    "--lora 16": {"lora": 16},
    "--lora 16 --model.gradient-checkpointing": {"lora": 16, "gradient_checkpointing": True},
}
ROLLOUT_FLAGS = {
    "prompts": "--batch",
    "max_tokens": "--max-tokens",
    "micro_batch": "--rollout.micro-batch",
}


def smaller(config: PlanConfig) -> Iterator[list[tuple[str, PlanConfig]]]:
    """Families of changes that save memory, each from mild to strong."""
    model = config.model
    rollout = config.rollout
    rows = rollout.prompts * rollout.generations // rollout.updates // num_processes()
    micro = range((rollout.micro_batch or rows) - 1, 0, -1)
    sizes = [{"micro_batch": n} for n in micro if rows % n == 0]
    halves = [k for k in (2, 4, 8) if rows % k == rollout.prompts % k == 0]
    sizes += [{"prompts": rollout.prompts // k, "micro_batch": 1} for k in halves]
    shorter = [{"max_tokens": rollout.max_tokens // k} for k in (2, 4)]
    families = [("", model, sizes), ("", model, shorter)]

    kept = {"lora", "dtype"} if model.lora else {"dtype"} if model.dtype == "float32" else set()
    for flags, change in MODEL_CHANGES.items():
        if not kept & change.keys():
            families.append((flags, replace(model, **change), [{}, *sizes]))

    if model.load == "full" and not rollout.fast and rollout.vllm == "off":
        flags = "--model.load 4bit" if model.lora else "--lora 16 --model.load 4bit"
        families.append((flags, replace(model, lora=model.lora or 16, load="4bit"), [{}, *sizes]))

    for flags, changed, sets in families:
        named = [[f"{ROLLOUT_FLAGS[name]} {n}" for name, n in one.items()] for one in sets]
        yield [
            (
                " ".join(filter(None, (flags, *names))),
                replace(config, model=changed, rollout=replace(rollout, **one)),
            )
            for names, one in zip(named, sets, strict=True)
        ]


def spell(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _time_and_money(result: Estimate, config: PlanConfig) -> list[tuple[str, str]]:
    rows = []
    pace = result.pace.seconds_per_step
    for what, steps in (("this run", config.steps), ("one epoch", result.maths.updates_per_epoch)):
        if pace is not None:
            dollars = result.dollars(steps)
            cost = "" if dollars is None else f", {dollars:,.2f} dollars"
            rows.append((f"time of {what}", f"{spell_time(steps * pace)}{cost}"))

    affordable = result.affordable_steps
    if affordable is not None:
        limits = [] if config.budget is None else [f"{config.budget:g} dollars"]
        limits += [] if config.time_limit is None else [config.time_limit]
        share = affordable / result.maths.updates_per_epoch
        enough = "all of this run" if affordable >= config.steps else f"{affordable:,} steps of it"
        rows.append((f"{' and '.join(limits)} buy", f"{enough}; {share:.3g} epochs"))

    return rows

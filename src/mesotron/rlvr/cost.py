"""`mesotron plan`: steps, tokens, hours, dollars and memory of a run before it starts.

Nothing is downloaded: sizes of common datasets and models are known, the rest is read from disk.
The hours do not count evaluations and further rounds of dynamic sampling.
"""

import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mesotron.config import PRICES_AS_OF, GpuName, PlanConfig, TaskConfig, TrainConfig
from mesotron.config.base import from_plain
from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.estimate import (
    DEVICES,
    Lengths,
    Prediction,
    find_device,
    find_shape,
    predict,
)
from mesotron.rlvr.objectives import first_round_prompts, resolve
from mesotron.rlvr.prompts import SYSTEM
from mesotron.rlvr.tasks.load import GENERATED, load_task
from mesotron.rlvr.train import check, check_enough, check_installed, set_library_variables
from mesotron.runs import RunFolder
from mesotron.runs.console import SafeConsole, print_line, spell_time
from mesotron.runs.doctor import list_gpus
from mesotron.runs.files import read_json, read_rows
from mesotron.runs.process import num_processes
from mesotron.watch.budget import Limits, StepMath, limits_of, step_math

CALIBRATION_STEPS = 3
# Training rows of common datasets and tokens of a typical question, by their names on the hub.
DATASETS = {
    "openai/gsm8k": (7473, 60), "gsm8k": (7473, 60),
    "DigitalLearningGmbH/MATH-lighteval": (7500, 90), "EleutherAI/hendrycks_math": (7500, 90),
    "hendrycks/competition_math": (7500, 90), "hiyouga/math12k": (12000, 90),
    "HuggingFaceH4/MATH-500": (500, 90), "GAIR/LIMO": (817, 120), "ChilleD/SVAMP": (700, 45),
    "agentica-org/DeepScaleR-Preview-Dataset": (40315, 110), "AI-MO/NuminaMath-TIR": (72441, 110),
    "AI-MO/NuminaMath-CoT": (859494, 110), "open-r1/OpenR1-Math-220k": (93733, 110),
    "zwhe99/DeepMath-103K": (103022, 90), "trl-lib/DeepMath-103K": (103022, 90),
    "Jiayi-Pan/Countdown-Tasks-3to4": (490364, 60), "tatsu-lab/alpaca": (52002, 40),
}  # fmt: skip
MATH_LEVELS = {1: 564, 2: 1348, 3: 1592, 4: 1690, 5: 2304}  # of the 7,500
QUESTION_TOKENS = 80  # where nothing is known
CHARACTERS_PER_TOKEN = 3.5
CHAT_TOKENS = 20  # marks of a chat around its messages
RUNS_READ = 12  # newest runs that may calibrate an estimate


@dataclass(frozen=True)
class Pace:
    seconds_per_step: float | None  # of one optimizer step; None if unknown
    completion_tokens: float  # of a typical completion
    source: str  # where both come from, in words


@dataclass(frozen=True)
class Estimate:
    num_prompts: int  # training problems
    maths: StepMath  # of a step and of an epoch
    steps: int  # of the run
    tokens: tuple[float, float, float]  # sampled in the run: at least, expected, at most
    pace: Pace
    limits: Limits  # price and budget

    def seconds(self, steps: float) -> float | None:
        pace = self.pace.seconds_per_step
        return None if pace is None else steps * pace

    def dollars(self, steps: float) -> float | None:
        seconds, price = self.seconds(steps), self.limits.price
        return None if seconds is None or price is None else seconds / 3600 * price

    @property
    def affordable_steps(self) -> int | None:
        """Steps within budget and time limit; None without a pace or a limit."""
        limits = self.limits
        pairs = ((limits.dollars, self.dollars(1)), (limits.seconds, self.seconds(1)))
        fits = [limit / step for limit, step in pairs if limit is not None and step]
        return math.floor(min(fits) * (1 + 1e-9)) if fits else None


@dataclass(frozen=True)
class Problems:
    count: int
    question_tokens: float


def run(config: PlanConfig) -> int:
    if config.calibrate:
        check_installed(config)
    check(config)
    limits_of(config)
    problems = find_problems(config.task)
    set_library_variables(config.task, config.model.name)
    plan = Estimator(config, problems.question_tokens)
    pace = find_pace(config, problems.count, plan)
    show(estimate(config, problems.count, pace), config, SafeConsole(highlight=False), plan)
    return 0


def find_problems(task: TaskConfig) -> Problems:
    """Training problems by the table, by counting those on disk, or as given."""
    if task.data:
        hub = [name for name in task.data if not Path(name).expanduser().exists()]
        local = tuple(name for name in task.data if name not in hub)
        questions = load_task(replace(task, data=local, weights=())).train if local else []
        tokens = mean([len(one.question) for one in questions] or [0]) / CHARACTERS_PER_TOKEN
        parts = [Problems(len(questions), tokens)] if local else []
        plain = replace(task, name="file", data=(), columns="", weights=())
        parts += [find_problems(replace(plain, path=name.partition(":")[0])) for name in hub]
        return Problems(sum(x.count for x in parts), mean(x.question_tokens for x in parts))
    if task.name == "arith":
        return Problems(GENERATED if task.num_train is None else task.num_train, 40)
    hub = task.path or task.name
    if task.path is not None and not Path(task.path).expanduser().exists():
        count, question = DATASETS.get(hub, (task.num_train, QUESTION_TOKENS))
        if count is None:
            raise ValueError(
                f"the size of {hub} is not known here and plan downloads nothing: give the number "
                "of its problems with --task.num-train"
            )
        if task.levels and count == sum(MATH_LEVELS.values()) + 2:  # two rows have no level
            count = sum(MATH_LEVELS[level] for level in task.levels)
        count -= task.few_shot
        return Problems(min(count, task.num_train or count), question)
    if hub in DATASETS:
        return find_problems(replace(task, path=hub))
    questions = [problem.question for problem in load_task(task).train]
    return Problems(len(questions), mean(map(len, questions)) / CHARACTERS_PER_TOKEN)


class Estimator:
    """The arithmetic of `estimate.py` for one config, calibrated by earlier runs.

    `prediction` is None if the model's shape or the GPU is unknown; `problem` then says which.
    """

    def __init__(self, config: PlanConfig, question_tokens: float, root: Path | None = None):
        self.config, self.question_tokens = config, question_tokens
        self.shape, self.problem = find_shape(config.model.name), ""
        self.gpu: GpuName | None = config.gpu
        self.prediction: Prediction | None = None
        if self.shape is None:
            self.problem = f"the shape of {config.model.name} is unknown: give its folder"
            return
        if self.gpu is None and config.device != "cpu":
            gpus = list_gpus()
            self.gpu = find_device(gpus[0].name) if gpus else None
            if gpus and self.gpu is None:
                self.problem = f"{gpus[0].name} is not in the table: give a similar one by --gpu"
                return
        self.lengths = lengths_of(config, question_tokens, config.completion_tokens)
        self.prediction = predict(config, self.shape, self.gpu, self.lengths)
        self.factor, self.runs = calibration(config, self.gpu, root or Path("runs"))

    def pace(self) -> Pace | None:
        if self.prediction is None:
            return None
        source = f"estimate for {self.gpu or 'one CPU core'}"
        if self.runs:
            source += f" times {self.factor:.2g}, measured in {', '.join(self.runs[:2])}"
            source += f" and {len(self.runs) - 2} more" if len(self.runs) > 2 else ""
        return Pace(self.prediction.step * self.factor, self.lengths.completion, source)

    def changed(self, config: PlanConfig) -> Prediction:
        assert self.shape is not None
        lengths = lengths_of(config, self.question_tokens, config.completion_tokens)
        return predict(config, self.shape, self.gpu, lengths)


def lengths_of(config: TrainConfig, question: float, completion: float | None = None) -> Lengths:
    task, most = config.task, config.rollout.max_tokens
    system = f"{SYSTEM} {FORMATS[task.format].instruction}" if task.system is None else task.system
    prompt = CHAT_TOKENS + len(system) / CHARACTERS_PER_TOKEN + question
    prompt += task.few_shot * (question + 100)
    completion = min(completion or most / 2, most)
    # Among many completions the longest is often cut off at the limit.
    return Lengths(prompt=prompt, completion=completion, longest=min(most, 2 * completion))


def calibration(config: TrainConfig, gpu: GpuName | None, root: Path) -> tuple[float, list[str]]:
    """How many times as long as estimated earlier runs took, and which: those with the same model
    on the same device, else any on that device, else any on a GPU."""
    ranked: dict[int, list[tuple[float, str]]] = {}
    for path, run, device, seconds, completion in earlier_runs(root):
        shape = find_shape(run.model.name)
        if shape is None or (device is None) != (gpu is None):
            continue
        question = DATASETS.get(run.task.path or run.task.name, (0, QUESTION_TOKENS))[1]
        predicted = predict(run, shape, device, lengths_of(run, question, completion)).step
        rank = (device != gpu) * 2 + (run.model.name != config.model.name)
        ranked.setdefault(rank, []).append((seconds / predicted, str(path)))
    if not ranked:
        return 1.0, []
    best = ranked[min(ranked)]
    return geometric_mean([ratio for ratio, _ in best]), [name for _, name in best]


def earlier_runs(
    root: Path,
) -> Iterator[tuple[Path, TrainConfig, GpuName | None, float, float | None]]:
    """Path, config, GPU (None: a CPU), seconds per step and mean completion of the newest runs."""
    files = [path for path in root.glob("*/config.json") if not path.parent.is_symlink()]
    for file in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)[:RUNS_READ]:
        path = file.parent
        try:
            rows = read_rows(path / "metrics.jsonl") if (path / "metrics.jsonl").is_file() else []
            times = [float(row["time/step"]) for row in rows if row.get("time/step")]
            config = from_plain(TrainConfig, read_json(file), str(file))
            device = str(read_json(path / "env.json").get("device", ""))
        except (OSError, TypeError, ValueError):
            continue  # of another command or version, or damaged
        gpu = find_device(device)
        if len(times) < 4 or (gpu is None and device != "cpu"):
            continue
        lengths = [
            row["completions/mean_length"] for row in rows if "completions/mean_length" in row
        ]
        yield path, config, gpu, median(times[2:]), mean(lengths) if lengths else None


def find_pace(config: PlanConfig, num_prompts: int, plan: Estimator | None = None) -> Pace:
    length = config.completion_tokens or config.rollout.max_tokens / 2
    if config.calibrate:
        return calibrate(config)
    if config.tokens_per_second:
        per_step = completions_per_update(config, num_prompts) * length / config.tokens_per_second
        return Pace(per_step, length, f"{config.tokens_per_second:g} tokens per second, as given")
    if config.seconds_per_step:
        return Pace(config.seconds_per_step, length, "as given")
    estimated = plan.pace() if plan else None
    problem = f"{plan.problem}; " if plan else ""
    return estimated or Pace(
        None, length, f"unknown: {problem}or add --calibrate or --seconds-per-step"
    )


def calibrate(config: PlanConfig) -> Pace:
    """Time a few whole rollouts on this machine; the first, a warm-up, is not counted."""
    from transformers import TrainerCallback

    from mesotron.rlvr.answers.verify import Verifier
    from mesotron.rlvr.session import build_trainer, load, quiet_libraries

    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            moments.append(time.monotonic())

        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if "loss" in (logs or {}):
                moments.append(time.monotonic())

    quiet_libraries()
    updates = config.rollout.updates
    steps = CALIBRATION_STEPS * updates
    short = replace(config, steps=steps, save_every=0, guard="off", report_to=())
    with tempfile.TemporaryDirectory() as folder, Verifier(config.reward.timeout) as verifier:
        run = RunFolder.create(Path(folder) / "run", short, {})
        trainer = build_trainer(load(short, verifier), run)
        trainer.add_callback(Clock())
        trainer.train()
    key = "completions/mean_length"
    lengths = [row[key] for row in trainer.state.log_history if key in row]
    seconds = (moments[-1] - moments[updates]) / (steps - updates)
    length = config.completion_tokens or mean(lengths)
    source = f"{steps} steps on this machine, {length:.3g} tokens per completion"
    return Pace(seconds, length, source)


def completions_per_update(config: PlanConfig, num_prompts: int) -> float:
    """Completions sampled per optimizer step, without further rounds of dynamic sampling."""
    first = first_round_prompts(config.objective, config.rollout, num_processes())
    return maths_of(config, num_prompts).completions_per_update * first / config.rollout.prompts


def maths_of(config: PlanConfig, num_prompts: int) -> StepMath:
    check_enough(num_prompts, config)
    rollout, objective = config.rollout, resolve(config.objective, config.rollout.generations)
    # A corewarding anchor samples beside the policy.
    beside = (objective.momentum_generations or 0) if objective.name == "corewarding" else 0
    return step_math(num_prompts, rollout.prompts, rollout.generations + beside, rollout.updates)


def estimate(config: PlanConfig, num_prompts: int, pace: Pace) -> Estimate:
    maths = maths_of(config, num_prompts)
    # The last rollout is sampled whole, though the run may end within its updates.
    updates = config.rollout.updates * math.ceil(config.steps / config.rollout.updates)
    first = completions_per_update(config, num_prompts) * updates
    resamples = config.objective.dynamic_sampling == "resample"
    rounds = config.objective.dynamic_max_rounds - 1 if resamples else 0
    further = maths.completions_per_update * updates * rounds
    tokens = (first, first * pace.completion_tokens, (first + further) * config.rollout.max_tokens)
    return Estimate(num_prompts, maths, config.steps, tokens, pace, limits_of(config))


def show(
    result: Estimate, config: PlanConfig, console: Console, plan: Estimator | None = None
) -> None:
    maths, steps, pace = result.maths, result.steps, result.pace
    sampled = completions_per_update(config, result.num_prompts)
    trained = maths.completions_per_update
    completions = f"{trained:,g}"
    if sampled != trained:
        further = " or more" if config.objective.dynamic_max_rounds > 1 else ""
        completions += f", chosen from {sampled:,g}{further}"
    tokens = " / ".join(f"{count:,.0f}" for count in result.tokens)
    speed = pace.source
    if pace.seconds_per_step is not None:
        speed = f"{spell(pace.seconds_per_step)} s per step ({speed})"
    table = Table(title=f"{config.recipe}: {steps:,} steps", show_header=False)
    rows = [
        ("training problems", f"{result.num_prompts:,}"),
        ("prompts per update", f"{maths.prompts_per_update:,g}"),
        ("completions per update", completions),
        ("updates per epoch", f"{maths.updates_per_epoch:,}"),
        ("completions per epoch", f"{maths.completions_per_epoch:,}"),
        ("epochs of this run", f"{steps / maths.updates_per_epoch:.3g}"),
        ("tokens sampled, at least / expected / at most", tokens),
        ("pace", speed),
        *_time_and_money(result, config),
    ]
    if plan and plan.prediction and plan.shape:
        part = f"LoRA of rank {config.model.lora}" if config.model.lora else "all trained"
        size = f"{plan.shape.parameters / 1e6:,.0f} M weights, {part}"
        phases = [f"{name} {spell(seconds)} s" for name, seconds in plan.prediction.seconds.items()]
        rows = [("model", f"{config.model.name}: {size}"), *rows]
        rows.append(("estimated phases of a step", ", ".join(phases)))
        if plan.gpu:
            rows.append((f"memory of one {plan.gpu}", spell_memory(plan.prediction)))
    for row in rows:
        table.add_row(*map(Text, row))  # names are no markup
    console.print(table)
    for line in advise(plan) if plan else ():
        print_line(console, line)
    if config.gpu and config.price is None:
        console.print(f"price of {config.gpu} as of {PRICES_AS_OF}; --price sets your own")
    console.print("evaluations and start-up are not in the hours")


def spell_memory(prediction: Prediction) -> str:
    verdict = "fits" if prediction.fits else "does not fit"
    parts = ", ".join(f"{name} {size:.1f}" for name, size in prediction.memory.items())
    total = f"{prediction.needed:.1f} of {prediction.capacity:g} GiB"
    return f"{verdict}: {total} (estimate: {parts})"


def advise(plan: Estimator) -> list[str]:
    """What to change if the run does not fit, or if sampling takes most of the time."""
    config, now, shape, gpu = plan.config, plan.prediction, plan.shape, plan.gpu
    if now is None or shape is None or gpu is None:
        return []
    if not now.fits:
        fitting: list[str] = []
        for family in smaller(config):
            found = ((flags, plan.changed(changed)) for flags, changed in family)
            flags, other = next((one for one in found if one[1].fits), ("", None))
            if other and not any(f"{flags} ".startswith(one.split("(")[0]) for one in fitting):
                pace = spell(other.step * plan.factor)
                fitting.append(f"{flags} ({other.needed:.0f} GiB, {pace} s per step)")
        by_memory: list[GpuName] = sorted(DEVICES, key=lambda name: DEVICES[name].memory)
        enough = [n for n in by_memory if predict(config, shape, n, plan.lengths).fits]
        fitting += [f"--gpu {name}" for name in enough[:1]]
        weights = now.memory["weights"]
        apart = f"LoRA on 8-bit weights in your own script ({weights / 2:.0f} of {weights:.0f} GiB)"
        fitting = fitting or [f"several GPUs (docs/scaling.md), or {apart}"]
        return ["it would fit with one of:", *(f"  {one}" for one in fitting)]
    share, rollout = now.seconds["generate"] / now.step, config.rollout
    if share > 0.5 and not rollout.fast and rollout.vllm == "off":
        faster = plan.changed(replace(config, rollout=replace(rollout, fast=True)))
        pace = spell(faster.step * plan.factor)
        return [f"sampling takes {share:.0%} of a step; with --rollout.fast {pace} s per step"]
    return []


def smaller(config: PlanConfig) -> Iterator[Iterator[tuple[str, PlanConfig]]]:
    """Families of changes that save memory, each from mild to strong."""
    model, rollout = config.model, config.rollout

    names = {"prompts": "batch", "max_tokens": "max-tokens", "micro_batch": "rollout.micro-batch"}

    def vary(base: PlanConfig, *sets: dict[str, int], flags: str = "") -> Any:
        for one in sets:
            named = [f"--{names[name]} {n}" for name, n in one.items()]
            changed = replace(base, rollout=replace(rollout, **one))  # type: ignore[arg-type]
            yield " ".join(filter(None, (flags, *named))), changed

    rows = rollout.prompts * rollout.generations // rollout.updates // num_processes()
    most = rollout.micro_batch or rows
    micro = [{"micro_batch": n} for n in range(most - 1, 0, -1) if rows % n == 0]
    prompts = [{"prompts": rollout.prompts // k} for k in (2, 4, 8) if rows % (k * most) == 0]
    both = [
        {"prompts": rollout.prompts // k, "micro_batch": n}
        for k, n in ((2, 4), (4, 2), (8, 1)) if rows % (k * n) == 0 and rollout.prompts % k == 0
    ]  # fmt: skip
    yield vary(config, *micro)
    yield vary(config, *({"max_tokens": rollout.max_tokens // k} for k in (2, 4)))
    yield vary(config, *prompts)
    checkpointed = replace(model, gradient_checkpointing=True)
    half = replace(model, dtype="bfloat16")
    for flags, changed in (
        ("--model.dtype bfloat16", half if model.dtype in ("auto", "mixed") else model),
        ("--model.gradient-checkpointing", checkpointed),
        ("--lora 16", replace(model, lora=16)),
        ("--lora 16 --model.gradient-checkpointing", replace(checkpointed, lora=16)),
    ):
        if changed not in (model, checkpointed if model.lora else None):
            base = replace(config, model=changed)
            yield vary(base, {}, *micro, *prompts, *both, flags=flags)


def spell(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _time_and_money(result: Estimate, config: PlanConfig) -> list[tuple[str, str]]:
    rows = []
    for what, steps in (("this run", result.steps), ("one epoch", result.maths.updates_per_epoch)):
        seconds, dollars = result.seconds(steps), result.dollars(steps)
        if seconds is not None:
            cost = "" if dollars is None else f", {dollars:,.2f} dollars"
            rows.append((f"time of {what}", f"{spell_time(seconds)}{cost}"))
    affordable = result.affordable_steps
    if affordable is not None:
        limits = [] if config.budget is None else [f"{config.budget:g} dollars"]
        limits += [] if config.time_limit is None else [config.time_limit]
        share = affordable / result.maths.updates_per_epoch
        enough = "all of this run" if affordable >= result.steps else f"{affordable:,} steps of it"
        rows.append((f"{' and '.join(limits)} buy", f"{enough}; {share:.3g} epochs"))
    return rows

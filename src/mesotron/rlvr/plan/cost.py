"""`mesotron plan`: steps, tokens, hours, dollars and memory of a run before it starts.

    problems = how many there are, how long their questions      problems.py
    step     = seconds and memory of a step                      estimate.py: seconds.py, memory.py
    pace     = that, or as given, or as timed here               pace.py
    run      = steps, tokens, hours and dollars                  sizes.py, and below

Nothing is downloaded: sizes of common datasets and models are known, the rest is read from disk.
The hours do not count evaluations and further rounds of dynamic sampling.
"""

import math
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mesotron.config import GPUS, PRICES_AS_OF, PlanConfig
from mesotron.models.variables import set_library_variables
from mesotron.rlvr.plan.advice import advise, spell
from mesotron.rlvr.plan.estimate import Prediction, StepEstimate, estimate_step
from mesotron.rlvr.plan.pace import Pace, find_pace
from mesotron.rlvr.plan.problems import find_problems
from mesotron.rlvr.plan.shapes import Shape
from mesotron.rlvr.plan.sizes import (
    StepMath,
    TokenCounts,
    sampled_per_update,
    step_math,
    tokens_of_run,
)
from mesotron.rlvr.pocket import allow
from mesotron.rlvr.train import check, check_installed, resolve_own, resolve_steps
from mesotron.runs.console import SafeConsole, print_line, spell_time
from mesotron.runs.folder import run_name
from mesotron.watch.budget import Limits, limits_of

TableRow = tuple[str, str]


class RunEstimate(NamedTuple):
    num_prompts: int  # training problems
    maths: StepMath  # of a step and of an epoch
    sampled: float  # completions per update, without further rounds of dynamic sampling
    tokens: TokenCounts  # sampled in the run
    pace: Pace
    limits: Limits  # price and budget
    start: float = 0.0  # seconds of the supervised start

    def seconds(self, steps: float) -> float | None:
        pace = self.pace.seconds_per_step
        return None if pace is None else steps * pace

    def dollars(self, seconds: float) -> float | None:
        price = self.limits.price
        return None if price is None else seconds / 3600 * price

    @property
    def affordable_steps(self) -> int | None:
        """Steps within budget and time limit; None without a pace or a limit."""
        limits = self.limits
        step = self.seconds(1)
        seconds = []
        if limits.seconds is not None:
            seconds.append(limits.seconds)
        if limits.dollars is not None and limits.price:
            seconds.append(limits.dollars / limits.price * 3600)

        if not step or not seconds:
            return None

        left = max(min(seconds) - self.start, 0.0)
        return math.floor(left / step * (1 + 1e-9))


def run(config: PlanConfig) -> int:
    if config.calibrate:
        check_installed(config)

    config, notes = resolve_steps(config)
    for note in notes:
        print(note)

    config, _ = check(config)
    config = resolve_own(config)
    limits_of(config)

    problems = find_problems(config.task)
    set_library_variables(config.task, config.model.name)
    step = estimate_step(config, problems.question_tokens)
    pace = find_pace(config, problems.number, step)

    start = 0.0
    if step.prediction is not None:
        start = config.sft.steps * step.prediction.supervised * step.factor

    result = estimate_run(config, problems.number, pace, start)
    show(result, step, SafeConsole(highlight=False))
    return 0


def estimate_run(
    config: PlanConfig, num_prompts: int, pace: Pace, start: float = 0.0
) -> RunEstimate:
    maths = step_math(config, num_prompts)
    return RunEstimate(
        num_prompts=num_prompts,
        maths=maths,
        sampled=sampled_per_update(config, maths),
        tokens=tokens_of_run(config, maths, pace.completion_tokens),
        pace=pace,
        limits=limits_of(config),
        start=start,
    )


# What is printed


def show(result: RunEstimate, step: StepEstimate, console: Console) -> None:
    config = step.config
    rows = [*run_rows(result, config), *money_rows(result, config)]
    if step.prediction is not None and step.shape is not None:
        rows.insert(0, model_row(config, step.shape))
        rows += step_rows(step, step.prediction)

    table = Table(title=f"{run_name(config)}: {config.steps:,} steps", show_header=False)
    for row in rows:
        table.add_row(*map(Text, row))  # names are no markup

    console.print(table)
    for line in advise(step):
        print_line(console, line)

    if config.gpu and config.price is None:
        if GPUS[config.gpu].price is None:
            console.print(f"a {config.gpu} has no usual rent; --price sets dollars per hour")
        else:
            console.print(f"price of {config.gpu} as of {PRICES_AS_OF}; --price sets your own")

    console.print("evaluations and start-up are not in the hours")


def model_row(config: PlanConfig, shape: Shape) -> TableRow:
    rank = config.model.lora
    part = f"LoRA of rank {rank}" if rank else "all trained"
    millions = shape.parameters / 1e6
    size = f"{millions:,.0f}" if millions >= 10 else f"{millions:,.1f}"

    return "model", f"{config.model.name}: {size} M weights, {part}"


def run_rows(result: RunEstimate, config: PlanConfig) -> list[TableRow]:
    maths = result.maths
    epochs = config.steps / maths.updates_per_epoch
    tokens = " / ".join(f"{number:,.0f}" for number in result.tokens)

    return [
        ("training problems", f"{result.num_prompts:,}"),
        ("prompts per update", f"{maths.prompts_per_update:,g}"),
        ("completions per update", spell_completions(result, config)),
        ("updates per epoch", f"{maths.updates_per_epoch:,}"),
        ("completions per epoch", f"{maths.completions_per_epoch:,}"),
        ("epochs of this run", f"{epochs:.3g}"),
        ("tokens sampled, at least / expected / at most", tokens),
        ("pace", spell_pace(result.pace)),
    ]


def spell_completions(result: RunEstimate, config: PlanConfig) -> str:
    trained = f"{result.maths.completions_per_update:,g}"
    if result.sampled == result.maths.completions_per_update:
        return trained

    further = " or more" if config.objective.dynamic_max_rounds > 1 else ""
    return f"{trained}, chosen from {result.sampled:,g}{further}"


def spell_pace(pace: Pace) -> str:
    if pace.seconds_per_step is None:
        return pace.source

    return f"{spell(pace.seconds_per_step)} s per step ({pace.source})"


def money_rows(result: RunEstimate, config: PlanConfig) -> list[TableRow]:
    rows = []
    if config.lr_auto:
        rows.append(("search of --lr auto", f"at most {searched_steps(config):,} steps more"))

    epoch = result.maths.updates_per_epoch

    if result.start:
        per_step = spell(result.start / config.sft.steps)
        steps = f"{config.sft.steps:,} steps, {spell_time(result.start)} ({per_step} s each)"
        rows.append(("supervised start, part of this run", steps))

    whole = config.steps + searched_steps(config)
    for what, steps, more in (("this run", whole, result.start), ("one epoch", epoch, 0.0)):
        seconds = result.seconds(steps)
        if seconds is None:
            continue

        dollars = result.dollars(seconds + more)
        cost = "" if dollars is None else f", {dollars:,.2f} dollars"
        rows.append((f"time of {what}", f"{spell_time(seconds + more)}{cost}"))

    affordable = result.affordable_steps
    if affordable is not None:
        is_enough = affordable >= config.steps + searched_steps(config)

        if is_enough:
            steps = "all of this run"
        else:
            steps = f"{affordable:,} steps of it"

        bought = f"{steps}; {affordable / epoch:.3g} epochs"
        rows.append((f"{spell_limits(config)} buy", bought))

    return rows


def searched_steps(config: PlanConfig) -> int:
    """Steps that a search for the rate takes at most, beside those of the run."""
    if not config.lr_auto:
        return 0

    return allow(config.steps).most


def spell_limits(config: PlanConfig) -> str:
    limits = []
    if config.budget is not None:
        limits.append(f"{config.budget:g} dollars")
    if config.time_limit is not None:
        limits.append(config.time_limit)

    return " and ".join(limits)


def step_rows(step: StepEstimate, prediction: Prediction) -> list[TableRow]:
    phases = []
    for name, seconds in prediction.seconds.items():
        phases.append(f"{name} {spell(seconds * step.factor)} s")

    rows = [("estimated phases of a step", ", ".join(phases))]
    if step.gpu:
        rows.append((f"memory of one {step.gpu}", spell_memory(prediction)))

    return rows


def spell_memory(prediction: Prediction) -> str:
    verdict = "fits" if prediction.fits else "does not fit"
    total = f"{prediction.needed:.1f} of {prediction.capacity:g} GiB"

    allocator = prediction.needed - prediction.allocated
    sizes = prediction.memory | {"allocator": allocator}
    parts = ", ".join(f"{name} {size:.1f}" for name, size in sizes.items())

    return f"{verdict}: {total} (estimate: {parts})"

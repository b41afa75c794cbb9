"""`mesotron plan`: what a run will take, before it starts.

The step math needs the number of problems alone; hours and dollars need a pace, which is measured
here or stated. Sampling until groups have a signal, and evaluations, are not in the hours.
"""

import math
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from mesotron.config import PRICES_AS_OF, PlanConfig
from mesotron.rlvr.cost.pace import Pace
from mesotron.rlvr.objectives import first_round_prompts, resolve
from mesotron.rlvr.tasks.load import GENERATED, load_task
from mesotron.rlvr.train import check, check_enough, check_installed, set_library_variables
from mesotron.runs.console import spell_time
from mesotron.runs.processes import num_processes
from mesotron.watch.budget import Limits, StepMath, limits_of, step_math


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Args:
        num_prompts: training problems.
        maths: of a step and of an epoch.
        steps: of the run.
        tokens: sampled in the run: at least, expected, at most.
        pace: as taken.
        limits: price and budget.
    """

    num_prompts: int
    maths: StepMath
    steps: int
    tokens: tuple[float, float, float]
    pace: Pace
    limits: Limits

    def seconds(self, steps: float) -> float | None:
        """Seconds of so many steps, if the pace is known."""
        pace = self.pace.seconds_per_step
        return None if pace is None else steps * pace

    def dollars(self, steps: float) -> float | None:
        """What so many steps cost, if pace and price are known."""
        seconds, price = self.seconds(steps), self.limits.price
        return None if seconds is None or price is None else seconds / 3600 * price

    @property
    def affordable_steps(self) -> int | None:
        """Steps that fit into budget and time limit; None without a pace or a limit."""
        one_step, one_cost = self.seconds(1), self.dollars(1)
        fits = []
        if self.limits.dollars is not None and one_cost:
            fits.append(self.limits.dollars / one_cost)
        if self.limits.seconds is not None and one_step:
            fits.append(self.limits.seconds / one_step)
        return math.floor(min(fits) * (1 + 1e-9)) if fits else None


def run(config: PlanConfig) -> int:
    """Print what a run will take.

    Args:
        config: of the run, and its pace.

    Returns:
        0.
    """
    check(config)
    limits_of(config)
    num_prompts = count_prompts(config)
    set_library_variables(config)
    pace = find_pace(config, num_prompts)
    found = estimate(config, num_prompts, pace)
    show(found, config, Console(highlight=False))
    return 0


def count_prompts(config: PlanConfig) -> int:
    """Training problems of the run: as stated, or counted."""
    task = config.task
    if task.name == "arith":
        return GENERATED if task.num_train is None else task.num_train
    # A file may hold fewer than were asked for; one on the hub is not fetched to find that out.
    local = task.path is not None or task.num_train is None
    return len(load_task(task).train) if local else task.num_train or 0


def find_pace(config: PlanConfig, num_prompts: int) -> Pace:
    """The pace as measured or stated."""
    length = config.completion_tokens or config.rollout.max_tokens / 2
    if config.calibrate:
        check_installed()
        from mesotron.rlvr.cost.calibrate import calibrate

        return calibrate(config)
    if config.tokens_per_second:
        per_step = completions_per_update(config, num_prompts) * length / config.tokens_per_second
        return Pace(per_step, length, f"{config.tokens_per_second:g} tokens a second, as stated")
    if config.seconds_per_step:
        return Pace(config.seconds_per_step, length, "as stated")
    return Pace(None, length, "unknown: add --calibrate or --seconds-per-step")


def completions_per_update(config: PlanConfig, num_prompts: int) -> float:
    """Completions sampled for one optimizer step, without further rounds of dynamic sampling."""
    first = first_round_prompts(config.objective, config.rollout, num_processes())
    return maths_of(config, num_prompts).completions_per_update * first / config.rollout.prompts


def maths_of(config: PlanConfig, num_prompts: int) -> StepMath:
    """The step math of a config; a corewarding anchor samples beside the policy."""
    rollout = config.rollout
    objective = resolve(config.objective, rollout.generations)
    beside = (objective.momentum_generations or 0) if objective.name == "corewarding" else 0
    check_enough(num_prompts, config)
    return step_math(num_prompts, rollout.prompts, rollout.generations + beside, rollout.updates)


def estimate(config: PlanConfig, num_prompts: int, pace: Pace) -> Estimate:
    """Everything that follows from a config, the number of its problems and its pace.

    Example:
        >>> from mesotron.config import RolloutConfig
        >>> config = PlanConfig(rollout=RolloutConfig(prompts=4, generations=4), steps=1250,
        ...     price=3.6, budget=0.9)
        >>> found = estimate(config, 5000, Pace(2.0, 100.0, "as stated"))
        >>> found.maths.updates_per_epoch, found.dollars(1250), found.affordable_steps
        (1250, 2.5, 450)
    """
    maths = maths_of(config, num_prompts)
    # The last rollout is sampled whole, though the run may end within its updates.
    updates = config.rollout.updates * math.ceil(config.steps / config.rollout.updates)
    first = completions_per_update(config, num_prompts) * updates
    further = 0.0
    if config.objective.dynamic_sampling == "resample":
        rounds = config.objective.dynamic_max_rounds - 1
        further = maths.completions_per_update * updates * rounds
    tokens = (
        first,
        first * pace.completion_tokens,
        (first + further) * config.rollout.max_tokens,
    )
    return Estimate(num_prompts, maths, config.steps, tokens, pace, limits_of(config))


def show(found: Estimate, config: PlanConfig, console: Console) -> None:
    """The estimate as a table."""
    maths, steps = found.maths, found.steps
    table = Table(title=f"{config.recipe}: {steps:,} steps", show_header=False)
    rows = [
        ("training problems", f"{found.num_prompts:,}"),
        ("prompts per update", f"{maths.prompts_per_update:,g}"),
        ("completions per update", completions_words(found, config)),
        ("updates per epoch", f"{maths.updates_per_epoch:,}"),
        ("completions per epoch", f"{maths.completions_per_epoch:,}"),
        ("epochs of this run", f"{steps / maths.updates_per_epoch:.3g}"),
        ("tokens sampled, at least / expected / at most",
         " / ".join(f"{tokens:,.0f}" for tokens in found.tokens)),
        ("pace", pace_words(found.pace)),
        *time_and_money(found, config),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if config.gpu and config.price is None:
        console.print(f"price of {config.gpu} as of {PRICES_AS_OF}; --price gives your own")
    console.print("evaluations and the start of the program are not in the hours")


def completions_words(found: Estimate, config: PlanConfig) -> str:
    """How many train, and how many are sampled for them where groups are chosen."""
    sampled = completions_per_update(config, found.num_prompts)
    trained = found.maths.completions_per_update
    if sampled == trained:
        return f"{trained:,g}"
    further = " or more" if config.objective.dynamic_max_rounds > 1 else ""
    return f"{trained:,g}, chosen from {sampled:,g}{further}"


def pace_words(pace: Pace) -> str:
    """The pace in a cell."""
    if pace.seconds_per_step is None:
        return pace.source
    return f"{pace.seconds_per_step:.3g} s a step ({pace.source})"


def time_and_money(found: Estimate, config: PlanConfig) -> list[tuple[str, str]]:
    """The rows that need a pace; none without one."""
    rows = []
    for what, steps in (("this run", found.steps), ("one epoch", found.maths.updates_per_epoch)):
        seconds, dollars = found.seconds(steps), found.dollars(steps)
        if seconds is not None:
            cost = "" if dollars is None else f", {dollars:,.2f} dollars"
            rows.append((f"time of {what}", f"{spell_time(seconds)}{cost}"))
    affordable = found.affordable_steps
    if affordable is not None:
        words = [f"{config.budget:g} dollars"] * (config.budget is not None)
        words += [str(config.time_limit)] * (config.time_limit is not None)
        share = affordable / found.maths.updates_per_epoch
        enough = "all of this run" if affordable >= found.steps else f"{affordable:,} steps of it"
        rows.append((f"{' and '.join(words)} buy", f"{enough}; {share:.3g} epochs"))
    return rows

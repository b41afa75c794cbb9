"""`--lr auto`: the search for a learning rate inside a run, on plain values.

    allow       how many steps the search may take: at most 0.4 of the run beside it
    next_heat   which fork trains next, and how far
    choose      the rate to continue with, and why
    look_again  the same later: keep the rate, halve it or double it

A fork is the run itself, continued from one state at another rate on the same prompts and draws
(`heats` trains them). Rates are factors of the recipe's, all of them powers of two.

A short heat prefers rates that die later. So forks at large rates are scouts: the distance that a
rate travels is the sum of its scheduled rates, and a scout at four times a rate goes in a few steps
as far as that rate will in the run. A rate is admitted only if a healthy fork went about as far as
it will go. The standard library and the watch only: `plan` and the report read it, too.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, stdev
from typing import Any, Literal

from mesotron.config import WatchSettings
from mesotron.config.train import LEAST_SEARCHED
from mesotron.watch.diagnosis import harmful_events
from mesotron.watch.engine import Engine

NAME = "pocket"  # of the record, pocket.json, and of the folder of the forks
SPACING = 4.0
FIRST = (1.0, 4.0, 16.0, 0.25)  # factors of the first forks
LOOKS = (0.25, 0.5)  # shares of the run after which it looks again
LOOK_FACTORS = (1.0, 0.5, 2.0)
COST = 0.4  # share of the run's steps that the search may take beside the winner's
LEAST_LOOK = 3  # steps of a later heat: the first samples the same policy in every fork
SURVIVORS = 2
# Standard errors of a paired difference that count: a search makes up to ten comparisons.
CLEAR = 2.5
# How much farther than a healthy fork has gone an admitted rate may travel.
REACH = 3.0
# A heat is shorter than the watch's usual windows.
SHORT = WatchSettings(warmup=2, window=2, patience=2)

Condition = Literal["healthy", "drifting", "dead", "not finite"]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One step of a fork: what its policy, before the step, earned."""

    step: int
    travelled: float  # sum of the rates before it, from the fork's start
    rewards: dict[str, float]  # prompt -> mean reward of its group
    drift: dict[str, float]  # entropy, clipped share and the like


@dataclass(frozen=True, kw_only=True)
class Fork:
    """The run continued at a multiple of its rate."""

    factor: float
    rate: float
    planned: float  # the distance from the fork's start to the end of the run
    steps: tuple[Sampled, ...]
    conditions: tuple[Condition, ...]  # after each heat

    @property
    def condition(self) -> Condition:
        return self.conditions[-1]

    @property
    def is_healthy(self) -> bool:
        return self.condition == "healthy"

    @property
    def has_state(self) -> bool:
        """Whether it can be continued."""
        return self.condition != "not finite"

    @property
    def travelled(self) -> float:
        return self.steps[-1].travelled if self.steps else 0.0

    @property
    def last(self) -> int:
        return self.steps[-1].step if self.steps else 0

    def after_first_heat(self, step: int) -> "Fork":
        """As it was when its first heat ended at that step."""
        steps = tuple(each for each in self.steps if each.step <= step)
        return replace(self, steps=steps, conditions=self.conditions[:1])


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A fork trains from one step to another."""

    factor: float
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean reward of one fork minus another's, paired by step and prompt."""

    mean: float
    error: float  # standard error
    pairs: int

    @property
    def is_clear(self) -> bool:
        return abs(self.mean) > CLEAR * self.error and self.pairs > 1

    @property
    def is_gain(self) -> bool:
        return self.is_clear and self.mean > 0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The rate to continue with."""

    factor: float
    rate: float
    why: str  # a sentence
    admitted: tuple[float, ...] = ()  # factors
    difference: Difference | None = None  # of the deciding comparison


@dataclass(frozen=True, kw_only=True)
class Search:
    """The forks from one state, and the choice once it is made."""

    step: int  # of the state
    forks: tuple[Fork, ...] = ()
    choice: Choice | None = None

    @property
    def trained(self) -> int:
        """Steps of all forks."""
        return sum(len(fork.steps) for fork in self.forks)

    @property
    def kept(self) -> int:
        """Steps of the winner, which the run keeps."""
        return 0 if self.choice is None else len(self.fork(self.choice.factor).steps)

    def fork(self, factor: float) -> Fork:
        return next(fork for fork in self.forks if fork.factor == factor)

    def with_fork(self, fork: Fork) -> "Search":
        others = tuple(each for each in self.forks if each.factor != fork.factor)
        return replace(self, forks=(*others, fork))

    @property
    def reach(self) -> float:
        """The largest distance that a healthy fork has gone."""
        return max((fork.travelled for fork in on_the_way(self.forks)), default=0.0)


# What a search may take


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """Steps that the searches of a run may take."""

    heat: int  # of a first heat
    look_heat: int
    looks: tuple[int, ...]  # steps of the run at which it looks again
    most: int  # in all, beside the winners'


def allow(steps: int) -> Allowance:
    """The allowance of a run of so many steps; ValueError for one that is too short."""
    if steps < LEAST_SEARCHED:
        raise ValueError(f"--lr auto needs --steps {LEAST_SEARCHED} or more, not {steps}")

    heat = steps // 20
    looks = tuple(math.ceil(share * steps) for share in LOOKS)
    return Allowance(
        heat=heat,
        look_heat=max(heat // 2, LEAST_LOOK),
        looks=looks,
        most=math.floor(COST * steps),
    )


def spent(searches: Iterable[Search]) -> int:
    """Steps that were trained and thrown away."""
    return sum(search.trained - search.kept for search in searches)


# The next heat


def next_heat(search: Search, allowance: Allowance) -> Heat | None:
    """The next heat of a search from the start of a run; None if it can choose."""
    end = search.step + allowance.heat
    known = {fork.factor for fork in search.forks}
    for factor in FIRST:
        if factor not in known:
            return Heat(factor=factor, first=search.step, last=end)

    further = end + allowance.heat
    for fork in survivors(search.forks, end):
        if fork.is_healthy and len(fork.conditions) == 1:
            return Heat(factor=fork.factor, first=end, last=further)

    factor = extension(search.forks)
    if factor is None or known - {*FIRST}:
        return None

    return Heat(factor=factor, first=search.step, last=further)


def next_look(search: Search, allowance: Allowance) -> Heat | None:
    """The next heat of a later look."""
    known = {fork.factor for fork in search.forks}
    for factor in LOOK_FACTORS:
        if factor not in known:
            return Heat(factor=factor, first=search.step, last=search.step + allowance.look_heat)

    return None


def survivors(forks: Sequence[Fork], end: int) -> list[Fork]:
    """The forks that go on after the first heat, which ended at that step: of those on the way up
    the farthest ones, since they show what the others' runs will be like."""
    first = {fork.factor: fork.after_first_heat(end) for fork in forks if fork.factor in FIRST}
    healthy = on_the_way([*first.values()])
    healthy.sort(key=lambda fork: -fork.factor)
    chosen = {fork.factor for fork in healthy[:SURVIVORS]}

    return [fork for fork in forks if fork.factor in chosen]


def extension(forks: Sequence[Fork]) -> float | None:
    """A further factor to try: above if the farthest fork still gains clearly, below if no rate is
    admitted."""
    choice = choose(forks)
    if not choice.admitted:
        return min(fork.factor for fork in forks) / SPACING

    rising = sorted(on_the_way(forks), key=lambda fork: fork.factor)
    top = max(forks, key=lambda fork: fork.factor)
    is_at_edge = choice.factor == max(choice.admitted) and rising[-1] == top
    if is_at_edge and len(rising) > 1 and is_better(top, rising[-2]):
        return top.factor * SPACING

    return None


# Comparing forks


def compare(a: Fork, b: Fork) -> Difference:
    """The rewards of a minus those of b in the later half of the steps that both made."""
    other = {each.step: each for each in b.steps}
    common = [each for each in a.steps if each.step in other]
    later = common[len(common) // 2 :]

    pairs = []
    for each in later:
        theirs = other[each.step].rewards
        for prompt, reward in each.rewards.items():
            if prompt in theirs:
                pairs.append(reward - theirs[prompt])

    if len(pairs) < 2:
        return Difference(mean=0.0, error=math.inf, pairs=len(pairs))

    return Difference(
        mean=mean(pairs),
        error=stdev(pairs) / math.sqrt(len(pairs)),
        pairs=len(pairs),
    )


def is_better(a: Fork, b: Fork) -> bool:
    return compare(a, b).is_gain


def on_the_way(forks: Sequence[Fork]) -> list[Fork]:
    """The healthy forks that no fork beats which went less far: the others are over the hill."""
    healthy = [fork for fork in forks if fork.is_healthy]
    rising = []
    for fork in healthy:
        behind = [each for each in healthy if each.travelled < fork.travelled]
        if not any(is_better(each, fork) for each in behind):
            rising.append(fork)

    return rising


def preview(fork: Fork, forks: Sequence[Fork]) -> Fork | None:
    """The healthy fork that has gone about as far as this one's rate will in the run."""
    seen = [each for each in on_the_way(forks) if each.travelled > 0]
    if not seen or fork.planned <= 0:
        return None

    return min(seen, key=lambda each: abs(math.log(each.travelled / fork.planned)))


def is_admitted(fork: Fork, forks: Sequence[Fork]) -> bool:
    """Whether a healthy fork has gone so far that this rate's whole run is no leap, and no fork at
    up to four times the rate failed within that distance."""
    rising = on_the_way(forks)
    if fork not in rising or fork.planned > REACH * max(each.travelled for each in rising):
        return False

    for other in forks:
        is_near = fork.factor <= other.factor <= SPACING * fork.factor
        if is_near and other not in rising and other.travelled <= fork.planned:
            return False

    return True


# The choice


def choose(forks: Sequence[Fork]) -> Choice:
    """The smallest admitted rate, from the recipe's upward, whose end is not clearly worse than
    that of another; below the recipe's only if that is not admitted."""
    admitted = sorted(
        (fork for fork in forks if is_admitted(fork, forks)), key=lambda fork: fork.factor
    )
    if not admitted:
        return fallback(forks)

    factors = tuple(fork.factor for fork in admitted)
    upward = [fork for fork in admitted if fork.factor >= 1.0] or admitted[-1:]
    chosen, decided = climb(upward, forks)

    return Choice(
        factor=chosen.factor,
        rate=chosen.rate,
        why=explain(chosen, upward, forks, decided),
        admitted=factors,
        difference=decided,
    )


def climb(upward: Sequence[Fork], forks: Sequence[Fork]) -> tuple[Fork, Difference | None]:
    """The last of the rates that earned clearly more than the one chosen before, and the
    comparison that decided, or else the first one that could be made."""
    chosen = upward[0]
    decided: Difference | None = None

    for fork in upward[1:]:
        here = preview(chosen, forks)
        there = preview(fork, forks)
        if here is None or there is None or here == there:
            continue

        difference = compare(there, here)
        decided = decided or difference
        if difference.is_gain:
            chosen = fork
            decided = difference

    return chosen, decided


def explain(
    chosen: Fork, upward: Sequence[Fork], forks: Sequence[Fork], decided: Difference | None
) -> str:
    if chosen.factor < 1.0:
        return "the largest rate whose whole run a healthy fork has previewed"
    if chosen != upward[0] and decided is not None:
        return f"forks that went as far as its run will earn {decided.mean:.2f} more"
    if len(upward) == 1:
        return "no larger rate is admitted"
    if decided is None:
        return "no difference can be seen: the smallest rate from the recipe's upward"

    return (
        f"no difference to larger rates ({decided.mean:+.2f} ± {decided.error:.2f}): the smallest"
    )


def fallback(forks: Sequence[Fork]) -> Choice:
    """The smallest rate: the first of the healthy ones if there are any."""
    healthy = [fork for fork in forks if fork.is_healthy]
    finite = [fork for fork in forks if fork.has_state]
    smallest = min(healthy or finite or forks, key=lambda fork: fork.factor)
    if healthy:
        why = "no rate's whole run was previewed by a healthy fork: the smallest one"
    else:
        why = "no fork stayed healthy: the smallest rate"

    return Choice(factor=smallest.factor, rate=smallest.rate, why=why)


def look_again(forks: Sequence[Fork], reach: float) -> Choice:
    """Keep the rate, halve it or double it; `reach` is the farthest that is known to be healthy,
    from where the forks began."""
    by_factor = {fork.factor: fork for fork in forks}
    present, half, double = (by_factor[factor] for factor in LOOK_FACTORS)

    if not present.is_healthy and half.has_state:
        why = f"at the present rate it is {present.condition}"
        return Choice(factor=0.5, rate=half.rate, why=why)

    down = compare(half, present)
    if half.is_healthy and down.is_gain:
        why = f"half the rate earns {down.mean:.2f} more"
        return Choice(factor=0.5, rate=half.rate, why=why, difference=down)

    up = compare(double, present)
    is_known = double.planned <= REACH * max(reach, double.travelled)
    if double.is_healthy and is_known and up.is_gain:
        why = f"twice the rate earns {up.mean:.2f} more"
        return Choice(factor=2.0, rate=double.rate, why=why, difference=up)

    why = f"no difference to twice the rate ({up.mean:+.2f} ± {up.error:.2f})"
    if up.is_gain:
        why = "twice the rate would go farther than any healthy fork has"
    elif up.is_clear:
        why = f"twice the rate earns {-up.mean:.2f} less"

    return Choice(factor=1.0, rate=present.rate, why=why, difference=up)


# Health


def judge(rows: Sequence[Mapping[str, Any]], past: Sequence[Mapping[str, Any]] = ()) -> Condition:
    """What the watch says of a fork's rows, after those of the run before it."""
    for row in rows:
        for name in ("loss", "grad_norm", "reward"):
            if not math.isfinite(row.get(name) or 0.0):
                return "not finite"

    engine = Engine(None if past else SHORT)
    for row in past:
        engine.update(row)

    events = []
    for row in rows:
        events += engine.update(row)

    condition: Condition = "healthy"
    for event in harmful_events(events, engine):
        is_dead = event.severity == "stop"
        if is_dead:
            return "dead"
        if event.severity == "warn":
            condition = "drifting"

    return condition


# The record


def to_record(searches: Sequence[Search]) -> dict[str, Any]:
    """What pocket.json holds; an error that is not known is null, since JSON has no infinity."""
    records = []
    for search in searches:
        record = asdict(search)
        difference = (record["choice"] or {}).get("difference")
        if difference is not None and math.isinf(difference["error"]):
            difference["error"] = None

        records.append(record)

    return {"searches": records, "spent": spent(searches)}


def from_record(record: Mapping[str, Any]) -> tuple[Search, ...]:
    """The searches in pocket.json; ValueError if it holds something else."""
    try:
        return tuple(_read_search(each) for each in record["searches"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{NAME}.json is damaged ({type(error).__name__}): remove it") from error


def spell_rate(given: float, record: Mapping[str, Any] | None) -> str:
    """The rate of a run in words: as given, or the last that its searches chose."""
    searches = from_record(record) if record is not None else ()
    choices = [search.choice for search in searches if search.choice is not None]
    if not choices:
        return f"{given:g}"

    return f"{choices[-1].rate:.3g} (found by --lr auto around {given:g})"


def _read_difference(values: Mapping[str, Any]) -> Difference:
    error = math.inf if values["error"] is None else values["error"]
    return Difference(**{**values, "error": error})


def _read_search(values: Mapping[str, Any]) -> Search:
    forks = []
    for each in values["forks"]:
        steps = tuple(Sampled(**step) for step in each["steps"])
        known = {**each, "steps": steps, "conditions": tuple(each["conditions"])}
        forks.append(Fork(**known))

    choice = values["choice"]
    if choice is not None:
        difference = choice["difference"]
        known = {
            **choice,
            "admitted": tuple(choice["admitted"]),
            "difference": _read_difference(difference) if difference else None,
        }
        choice = Choice(**known)
        if choice.factor not in {fork.factor for fork in forks}:
            raise ValueError("the chosen fork is missing")

    return Search(step=values["step"], forks=tuple(forks), choice=choice)

"""The result of an evaluation: scores of greedy and sampled completions, and what they mean.

Strict means right in the requested format; lenient means right wherever the answer is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from mesotron.answers.facts import Facts, summarise
from mesotron.evaluate.scores import (
    Score,
    bootstrap,
    majority_right,
    pass_at_k,
    powers_of_two,
    wilson,
)
from mesotron.evaluate.transcripts import Transcript
from mesotron.tasks.problem import Problem

if TYPE_CHECKING:
    from mesotron.sampling.decode import Completion

Measure = Literal["accuracy", "reward"]

# Smaller differences are not worth a sentence even if they are significant.
MIN_GAP = 0.03
MANY_TRUNCATED = 0.05


@dataclass(frozen=True)
class Greedy:
    """Scores of one greedy completion per problem."""

    strict: Score | None  # None without gold answers
    lenient: Score | None
    by_level: dict[str, Score]  # strict accuracy by level of difficulty, where problems have one
    rates: dict[str, float]  # facts/parsed, facts/formatted and so on, as in training
    mean_tokens: float
    reward: Score | None = None  # mean of the user's own rewards


@dataclass(frozen=True)
class SampledScores:
    """Scores of several samples per problem."""

    samples: int
    temperature: float
    pass_at: dict[int, Score]  # strict pass@k for k = 1, 2, 4, ..., samples
    lenient: Score | None  # lenient pass@1; None without gold answers
    majority: Score | None  # strict accuracy of the most frequent answer
    mixed: float  # share of problems whose samples differ in the result: those that give a gradient
    rates: dict[str, float]
    mean_tokens: float
    reward: Score | None = None  # mean of the user's own rewards, over the samples of a problem


@dataclass(frozen=True)
class Evaluation:
    """Everything that is known about a model after it was evaluated."""

    model: str
    problems: int
    greedy: Greedy
    sampled: SampledScores | None
    findings: list[str]  # gaps between the numbers that mislead, in words; empty if there are none
    transcripts: list[Transcript]  # the greedy completion of every problem
    measure: Measure = "accuracy"  # which of the two is the result

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def score_greedy(
    completions: Sequence[Completion],
    facts: Sequence[Facts],
    problems: Sequence[Problem],
    rewards: Sequence[float | None] = (),
    seed: int = 0,
) -> Greedy:
    strict = None
    lenient = None
    if any(problem.gold is not None for problem in problems):
        strict = wilson(_num_right(facts), len(facts))
        lenient = wilson(_num_lenient(facts), len(facts))

    earned = [reward for reward in rewards if reward is not None]

    return Greedy(
        strict=strict,
        lenient=lenient,
        by_level=_accuracy_by_level(facts, problems),
        rates=summarise(list(facts)),
        mean_tokens=_mean_tokens(completions),
        reward=bootstrap(earned, seed) if earned else None,
    )


def _accuracy_by_level(facts: Sequence[Facts], problems: Sequence[Problem]) -> dict[str, Score]:
    levels: dict[str, list[Facts]] = {}
    for problem, fact in zip(problems, facts, strict=True):
        if problem.level is not None:
            levels.setdefault(str(problem.level), []).append(fact)

    return {
        level: wilson(_num_right(levels[level]), len(levels[level])) for level in sorted(levels)
    }


def score_sampled(
    completions: Sequence[Completion],
    facts: Sequence[Facts],
    samples: int,
    temperature: float,
    seed: int,
) -> SampledScores:
    """Scores of `samples` completions per problem; those of a problem are adjacent."""
    groups = split_groups(facts, samples)
    num_right = [_num_right(group) for group in groups]

    pass_at = {}
    for k in powers_of_two(samples):
        chances = [pass_at_k(samples, right, k) for right in num_right]
        pass_at[k] = bootstrap(chances, seed, share=True)

    lenient = [_num_lenient(group) / samples for group in groups]
    majority = [majority_right([(one.answer, one.correct) for one in group]) for group in groups]
    num_mixed = sum(0 < right < samples for right in num_right)

    return SampledScores(
        samples=samples,
        temperature=temperature,
        pass_at=pass_at,
        lenient=bootstrap(lenient, seed, share=True),
        majority=bootstrap(majority, seed, share=True),
        mixed=num_mixed / len(groups),
        rates=summarise(list(facts)),
        mean_tokens=_mean_tokens(completions),
    )


def add_rewards(
    sampled: SampledScores, rewards: Sequence[float | None], seed: int, *, has_gold: bool
) -> SampledScores:
    """The same with the mean reward; without gold answers it is all that is known."""
    means = []
    num_mixed = 0
    for start in range(0, len(rewards), sampled.samples):
        group = [one for one in rewards[start : start + sampled.samples] if one is not None]
        num_mixed += len(set(group)) > 1
        if group:
            means.append(sum(group) / len(group))

    reward = bootstrap(means, seed) if means else None
    if has_gold:
        return replace(sampled, reward=reward)

    mixed = num_mixed * sampled.samples / len(rewards)
    return replace(sampled, reward=reward, pass_at={}, lenient=None, majority=None, mixed=mixed)


def split_groups(facts: Sequence[Facts], samples: int) -> list[Sequence[Facts]]:
    """The facts of each problem's samples."""
    return [facts[start : start + samples] for start in range(0, len(facts), samples)]


def _num_right(facts: Sequence[Facts]) -> int:
    return sum(fact.correct for fact in facts)


def _num_lenient(facts: Sequence[Facts]) -> int:
    return sum(fact.correct or fact.correct_unformatted for fact in facts)


def _mean_tokens(completions: Sequence[Completion]) -> float:
    return sum(len(one.ids) for one in completions) / len(completions)


# Findings: what a reader of the numbers would miss


def describe_greedy(greedy: Greedy, measure: Measure) -> list[str]:
    findings = []
    if greedy.strict and greedy.lenient and measure == "accuracy":
        findings += describe_format(greedy.strict.value, greedy.lenient.value)

    truncated = greedy.rates["facts/truncated"]
    if truncated > MANY_TRUNCATED:
        findings.append(
            f"greedy: {truncated:.1%} of the completions hit the token limit: raise --max-tokens"
        )

    unreadable = greedy.rates["facts/gold_unparseable"]
    if unreadable > 0:
        findings.append(
            f"{unreadable:.1%} of the gold answers cannot be read and count as wrong: fix the data"
        )

    return findings


def describe_format(strict: float, lenient: float) -> list[str]:
    if lenient - strict < MIN_GAP:
        return []

    return [
        f"greedy: {lenient - strict:.1%} of the answers are correct but not in the format "
        f"({strict:.1%} strict, {lenient:.1%} lenient): reward the format, or teach it first with "
        "mesotron sft"
    ]


def describe_samples(
    greedy: Greedy,
    sampled: SampledScores,
    greedy_facts: Sequence[Facts],
    sampled_facts: Sequence[Facts],
    seed: int,
) -> list[str]:
    """Compare greedy and sampled accuracy, paired by problem so that the noise of problems
    cancels."""
    gaps = []
    groups = split_groups(sampled_facts, sampled.samples)
    for fact, group in zip(greedy_facts, groups, strict=True):
        gaps.append(float(fact.correct) - _num_right(group) / sampled.samples)

    strict = greedy.strict.value if greedy.strict else 0.0
    pass_1 = sampled.pass_at[1].value
    return describe_temperature(
        bootstrap(gaps, seed, signed=True), strict, pass_1, sampled.temperature
    )


def describe_temperature(
    gap: Score, greedy: float, sampled: float, temperature: float
) -> list[str]:
    is_significant = gap.low > 0 or gap.high < 0
    if abs(gap.value) < MIN_GAP or not is_significant:
        return []

    pass_1 = f"pass@1 at temperature {temperature:g} is {sampled:.1%}"
    if gap.value > 0:
        return [
            f"greedy accuracy is {greedy:.1%}, {pass_1}: compare models under one of the two only; "
            "training at this temperature optimizes the lower number"
        ]

    return [
        f"{pass_1}, greedy accuracy only {greedy:.1%}: greedy completions may repeat themselves; "
        "read a few transcripts"
    ]

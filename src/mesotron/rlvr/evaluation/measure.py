"""Measure a model on problems: greedy and sampled, strict and lenient, with intervals.

Strict is right in the asked format; lenient is right wherever a patient reader finds it. Nothing
here trains, and nothing is drawn that the seed does not fix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mesotron.config import TaskConfig
from mesotron.rlvr.answers.facts import Facts, Judge, summarise
from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.answers.verify import Verifier
from mesotron.rlvr.evaluation.findings import (
    describe_format,
    describe_rates,
    describe_temperature,
    temperature_gap,
)
from mesotron.rlvr.evaluation.generate import Completion, generate
from mesotron.rlvr.evaluation.scores import (
    Score,
    bootstrap,
    majority_right,
    pass_at_k,
    powers_of_two,
    wilson,
)
from mesotron.rlvr.evaluation.transcripts import Transcript
from mesotron.rlvr.prompts import render_prompts
from mesotron.rlvr.tasks.problem import Problem


@dataclass(frozen=True)
class Greedy:
    """Scores of the likeliest completions, one for each problem."""

    strict: Score
    lenient: Score
    by_level: dict[str, Score]
    """Strict accuracy of each level of difficulty, where problems have one."""
    rates: dict[str, float]
    """facts/parsed, facts/formatted and the like, as in training."""
    mean_tokens: float


@dataclass(frozen=True)
class Sampled:
    """Scores of several sampled completions of each problem."""

    samples: int
    temperature: float
    pass_at: dict[int, Score]
    """Strict pass@k for k = 1, 2, 4, ..., samples."""
    lenient: Score
    """Lenient pass@1."""
    majority: Score
    """Strict accuracy of the answer given most often."""
    mixed: float
    """Share of problems with both right and wrong samples: where a group has a signal."""
    rates: dict[str, float]
    mean_tokens: float


@dataclass(frozen=True)
class EvalResult:
    """What one evaluation found; `to_json` is what files hold."""

    model: str
    problems: int
    greedy: Greedy
    sampled: Sampled | None
    findings: list[str]
    """What the numbers say in words; empty if nothing misleads."""
    transcripts: list[Transcript]
    """The greedy completion of every problem."""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON holds it: numbers, words and lists alone."""
        return dataclasses.asdict(self)


def evaluate(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    task: TaskConfig,
    *,
    examples: Sequence[Problem] = (),
    name: str = "model",
    max_tokens: int = 256,
    samples: int = 8,
    temperature: float = 1.0,
    batch: int | None = None,
    seed: int = 0,
    judge: Judge | None = None,
    progress: Callable[[int], None] | None = None,
) -> EvalResult:
    """Measure a model on problems.

    Args:
        model: a causal language model; it is put into evaluation mode and back.
        tokenizer: its tokenizer.
        problems: what is asked, such as `load_task(task).eval`.
        task: how it is asked: format, system prompt, few-shot examples.
        examples: `Task.examples`, if the task has few-shot examples.
        name: what the result calls the model.
        max_tokens: longest completion.
        samples: sampled completions of each problem beside the greedy one; 0 is greedy alone.
        temperature: of the samples.
        batch: completions generated at once; what memory holds if None.
        seed: of the samples and of the bootstrap.
        judge: checks answers; one is made, and its processes ended, if None.
        progress: called with the number of completions that were just finished.

    Returns:
        Scores with 95 % intervals over problems, findings in words, and every greedy transcript.
    """
    if not problems:
        raise ValueError("there is no problem to evaluate on: raise --task.num-eval above 0")
    prompts = render_prompts(problems, task, tokenizer, examples)
    was_training = model.training
    model.eval()
    how: dict[str, Any] = {"max_tokens": max_tokens, "batch": batch, "progress": progress}
    greedy = generate(model, tokenizer, prompts, **how)
    rows = [prompt for prompt in prompts for _ in range(samples)]
    drawn = generate(model, tokenizer, rows, temperature=temperature, seed=seed, **how)
    model.train(was_training)
    golds = [problem for problem in problems for _ in range(samples)]
    with judging(judge, task) as checker:
        facts = judge_all(checker, greedy, problems)
        drawn_facts = judge_all(checker, drawn, golds)
    first = score_greedy(greedy, facts, problems)
    second = score_sampled(drawn, drawn_facts, samples, temperature, seed) if samples else None
    return EvalResult(
        model=name,
        problems=len(problems),
        greedy=first,
        sampled=second,
        findings=find(first, second, facts, drawn_facts, seed),
        transcripts=[transcribe(*row) for row in zip(problems, greedy, facts, strict=True)],
    )


@contextmanager
def judging(judge: Judge | None, task: TaskConfig) -> Iterator[Judge]:
    """The judge that was given, or one of the task's format whose processes end with the block."""
    if judge is not None:
        yield judge
        return
    with Verifier() as verifier:
        yield Judge(FORMATS[task.format], verifier)


def judge_all(
    judge: Judge, completions: Sequence[Completion], problems: Sequence[Problem]
) -> list[Facts]:
    """The facts of each completion."""
    texts = [completion.text for completion in completions]
    truncated = [completion.truncated for completion in completions]
    return judge.judge(texts, [problem.gold for problem in problems], truncated)


def score_greedy(
    completions: Sequence[Completion], facts: Sequence[Facts], problems: Sequence[Problem]
) -> Greedy:
    """Accuracy of one completion for each problem, with Wilson's interval."""
    levels: dict[str, list[bool]] = {}
    for problem, fact in zip(problems, facts, strict=True):
        if problem.level is not None:
            levels.setdefault(str(problem.level), []).append(fact.correct)
    return Greedy(
        strict=wilson(sum(fact.correct for fact in facts), len(facts)),
        lenient=wilson(sum(map(lenient, facts)), len(facts)),
        by_level={level: wilson(sum(ok), len(ok)) for level, ok in sorted(levels.items())},
        rates=summarise(list(facts)),
        mean_tokens=mean_tokens(completions),
    )


def score_sampled(
    completions: Sequence[Completion],
    facts: Sequence[Facts],
    samples: int,
    temperature: float,
    seed: int,
) -> Sampled:
    """pass@k, majority@k, the share of mixed groups; a problem's samples stand together."""
    groups = in_groups(facts, samples)
    right = [sum(fact.correct for fact in group) for group in groups]
    majority = [
        majority_right([f.answer for f in group], [f.correct for f in group]) for group in groups
    ]
    return Sampled(
        samples=samples,
        temperature=temperature,
        pass_at={
            k: bootstrap([pass_at_k(samples, c, k) for c in right], seed)
            for k in powers_of_two(samples)
        },
        lenient=bootstrap([sum(map(lenient, group)) / samples for group in groups], seed),
        majority=bootstrap(majority, seed),
        mixed=sum(0 < c < samples for c in right) / len(groups),
        rates=summarise(list(facts)),
        mean_tokens=mean_tokens(completions),
    )


def find(
    greedy: Greedy,
    sampled: Sampled | None,
    facts: Sequence[Facts],
    drawn: Sequence[Facts],
    seed: int,
) -> list[str]:
    """What the numbers say in words."""
    said = describe_format(greedy.strict.value, greedy.lenient.value, "greedy")
    said += describe_rates(greedy.rates, "greedy")
    if sampled is None:
        return said
    shares = [
        sum(f.correct for f in g) / sampled.samples for g in in_groups(drawn, sampled.samples)
    ]
    gap = temperature_gap([float(fact.correct) for fact in facts], shares, seed)
    mean = sampled.pass_at[1].value
    said += describe_temperature(gap, greedy.strict.value, mean, sampled.temperature)
    said += describe_format(mean, sampled.lenient.value, "sampled")
    return said


def in_groups(facts: Sequence[Facts], samples: int) -> list[Sequence[Facts]]:
    """The samples of each problem."""
    return [facts[i : i + samples] for i in range(0, len(facts), samples)]


def lenient(fact: Facts) -> bool:
    """Whether a patient reader finds the right answer."""
    return fact.correct or fact.correct_unformatted


def mean_tokens(completions: Sequence[Completion]) -> float:
    """Mean length of completions in tokens."""
    return sum(len(completion.ids) for completion in completions) / len(completions)


def transcribe(problem: Problem, completion: Completion, fact: Facts) -> Transcript:
    """What is kept of one greedy completion."""
    return Transcript(
        id=problem.id,
        question=problem.question,
        gold=problem.gold,
        completion=completion.text,
        answer=fact.answer,
        correct=fact.correct,
        correct_unformatted=fact.correct_unformatted,
        truncated=fact.truncated,
    )

"""Evaluate a model on problems: complete each one, grade what was written, score it.

    chats = one conversation per problem
    greedy, sampled = completions of the model
    facts = what the judge reads in each completion
    scores, findings and transcripts = the result

Torch is imported only when a model generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mesotron.answers.facts import Facts, Judge
from mesotron.answers.formats import FORMATS
from mesotron.answers.verify import Verifier
from mesotron.config import TaskConfig
from mesotron.evaluate.result import (
    Evaluation,
    Measure,
    add_rewards,
    describe_greedy,
    describe_samples,
    score_greedy,
    score_sampled,
)
from mesotron.evaluate.transcripts import Transcript
from mesotron.rewards.call import Reward, is_own
from mesotron.tasks.gym import regrade
from mesotron.tasks.problem import Problem, own_row
from mesotron.tasks.prompts import Message, build_prompt, plain_text, render_all

if TYPE_CHECKING:
    from mesotron.sampling.decode import Completion
    from mesotron.sampling.tools import Toolbox
    from mesotron.sampling.turns import TurnSampler

Chats = Sequence[Sequence[Message]]
Rewards = Sequence[float | None]  # None where the reward has no verdict


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """How a model is evaluated."""

    name: str = "model"
    """Name of the model in the result."""
    examples: Sequence[Problem] = ()
    """`Task.examples`, if the task has few-shot examples."""
    max_tokens: int = 256
    """Longest completion."""
    samples: int = 8
    """Sampled completions per problem beside the greedy one; 0 for greedy only."""
    temperature: float = 1.0
    """Of the samples."""
    batch: int | None = None
    """Completions generated at once; None: what fits into memory."""
    seed: int = 0
    """Of the samples and the bootstrap."""
    judge: Judge | None = None
    """Checks answers; None makes one for the task's format."""
    reward: Reward | None = None
    """Also the mean of this. It is the result if there is no gold answer, or if all its parts are
    the user's own."""
    toolbox: Toolbox | TurnSampler | None = None
    """Plays episodes: with tools, or in environments."""
    progress: Callable[[int], None] | None = None
    """Called with the number of completions just finished."""


def evaluate(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    task: TaskConfig,
    **settings: Any,
) -> Evaluation:
    """Evaluate a model on problems.

    Args:
        model: a causal language model; set to evaluation mode and back.
        tokenizer: its tokenizer.
        problems: such as `load_task(task).eval`.
        task: format, system prompt and few-shot examples of the prompts.
        settings: fields of `EvalSettings`, such as `max_tokens=48, samples=4`.

    Returns:
        Scores with 95% intervals over problems, findings, and every greedy transcript.
    """
    how = EvalSettings(**settings)
    if not problems:
        raise ValueError("there is no problem to evaluate on: raise --task.num-eval above 0")

    has_gold = any(problem.gold is not None for problem in problems)
    if not has_gold and how.reward is None:
        how = replace(how, samples=0)

    # Generate.
    format = FORMATS[task.answer_format]
    chats = [build_prompt(problem, task, format, how.examples) for problem in problems]

    was_training = model.training
    model.eval()
    greedy = complete_greedily(model, tokenizer, chats, problems, how)
    sampled = draw_samples(model, tokenizer, chats, problems, how)
    model.train(was_training)

    # Grade.
    with judge_of(task, how) as judge:
        facts = grade(judge, greedy, problems)
        sampled_facts = grade_samples(judge, sampled, problems, how.samples)

    rewards: Rewards = [None] * len(problems)
    rows = reward_rows(problems, chats, tokenizer)
    if how.reward is not None:
        rewards = score_by_reward(how.reward, greedy, problems, rows, facts)

    # Score.
    measure = choose_measure(how.reward, task, has_gold)
    greedy_scores = score_greedy(greedy, facts, problems, rewards, how.seed)
    findings = describe_greedy(greedy_scores, measure)

    sampled_scores = None
    if how.samples:
        sampled_scores = score_sampled(
            sampled, sampled_facts, how.samples, how.temperature, how.seed
        )
        if has_gold:
            findings += describe_samples(
                greedy_scores, sampled_scores, facts, sampled_facts, how.seed
            )

        if how.reward is not None:
            sampled_rewards = score_by_reward(
                how.reward,
                sampled,
                repeat(problems, how.samples),
                repeat(rows, how.samples),
                sampled_facts,
            )
            sampled_scores = add_rewards(
                sampled_scores, sampled_rewards, how.seed, has_gold=has_gold
            )

    shown_rewards = rewards if measure == "reward" else [None] * len(problems)
    return Evaluation(
        model=how.name,
        problems=len(problems),
        greedy=greedy_scores,
        sampled=sampled_scores,
        findings=findings,
        transcripts=write_transcripts(problems, greedy, facts, shown_rewards),
        measure=measure,
    )


def choose_measure(reward: Reward | None, task: TaskConfig, has_gold: bool) -> Measure:
    """Whether accuracy or the mean reward is the result."""
    if reward is None:
        return "accuracy"
    if not has_gold:
        return "reward"

    if task.env or (task.has_own_data and is_own(reward.config)):
        return "reward"

    return "accuracy"


# Completions


def complete_greedily(
    model: Any,
    tokenizer: Any,
    chats: Chats,
    problems: Sequence[Problem],
    how: EvalSettings,
) -> list[Completion]:
    """One completion per chat."""
    from mesotron.sampling.decode import generate

    limits: dict[str, Any] = {
        "max_tokens": how.max_tokens,
        "batch": how.batch,
        "progress": how.progress,
    }
    if how.toolbox is not None:
        rows = [own_row(problem) for problem in problems]
        return how.toolbox.play(model, tokenizer, chats, rows, **limits)

    prompts = render_all(chats, tokenizer)
    return generate(model, tokenizer, prompts, **limits)


def draw_samples(
    model: Any,
    tokenizer: Any,
    chats: Chats,
    problems: Sequence[Problem],
    how: EvalSettings,
) -> list[Completion]:
    """`how.samples` completions per chat; those of a chat are adjacent."""
    from mesotron.sampling.decode import generate

    if not how.samples:
        return []

    settings: dict[str, Any] = {
        "max_tokens": how.max_tokens,
        "temperature": how.temperature,
        "seed": how.seed,
        "batch": how.batch,
        "progress": how.progress,
    }
    if how.toolbox is not None:
        rows = [own_row(problem) for problem in problems]
        times = how.samples
        return how.toolbox.play(
            model, tokenizer, repeat(chats, times), repeat(rows, times), **settings
        )

    return generate(model, tokenizer, repeat(render_all(chats, tokenizer), how.samples), **settings)


def repeat(items: Sequence[Any], times: int) -> list[Any]:
    """Each item so many times in a row."""
    repeated: list[Any] = []
    for item in items:
        repeated += [item] * times

    return repeated


# Grades


@contextmanager
def judge_of(task: TaskConfig, how: EvalSettings) -> Iterator[Judge]:
    if how.judge is not None:
        yield how.judge
        return

    with Verifier() as verifier:
        yield Judge(FORMATS[task.answer_format], verifier)


def grade(
    judge: Judge, completions: Sequence[Completion], problems: Sequence[Problem]
) -> list[Facts]:
    """Facts of one completion per problem."""
    texts = [completion.text for completion in completions]
    truncated = [completion.truncated for completion in completions]
    golds = [problem.gold for problem in problems]
    facts = judge.judge(texts, golds, truncated)

    columns = [problem.columns for problem in problems]
    return regrade(facts, texts, columns, judge.format)


def grade_samples(
    judge: Judge, completions: Sequence[Completion], problems: Sequence[Problem], samples: int
) -> list[Facts]:
    """Facts of `samples` completions per problem, with an answer that can have a majority."""
    graded = []
    facts = grade(judge, completions, repeat(problems, samples))
    for fact, completion in zip(facts, completions, strict=True):
        # A grid or a sentence has no key: its text, up to white space, takes the key's place.
        text = judge.format.extract(completion.text, complete=not completion.truncated)
        plain = " ".join(text.split()) if text else text
        graded.append(replace(fact, answer=fact.answer or plain))

    return graded


def reward_rows(problems: Sequence[Problem], chats: Chats, tokenizer: Any) -> list[dict[str, Any]]:
    """The rows that a reward of the user's own receives, prompts included."""
    rows = []
    for problem, chat in zip(problems, chats, strict=True):
        prompt = chat if tokenizer.chat_template else plain_text(chat)
        rows.append({**own_row(problem), "prompt": prompt})

    return rows


def score_by_reward(
    reward: Reward,
    completions: Sequence[Completion],
    problems: Sequence[Problem],
    rows: Sequence[dict[str, Any]],
    facts: Sequence[Facts],
) -> Rewards:
    earned = []
    for row, completion in zip(rows, completions, strict=True):
        earned.append(row | {"played": completion.played})

    return reward(
        [completion.text for completion in completions],
        [completion.ids for completion in completions],
        [problem.gold for problem in problems],
        [completion.truncated for completion in completions],
        earned,
        facts,
    )


def write_transcripts(
    problems: Sequence[Problem],
    completions: Sequence[Completion],
    facts: Sequence[Facts],
    rewards: Rewards,
) -> list[Transcript]:
    transcripts = []
    for problem, completion, fact, reward in zip(
        problems, completions, facts, rewards, strict=True
    ):
        transcript = Transcript(
            id=problem.id,
            question=problem.question,
            gold=problem.gold,
            completion=completion.text,
            answer=fact.answer,
            correct=fact.correct,
            correct_unformatted=fact.correct_unformatted,
            truncated=fact.truncated,
            reward=reward,
        )
        transcripts.append(transcript)

    return transcripts

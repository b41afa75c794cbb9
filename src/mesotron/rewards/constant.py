"""Why a reward pays the same for every answer: types that never compare equal, or no gold answer.

A table may hold the gold answer as a number while the function compares text, or the other way
around: the reward is then 0 for ever, and training learns nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mesotron.rewards.cheats import spellings
from mesotron.tasks.problem import Problem

Score = float | None
Score_of = Callable[[Sequence[str], Sequence[Problem]], Sequence[Score]]


def explain_constant(score: Score_of, problem: Problem) -> str | None:
    """One sentence on why the gold answer of a problem earns nothing; None if it earns.

    Args:
        score: calls the reward on texts and their problems.
        problem: any problem of the task.
    """
    if not problem.gold:
        return ask_for_gold(problem)

    most = best(score, problem)
    for name, value in problem.columns.items():
        other = retyped(value)
        if other is None:
            continue

        columns = problem.columns | {name: other}
        if best(score, replace(problem, columns=columns)) > most:
            return describe(name, value)

    if most > worst(score, problem):
        return None

    return (
        f"no spelling of the gold answer {problem.gold!r:.40} earns anything: the reward expects "
        "another format, or it reads another column"
    )


def ask_for_gold(problem: Problem) -> str:
    names = [name for name, value in problem.columns.items() if value != problem.question]
    example = names[0] if names else "COLUMN"
    listed = f" (columns: {', '.join(names)})" if names else ""
    return (
        "the data names no gold answer, so right answers cannot be tried: add "
        f"--data.columns gold={example}{listed}"
    )


def retyped(value: Any) -> Any:
    """A number as text, a number in text as a number; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        return None

    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue

    return None


def describe(name: str, value: Any) -> str:
    if isinstance(value, str):
        return (
            f"the column {name!r} holds text, such as {value!r:.40}, but the reward compares it "
            f"with a number: use float({name}) in the reward, or store numbers"
        )

    kind = type(value).__name__
    return (
        f"the column {name!r} holds a number ({kind}), such as {value!r:.40}, but the reward "
        f"compares it with text: use str({name}) in the reward, or store text"
    )


def best(score: Score_of, problem: Problem) -> float:
    """The most that a spelling of the gold answer earns."""
    texts = spellings(problem.gold or "")
    return max(known(score(texts, [problem] * len(texts))), default=0.0)


def worst(score: Score_of, problem: Problem) -> float:
    """What an empty answer earns."""
    return min(known(score([""], [problem])), default=0.0)


def known(scores: Sequence[Score]) -> list[float]:
    return [score for score in scores if score is not None]

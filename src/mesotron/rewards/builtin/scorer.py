"""The verdict of the task's own scorer."""

from mesotron.rewards.registry import Judged, reward


@reward(
    "scorer",
    about="what the task's own scorer gives the answer in the format, 0 to 1; 1 for a correct "
    "answer of a task without one",
    note="partial scores of `rg:` tasks",
)
def scorer(completion: Judged) -> float:
    facts = completion.facts
    if facts.score is None:
        return float(facts.correct)

    return facts.score

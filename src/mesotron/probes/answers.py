"""How different the answers are, within a prompt and across prompts.

One answer for every prompt, whatever was asked, is how self-rewarded training ends (SRT, arXiv
2505.21444): the vote is then unanimous and the reward perfect. Answers are compared as strings:
bring them to a canonical form first.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence


def answer_diversity(groups: Sequence[Sequence[str | None]]) -> dict[str, float]:
    """Distinct answers within a group, and the share of the commonest answer over all prompts.

    Each prompt has one vote, divided among its answers, so that a prompt with many parsed answers
    does not outweigh one with few.

    Args:
        groups: for each prompt the canonical answers of its completions, None where none was
            found.

    Returns:
        answers/distinct_in_group (mean count over prompts with an answer; 0 if there is none) and
        answers/top_share (0 to 1; 0 if no answer was found; 1 if there is one answer for all).

    Example:
        >>> answer_diversity([["7", "7", None], ["7", "8", "9"]])["answers/distinct_in_group"]
        2.0
        >>> answer_diversity([["42", "42"], ["42", "42"]])["answers/top_share"]
        1.0

    References:
        Shafayat et al., Can Large Reasoning Models Self-Train?, 2025, arXiv 2505.21444.
    """
    counts = [Counter(answer for answer in group if answer is not None) for group in groups]
    counts = [count for count in counts if count]
    votes: defaultdict[str, float] = defaultdict(float)
    for count in counts:
        for answer, number in count.items():
            votes[answer] += number / count.total()
    prompts = max(len(counts), 1)
    return {
        "answers/distinct_in_group": sum(map(len, counts)) / prompts,
        "answers/top_share": max(votes.values(), default=0.0) / prompts,
    }

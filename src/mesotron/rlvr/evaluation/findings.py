"""What the scores of an evaluation say in words: gaps that mislead, and where to look.

A gap is pointed out when its interval over problems leaves 0 out and it is large enough to change
a conclusion; each sentence names the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mesotron.rlvr.evaluation.scores import Score, bootstrap

# Differences below this are not worth a sentence even when they are certain.
SMALLEST_GAP = 0.03
MANY_TRUNCATED = 0.05


def temperature_gap(greedy: Sequence[float], sampled: Sequence[float], seed: int = 0) -> Score:
    """Greedy accuracy less sampled pass@1, problem by problem, so that their noise cancels.

    Args:
        greedy: 1 or 0 for each problem.
        sampled: the share of right samples of each problem.
        seed: of the bootstrap.
    """
    return bootstrap([g - s for g, s in zip(greedy, sampled, strict=True)], seed)


def describe_temperature(
    gap: Score, greedy: float, sampled: float, temperature: float
) -> list[str]:
    """The temperature trap: two ways to decode that do not tell the same story."""
    if abs(gap.value) < SMALLEST_GAP or gap.low <= 0 <= gap.high:
        return []
    if gap.value > 0:
        return [
            f"greedy decoding is right on {greedy:.1%}, samples at temperature {temperature:g} on "
            f"{sampled:.1%}: compare models under one of the two, never across; training at this "
            "temperature optimizes the lower number"
        ]
    return [
        f"samples at temperature {temperature:g} are right on {sampled:.1%}, greedy decoding on "
        f"{greedy:.1%}: the likeliest answer is worse than a typical one, as after training that "
        "repeats itself; read a few greedy transcripts"
    ]


def describe_format(strict: float, lenient: float, where: str) -> list[str]:
    """Right answers that the format does not show: a loss of form, not of arithmetic."""
    if lenient - strict < SMALLEST_GAP:
        return []
    return [
        f"{where}: {lenient - strict:.1%} of the answers are right but not in the asked format "
        f"({strict:.1%} strict, {lenient:.1%} lenient): the model lost, or never had, the form; "
        "reward the format, or give it a cold start with mesotron sft"
    ]


def describe_rates(rates: Mapping[str, float], where: str) -> list[str]:
    """Rates of what should be rare: completions cut off, golds that cannot be read."""
    said = []
    if (cut := rates["facts/truncated"]) > MANY_TRUNCATED:
        said.append(
            f"{where}: {cut:.1%} of the completions hit the token limit: raise --max-tokens"
        )
    if (bad := rates["facts/gold_unparseable"]) > 0:
        said.append(
            f"{bad:.1%} of the gold answers cannot be read and count as wrong: mend the data"
        )
    return said

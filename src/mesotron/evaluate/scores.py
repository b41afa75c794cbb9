"""Scores with intervals (Wilson, bootstrap, pass@k, majority vote) and transcripts to compare."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from mesotron.runs.files import printable

Z95 = 1.959963984540054  # normal quantile of a two-sided 95% interval
RESAMPLES = 2000
SHOWN_CHARACTERS = 400


@dataclass(frozen=True)
class Score:
    """A mean over problems with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(right: int, total: int) -> Score:
    """The share `right / total` with Wilson's interval (1927), which is valid near 0 and 1 too."""
    if not 0 <= right <= total or total == 0:
        raise ValueError(f"{right} right of {total} is not a share of at least one problem")

    share = right / total
    z2 = Z95**2 / total
    middle = (share + z2 / 2) / (1 + z2)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total)) / (1 + z2)

    # At 0 and 1 the ends equal the share up to rounding.
    return Score(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def bootstrap(values: Sequence[float], seed: int = 0) -> Score:
    """The mean of one number per problem with a percentile bootstrap interval."""
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean())
    if len(x) == 1:
        return Score(mean, mean, mean)
    from scipy import stats  # slow to import

    rng = np.random.default_rng(seed)
    low, high = stats.bootstrap(
        (x,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=rng
    ).confidence_interval

    return Score(mean, float(low), float(high))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased pass@k (arXiv 2107.03374): 1 - C(n - c, k) / C(n, k), n samples, c of them right."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_right(answers: Sequence[tuple[str | None, bool]]) -> float:
    """Whether the most frequent of (answer, is right) pairs is right; for a tie, the share of
    winners that are."""
    votes = Counter(answer for answer, _ in answers if answer is not None)
    verdicts = dict(answers)
    winners = [verdicts[one] for one, count in votes.items() if count == max(votes.values())]

    return sum(winners) / len(winners) if winners else 0.0


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself: the k for which pass@k is reported."""
    return sorted({2**i for i in range(limit.bit_length()) if 2**i <= limit} | {limit})


@dataclass(frozen=True)
class Transcript:
    id: str
    question: str
    gold: str | None
    completion: str
    answer: str | None  # the answer as read; None if there was none in the format
    correct: bool
    correct_unformatted: bool
    truncated: bool
    reward: float | None = None  # where the mean reward is the result


def changes_of(pairs: Iterable[tuple[Transcript, Transcript]], measure: str) -> list[float]:
    """By how much each problem's score changed, without those the reward had no verdict for."""
    if measure != "reward":
        return [float(new.correct) - float(old.correct) for old, new in pairs]
    scored = [(old.reward, new.reward) for old, new in pairs]
    return [new - old for old, new in scored if old is not None and new is not None]


@dataclass(frozen=True)
class Pair:
    before: Transcript
    after: Transcript

    @property
    def change(self) -> str:
        return f"{verdict(self.before)} to {verdict(self.after)}"


def verdict(transcript: Transcript) -> str:
    if transcript.reward is not None:
        return f"reward {transcript.reward:.3g}"
    if transcript.gold is None:
        return "no gold"
    if transcript.correct:
        return "right"
    if transcript.correct_unformatted:
        return "right outside the format"
    if transcript.truncated:
        return "cut off"

    return "wrong" if transcript.answer is not None else "no answer"


# (right before, right after), in the order in which they are shown.
CHANGES = {
    "gained": (False, True),
    "lost": (True, False),
    "still wrong": (False, False),
    "right before and after": (True, True),
}


def sort_pairs(before: Sequence[Transcript], after: Sequence[Transcript]) -> dict[str, list[Pair]]:
    """The problems that both lists have, by what changed (`CHANGES`)."""
    later = {transcript.id: transcript for transcript in after}
    pairs = [Pair(old, later[old.id]) for old in before if old.id in later]

    return {
        name: [pair for pair in pairs if (pair.before.correct, pair.after.correct) == kind]
        for name, kind in CHANGES.items()
    }


def pair_up(before: Sequence[Transcript], after: Sequence[Transcript], count: int) -> list[Pair]:
    """Up to `count` typical problems: the first ones of each change, in proportion to how many
    problems changed that way (largest remainders)."""
    kinds = list(sort_pairs(before, after).values())
    if any(one.reward is not None for one in before):  # the largest changes of the reward
        pairs = [pair for kind in kinds for pair in kind]
        change = [-abs((pair.after.reward or 0) - (pair.before.reward or 0)) for pair in pairs]
        return [pairs[k] for k in sorted(range(len(pairs)), key=change.__getitem__)[:count]]

    total = sum(map(len, kinds))
    exact = [min(count, total) * len(kind) / max(total, 1) for kind in kinds]
    shown = [int(share) for share in exact]

    by_remainder = sorted(range(len(kinds)), key=lambda k: shown[k] - exact[k])
    for k in by_remainder[: min(count, total) - sum(shown)]:
        shown[k] += 1

    return [pair for kind, number in zip(kinds, shown, strict=True) for pair in kind[:number]]


def describe_changes(before: Sequence[Transcript], after: Sequence[Transcript]) -> str:
    """Such as "42 gained, 7 lost, 91 still wrong, 60 right before and after"."""
    return ", ".join(f"{len(kind)} {name}" for name, kind in sort_pairs(before, after).items())


def side_by_side(
    before: Sequence[Transcript],
    after: Sequence[Transcript],
    count: int = 4,
    titles: tuple[str, str] = ("before", "after"),
) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        expand=True,
        show_lines=True,
    )

    table.add_column("problem", ratio=2)
    for title in titles:
        table.add_column(title, ratio=3)

    colors = {"right": "green", "right outside the format": "yellow"}
    for pair in pair_up(before, after, count):
        gold = f"\ngold: {pair.before.gold}" if pair.before.gold is not None else ""
        cells = [Text(f"{shorten(pair.before.question)}{gold}")]
        for transcript in (pair.before, pair.after):
            word = verdict(transcript)
            cell = Text(shorten(transcript.completion))
            cell.append(f"\n{word}", style=colors.get(word, "red"))
            cells.append(cell)

        table.add_row(*cells)

    return table


def shorten(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Text without control characters, cut in the middle if it is long."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"
    return printable(text)

"""Transcripts of an evaluation, and which problems changed between two of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from rich import box
from rich.table import Table
from rich.text import Text

from mesotron.runs.files import printable

SHOWN_CHARACTERS = 400
COLORS = {"right": "green", "right outside the format": "yellow"}  # anything else is red

# (right before, right after), in the order in which they are shown.
CHANGES = {
    "gained": (False, True),
    "lost": (True, False),
    "still wrong": (False, False),
    "right before and after": (True, True),
}


@dataclass(frozen=True)
class Transcript:
    """One problem with the model's greedy completion, and how it was graded."""

    id: str
    question: str
    gold: str | None
    completion: str
    answer: str | None  # the answer as read; None if there was none in the format
    correct: bool
    correct_unformatted: bool
    truncated: bool
    reward: float | None = None  # where the mean reward is the result


@dataclass(frozen=True)
class BeforeAfter:
    """The same problem in two evaluations."""

    before: Transcript
    after: Transcript

    @property
    def change(self) -> str:
        return f"{verdict(self.before)} to {verdict(self.after)}"

    @property
    def reward_change(self) -> float:
        return (self.after.reward or 0) - (self.before.reward or 0)


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

    if transcript.answer is not None:
        return "wrong"

    return "no answer"


def changes_of(pairs: Iterable[tuple[Transcript, Transcript]], measure: str) -> list[float]:
    """By how much each problem's score changed; problems without a reward are left out."""
    changes = []
    for old, new in pairs:
        if measure != "reward":
            changes.append(float(new.correct) - float(old.correct))
        elif old.reward is not None and new.reward is not None:
            changes.append(new.reward - old.reward)

    return changes


def sort_pairs(
    before: Sequence[Transcript], after: Sequence[Transcript]
) -> dict[str, list[BeforeAfter]]:
    """The problems that both lists have, by what changed (`CHANGES`)."""
    later = {transcript.id: transcript for transcript in after}
    kind_of = {ends: kind for kind, ends in CHANGES.items()}

    pairs: dict[str, list[BeforeAfter]] = {kind: [] for kind in CHANGES}
    for old in before:
        new = later.get(old.id)
        if new is not None:
            kind = kind_of[old.correct, new.correct]
            pairs[kind].append(BeforeAfter(old, new))

    return pairs


def pair_up(
    before: Sequence[Transcript], after: Sequence[Transcript], count: int
) -> list[BeforeAfter]:
    """Up to `count` typical problems. Of each change the first ones, in proportion to how many
    problems changed that way; where rewards are the result, the largest changes of the reward."""
    kinds = list(sort_pairs(before, after).values())
    by_reward = any(one.reward is not None for one in before)
    if by_reward:
        pairs = list(chain.from_iterable(kinds))
        pairs.sort(key=lambda pair: -abs(pair.reward_change))
        return pairs[:count]

    numbers = apportion([len(kind) for kind in kinds], count)
    shown = []
    for kind, number in zip(kinds, numbers, strict=True):
        shown += kind[:number]

    return shown


def apportion(sizes: Sequence[int], seats: int) -> list[int]:
    """Seats in proportion to sizes, by largest remainders; no more seats than the sizes' sum."""
    total = sum(sizes)
    seats = min(seats, total)
    exact = [seats * size / max(total, 1) for size in sizes]
    given = [int(share) for share in exact]

    by_remainder = sorted(range(len(sizes)), key=lambda k: given[k] - exact[k])
    left = seats - sum(given)
    for k in by_remainder[:left]:
        given[k] += 1

    return given


def describe_changes(before: Sequence[Transcript], after: Sequence[Transcript]) -> str:
    """Such as "42 gained, 7 lost, 91 still wrong, 60 right before and after"."""
    pairs = sort_pairs(before, after)
    return ", ".join(f"{len(pairs[kind])} {kind}" for kind in CHANGES)


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

    for pair in pair_up(before, after, count):
        problem = shorten(pair.before.question)
        if pair.before.gold is not None:
            problem += f"\ngold: {pair.before.gold}"

        table.add_row(Text(problem), _cell(pair.before), _cell(pair.after))

    return table


def _cell(transcript: Transcript) -> Text:
    word = verdict(transcript)
    cell = Text(shorten(transcript.completion))
    cell.append(f"\n{word}", style=COLORS.get(word, "red"))

    return cell


def shorten(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Text without control characters, cut in the middle if it is long."""
    if len(text) > limit:
        half = limit // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]} [{left_out} characters] {text[-half:]}"

    return printable(text)

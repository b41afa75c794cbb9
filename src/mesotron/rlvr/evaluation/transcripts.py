"""Transcripts: what a model wrote for the same problems before and after, side by side.

Completions are text from a model, so control characters are shown as escapes and a long one is
cut in the middle, where a worked solution is least telling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_CHARACTERS = 400


@dataclass(frozen=True)
class Transcript:
    """One problem, what was written for it greedily, and the verdict."""

    id: str
    question: str
    gold: str | None
    completion: str
    answer: str | None
    """The answer as it was read, None if there was none in the format."""
    correct: bool
    correct_unformatted: bool
    truncated: bool


@dataclass(frozen=True)
class Pair:
    """The transcripts of one problem before and after."""

    before: Transcript
    after: Transcript

    @property
    def change(self) -> str:
        """Such as "wrong to right"."""
        return f"{verdict(self.before)} to {verdict(self.after)}"


def verdict(transcript: Transcript) -> str:
    """One word, or a few, for how a completion was judged."""
    if transcript.correct:
        return "right"
    if transcript.correct_unformatted:
        return "right outside the format"
    if transcript.truncated:
        return "cut off"
    return "wrong" if transcript.answer is not None else "no answer"


def pair_up(before: Sequence[Transcript], after: Sequence[Transcript], count: int) -> list[Pair]:
    """The problems that both lists have, the most telling first: gained, lost, still wrong, kept.

    Args:
        before: transcripts of one model.
        after: of another one on the same problems.
        count: how many pairs are kept, the kinds in turn.

    Returns:
        At most `count` pairs.
    """
    later = {transcript.id: transcript for transcript in after}
    pairs = [Pair(old, later[old.id]) for old in before if old.id in later]
    kinds: dict[tuple[bool, bool], list[Pair]] = {
        (False, True): [],
        (True, False): [],
        (False, False): [],
        (True, True): [],
    }
    for pair in pairs:
        kinds[pair.before.correct, pair.after.correct].append(pair)
    chosen: list[Pair] = []
    for turn in range(max(map(len, kinds.values()), default=0)):
        chosen += [kind[turn] for kind in kinds.values() if turn < len(kind)]
    return chosen[:count]


def side_by_side(
    before: Sequence[Transcript],
    after: Sequence[Transcript],
    count: int = 4,
    titles: tuple[str, str] = ("before", "after"),
) -> Table:
    """A table of the same problems before and after.

    Args:
        before: transcripts of one model, such as `EvalResult.transcripts`.
        after: of another one on the same problems.
        count: problems shown.
        titles: headings of the two columns.

    Returns:
        A rich table: print it with `rich.console.Console().print(...)`.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, expand=True, show_lines=True)
    table.add_column("problem", ratio=2)
    for title in titles:
        table.add_column(title, ratio=3)
    colours = {"right": "green", "right outside the format": "yellow"}
    for pair in pair_up(before, after, count):
        cells = [Text(f"{printable(pair.before.question)}\ngold: {pair.before.gold}")]
        for transcript in (pair.before, pair.after):
            word = verdict(transcript)
            cell = Text(printable(transcript.completion))
            cell.append(f"\n{word}", style=colours.get(word, "red"))
            cells.append(cell)
        table.add_row(*cells)
    return table


def printable(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    r"""Text that a terminal shows and does not obey, cut in the middle if it is long.

    Example:
        >>> printable("a\x1b[2Jb")
        'a\\x1b[2Jb'
        >>> printable("x" * 10, limit=5)
        'xx [6 characters] xx'
    """
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )

"""What the model wrote: the same problems before and after in two columns, and on the way.

The answer that the format finds is highlighted. Long texts are cut in the middle, where a worked
solution is least telling; nothing here decides what is right.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesotron.report.markup import Html, el
from mesotron.report.read import Run
from mesotron.rlvr.answers.formats import FORMATS, MAX_TAIL, AnswerFormat
from mesotron.rlvr.scores import Pair, Transcript, pair_up, verdict
from mesotron.runs.files import Row

PAIRS = 8
MOMENTS = 6
MOST_CHARACTERS = 2400
_CLASSES = {"right": "good", "right outside the format": "fair"}


def transcript_parts(run: Run, count: int = PAIRS) -> list[Html]:
    """Pairs of completions, and samples of the way; nothing if the run has neither."""
    format = format_of(run)
    before, after = _transcripts(run.before), _transcripts(run.after)
    pairs = pair_up(before, after, count)
    parts: list[Html] = []
    if pairs:
        parts.append(el("p", tally(before, after)))
        parts += [pair_card(pair, format) for pair in pairs]
    elif before:
        shown = before[:count]
        parts.append(el("p", "Before training, greedily:"))
        parts.append(el("div", *(_column("before", one, format) for one in shown), class_="pair"))
    samples = [row for row in run.samples if isinstance(row.get("completion"), str)]
    if samples:
        parts.append(el("h3", "On the way"))
        shown = [_moment(row, format) for row in moments(samples, min(count, MOMENTS))]
        parts.append(el("div", *shown, class_="pair"))
    return parts


def tally(before: Sequence[Transcript], after: Sequence[Transcript]) -> str:
    """How many problems were gained and lost, in a sentence."""
    first = {one.id: one.correct for one in before}
    pairs = [(first[one.id], one.correct) for one in after if one.id in first]
    gained, lost = pairs.count((False, True)), pairs.count((True, False))
    kept = pairs.count((True, True))
    return (
        f"Of {len(pairs)} held-out problems {kept} were right before and after, {gained} were "
        f"gained and {lost} lost. The most telling ones, kinds in turn:"
    )


def pair_card(pair: Pair, format: AnswerFormat) -> Html:
    """One problem: the question, and the two completions side by side."""
    gold = f"gold: {pair.before.gold}" if pair.before.gold is not None else "no gold"
    return el(
        "article",
        el("h3", pair.change),
        el("blockquote", pair.before.question, dir="auto"),
        el("p", gold, class_="gold"),
        el(
            "div",
            _column("before", pair.before, format),
            _column("after", pair.after, format),
            class_="pair",
        ),
        class_="problem",
    )


def highlight(text: str, format: AnswerFormat, complete: bool = True) -> Html:
    r"""A completion with its answer marked, cut in the middle if it is long.

    Example:
        >>> highlight(r"3 + 4 = 7, so \boxed{7}.", FORMATS["boxed"])
        '<pre dir="auto">3 + 4 = 7, so \\boxed{<mark>7</mark>}.</pre>'
    """
    skipped = max(len(text) - MAX_TAIL, 0)
    found = format.find(text[skipped:], complete)
    if found is None:
        return el("pre", _cut(text), dir="auto")
    start = text.index(found[1], skipped + found[0])
    end = start + len(found[1])
    head, tail = text[:start], text[end:]
    return el("pre", _cut(head), el("mark", text[start:end]), _cut(tail), dir="auto")


def format_of(run: Run) -> AnswerFormat:
    """The answer format that the run asked for."""
    task = run.config.get("task")
    name = task.get("format") if isinstance(task, dict) else None
    return FORMATS[name] if name in FORMATS else FORMATS["boxed"]


def moments(samples: Sequence[Row], count: int = MOMENTS) -> list[Row]:
    """A few samples, evenly spaced from the first to the last."""
    if len(samples) <= count:
        return list(samples)
    return [samples[round(k * (len(samples) - 1) / (count - 1))] for k in range(count)]


def _column(when: str, one: Transcript, format: AnswerFormat) -> Html:
    word = verdict(one)
    head = el(
        "p", el("b", when), " ", el("span", word, class_=f"verdict {_CLASSES.get(word, 'bad')}")
    )
    return el("div", head, highlight(one.completion, format, not one.truncated))


def _moment(row: Row, format: AnswerFormat) -> Html:
    reward = row.get("reward")
    earned = f", reward {reward:.3g}" if isinstance(reward, int | float) else ""
    head = el("p", el("b", f"step {row.get('step', '?')}"), earned)
    asked = el("blockquote", _cut(str(row.get("prompt", "")), 600), dir="auto")
    return el("div", head, asked, highlight(str(row["completion"]), format))


def _transcripts(result: Row | None) -> list[Transcript]:
    return [Transcript(**one) for one in result["transcripts"]] if result else []


def _cut(text: str, most: int = MOST_CHARACTERS) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[ {len(text) - 2 * half:,} characters ]\n{text[-half:]}"

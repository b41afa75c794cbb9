"""Answer formats: how a final answer is requested, written and extracted.

The prompt, the parser and the reward share one `AnswerFormat`, so they agree by construction.
Extraction is linear in the text and never evaluates it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mesotron.config import FormatName

MAX_TAIL = 16_384  # characters at the end of a completion that are searched
MAX_ANSWER = 512  # longer is prose, not an answer

_BRACES = re.compile(r"\\boxed\s*\{|\\[{}\\]|[{}]")
_PHRASE = re.compile(r"(?i)\banswer\s*(?:is|:|=)([^\n]*)")
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?(?:\$|\\\$)?(?<!\d)(?<!\d\.)"  # a sign, not a minus; currency
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,200})(?:\.\d{1,200})?"  # 1,080 or 1080 or 10.80
    r"(?:/\d{1,200})?%?",
    re.ASCII,
)


@dataclass(frozen=True)
class AnswerFormat:
    r"""One way to write a final answer: `prefix + answer + suffix`.

    With a suffix the answer ends at the closing brace, without one at the end of its line.

    Example:
        >>> boxed = FORMATS["boxed"]
        >>> boxed.render("72")
        '\\boxed{72}'
        >>> boxed.extract(r"3 * 24 = 72, so \boxed{71}, no: \boxed{72}.")
        '72'
        >>> boxed.extract(r"The answer is 72, \boxed{72") is None
        True
    """

    name: FormatName
    instruction: str
    """The sentence of the prompt that requests this format."""
    prefix: str
    suffix: str = ""

    def render(self, answer: str) -> str:
        return f"{self.prefix}{answer}{self.suffix}"

    def extract(self, text: str, *, complete: bool = True) -> str | None:
        """The last well-formed answer in this format, stripped, or None.

        Only the last `MAX_TAIL` characters are read. If the text was truncated (not complete), an
        answer that touches the cut is not taken: "ANSWER: 7" might have become 72.
        """
        found = self.find(text[-MAX_TAIL:], complete)
        return found[1] if found else None

    def find(self, text: str, complete: bool = True) -> tuple[int, str] | None:
        """Start of the last well-formed answer, and the answer; None if there is none."""
        if self.prefix.strip(" {") not in text:  # fast path
            return None
        spans = _boxes(text) if self.suffix else self._lines(text, complete)
        last = None
        for start, answer in spans:
            answer = answer.strip()
            if 0 < len(answer) <= MAX_ANSWER and (last is None or start > last[0]):
                last = (start, answer)
        return last

    def _lines(self, text: str, complete: bool) -> Iterator[tuple[int, str]]:
        marker = re.escape(self.prefix.strip())
        for match in re.finditer(rf"(?<![\w#]){marker}(?!#)([^\n]*)", text):
            if complete or match.end() < len(text):
                yield match.start(), match[1]


def _boxes(text: str) -> Iterator[tuple[int, str]]:
    r"""Every \boxed{...} whose braces close, innermost first, in one pass over the braces."""
    open_braces: list[int | None] = []  # where a box's content starts, None for any other brace
    for match in _BRACES.finditer(text):
        token = match[0]
        if token.endswith("{") and token != r"\{":
            open_braces.append(match.end() if len(token) > 1 else None)
        elif token == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                yield start, text[start : match.start()]


FORMATS: dict[FormatName, AnswerFormat] = {
    form.name: form
    for form in (
        AnswerFormat("boxed", r"Put the final answer in \boxed{}.", r"\boxed{", "}"),
        AnswerFormat("answer", "End with a line of the form ANSWER: n.", "ANSWER: "),
        AnswerFormat("hashes", "End with a line of the form #### n.", "#### "),
    )
}


def lenient_answer(text: str, *, complete: bool = True) -> str | None:
    """The last answer in any known format; else the number after the last "answer is"; else the
    last number. A number at the cut of a truncated (not complete) text is not taken.

    >>> lenient_answer("So the answer is $1,080 for 3 days.")
    '$1,080'
    """
    text = text[-MAX_TAIL:]
    formatted = [found for form in FORMATS.values() if (found := form.find(text, complete))]
    if formatted:
        return max(formatted)[1]
    for match in reversed(list(_PHRASE.finditer(text))):
        number = _NUMBER.search(text, match.start(1), match.end(1))
        if number and (complete or number.end() < len(text)):
            return number[0]
    numbers = [m[0] for m in _NUMBER.finditer(text) if complete or m.end() < len(text)]
    return numbers[-1] if numbers else None

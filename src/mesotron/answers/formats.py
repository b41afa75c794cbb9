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
        if found is None:
            return None

        _, answer = found
        return answer

    def find(self, text: str, complete: bool = True) -> tuple[int, str] | None:
        """Start of the last well-formed answer, and the answer; None if there is none."""
        if self.prefix.strip(" {") not in text:  # fast path
            return None

        spans = _boxes(text) if self.suffix else self._lines(text, complete)
        last = None
        for start, text_inside in spans:
            answer = text_inside.strip()
            is_answer = 0 < len(answer) <= MAX_ANSWER
            if is_answer and (last is None or start > last[0]):
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
        if token == "{":
            open_braces.append(None)
        elif token.startswith(r"\boxed"):
            open_braces.append(match.end())
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

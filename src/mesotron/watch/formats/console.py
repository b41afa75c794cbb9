"""What trainers print among other lines, in five shapes:

    step:3 - actor/entropy:0.4 - ...              verl, perhaps wrapped over several lines
    step 3: {'loss': 0.1, 'reward': 0.5}          TRL, slime: a dictionary, perhaps with its step
    Step 3 | Loss 0.1 | Reward: 0.5               prime-rl and many others
    Epoch:[2/3](98/500), Reward: 0.5              MiniMind: step 98 of 500 in the second epoch
    METRICS STEP 3, then a line for each number   torchforge, SkyRL

A framework whose lines look otherwise is a format of its own.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from mesotron.watch.metrics import is_known
from mesotron.watch.reader import LineReader, log_format
from mesotron.watch.rows import MAX_KEYS, Row, to_number, to_row

MAX_TEXT = 4096  # letters of a line that may hold numbers

COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Ray puts the worker in front: (TaskRunner pid=15930, ip=10.4.1.33)
WORKER = re.compile(r"^\(\w{1,64} pid=\d{1,12}[^)\n]{0,64}\)\s*")

VERL = re.compile(r"(?:^|\s)step:(\d{1,12})(?=\s|$)")
PAIR = re.compile(r"([\w@./()-]{1,200}):(?:np\.\w{1,16}\()?([-+\w.]{1,40})\)?$")

PRINTED = re.compile(
    r"""['"]([^'"\n]{1,200})['"]:\s{0,8}(?:[\w.]{1,20}\()?['"]?([-+\w.]{1,40})['"]?\)?\s{0,8}(?:[,}]|$)"""
)
BEFORE = 40  # letters in front of a dictionary that may hold its step
NUMBERED = re.compile(r"\b(?:step|rollout|perf|eval) (\d{1,12}): ?$")

COUNT = r"(\d{1,3}(?:,\d{3}){1,3}(?!\d)|\d{1,12}(?!\d|\.\d))"
STEP = re.compile(rf"\b(?:step|iteration|iter|update)[\s:=#]{{1,12}}{COUNT}", re.IGNORECASE)
COUNTED = re.compile(rf"\b(?:batch|episode|round)\s{{1,12}}#?{COUNT}", re.IGNORECASE)
# The step within an epoch, of so many: Epoch:[2/3](98/500), or Epoch [2/3], Step [98/500].
IN_EPOCH = re.compile(
    r"\bepoch:?\s?\[(\d{1,6})/\d{1,6}\],?\s?(?:step:?\s?)?[\[(](\d{1,12})/(\d{1,12})[\])]",
    re.IGNORECASE,
)

NUMBER = r"([-+]?[\d.]{1,24}(?:e[-+]?\d{1,3})?|nan|[-+]?inf)(%?)"
NAMED = re.compile(
    rf"\W{{0,4}}([a-z][\w @./-]{{0,80}}?)\s{{0,4}}[:=]?\s{{0,4}}{NUMBER}"
    r"\s?[a-z/]{0,20}[\s\]).]{0,4}",
    re.IGNORECASE,
)
JOINED = re.compile(rf"([a-z][\w@./-]{{0,80}})\s?[:=]\s?{NUMBER}(?![\w.])", re.IGNORECASE)
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)")
PADDING = re.compile(r"(?<=[a-z:=])\s{2,}(?=[-+.\d])", re.IGNORECASE)  # as f"{x:8.3f}" leaves it

STEPS = (VERL, PRINTED, IN_EPOCH, STEP, COUNTED)


@log_format(
    "console",
    about="Lines that verl, TRL, slime, SkyRL, torchforge, prime-rl or MiniMind print, and others "
    "such as `Step 12 \\| reward: 0.5`",
)
class Console(LineReader):
    rank = 100
    printed = True

    def __init__(self, path: Path, part: str | None = None) -> None:
        super().__init__(path, part)
        self._row: Row = {}  # of several lines, not complete yet
        self._goes_on: Literal["", "verl", "pairs"] = ""  # in what shape
        self._names: set[str] = set()

    @classmethod
    def recognizes(cls, head: bytes) -> bool:
        text = head.decode("utf-8", errors="replace")
        return any(pattern.search(text) for pattern in STEPS)

    @classmethod
    def parts(cls, path: Path) -> list[str]:
        return []

    def parse(self, line: str) -> list[Row]:
        rows = []
        for part in COLOR.sub("", line).split("\r"):  # a progress bar overwrites its line
            rows += self._parse_part(WORKER.sub("", part))

        return rows

    def end(self) -> list[Row]:
        row = self._row
        self._row = {}
        return [row] if len(row) > 1 and self._has_metric(row) else []  # a step is no row

    def _parse_part(self, part: str) -> list[Row]:
        if self._continues(part):
            return []

        rows = self.end()  # a row of several lines is complete when another line begins
        verl = VERL.search(part)
        if verl:
            self._goes_on = "verl"
            self._row = {"step": float(verl[1])} | parse_pairs(part[verl.end() :])
            return rows

        row = parse_dictionary(part)
        if row is not None:
            return [*rows, row] if len(row) > 1 else rows

        in_epoch = IN_EPOCH.search(part)
        if in_epoch:
            row = parse_named(part[in_epoch.end() :])
            row["step"] = count_steps(in_epoch)
            return [*rows, row] if self._has_metric(row) else rows

        step = STEP.search(part) or COUNTED.search(part)
        if step:
            rows += self._parse_step(part, step)

        return rows

    def _continues(self, part: str) -> bool:
        """Whether a line belongs to the open row, which it joins."""
        if not self._row:
            return False

        if self._goes_on == "verl":
            if not part.lstrip().startswith("- "):
                return False

            self._row |= parse_pairs(part)
            return True

        if self._goes_on == "pairs":
            if not part.strip(" \t{}[]=-"):
                return True

            pairs = parse_pair(part)
            is_pair = bool(pairs)
            pairs.pop("step", None)
            self._row |= pairs
            return is_pair

        return False

    def _parse_step(self, part: str, step: re.Match[str]) -> list[Row]:
        number = float(step[1].replace(",", ""))
        before = parse_named(part[: step.start()])
        after = parse_named(part[step.end() :])

        row = before | after | {"step": number}
        if self._has_metric(row):
            return [row]

        self._row = {"step": number}  # "Step 3:", with the numbers on the next lines
        self._goes_on = "pairs"
        return []

    def _has_metric(self, row: Row) -> bool:
        """Whether a row has a metric; a text like "step 5: saved 3 files" has none."""
        if len(self._names) < MAX_KEYS:
            self._names |= row.keys()
        return any(is_known(name) for name in row if name in self._names)


def count_steps(in_epoch: re.Match[str]) -> float:
    """The step of the whole run: those of the epochs before are added."""
    epoch, step, num_steps = map(int, in_epoch.groups())
    return float((epoch - 1) * num_steps + step)


def parse_dictionary(text: str) -> Row | None:
    """The dictionary that a line holds, with the step in front of it if it has none."""
    starts = []
    for place in (text.find("{'"), text.find('{"')):
        if place >= 0:
            starts.append(place)

    if not starts:
        return None

    # As Python prints it, or else as JSON.
    start = starts[0]
    pairs = PRINTED.findall(text[start:])
    if not pairs:
        return None

    row = to_row(dict(pairs))
    number = NUMBERED.search(text[max(start - BEFORE, 0) : start])
    if number and "step" not in row:
        return {"step": float(number[1])} | row

    return row


def parse_pair(line: str) -> Row:
    """The numbers of a line in a block under a step: `'name': '0.5',` or `name: 0.5`."""
    if line.lstrip(" {").startswith(("'", '"')):
        pairs = PRINTED.findall(line)
        if pairs:
            return to_row(dict(pairs))

    named = NAMED.fullmatch(line)
    if named and re.search("[:=]", line):
        return _numbers([named.groups()])

    return {}


def parse_pairs(text: str) -> Row:
    """Numbers in verl's form, as in "- actor/entropy:0.4 - reward:np.float64(0.5)"."""
    return _numbers(_pairs(text))


def _pairs(text: str) -> Iterator[tuple[str, str, str]]:
    for part in re.split(r"(?:^|\s)-\s", text):
        match = PAIR.fullmatch(part.strip())
        if match:
            yield match[1], match[2], ""


def parse_named(text: str) -> Row:
    """Numbers with names, as in "Loss 0.1 | Mismatch KL: 0.02 | Truncation 1.0%"."""
    text = PADDING.sub(" ", text[:MAX_TEXT])
    text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)

    row: Row = {}
    for piece in re.split(r"[|,;]|\s-\s|\s{2,}", text):
        whole = NAMED.fullmatch(piece)
        row |= _numbers([whole.groups()] if whole else JOINED.findall(piece))

    return row


def _numbers(found: Iterable[tuple[str | Any, ...]]) -> Row:
    """The numbers among triples of name, digits and percent sign."""
    row: Row = {}
    for name, digits, percent in found:
        number = to_number(digits + percent)
        if number is not None:
            row[name.strip()] = number

    return row

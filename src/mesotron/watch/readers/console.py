"""What trainers print: verl's `step:3 - actor/entropy:0.4 - ...` and Trainer's `{'loss': 0.1}`.

A console log holds anything between such lines, so that nothing in it is an error except that no
line is of either form.
"""

import re
from pathlib import Path

from mesotron.watch.readers.parser import LineParser, Row, number, tidy

COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Ray puts the worker in front: (TaskRunner pid=15930, ip=10.4.1.33)
WORKER = re.compile(r"^\(\w{1,64} pid=\d{1,12}[^)\n]{0,64}\)\s*")
VERL = re.compile(r"(?:^|\s)step:(\d{1,12})(?=\s|$)")
PAIR = re.compile(r"([\w@./()-]{1,200}):(?:np\.\w{1,16}\()?([-+\w.]{1,40})\)?$")
PRINTED = re.compile(r"'([^'\n]{1,200})':\s*'?([-+\w.]{1,40})'?[,}]")


class Console(LineParser):
    """Lines of verl's console logger, which may be wrapped, and dictionaries of Trainer."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._row: Row = {}

    def line(self, text: str) -> list[Row]:
        """Read one line; a verl row is whole when another line begins."""
        rows: list[Row] = []
        # A progress bar writes over its line again and again.
        for part in COLOUR.sub("", text).split("\r"):
            part = WORKER.sub("", part)
            if self._row and part.lstrip().startswith("- "):
                self._row |= pairs(part)
                continue
            rows += self.last()
            if step := VERL.search(part):
                self._row = {"step": float(step[1])} | pairs(part[step.end() :])
            elif "{'" in part:
                found = {key: value for key, value in PRINTED.findall(part[part.index("{'") :])}
                row = tidy(found)
                rows += [row] if len(row) > 1 else []
        return rows

    def last(self) -> list[Row]:
        """The row that was being read, unless it holds a step alone."""
        row, self._row = self._row, {}
        return [row] if len(row) > 1 else []


def pairs(text: str) -> Row:
    """Numbers of `name:value - name:value`.

    Example:
        >>> pairs(" - actor/entropy:0.25 - critic/score/mean:np.float64(0.5) - note:hello")
        {'actor/entropy': 0.25, 'critic/score/mean': 0.5}
    """
    found = (PAIR.fullmatch(part.strip()) for part in re.split(r"(?:^|\s)-\s", text))
    read = ((match[1], number(match[2])) for match in found if match)
    return {name: value for name, value in read if value is not None}

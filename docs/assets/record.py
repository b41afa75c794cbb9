"""Record a command in a terminal and draw the recording as an animated GIF.

    python docs/assets/record.py docs/assets/rescue.gif \
        -- mesotron train arith_collapse --guard rollback --seed 401

The command runs in a terminal of its own. What it shows is kept each time that it changes, waits
are shortened, and the last picture stays. Needs `pip install pyte`, Pillow and Matplotlib's font.
"""

import argparse
import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

import pyte
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

COLUMNS, ROWS = 100, 30
FONT_SIZE = 15
MARGIN = 14

# One palette for every picture of the recording: GIFs of few colors are small.
BACKGROUND = "#16181d"
FOREGROUND = "#d7dae0"
PALETTE = {
    "black": "#5c6370",
    "red": "#f07178",
    "green": "#a5d67e",
    "brown": "#f2c063",
    "yellow": "#f2c063",
    "blue": "#7fb4f5",
    "magenta": "#d39be8",
    "cyan": "#6ccfd0",
    "white": FOREGROUND,
}

# A recording lasts seconds, whatever the run took.
PICTURES = 90
MILLISECONDS = 160
LAST_MILLISECONDS = 6000


@dataclass(frozen=True)
class Moment:
    """The screen at one time: its characters, row by row."""

    seconds: float
    rows: tuple[tuple[pyte.screens.Char, ...], ...]


class WrappedScreen(pyte.Screen):
    """A screen whose long lines break between words."""

    def draw(self, data: str) -> None:
        for char in data:
            if self.cursor.x == self.columns and char != " ":
                self._carry_word()

            super().draw(char)

    def _carry_word(self) -> None:
        """Move the word that ends at the edge to a new line."""
        row = self.buffer[self.cursor.y]
        start = self.columns
        while start > 0 and row[start - 1].data != " ":
            start -= 1

        if start == 0:  # one word fills the line
            return

        word = [row.pop(x) for x in range(start, self.columns)]
        self.carriage_return()
        self.linefeed()
        for x, char in enumerate(word):
            self.buffer[self.cursor.y][x] = char

        self.cursor.x = len(word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("command", nargs="+", help="after --")
    given = parser.parse_args()

    moments, status = record(given.command)
    if status:
        sys.exit(f"{given.command[0]} ended with exit code {status}; nothing was drawn")

    pictures = [draw(moment) for moment in choose(moments, PICTURES)]
    durations = [MILLISECONDS] * (len(pictures) - 1) + [LAST_MILLISECONDS]
    first, *others = quantize(pictures)
    first.save(
        given.picture,
        save_all=True,
        append_images=others,
        duration=durations,
        loop=0,
        optimize=True,
    )
    size = given.picture.stat().st_size / 1e6
    print(f"{given.picture}: {len(pictures)} pictures, {size:.2f} MB")


def record(command: list[str]) -> tuple[list[Moment], int]:
    """Run the command in a terminal; its screens and its exit code."""
    child, terminal = pty.fork()
    if child == 0:
        environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        os.execvpe(command[0], command, environment)

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen = WrappedScreen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    stream.feed(f"\x1b[1m$ {' '.join(command)}\x1b[0m\r\n".encode())
    moments = [take(screen, 0.0)]
    began = time.monotonic()
    while True:
        ready, _, _ = select.select([terminal], [], [], 1.0)
        if not ready:
            continue

        try:
            written = os.read(terminal, 65536)
        except OSError:  # Linux: the other end is closed
            written = b""
        if not written:
            break

        stream.feed(written)
        moment = take(screen, time.monotonic() - began)
        if moment.rows != moments[-1].rows:
            moments.append(moment)

    _, status = os.waitpid(child, 0)
    return moments, os.waitstatus_to_exitcode(status)


def take(screen: pyte.Screen, seconds: float) -> Moment:
    rows = []
    for y in range(screen.lines):
        rows.append(tuple(screen.buffer[y][x] for x in range(screen.columns)))

    return Moment(seconds, tuple(rows))


def choose(moments: list[Moment], number: int) -> list[Moment]:
    """The first and the last screen, and those at equal distances between them."""
    if len(moments) <= number:
        return moments

    last = len(moments) - 1
    return [moments[round(index * last / (number - 1))] for index in range(number)]


def draw(moment: Moment) -> Image.Image:
    fonts = {}
    for bold, weight in ((False, "regular"), (True, "bold")):
        path = findfont(f"DejaVu Sans Mono:{weight}")
        fonts[bold] = ImageFont.truetype(path, FONT_SIZE)

    width = fonts[False].getlength("M")
    height = FONT_SIZE + 5
    size = (round(COLUMNS * width) + 2 * MARGIN, ROWS * height + 2 * MARGIN)
    image = Image.new("RGB", size, BACKGROUND)
    pen = ImageDraw.Draw(image)
    for y, row in enumerate(moment.rows):
        for x, char in enumerate(row):
            corner = (MARGIN + x * width, MARGIN + y * height)
            if char.data != " ":
                color = PALETTE.get(char.fg.removeprefix("bright"), FOREGROUND)
                pen.text(corner, char.data, font=fonts[char.bold], fill=color)

    return image


def quantize(pictures: list[Image.Image]) -> list[Image.Image]:
    """The same few colors in every picture: the two grounds, the palette and shades of them."""
    last = pictures[-1].quantize(32, method=Image.Quantize.MEDIANCUT)
    return [picture.quantize(palette=last, dither=Image.Dither.NONE) for picture in pictures]


if __name__ == "__main__":
    main()

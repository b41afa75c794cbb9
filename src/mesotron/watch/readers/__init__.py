"""Readers of logs, ours and other tools': files in, rows of numbers out, nothing executed.

Each reader continues where it stopped, so finished and growing logs are read by the same code.
Files are not trusted: sizes are bounded, no pickle, no eval, and a malformed file is one sentence
that names the file and the line.
"""

from mesotron.watch.readers.parsers import Row
from mesotron.watch.readers.stream import Log, Stream, read_log

__all__ = ["Log", "Row", "Stream", "read_log"]

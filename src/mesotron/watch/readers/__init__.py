"""Readers of logs, ours and other people's: bytes in, rows of numbers out, nothing executed.

Every reader takes its file in pieces, so that a finished log and one that still grows are read by
the same code. Files are not trusted: sizes are bounded, no pickle, no eval, and a malformed file is
a sentence that names the file and the line.
"""

from mesotron.watch.readers.parser import Row
from mesotron.watch.readers.stream import Log, Stream, read_log

__all__ = ["Log", "Row", "Stream", "read_log"]

"""Readers of logs, ours and other tools': files in, rows of numbers out, nothing executed.

Files are not trusted: sizes are bounded, no pickle, no eval, and an error names file and line.
"""

from mesotron.watch.readers.locate import find_runs
from mesotron.watch.readers.parsers import Row
from mesotron.watch.readers.stream import Log, Stream, read_log

__all__ = ["Log", "Row", "Stream", "find_runs", "read_log"]

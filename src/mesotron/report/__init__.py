"""Reports: run folders and tournaments as one HTML page that needs nothing else.

Reads files alone and imports neither torch nor jax.
"""

from mesotron.report.read import Run, read_run, read_runs
from mesotron.report.runs_page import render_runs

__all__ = ["Run", "read_run", "read_runs", "render_runs"]

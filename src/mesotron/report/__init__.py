"""Run folders and tournaments as one HTML page. Reads files only; imports neither torch nor jax."""

from mesotron.report.read import Run, read_run, read_runs
from mesotron.report.render import render_runs

__all__ = ["Run", "read_run", "read_runs", "render_runs"]

"""Run folders: what every kind of training writes, and every tool reads.

The standard library and rich only: reading a run needs neither torch nor jax.
"""

from mesotron.runs.checkpoints import Checkpoint, list_checkpoints, newest_whole
from mesotron.runs.folder import RunFolder, check_free, describe_environment, new_run_path

__all__ = [
    "Checkpoint",
    "RunFolder",
    "check_free",
    "describe_environment",
    "list_checkpoints",
    "new_run_path",
    "newest_whole",
]

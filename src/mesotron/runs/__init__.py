"""Run folders: what training writes and tools read, without torch or jax."""

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

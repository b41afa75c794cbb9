"""Variables of the Hugging Face libraries, set before they are imported."""

import logging
import os
from pathlib import Path

from mesotron.config import TaskConfig
from mesotron.config.registry import TASKS
from mesotron.models.names import is_local


def set_library_variables(task: TaskConfig, *models: str) -> None:
    """No telemetry, and no network unless a model or the data is a name on the hub."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

    # At its import it warns of a CPU kernel that it looks for on the hub.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

    if _is_local_data(task) and all(is_local(model) for model in models):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _is_local_data(task: TaskConfig) -> bool:
    if not task.data:
        return TASKS[task.source].hub is None  # generated, or from the hub

    return all(Path(path).expanduser().exists() for path in task.data)

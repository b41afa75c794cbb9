"""Variables of the Hugging Face libraries, set before they are imported."""

import os
from pathlib import Path

from mesotron.config import TaskConfig
from mesotron.models.load import SHIPPED


def set_library_variables(task: TaskConfig, *models: str) -> None:
    """No telemetry, and no network unless a model or the data is a name on the hub."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

    # Without a path the data is generated, or the hub's GSM8K.
    paths = task.data or ((task.path,) if task.path else ())
    local = [Path(path).expanduser().exists() for path in paths]
    local += [task.name != "gsm8k"] if not paths else []
    local += [name in SHIPPED or Path(name).expanduser().exists() for name in models]

    if all(local):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")

"""Training as a command runs it: find the folder and the settings, then train.

Nothing heavy is imported before the folder and the settings are found usable, and before the
variables are set that Hugging Face libraries read once, at import.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from mesotron.config import SftConfig, TrainConfig
from mesotron.config.checks import check_least
from mesotron.rlvr.checks import check_parts
from mesotron.runs import new_run_path
from mesotron.runs.hub import go_offline_without_network
from mesotron.runs.plan import Plan, begin, go_on
from mesotron.runs.processes import is_main, num_processes
from mesotron.watch.budget import limits_of

Limited = TypeVar("Limited", TrainConfig, SftConfig)  # whose cost may have a limit
# Of these runs alone; what holds for every run is in `checks`.
LEAST = {
    "eval_every": 0,
    "watch.tries": 1,
    "watch.snr_every": 0,
    "rollout.prompts": 1,
    "rollout.generations": 2,  # one alone has nothing to be compared with
    "rollout.max_tokens": 1,
    "rollout.updates": 1,
    "rollout.micro_batch": 1,
}


def run(config: TrainConfig, then: Callable[[Path], None] | None = None) -> int:
    """Train, or continue a run.

    Args:
        config: as parsed; to continue a run see `mesotron.runs.continuation`.
        then: called with the run's folder when it is over, or stopped and saved; in the first of
            several processes.

    Returns:
        The exit code: 0 when finished, and also when stopped by Ctrl-C or SIGTERM and saved.
    """
    began = time.monotonic()
    check_installed()
    plan = go_on_within(config) if config.resume else new_run(config)
    limits_of(plan.config)  # refuses a budget without a price
    set_library_variables(plan.config)
    go_offline_without_network()
    from mesotron.rlvr.session import train

    code = train(plan, began)
    if then is not None and is_main():
        then(plan.path)
    return code


def go_on_within(config: Limited) -> Plan[Limited]:
    """The plan of a run that was stopped, with the limits that are given anew."""
    plan = go_on(
        config,
        evaluate="mesotron eval",
        instead="start a new run (from its weights: --model.name CHECKPOINT)",
    )
    check_least(plan.config, {"threads": 1})
    if config.gpu is not None and config.price is None:
        # The run's old price was of another machine.
        return replace(plan, config=replace(plan.config, price=None))
    return plan


def check_installed() -> None:
    """Say what to install instead of failing at an import."""
    for name in ("trl", "datasets", "accelerate"):
        if find_spec(name) is None:
            raise ValueError(
                f"training needs {name}, which is not installed: pip install 'mesotron[rlvr]'"
            )


def new_run(config: TrainConfig) -> Plan[TrainConfig]:
    """The plan of a run from the beginning."""
    check(config)
    return begin(config, config.out or new_run_path(config.recipe))


def check(config: TrainConfig) -> None:
    """Refuse numbers that cannot be meant, before anything is loaded."""
    check_least(config, LEAST)
    temperature, top_p = config.rollout.temperature, config.rollout.top_p
    if not 0 < temperature < math.inf:
        raise ValueError(f"--rollout.temperature {temperature:g} must be above 0, and finite")
    if not 0 < top_p <= 1:
        raise ValueError(f"--rollout.top-p {top_p:g} is a share: give a number above 0, up to 1")
    vllm = config.rollout.vllm
    if vllm != "off" and find_spec("vllm") is None:
        raise ValueError(
            f"--rollout.vllm {vllm} needs vLLM, which is not installed: pip install 'trl[vllm]'"
        )
    if num_processes() > 1 and config.out is None:
        raise ValueError("several processes must agree on the run's folder: give it with --out")
    check_parts(config)


def set_library_variables(config: TrainConfig) -> None:
    """No telemetry, and no network unless the model or the data is a name on the hub."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not needs_hub(config):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def needs_hub(config: TrainConfig) -> bool:
    """Whether the model or the data can only be a name on the hub.

    Example:
        >>> needs_hub(TrainConfig())
        False
    """
    model, path = config.model.name, config.task.path
    local_model = model in ("tiny", "smollm2") or Path(model).expanduser().exists()
    # Without a path the data is generated, or the hub's GSM8K.
    local_data = Path(path).expanduser().exists() if path else config.task.name != "gsm8k"
    return not (local_model and local_data)

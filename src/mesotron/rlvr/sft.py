"""`mesotron sft`: a warm start on solved problems, with the tasks, formats and optimizers of RL.

Checks the settings and plans the run; nothing heavy is imported before that. `warm_start` trains.
"""

from __future__ import annotations

import time

from mesotron.config import SftConfig
from mesotron.rlvr.train import check as check_inputs
from mesotron.rlvr.train import resume_plan, set_library_variables
from mesotron.runs import new_run_path
from mesotron.runs.process import go_offline_without_network, num_processes
from mesotron.runs.resume import Plan, plan_new
from mesotron.watch.budget import limits_of


def run(config: SftConfig) -> int:
    """Train on solved problems, or continue such a run.

    Args:
        config: as parsed; to continue a run see `mesotron.runs.resume`.

    Returns:
        The exit code: 0 when finished, and also when stopped by Ctrl-C or SIGTERM and saved.
    """
    began = time.monotonic()
    plan = resume_plan(config) if config.resume else new_run(config)
    limits_of(plan.config)  # refuses a budget without a price
    set_library_variables(plan.config)
    go_offline_without_network()
    from mesotron.rlvr.warm_start import train

    return train(plan, began)


def new_run(config: SftConfig) -> Plan[SftConfig]:
    """The plan of a run from the beginning."""
    check(config)
    return plan_new(config, config.out or new_run_path("sft"))


def check(config: SftConfig) -> None:
    """Refuse several processes, and what `mesotron train` would refuse."""
    if num_processes() > 1:
        raise ValueError(
            f"mesotron sft runs in one process, not in WORLD_SIZE={num_processes()}: start it "
            "without a launcher"
        )
    check_inputs(config)

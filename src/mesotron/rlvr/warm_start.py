"""The supervised start of a training run, its first stage: `mesotron train --sft-steps N`.

It is a run of `mesotron sft` in the run's folder `sft`, with a log and checkpoints of its own.
Reinforcement learning then starts from its last weights, which stay there: a KL term is measured
from them, and `mesotron eval` compares with them. A run that is killed in either stage resumes in
it.
"""

import gc
from dataclasses import replace

import torch

from mesotron.config import OptimConfig, SftConfig, TrainConfig
from mesotron.optim.device import choose_device, name_device
from mesotron.rlvr import sft
from mesotron.runs import RunFolder, newest_whole
from mesotron.runs.folder import START
from mesotron.runs.resume import Plan
from mesotron.watch.budget import Budget


def warm_up(plan: Plan[TrainConfig], budget: Budget) -> Plan[TrainConfig] | None:
    """Train the supervised start, as far as it is not there yet.

    Returns:
        The plan of a run from its weights; None if a limit or the user stopped it.
    """
    if plan.folder is None:
        device = choose_device(plan.config.device, plan.config.threads)
        folder = plan.open_folder(name_device(device), torch.get_num_threads())
        plan = replace(plan, folder=folder)

    run = plan.folder
    assert run is not None
    budget.run = run

    stage = plan_stage(plan)
    if stage.folder is None or stage.folder.result is None:
        with run:  # no other process trains it
            sft.train(stage, stage_budget(budget))
            free_memory()

    if RunFolder(stage.path).result is None:
        return None

    newest, damaged = newest_whole(stage.path / "checkpoints")
    if newest is None:
        raise ValueError(f"{stage.path} has no intact weights ({'; '.join(damaged)}): start again")

    model = replace(plan.config.model, name=str(newest.path))
    return replace(plan, config=replace(plan.config, model=model))


def plan_stage(plan: Plan[TrainConfig]) -> Plan[SftConfig]:
    """The supervised stage: new, or from its newest checkpoint."""
    path = plan.path / START
    config = stage_config(plan.config)
    if not (path / "config.json").is_file():
        return Plan(config, path, whole=plan)

    folder = RunFolder(path)
    checkpoint, _ = newest_whole(folder.checkpoints)
    return Plan(config, path, folder, checkpoint, whole=plan)


def stage_config(config: TrainConfig) -> SftConfig:
    start = config.sft
    optim = OptimConfig(
        name="adamw",
        lr=start.lr,
        schedule="linear",
        warmup=0.1,
    )
    return SftConfig(
        model=config.model,
        task=config.task,
        optim=optim,
        steps=start.steps,
        batch=start.batch,
        keep=1,
        seed=config.seed,
        budget=config.budget,
        price=config.price,
        gpu=config.gpu,
        time_limit=config.time_limit,
        device=config.device,
        threads=config.threads,
    )


def stage_budget(budget: Budget) -> Budget:
    """The same limits and clock; the times of its steps say nothing about the second stage's."""
    stage = Budget(budget.limits, earlier=budget.earlier, began=budget.began)
    stage.deadline = budget.deadline
    return stage


def free_memory() -> None:
    gc.collect()  # trainer and callbacks refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

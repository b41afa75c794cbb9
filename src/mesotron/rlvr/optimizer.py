"""The optimizer of a training run: built from its config, and logged to the run's folder."""

import logging
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from mesotron.config import OptimConfig
from mesotron.config.rules import SPECTRAL_RULES, optimizer_names
from mesotron.models.adapters import widen_adapters
from mesotron.optim import RoutedOptimizer, find_builder, triton
from mesotron.optim.spectra import Block, choose_blocks, measure_spectrum
from mesotron.runs import RunFolder

log = logging.getLogger("mesotron")
# At 0.1, the default for training from scratch, SmolLM2's accuracy fell to 0 in ten steps.
FINE_TUNING_SGD_LR = 1e-3
NUM_SPECTRA = 5  # steps of a run whose spectra are kept


def build_optimizer(model: nn.Module, config: OptimConfig) -> RoutedOptimizer:
    """The optimizer that a config names; weights wrapped later (LoRA, FSDP2) would not train."""
    widen_adapters(model)
    if config.name not in optimizer_names():
        known = ", ".join(optimizer_names())
        raise ValueError(f"optim.name = {config.name!r} must be one of {known}")

    optimizer = find_builder(config.name)(model, config.lr, **builder_options(config))
    check_all_train(model, optimizer)

    return optimizer


def builder_options(config: OptimConfig) -> dict[str, Any]:
    """What a config says beside name and rate; fields left open keep the builder's defaults."""
    options: dict[str, Any] = {"weight_decay": config.weight_decay, "per_head": config.per_head}

    if config.name != "adamw":
        options["momentum"] = config.momentum
        options["scale"] = config.scale
        options["aux_lr"] = config.aux_lr
        options["leash"] = config.leash
        options["lora"] = config.lora
        options["fused"] = False if config.fused is False else None

    if config.name == "muon_sgd" and config.aux_lr is None:
        options["aux_lr"] = FINE_TUNING_SGD_LR

    if config.promote is not None:
        options["promote"] = config.promote
    if config.cutoff is not None:
        options["cutoff"] = config.cutoff
    if config.rank is not None:
        options["filter"] = "low_rank"
        options["rank"] = config.rank

    return options


def check_settings(config: OptimConfig) -> None:
    build_optimizer(nn.Linear(8, 8), replace(config, per_head=False))  # a model has the heads


def check_all_train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # An optimizer built before LoRA wrapping would raise nothing, and the adapters would not train.
    stepped = set()
    for group in optimizer.param_groups:
        stepped.update(id(p) for p in group["params"])

    missing = []
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in stepped:
            missing.append(name)

    if missing:
        raise ValueError(
            f"{missing[0]!r} trains but is in no group of the optimizer ({len(missing)} such): "
            "build the optimizer after the model is wrapped, or pass the trainer optim= instead"
        )


def resolve_optim(
    args: Any, optim: str | OptimConfig | None, optimizers: Any
) -> OptimConfig | None:
    if optim is not None and optimizers is not None and optimizers[0] is not None:
        raise ValueError("optim= and optimizers= both give an optimizer: leave one of them out")

    if isinstance(optim, str):
        rate = args.learning_rate
        decay = args.weight_decay
        return OptimConfig(name=optim, lr=rate, weight_decay=decay)  # pyright: ignore

    return optim


def unwrap_optimizer(optimizer: Any) -> RoutedOptimizer | None:
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, RoutedOptimizer):
        return inner

    return None


def matrix_rate(optimizer: Any, first: float) -> float:
    """The rate to log: Transformers takes the first group's, that of embeddings and norms."""
    routed = unwrap_optimizer(optimizer)
    if routed is None:
        return first

    for group in routed.param_groups:
        if group["rule"] in SPECTRAL_RULES:
            return float(group["lr"])

    return float(first)


def devices_of_kernels(optimizer: RoutedOptimizer) -> set[torch.device]:
    """Where matrices are that fused kernels may step."""
    devices = set()
    for group in optimizer.param_groups:
        if group["rule"] in ("muon", "pion") and group["fused"] is not False:
            devices.update(p.device for p in group["params"])

    return devices


class OptimizerLog(TrainerCallback):
    """Writes routing.json at the start, and rows of spectra.jsonl at five steps of the run."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.blocks: list[Block] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = unwrap_optimizer(kwargs["optimizer"])
        if optimizer is None or not state.is_world_process_zero:
            return

        self.blocks = choose_blocks(optimizer)
        if any(map(triton.available, devices_of_kernels(optimizer))):
            log.warning(
                "the first step compiles GPU kernels, up to 13 s, unless they are in Triton's "
                "cache on disk (--no-optim.fused does without them)"
            )

        if optimizer.table is not None:
            self.run.save("routing", {"rows": [asdict(row) for row in optimizer.table.merged()]})

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step + 1  # counted after the step; its gradients are still there
        optimizer = unwrap_optimizer(kwargs["optimizer"])

        # The first step, the last, and three in between.
        last = state.max_steps - 1
        measured = {1 + round(k * last / (NUM_SPECTRA - 1)) for k in range(NUM_SPECTRA)}
        if optimizer is None or step not in measured:
            return

        for block in self.blocks:
            spectrum = measure_spectrum(optimizer, block)
            if spectrum is not None:
                self.run.append("spectra", {"step": step, **spectrum})

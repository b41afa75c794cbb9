"""Our optimizers by the names that the benchmarks use: builders with options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from mesotron.optim import Muon, RoutedOptimizer, adamw, muon, muon_sgd, pion, route


class Contender(NamedTuple):
    """A builder, its options and a description."""

    builder: Callable[..., RoutedOptimizer]
    options: dict[str, Any]
    about: str

    def build(self, model: nn.Module, **more: Any) -> RoutedOptimizer:
        """The routed optimizer for a model."""
        return self.builder(model, **self.options, **more)


def adamw_split(model: nn.Module, *, lr: float, aux_lr: float) -> RoutedOptimizer:
    """AdamW with one rate for the hidden matrices and another for the rest.

    Muon and Pion have two rates; a baseline with one could lose for that reason alone.
    """
    groups = []
    for group in route(model).groups(model):
        hidden = group["rule"] == "muon"
        for vectors in (False, True):
            members = []
            for p in group["params"]:
                if (p.ndim < 2) == vectors:
                    members.append(p)

            if members:
                decay = {"weight_decay": 0.0} if vectors else {}
                rate = lr if hidden else aux_lr
                groups.append(
                    {
                        "params": members,
                        "rule": "adamw",
                        "lr": rate,
                        **decay,
                    }
                )

    return Muon(groups)


CONTENDERS = {
    "adamw": Contender(adamw, {}, "AdamW for everything"),
    "adamw_split": Contender(adamw_split, {}, "AdamW, a rate of its own for the rest"),
    "muon": Contender(muon, {}, "Muon's quintic, five steps"),
    "polar_express": Contender(
        muon, {"filter": "polar_express"}, "Muon with Polar Express's coefficients"
    ),
    "muon_sgd": Contender(muon_sgd, {}, "Muon, and SGD with momentum for the rest"),
    "pion": Contender(pion, {"promote": 0}, "Pion as released: promote 0"),
    "pion_promote2": Contender(pion, {"promote": 2}, "Pion with two promotion steps"),
    "pion_noise": Contender(pion, {"cutoff": "noise"}, "Pion cut at the edge of pure noise"),
    "pion_per_head": Contender(
        pion, {"promote": 0, "per_head": True}, "Pion, promote 0, attention head by head"
    ),
}


def check_names(names: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """All known names if none are given; raises on unknown ones."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown optimizer {unknown[0]!r}: choose from {', '.join(known)}")
    return names or known

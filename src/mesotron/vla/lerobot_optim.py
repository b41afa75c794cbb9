"""Pion and Muon as an optimizer choice of LeRobot: `lerobot-train --optimizer.type=mesotron_pion`.

LeRobot imports this file for `--optimizer.discover_packages_path=mesotron.vla.lerobot_optim`. The
vision and language parts go to Muon and the rest, the action module, to Pion.
"""

from dataclasses import dataclass
from typing import Any

from lerobot.optim.optimizers import OptimizerConfig  # type: ignore[import-not-found]
from torch import nn
from torch.optim import Optimizer

from mesotron.optim import pion
from mesotron.optim.routing.params import model_behind

__path__: list[str] = []  # LeRobot looks for modules in a plugin: here are none
# What LeRobot's policies call their vision and language parts, and single output layers.
PERCEPTION = (
    "backbone",
    "eagle_model",
    "image_encoder",
    "language_model",
    "paligemma",
    "rgb_encoder",
    "text_encoder",
    "vision_model",
    "vision_tower",
    "vlm",
)
HEADS = ("action_head", "action_out_proj")


@OptimizerConfig.register_subclass("mesotron_pion")
@dataclass
class PionConfig(OptimizerConfig):
    lr: float = 1e-4
    weight_decay: float = 0.01
    grad_clip_norm: float = 10.0
    momentum: float = 0.95
    promote: int = 0
    cutoff: float | None = None
    perception: tuple[str, ...] = PERCEPTION  # names of the modules that go to Muon

    def build(self, params: Any) -> Optimizer:
        model = model_behind(params)
        named = model.named_modules()
        trained = {n: m for n, m in named if any(p.requires_grad for p in m.parameters())}
        last = {name: name.rpartition(".")[2] for name in trained}
        heads = [n for n, m in trained.items() if last[n] in HEADS and isinstance(m, nn.Linear)]

        return pion(
            model,
            self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            promote=self.promote,
            cutoff=self.cutoff,
            modalities={name: "muon" for name in trained if last[name] in self.perception},
            overrides={f"{name}.weight": "adamw" for name in heads},
        )

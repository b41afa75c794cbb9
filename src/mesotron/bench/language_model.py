"""One training run of the benchmark: a small Llama on characters, one optimizer, rate and seed.

The model is a real Transformers Llama with grouped-query attention, built from a config with random
weights. All runs of a seed share the initial weights and the order of the data. There is no
gradient clipping, so that nothing but the optimizer holds a run together.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from mesotron.bench.contenders import CONTENDERS
from mesotron.bench.corpus import VOCABULARY, Corpus
from mesotron.bench.timing import host_clock

EVALUATION_WINDOWS = 128
WARM_UP = 0.1  # share of the steps
FINAL_RATE = 0.1  # of the peak, reached linearly
# A run is dead when its last losses are above this multiple of the loss of a uniform guess.
DIVERGED = 1.2
DIVERGENCE_WINDOW = 8


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything that decides a run, and so also its key in a sweep.

    Args:
        optimizer: a name in `CONTENDERS`.
        lr: of the hidden matrices; with `adamw`, of everything.
        aux_lr: of embeddings, head and norms; None is `lr`.
        seed: of weights and data order.
        steps, batch, context: optimizer steps, windows in each, characters in a window.
        width, layers: of the model.
    """

    optimizer: str
    lr: float
    aux_lr: float | None
    seed: int
    steps: int
    batch: int = 8
    context: int = 64
    width: int = 128
    layers: int = 2

    def as_dict(self) -> dict[str, Any]:
        """Plain values, in the order of the fields."""
        return asdict(self)


def build_model(settings: RunSettings) -> nn.Module:
    """A Llama with random weights from the run's seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    heads = settings.width // 32
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.width,
        intermediate_size=3 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=settings.context,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def train(settings: RunSettings, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """Train once and judge by held-out loss.

    Returns:
        loss: held-out nats per character, None if the run diverged; diverged_at: the step, or
        None; train_losses: one per step; steps_per_second: from the median step; stats: of the
        last step.
    """
    model = build_model(settings).to(device)
    rates = {"lr": settings.lr}
    if settings.aux_lr is not None:
        rates["aux_lr"] = settings.aux_lr
    optimizer = CONTENDERS[settings.optimizer].build(model, **rates)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_factor(step, settings.steps)
    )
    batches = corpus.batches(settings.seed, settings.steps, settings.batch, settings.context)
    clock = host_clock(device)
    losses: list[float] = []
    seconds: list[float] = []
    for batch in batches.to(device):
        start = clock()
        loss = next_character_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        seconds.append(clock() - start)
        if has_diverged(losses):
            break
    diverged = has_diverged(losses)
    held_out = corpus.evaluation(EVALUATION_WINDOWS, settings.context).to(device)
    return {
        "loss": None if diverged else evaluate(model, held_out),
        "diverged_at": len(losses) if diverged else None,
        "train_losses": [round(x, 4) if math.isfinite(x) else None for x in losses],
        "steps_per_second": 1 / median(seconds),
        "stats": optimizer.stats(),
    }


def rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to FINAL_RATE.

    Example:
        >>> [round(rate_factor(s, 100), 2) for s in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.55, 0.11]
    """
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 1 - (1 - FINAL_RATE) * (step - warm_up) / max(1, steps - warm_up)


def next_character_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each next character, in nats; tokens are [batch, context]."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor) -> float:
    """Held-out loss, nats per character."""
    parts = windows.split(32)
    return fmean(next_character_loss(model, part).item() for part in parts)


def has_diverged(losses: list[float]) -> bool:
    """Whether the last losses are not finite, or worse on average than guessing evenly."""
    recent = losses[-DIVERGENCE_WINDOW:]
    if not all(map(math.isfinite, recent)):
        return True
    even = math.log(VOCABULARY)
    return len(recent) == DIVERGENCE_WINDOW and fmean(recent) > DIVERGED * even

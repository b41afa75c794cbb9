"""One training run: a small Llama on characters, with one optimizer, rate and seed.

The model is a Transformers Llama with grouped-query attention and random weights. All runs of a
seed share the initial weights and the data order. Gradients are not clipped, so that stability is
the optimizer's alone. The text is `pydoc_data.topics`, a few hundred kilobytes of English prose and
code that every Python ships. It differs slightly between Python versions, so a result names the
version and the hash of the text; losses are compared within one result only.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._lib.contenders import CONTENDERS
from benchmarks._lib.timing import host_clock

VOCABULARY = 128  # ASCII; what lies outside is replaced
HELD_OUT_EVERY = 8  # every eighth topic, in alphabetical order
SAMPLING_SEED = 20260


@dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes, [length] int64 below VOCABULARY, and the hash of the text."""

    train: Tensor
    held_out: Tensor
    sha256: str

    def batches(self, seed: int, steps: int, batch: int, context: int) -> Tensor:
        """Random windows for a whole run, [steps, batch, context]; equal for equal seeds."""
        return _windows(self.train, seed, steps * batch, context).view(steps, batch, context)

    def evaluation(self, batch: int, context: int) -> Tensor:
        """The held-out windows, the same for every run, [batch, context]."""
        return _windows(self.held_out, SAMPLING_SEED, batch, context)


def read_corpus() -> Corpus:
    """The text, split by topic so that nothing held out is seen in training.

    Example:
        >>> corpus = read_corpus()
        >>> len(corpus.train) > 5 * len(corpus.held_out) > 0
        True
    """
    names = sorted(topics)
    rest = names[::HELD_OUT_EVERY]
    train = "\n\n".join(topics[name] for name in names if name not in rest)
    held_out = "\n\n".join(topics[name] for name in rest)
    digest = hashlib.sha256(f"{train}\0{held_out}".encode()).hexdigest()
    return Corpus(_encode(train), _encode(held_out), digest)


def _encode(text: str) -> Tensor:
    return torch.tensor(list(text.encode("ascii", "replace")), dtype=torch.int64)


def _windows(text: Tensor, seed: int, count: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]


EVALUATION_WINDOWS = 128
WARM_UP = 0.1  # share of the steps
FINAL_RATE = 0.1  # of the peak, reached linearly
# A run has diverged when its last losses exceed this multiple of a uniform guess's loss.
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
    """Train once and evaluate on held-out text.

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
    """Whether recent losses are not finite, or worse on average than a uniform guess."""
    recent = losses[-DIVERGENCE_WINDOW:]
    if not all(map(math.isfinite, recent)):
        return True

    uniform = math.log(VOCABULARY)
    return len(recent) == DIVERGENCE_WINDOW and fmean(recent) > DIVERGED * uniform

"""`mesotron train` with a sampler that differs from the trainer, and the gap logged as TRL does.

    python -m benchmarks.watch.mismatched stale train --steps 60 --out runs/x

stale: the sampler gets new weights every 20 steps only. unsynced: a sync at step 20 goes wrong and
leaves noise in the sampler's weights. quantized: its weights have 16 levels per row. healthy: the
same weights; the gap is that of two forward passes. Text is sampled by the sampler's weights and
trained on as if it were the trainer's, without a correction.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mesotron.cli import main
from mesotron.rlvr import session

KINDS = ("healthy", "stale", "unsynced", "quantized")
EVERY = 20
BREAKS_AT = 20
LEVELS = 16
NOISE = 0.3


class Sampler:
    """The weights that sample, in place of the trainer's while they do."""

    def __init__(self, kind: str, trainer: Any) -> None:
        self.kind = kind
        self.trainer = trainer
        self.synced = 0
        self.kept = self._copy()

    def _copy(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.trainer.policy.parameters()]

    def _weights(self) -> list[Tensor]:
        step = self.trainer.state.global_step
        now = self._copy()
        if self.kind == "stale":
            if step - self.synced >= EVERY:
                self.kept = now
                self.synced = step
            return self.kept

        if self.kind == "unsynced" and step >= BREAKS_AT:
            draw = torch.Generator().manual_seed(0)
            return [w + NOISE * w.std() * torch.randn(w.shape, generator=draw).to(w) for w in now]

        if self.kind == "quantized":
            return [quantize(w) for w in now]

        return now

    @contextmanager
    def in_place(self) -> Iterator[None]:
        own = self._copy()
        parameters = [*self.trainer.policy.parameters()]
        with torch.no_grad():
            for p, w in zip(parameters, self._weights()):
                p.copy_(w)

        yield
        with torch.no_grad():
            for p, w in zip(parameters, own):
                p.copy_(w)


def quantize(w: Tensor) -> Tensor:
    """Round each row to evenly spaced levels."""
    step = w.abs().amax(-1, keepdim=True).clamp_min(1e-12) / (LEVELS / 2)
    return (w / step).round() * step


def provoke(kind: str, trainer: Any) -> None:
    """Let a trainer sample with other weights and log the gap."""
    sampler = Sampler(kind, trainer)
    sample = trainer._sample
    score = trainer._generate_and_score_completions

    def sample_elsewhere(*arguments: Any) -> Any:
        with sampler.in_place():
            return sample(*arguments)

    @torch.no_grad()
    def logprobs(batch: dict[str, Any]) -> Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        width = batch["completion_ids"].size(1)

        return trainer._get_per_token_logps_and_entropies(trainer.policy, ids, mask, width)[0]

    def score_and_compare(inputs: Any) -> Any:
        batch = score(inputs)
        own = logprobs(batch)

        with sampler.in_place():
            other = logprobs(batch)

        gap = (own - other)[batch["completion_mask"].bool()]
        trainer.note(
            {
                "sampling/sampling_logp_difference/mean": gap.abs().mean().item(),
                "sampling/importance_sampling_ratio/mean": gap.exp().mean().item(),
                "sampling/importance_sampling_ratio/max": gap.exp().max().item(),
                "staleness": float(trainer.state.global_step - sampler.synced) * (kind == "stale"),
            }
        )

        return batch

    trainer._sample = sample_elsewhere
    trainer._generate_and_score_completions = score_and_compare


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    if kind not in KINDS:
        raise SystemExit(f"{kind} is not one of {', '.join(KINDS)}")

    usual = session.build_trainer

    def build(parts: Any, run: Any) -> Any:
        trainer = usual(parts, run)
        provoke(kind, trainer)
        return trainer

    session.build_trainer = build
    sys.exit(main())

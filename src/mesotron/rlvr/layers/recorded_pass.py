"""The training pass of a small model as two CUDA graphs, one forward and one backward.

Below a billion weights the GPU waits while Python launches some thousands of kernels; a replay is
one launch. Recorded is once for each shape, at its second pass: the first one has chosen and loaded
the kernels. Autograd sees one function of all weights, so that whatever reads gradients works as
before: accumulation, hooks, `torch.autograd.grad`. Where there is no CUDA the same pass runs
without graphs.
"""

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mesotron.rlvr.layers.fixed_pass import FixedPass, Scores, Tokens, tokens_of
from mesotron.rlvr.layers.packed_groups import Frame, PackedGroups

log = logging.getLogger("mesotron.rlvr")

Key = tuple[Frame, float]
# Shapes that are recorded. Each keeps gradients of its own; activations lie in memory that they
# share.
MOST_SHAPES = 4


class Recording:
    """Two graphs of one shape, and the tensors that they read and write.

    Args:
        work: the pass.
        tokens: of the shape; copied.
        frame: the shape.
        temperature: that the logits are divided by.
        pool: of memory that recordings share, of which only one is in use at a time.
    """

    def __init__(
        self, work: FixedPass, tokens: Tokens, frame: Frame, temperature: float, pool: Any
    ) -> None:
        self.tokens = Tokens(*(x.clone() for x in tokens))
        # Leaves of their own on the weights' memory: what is recorded knows nothing of the streams
        # on which others have used the weights.
        leaves = {p: p.detach().requires_grad_() for p in work.params}
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.enable_grad(), torch.cuda.graph(self.forward, pool=pool):
            found = work(self.tokens, frame, temperature, leaves)
        self.scores = Scores(*(x.detach() for x in found))
        outputs = [x for x in found if x.requires_grad]
        self.given = [torch.zeros_like(x) for x in outputs]
        with torch.cuda.graph(self.backward, pool=pool):
            self.gradients = torch.autograd.grad(
                outputs, list(leaves.values()), self.given, allow_unused=True
            )


class Recorder:
    """Passes of a model, recorded where a shape comes again.

    Args:
        work: the pass.

    Example:
        recorder = Recorder(FixedPass(model, accelerator.autocast))
        logprobs = packed.pick(recorder(packed, temperature=1.0).logprobs)
    """

    def __init__(self, work: FixedPass) -> None:
        self.work = work
        self.recordings: dict[Key, Recording] = {}
        self.turn = 0
        """Number of the pass whose activations the graphs' memory holds."""
        self._passes: Counter[Key] = Counter()
        self._homes: list[int] = []
        self._pool: Any = None
        self._told = False

    def __call__(self, packed: PackedGroups, temperature: float) -> Scores:
        """Log-probabilities and entropies of all segments.

        Args:
            packed: of a fixed shape.
            temperature: that the logits are divided by.
        """
        tokens, key = tokens_of(packed), (packed.frame, temperature)
        recording = self._recording(key, tokens) if tokens.ids.device.type == "cuda" else None
        if recording is None:
            return self.work(tokens, *key)
        for kept, fresh in zip(recording.tokens, tokens, strict=True):
            kept.copy_(fresh)
        return Scores(*Replayed.apply(self, recording, *self.work.params))  # pyright: ignore

    def _recording(self, key: Key, tokens: Tokens) -> Recording | None:
        """The graphs of a shape, made if it has come before and there is room for them."""
        homes = [p.data_ptr() for p in self.work.params]
        if homes != self._homes:  # weights that were moved are no longer what the graphs read
            self.recordings.clear()
            self._pool, self._homes = None, homes
        # A pass without gradient has not loaded the kernels of a backward one.
        if key in self.recordings or not torch.is_grad_enabled():
            return self.recordings.get(key)
        self._passes[key] += 1
        if self._passes[key] < 2:
            return None
        if len(self.recordings) >= MOST_SHAPES:
            self._tell()
            return None
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self.recordings[key] = Recording(self.work, tokens, *key, self._pool)
        return self.recordings[key]

    def _tell(self) -> None:
        """Say once that further shapes are not recorded."""
        if not self._told:
            log.warning(
                "rollout.record keeps %d shapes of training passes; others run as without it",
                MOST_SHAPES,
            )
        self._told = True


class Replayed(torch.autograd.Function):
    """A recording as a differentiable function of the weights."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, recording: Recording, *params: Tensor
    ) -> tuple[Tensor, ...]:
        """The scores of the tokens that lie in the recording."""
        recorder.turn += 1
        ctx.recorder, ctx.recording, ctx.turn = recorder, recording, recorder.turn
        recording.forward.replay()
        found = Scores(*(x.clone() for x in recording.scores))
        if not recorder.work.entropy:
            ctx.mark_non_differentiable(found.entropies)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *given: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the weights, as tensors of their own."""
        if ctx.recorder.turn != ctx.turn:
            raise ValueError(
                "a recorded pass was followed by another one before its backward pass, which has "
                "overwritten it: leave rollout.record out"
            )
        for kept, fresh in zip(ctx.recording.given, given, strict=False):
            kept.copy_(fresh)
        ctx.recording.backward.replay()
        found = (None if x is None else x.clone() for x in ctx.recording.gradients)
        return None, None, *found

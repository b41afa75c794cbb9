"""Training passes over shared prompts, recorded as CUDA graphs where a shape comes again.

A graph needs a pass in which the host decides nothing: every position of every segment is scored,
by the kernel of TRL's head, and padding is set to 0 afterwards. A shape is recorded at its second
pass, when the first has loaded the kernels. To autograd a replay is one function of all weights.

Shapes: U rows, S tokens of a row, G segments of T tokens, E width; see `packing`.
"""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from mesotron.rlvr.passes.blocks import VOCABULARY_CHUNK, RaggedPass
from mesotron.rlvr.passes.packing import IGNORED, Frame, PackedGroups, attention_mask, pack_groups
from mesotron.sampling.graphs import captured

log = logging.getLogger("mesotron.rlvr")

Autocast = Callable[[], AbstractContextManager[Any]]
Key = tuple[Frame, float]
Leaves = dict[Tensor, Tensor]  # other tensors in place of weights; they get the gradients
# Tokens of a pass above which the GPU and not the host sets the pace: then ragged rows are faster,
# which are not recorded.
RECORDED_TOKENS = 16_384
# Each recorded shape keeps its own gradients; activations share one memory pool.
MAX_SHAPES = 4
# Config fields that change the logits after the head.
LOGIT_SETTINGS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)


class Tokens(NamedTuple):
    ids: Tensor
    prompt: Tensor
    labels: Tensor


class Scores(NamedTuple):
    """(U G, T) results of a pass, 0 where nothing is scored."""

    logprobs: Tensor
    entropies: Tensor


@dataclass
class SharedPromptPass:
    """Log-probabilities and entropies of completions from rows that hold each prompt once."""

    model: Any  # the policy; recorded passes are of this model only
    autocast: Autocast
    group_size: int  # completions per prompt
    max_length: int  # of a completion
    record: bool = False  # replay passes as CUDA graphs
    entropy_gradient: bool = False  # as for an entropy bonus
    recorder: "Recorder | None" = None
    ragged: RaggedPass | None = None  # for passes that are not recorded

    def __call__(
        self, model: Any, ids: Tensor, mask: Tensor, length: int, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Log-probabilities and entropies (B, T) of ids and mask (B, P + T), or None where packing
        does not pay off. A reference model has no entropies; `temperature` is of recorded and
        ragged passes.
        """
        packed = self._of_fixed_shape(ids, mask, length)
        if packed is not None and self._records(model):
            if self.recorder is None:
                work = FixedPass(model, self.autocast, self.entropy_gradient)
                self.recorder = Recorder(work)

            scores = self.recorder(packed, temperature)
            entropies = packed.pick(scores.entropies) if entropy else None
            return packed.pick(scores.logprobs), entropies

        # A pass beside recorded ones has the same kernels as they, which a ratio needs.
        if packed is None and self.ragged is not None:
            both = self.ragged(model, ids, mask, length, temperature)
            if both is not None:
                return both[0], both[1] if entropy else None

        packed = pack_groups(ids, mask, length, self.group_size)
        if packed is None:
            return None

        with self.autocast():
            out = model(
                input_ids=packed.ids,
                attention_mask=packed.visible(),
                position_ids=packed.frame.positions(ids.device),
                shift_labels=packed.labels,
                fused_lm_head=True,
            )

        return packed.unpack(out.log_probs), packed.unpack(out.entropy) if entropy else None

    def _records(self, model: Any) -> bool:
        # Without gradient LoRA may be disabled, which a recording would not notice.
        lora_off = is_peft_model(model) and not torch.is_grad_enabled()
        return model is self.model and not lora_off

    def _of_fixed_shape(self, ids: Tensor, mask: Tensor, length: int) -> PackedGroups | None:
        """The rows of a pass that recordings are for."""
        if not self.record or length > self.max_length:
            return None

        # Without work on the GPU where even full groups have too many tokens.
        B = len(ids)
        lead = ids.shape[1] - length - 1
        least = B * self.max_length + B // self.group_size * lead
        if self.ragged is not None and least > RECORDED_TOKENS:
            return None

        packed = pack_groups(ids, mask, length, self.group_size, self.max_length)
        if packed is None:
            return None

        is_large = packed.ids.numel() > RECORDED_TOKENS
        return None if is_large and self.ragged is not None else packed


class FixedPass:
    """A pass over packed rows of a fixed shape, in which the host decides nothing."""

    def __init__(self, model: Any, autocast: Autocast, entropy: bool = False) -> None:
        self.model = model.get_base_model() if is_peft_model(model) else model
        self.autocast = autocast
        self.entropy = entropy
        self.params = [p for p in model.parameters() if p.requires_grad]

    def __call__(
        self, tokens: Tokens, frame: Frame, temperature: float, leaves: Leaves | None = None
    ) -> Scores:
        from trl.kernels import ChunkedLogProbFunction  # in TRL 1.15 it needs Triton

        leaves = leaves or {}

        kind = tokens.ids.device.type
        with self.autocast(), uncached(kind):
            hidden = self._hidden(tokens, frame, leaves)[:, frame.lead :]
            head = self.model.get_output_embeddings()
            labels = tokens.labels[:, frame.lead :].reshape(-1)

            logprobs, entropies, *_ = ChunkedLogProbFunction.apply(
                hidden.reshape(-1, hidden.shape[-1]),
                leaves.get(head.weight, head.weight),
                None if head.bias is None else leaves.get(head.bias, head.bias),
                labels.clamp(min=0),
                temperature,
                VOCABULARY_CHUNK,
                None,
                1.0,
                ("entropy",),
            )

        padding = labels == IGNORED
        entropies = entropies if self.entropy else entropies.detach()
        both = (x.masked_fill(padding, 0.0).view(-1, frame.length) for x in (logprobs, entropies))

        return Scores(*both)

    def _hidden(self, tokens: Tokens, frame: Frame, leaves: Leaves) -> Tensor:
        device = tokens.ids.device
        dtype = self.model.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)

        # An additive mask in the type of attention, made once for all layers.
        visible = attention_mask(tokens.prompt, frame.segments, frame.length)
        bias = torch.zeros(visible.shape, dtype=dtype, device=device)
        inputs = {
            "input_ids": tokens.ids,
            "attention_mask": bias.masked_fill_(~visible, -torch.inf),
            "position_ids": frame.positions(device),
            "use_cache": False,
        }

        backbone = self.model.base_model
        swapped = {}
        for n, p in backbone.named_parameters():
            if p in leaves:
                swapped[n] = leaves[p]

        return functional_call(backbone, swapped, kwargs=inputs).last_hidden_state


def uncached(kind: str) -> torch.autocast:
    # Weights must be cast inside the graph, so autocast may not use its cache.
    dtype = torch.get_autocast_dtype(kind)
    enabled = torch.is_autocast_enabled(kind)
    return torch.autocast(kind, dtype, enabled, cache_enabled=False)


class Recording:
    """A forward and a backward graph of one shape, and the tensors they read and write."""

    def __init__(
        self, work: FixedPass, tokens: Tokens, frame: Frame, temperature: float, pool: Any
    ) -> None:
        self.tokens = Tokens(*(x.clone() for x in tokens))

        # Separate leaves on the weights' memory: a capture must not meet the streams on which
        # others have used the weights.
        leaves = {p: p.detach().requires_grad_() for p in work.params}
        self.forward = torch.cuda.CUDAGraph()
        self.backward = torch.cuda.CUDAGraph()

        with torch.enable_grad(), captured(self.forward, pool):
            scores = work(self.tokens, frame, temperature, leaves)

        self.scores = Scores(*(x.detach() for x in scores))
        outputs = [x for x in scores if x.requires_grad]
        self.output_gradients = [torch.zeros_like(x) for x in outputs]

        with captured(self.backward, pool):
            self.gradients = torch.autograd.grad(
                outputs, list(leaves.values()), self.output_gradients, allow_unused=True
            )


class Recorder:
    """Runs passes of a model, recorded on CUDA where a shape comes again."""

    def __init__(self, work: FixedPass) -> None:
        self.work = work
        self.recordings: dict[Key, Recording] = {}
        self.turn = 0  # number of the pass whose activations the graphs' memory holds
        self._passes: Counter[Key] = Counter()
        self._addresses: list[int] = []
        self._pool: Any = None
        self._warned = False

    def __call__(self, packed: PackedGroups, temperature: float) -> Scores:
        tokens = Tokens(packed.ids, packed.prompt, packed.labels)
        key = (packed.frame, temperature)

        if tokens.ids.device.type == "cuda":
            recording = self._recording(key, tokens)
        else:
            recording = None

        if recording is None:
            return self.work(tokens, *key)

        for kept, new in zip(recording.tokens, tokens, strict=True):
            kept.copy_(new)

        return Scores(*Replay.apply(self, recording, *self.work.params))  # pyright: ignore

    def _recording(self, key: Key, tokens: Tokens) -> Recording | None:
        addresses = [p.data_ptr() for p in self.work.params]
        if addresses != self._addresses:  # the graphs read the weights' old memory
            self.recordings.clear()
            self._pool = None
            self._addresses = addresses

        # A pass without gradient has not loaded the kernels of a backward pass.
        if key in self.recordings or not torch.is_grad_enabled():
            return self.recordings.get(key)

        self._passes[key] += 1
        if self._passes[key] < 2:
            return None

        if len(self.recordings) >= MAX_SHAPES:
            if not self._warned:
                log.warning("recorded %d shapes of training passes; others run eagerly", MAX_SHAPES)
            self._warned = True
            return None

        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self.recordings[key] = Recording(self.work, tokens, *key, self._pool)

        return self.recordings[key]


class Replay(torch.autograd.Function):
    """A recording as a differentiable function of the weights."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, recording: Recording, *params: Tensor
    ) -> tuple[Tensor, ...]:
        recorder.turn += 1
        ctx.recorder = recorder
        ctx.recording = recording
        ctx.turn = recorder.turn
        recording.forward.replay()

        scores = Scores(*(x.clone() for x in recording.scores))
        if not recorder.work.entropy:
            ctx.mark_non_differentiable(scores.entropies)

        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        if ctx.recorder.turn != ctx.turn:
            raise ValueError("a later pass overwrote this backward pass: turn rollout.fast off")

        for kept, new in zip(ctx.recording.output_gradients, gradients, strict=False):
            kept.copy_(new)

        ctx.recording.backward.replay()
        copies = (None if x is None else x.clone() for x in ctx.recording.gradients)

        return None, None, *copies


def recording_obstacle(model: Any) -> str | None:
    settings = model.config.get_text_config().to_dict()
    drops = _dropouts(model, settings)
    if drops:
        return f"it has dropout {drops[0]}"

    rope = settings.get("rope_parameters") or {}
    ropes = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    for kind in sorted({str(part.get("rope_type")) for part in ropes}):
        if "dynamic" in kind or kind == "longrope":
            return f"its {kind} positions depend on the batch's length"

    for name in LOGIT_SETTINGS:
        if settings.get(name) not in (None, 1.0):
            return f"its config has {name} = {settings[name]}"

    return None


def _dropouts(model: nn.Module, settings: dict[str, Any]) -> list[float]:
    """Probabilities above 0, of modules and in the config."""
    drops = [m.p for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    for name, probability in settings.items():
        if name.endswith(("dropout", "pdrop")) and probability:
            drops.append(probability)

    return drops

"""A pass over packed rows of a fixed shape, in which the host decides nothing: a graph can hold it.

TRL's head picks the scored positions out, and how many there are only the GPU knows. Here every
position of every segment is scored, by the same kernel, and what is padding is then set to 0. The
mask is added to the scores of attention in the type it computes in, once for all layers.

Shapes: U rows, S tokens of a row, G segments of T tokens, E width, V vocabulary; see
`packed_groups`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.func import functional_call
from trl.kernels import ChunkedLogProbFunction

from mesotron.rlvr.layers.packed_groups import IGNORED, Frame, PackedGroups, who_sees_whom

# Columns of the logits that are there at one time.
VOCABULARY_CHUNK = 32768
# Settings of a model's config that change its logits on their way out of the head.
LOGIT_SETTINGS = (
    "final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier",
    "lm_head_multiplier",
)  # fmt: skip


class Tokens(NamedTuple):
    """What a pass reads."""

    ids: Tensor
    """(U, S)."""
    prompt: Tensor
    """(U, lead) booleans, false on the padding."""
    labels: Tensor
    """(U, S)."""


class Scores(NamedTuple):
    """What a pass finds, 0 where nothing is scored."""

    logprobs: Tensor
    """(U G, T)."""
    entropies: Tensor
    """(U G, T) in nats."""


class FixedPass:
    """Log-probabilities and entropies of packed rows by a model as it is.

    Args:
        model: a causal language model of Transformers, or PEFT's around one.
        autocast: opens the precision in which it computes, as `Accelerator.autocast` does.
        entropy: whether entropies have a gradient, as an entropy bonus needs.
    """

    def __init__(
        self,
        model: Any,
        autocast: Callable[[], AbstractContextManager[Any]],
        entropy: bool = False,
    ) -> None:
        self.model = model.get_base_model() if is_peft_model(model) else model
        self.autocast, self.entropy = autocast, entropy
        self.params = [p for p in model.parameters() if p.requires_grad]

    def __call__(
        self,
        tokens: Tokens,
        frame: Frame,
        temperature: float,
        leaves: dict[Tensor, Tensor] | None = None,
    ) -> Scores:
        """One pass.

        Args:
            tokens: of the frame's shape.
            frame: their shape.
            temperature: that the logits are divided by.
            leaves: tensors to compute with in place of weights; gradients are then theirs.
        """
        kind, instead = tokens.ids.device.type, leaves or {}
        with self.autocast(), uncached(kind):
            hidden = self._read(tokens, frame, instead)[:, frame.lead :]
            head = self.model.get_output_embeddings()
            labels = tokens.labels[:, frame.lead :].reshape(-1)
            logprobs, entropies, *_ = ChunkedLogProbFunction.apply(
                hidden.reshape(-1, hidden.shape[-1]),
                instead.get(head.weight, head.weight),
                None if head.bias is None else instead.get(head.bias, head.bias),
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

    def _read(self, tokens: Tokens, frame: Frame, instead: dict[Tensor, Tensor]) -> Tensor:
        """(U, S, E) hidden states."""
        device = tokens.ids.device
        computes = self.model.dtype
        if torch.is_autocast_enabled(device.type):
            computes = torch.get_autocast_dtype(device.type)
        seen = who_sees_whom(tokens.prompt, frame.segments, frame.length)
        bias = torch.zeros(seen.shape, dtype=computes, device=device)
        given = {
            "input_ids": tokens.ids,
            "attention_mask": bias.masked_fill_(~seen, -torch.inf),
            "position_ids": frame.places(device),
            "use_cache": False,
        }
        backbone = self.model.base_model
        swapped = {n: instead[p] for n, p in backbone.named_parameters() if p in instead}
        return functional_call(backbone, swapped, kwargs=given).last_hidden_state


def tokens_of(packed: PackedGroups) -> Tokens:
    """What a pass reads of packed rows."""
    return Tokens(packed.ids, packed.prompt, packed.labels)


def uncached(kind: str) -> torch.autocast:
    """The precision as it is, with weights cast anew in each pass: a graph must hold the casts.

    Args:
        kind: of the device.
    """
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return torch.autocast(kind, dtype, enabled, cache_enabled=False)


def check_fixed(model: Any, asked: str, instead: str) -> None:
    """Refuse a model that draws numbers or asks the host in a pass, or whose head is not plain.

    Args:
        model: of Transformers, or PEFT's around one.
        asked: the setting that needs this.
        instead: what to do where it cannot be had.
    """
    config = model.config.get_text_config()
    settings = config.to_dict()
    rope = settings.get("rope_parameters") or {}
    ropes = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    kinds = sorted({str(part.get("rope_type")) for part in ropes})
    drops = [m.p for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    drops += [x for name, x in settings.items() if name.endswith(("dropout", "pdrop")) and x]
    scaled = [name for name in LOGIT_SETTINGS if settings.get(name) not in (None, 1.0)]
    if drops:
        raise ValueError(
            f"{asked} does not go with dropout, and this model has {drops[0]}: {instead}"
        )
    if moving := [kind for kind in kinds if "dynamic" in kind or kind == "longrope"]:
        raise ValueError(
            f"{asked} needs positions that do not depend on the batch's length, and this model has "
            f"{moving[0]} ones: {instead}"
        )
    if scaled:
        raise ValueError(
            f"{asked} needs plain logits, and this model's config has {scaled[0]} = "
            f"{settings[scaled[0]]}: {instead}"
        )

"""Solved problems as batches of tokens, for supervised steps and for losses on held-out ones.

Legend: B rows, S tokens of the longest row, N tokens of the completions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lesson:
    """One batch: whole rows, and where the tokens of their completions are predicted."""

    ids: Tensor  # [B, S], padded on the right
    mask: Tensor  # [B, S]
    at: Tensor  # [N], flat positions before each target
    targets: Tensor  # [N]
    problem: Tensor  # [N], the row of each target

    def logits(self, net: Any) -> Tensor:
        """Of the completions' tokens, [N, V]; the model's base where it has an adapter."""
        hidden = net.model(input_ids=self.ids, attention_mask=self.mask, use_cache=False)
        return net.lm_head(hidden.last_hidden_state.flatten(0, 1)[self.at])


def make_lesson(
    problems: Sequence[Any], task: Any, config: Any, tokenizer: Any, device: torch.device
) -> Lesson:
    """A batch of solved problems.

    Args:
        problems: of the task, in their order.
        task: has the answers' format and the examples of a prompt.
        config: the task's config.
        tokenizer: of the model.
        device: of the tensors.
    """
    from mesotron.tasks.prompts import demonstrate, render_prompts, solved_text

    prompts = render_prompts(problems, config, tokenizer, task.examples)
    solved = [solved_text(problem, task.format) for problem in problems]
    pairs = demonstrate(list(zip(prompts, solved, strict=True)), tokenizer)

    S = max(len(prompt) + len(completion) for prompt, completion in pairs)
    ids = torch.full((len(pairs), S), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    at: list[int] = []
    targets: list[int] = []
    owners: list[int] = []

    for row, (prompt, completion) in enumerate(pairs):
        used = len(prompt) + len(completion)
        ids[row, :used] = torch.tensor([*prompt, *completion])
        mask[row, :used] = 1

        before = row * S + len(prompt) - 1
        at += range(before, before + len(completion))
        targets += completion
        owners += [row] * len(completion)

    return Lesson(
        ids=ids.to(device),
        mask=mask.to(device),
        at=torch.tensor(at, device=device),
        targets=torch.tensor(targets, device=device),
        problem=torch.tensor(owners, device=device),
    )

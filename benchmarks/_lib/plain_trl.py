"""What plain TRL needs of ours to train on the same task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def plain_reward(reward: Any, tokenizer: Any) -> Callable[..., Any]:
    """A reward of ours as a plain TRL function; it judges, which any such reward must."""
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)

    def judged(completions: Any, completion_ids: Any, gold: Any, **_: Any) -> Any:
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        truncated = [not ids or ids[-1] not in ends for ids in completion_ids]
        return reward(texts, completion_ids, gold, truncated)

    return judged

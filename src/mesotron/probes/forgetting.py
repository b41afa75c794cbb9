"""Forgetting: how well a model still predicts general text that training never shows it.

The shipped sample has fifteen short passages written for this purpose: prose, science, letters,
recipes, code. Values of different tokenizers cannot be compared.
"""

from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

LENGTH = 256  # tokens of a block
ROWS = 8  # blocks in memory at once


def read_text(path: str | Path | None = None) -> str:
    """The text of a file, or the shipped sample."""
    if path is None:
        return resources.files("mesotron.probes").joinpath("general.txt").read_text("utf-8")

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from error

    if not text.strip():
        raise ValueError(f"{path} is empty: give a file with some pages of plain text")

    return text


def text_blocks(tokenizer: Any, text: str, length: int = LENGTH) -> Tensor:
    """The text as blocks of tokens, [blocks, length]; a short text is one shorter block."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    length = min(length, len(ids))
    if length < 2:
        raise ValueError(f"the text has {len(ids)} tokens: the likelihood needs at least two")

    num_blocks = len(ids) // length
    kept = torch.tensor(ids[: num_blocks * length])
    return kept.view(num_blocks, length)


@torch.no_grad()
def text_nll(model: Any, blocks: Tensor) -> float:
    """Mean negative log-likelihood of a token given those before it in its block, in nats.

    Legend: R blocks at once, L tokens each, V tokens in the vocabulary.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()

    total = torch.zeros((), dtype=torch.float64)
    for rows in blocks.split(ROWS):
        ids = rows.to(device)  # [R, L]
        output = model(input_ids=ids, use_cache=False)

        logits = output.logits[:, :-1].float()  # [R, L - 1, V], of the next token
        targets = ids[:, 1:]
        loss = cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            reduction="sum",
        )
        total += loss.double().cpu()

    model.train(was_training)

    num_blocks, length = blocks.shape
    return total.item() / (num_blocks * (length - 1))

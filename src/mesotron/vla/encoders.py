"""The policy's own eyes and ears: a small vision transformer and a sentence encoder, from scratch.

`towers` has the pretrained ones; both kinds give the same two things, image tokens and words.

Legend: B batch, K cameras, P patches of an image, L words, D width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mesotron.vla.layers import Stack
from mesotron.vla.sizes import Size
from mesotron.vla.words import MAX_WORDS, NUM_WORDS, PADDING, encode_words


class Sentence(NamedTuple):
    """An instruction: [B, L, D] tokens, and [B, L] True where there is a word."""

    tokens: Tensor
    mask: Tensor

    def pooled(self) -> Tensor:
        """[B, D]: the mean over the words."""
        weights = self.mask.to(self.tokens.dtype)[..., None]
        return (self.tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1)


class Vision(nn.Module):
    """A vision transformer over the patches of each camera's image.

    Args:
        size: of the policy.
        num_cameras: K; a camera is told by its learned positions.
        pixels: height and width of an image; a multiple of `patch`.
        patch: side of a patch.

    References: Dosovitskiy et al., An Image is Worth 16x16 Words, 2021, arXiv 2010.11929.
    """

    def __init__(self, size: Size, num_cameras: int, pixels: int, patch: int) -> None:
        super().__init__()
        if pixels % patch:
            raise ValueError(
                f"images of {pixels} pixels do not divide into patches of {patch}: give "
                f"--policy.patch a divisor of {pixels}"
            )
        self.patches = nn.Conv2d(3, size.width, patch, stride=patch)
        places = plane_waves(pixels // patch, size.width)
        # A camera's own offset tells it from the others; with one it does no harm.
        offsets = 0.02 * torch.randn(num_cameras, 1, size.width)
        self.positions = nn.Parameter(places[None] + offsets)
        self.encoder = Stack(size.width, size.num_heads, size.mlp, size.vision)

    def forward(self, images: Tensor) -> Tensor:
        """[B, K, 3, H, W] uint8 -> [B, K * P, D]; each camera's tokens see their own image."""
        B = len(images)
        scaled = images.flatten(0, 1).float() / 127.5 - 1
        patches = self.patches(scaled).flatten(2).transpose(1, 2)
        X = patches + self.positions.to(patches.dtype).repeat(B, 1, 1)
        return self.encoder(X).reshape(B, -1, X.shape[-1])


def plane_waves(side: int, width: int) -> Tensor:
    """What positions are learned from: [side * side, D] sines and cosines of row and column, from a
    quarter of a wave over the image to one wave every two patches."""
    places = (torch.arange(side) + 0.5) / side
    frequencies = torch.logspace(math.log10(0.25), math.log10(max(side / 2, 0.5)), width // 4)
    angles = 2 * torch.pi * places[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = waves[:, None].expand(-1, side, -1)
    columns = waves[None].expand(side, -1, -1)
    return 0.5 * torch.cat([rows, columns], dim=-1).reshape(side * side, -1)


class Language(nn.Module):
    """Words of an instruction through a small transformer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, size.width)
        self.positions = nn.Parameter(0.02 * torch.randn(MAX_WORDS, size.width))
        self.encoder = Stack(size.width, size.num_heads, size.mlp, size.language)

    def encode(self, texts: list[str]) -> Tensor:
        """Instructions as numbers, [B, L]; what `forward` takes, and what training keeps."""
        return encode_words(texts)

    def forward(self, numbers: Tensor) -> Sentence:
        """[B, L] word numbers -> tokens."""
        mask = numbers != PADDING
        X = self.embedding(numbers) + self.positions[: numbers.shape[1]]
        return Sentence(self.encoder(X, mask), mask)

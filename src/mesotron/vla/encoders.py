"""The policy's own eyes and ears: a small vision transformer and a sentence encoder, from scratch.

`towers` has the pretrained ones; both kinds give the same two things, image tokens and words.

Legend: B batch, C cameras, P patches of an image, L words, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from mesotron.vla.layers import Stack, hide
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


class Sight(NamedTuple):
    """What was seen: [B, C * P, D] tokens, and [B, C * P] how much each stands out, which is added
    to the scores of attention; None where all are alike."""

    tokens: Tensor
    notice: Tensor | None


# Pictures that the usual one is the median of; and the energy of a patch in which nothing is to be
# seen, over the mean of all patches.
MOST_FITTED = 1024
FAINT = 0.01
BRIGHTNESS = (0.4, 2.5)  # what light is corrected for, over the usual
DARK, LIT = 16, 0.125  # a grey that says nothing of the light; the share of others that is enough


class Vision(nn.Module):
    """A vision transformer over the patches of each camera's image, told what is usual.

    A few of a picture's patches show something and the rest the same table as always. Attention
    begins even, and would hear five objects among sixty patches a tenth as loud: a policy for ten
    objects then never learned which one is meant. So each image, brought to the same light, is seen
    as its difference from the usual one, the median of the demonstrations, and every attention
    notices a patch by the logarithm of its energy.

    Args:
        size: of the policy.
        num_cameras: C; a camera is told by its learned positions.
        pixels: height and width of an image; a multiple of `patch`.
        patch: side of a patch.

    References: Dosovitskiy et al., An Image is Worth 16x16 Words, 2021, arXiv 2010.11929.
    """

    usual: Tensor
    spread: Tensor

    def __init__(self, size: Size, num_cameras: int, pixels: int, patch: int) -> None:
        super().__init__()
        if pixels % patch:
            raise ValueError(
                f"images of {pixels} pixels do not divide into patches of {patch}: give "
                f"--policy.patch a divisor of {pixels}"
            )
        self.patches = nn.Conv2d(3, size.width, patch, stride=patch)
        self.register_buffer("usual", torch.full((num_cameras, 3, pixels, pixels), 127.5))
        self.register_buffer("spread", torch.full((num_cameras, 1, 1, 1), 127.5))
        # A camera's own offset tells it from the others; with one it does no harm.
        offsets = 0.02 * torch.randn(num_cameras, 1, size.width)
        self.positions = nn.Parameter(coordinates(pixels // patch, size.width)[None] + offsets)
        self.encoder = Stack(size.width, size.num_heads, size.mlp, size.vision)

    def fit(self, images: Mapping[str, np.ndarray]) -> None:
        """Take the usual picture of each camera, and how far others differ from it, from
        demonstrations: camera to uint8 [M, H, W, 3], in the order of the cameras."""
        for camera, seen in enumerate(images.values()):
            some = seen[:: -(-len(seen) // MOST_FITTED)]
            usual = np.median(some, axis=0).astype(np.float32)
            self.usual[camera] = torch.from_numpy(usual).permute(2, 0, 1)
            self.spread[camera] = max(float(np.square(some - usual).mean()) ** 0.5, 1.0)

    def brightness(self, images: Tensor) -> Tensor:
        """How bright each image is beside the usual one, [B, C, 1, 1, 1]: by the middle of its
        pixels, so that a hand before the camera does not count, and of those alone that are not
        dark as usual, where noise would speak. 1 where these are few."""
        step = max(1, images.shape[-1] // 32)  # a thousand of them are enough
        grey = images[..., ::step, ::step].float().mean(dim=2).flatten(2)
        usual = self.usual[..., ::step, ::step].mean(dim=1).flatten(1)
        lit = usual > DARK
        number = lit.sum(dim=-1)
        ratios = torch.where(lit, grey / usual.clamp_min(1), torch.inf).sort(dim=-1).values
        place = (number // 2).expand(len(images), -1)[..., None]
        middle = torch.where(number[:, None] >= LIT * lit.shape[-1], ratios.gather(-1, place), 1.0)
        return middle.clamp(*BRIGHTNESS)[..., None, None]

    def forward(self, images: Tensor) -> Sight:
        """[B, C, 3, H, W] uint8 -> tokens; each camera's see their own image."""
        B = len(images)
        even = images.float() / self.brightness(images)
        unusual = ((even - self.usual) / self.spread).flatten(0, 1)
        patch = self.patches.stride[0]
        energy = avg_pool2d(unusual.square().mean(dim=1, keepdim=True), patch).flatten(1)
        notice = (energy + FAINT).log()
        patches = self.patches(unusual).flatten(2).transpose(1, 2)
        X = patches + self.positions.to(patches.dtype).repeat(B, 1, 1)
        X = self.encoder(X, notice)
        return Sight(X.reshape(B, -1, X.shape[-1]), notice.reshape(B, -1))


def coordinates(side: int, width: int) -> Tensor:
    """What positions are learned from: row and column of a patch, [side * side, D].

    Each of D numbers grows along a direction of its own in the image. Place is then read by one
    matrix, as a hand's is; from sines of row and column it was learned too late, or never.

    References: Liu et al., An intriguing failing of convolutional neural networks and the CoordConv
    solution, 2018, arXiv 1807.03247.
    """
    places = (torch.arange(side) + 0.5) / side - 0.5
    rows, columns = (place.flatten() for place in torch.meshgrid(places, places, indexing="ij"))
    angles = 2 * torch.pi * torch.arange(width) / width
    # Over an image their mean square is a half.
    return 6**0.5 * (rows[:, None] * angles.sin() + columns[:, None] * angles.cos())


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
        return Sentence(self.encoder(X, hide(mask)), mask)

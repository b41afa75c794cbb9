"""Image and instruction encoders trained from scratch, and the transformer layers of the policy.

Legend: B batch, T tokens, S context tokens, C cameras, P patches per image, L words, D width.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, scaled_dot_product_attention


class Size(NamedTuple):
    width: int
    num_heads: int
    mlp: int  # hidden width of an MLP over `width`
    vision: int  # layers, as in the other parts
    language: int
    fusion: int
    action: int
    patch: int  # side of an image patch in pixels
    word_tokens: bool  # fusion sees every word, not their mean, which a small model learns faster


SIZES = {
    "ci": Size(
        64,
        4,
        2,
        1,
        1,
        1,
        1,
        patch=4,
        word_tokens=False,
    ),
    "small": Size(
        256,
        4,
        4,
        2,
        1,
        1,
        2,
        patch=8,
        word_tokens=True,
    ),
    "base": Size(
        384,
        6,
        4,
        4,
        1,
        2,
        3,
        patch=8,
        word_tokens=True,
    ),
    "large": Size(
        512,
        8,
        4,
        6,
        2,
        3,
        4,
        patch=8,
        word_tokens=True,
    ),
}


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, X: Tensor, context: Tensor, bias: Tensor | None = None) -> Tensor:
        """X [B, T, D] attends to `context` [B, S, D]; `bias` [B, S] is added to the scores."""
        B, T, D = X.shape
        heads = (B, -1, self.num_heads, D // self.num_heads)
        Q = self.q(X).view(heads).transpose(1, 2)
        K, V = (part.reshape(heads).transpose(1, 2) for part in self.kv(context).chunk(2, dim=-1))
        mask = None if bias is None else bias[:, None, None, :].to(Q.dtype)
        Y = scaled_dot_product_attention(Q, K, V, attn_mask=mask)

        return self.o(Y.transpose(1, 2).reshape(B, T, D))


class Mlp(nn.Module):
    """Two matrices and a ReLU; an exact GELU is many times slower on CPUs without vector math."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, X: Tensor) -> Tensor:
        return self.down(self.up(X).relu())


class Layer(nn.Module):
    """Self-attention, cross-attention if `cross`, and an MLP, each with a residual."""

    def __init__(self, size: Size, cross: bool = False) -> None:
        super().__init__()
        width = size.width
        self.norm_self = nn.LayerNorm(width)
        self.attention = Attention(width, size.num_heads)
        self.norm_cross = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, size.num_heads) if cross else None
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = Mlp(width, size.mlp * width)

    def forward(
        self, X: Tensor, bias: Tensor | None, context: Any = None, context_bias: Any = None
    ) -> Tensor:
        Y = self.norm_self(X)
        X = X + self.attention(Y, Y, bias)
        if self.cross is not None and self.norm_cross is not None:
            X = X + self.cross(self.norm_cross(X), context, context_bias)

        return X + self.mlp(self.norm_mlp(X))


class Stack(nn.Module):
    def __init__(self, size: Size, num_layers: int, cross: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(size, cross) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(size.width)

    def forward(self, X: Tensor, *context: Tensor | None) -> Tensor:
        for layer in self.layers:
            X = layer(X, *context)
        return self.norm(X)


def mask_to_bias(mask: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)


class TextTokens(NamedTuple):
    """An instruction: tokens [B, L, D], and a mask [B, L] that is False for padding."""

    tokens: Tensor
    mask: Tensor

    def pooled(self) -> Tensor:
        """[B, D]: the mean over the words."""
        weights = self.mask.to(self.tokens.dtype)[..., None]
        return (self.tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1)


class ImageTokens(NamedTuple):
    """Tokens [B, C * P, D], and their salience [B, C * P], an attention bias, or None."""

    tokens: Tensor
    salience: Tensor | None


MAX_FIT_IMAGES = 1024  # for the median image
ENERGY_FLOOR = 0.01  # of an empty patch, relative to the mean over patches
BRIGHTNESS_RANGE = (0.4, 2.5)  # that is corrected for
DARK_GRAY = 16  # darker pixels say nothing about the light
MIN_LIT = 0.125  # fraction of lit pixels needed to estimate the light


class Vision(nn.Module):
    """A vision transformer (arXiv 2010.11929) that attends to what differs from the usual image.

    Few patches show an object, and attention starts uniform: a policy for ten objects never learned
    which one is meant. So each image, normalized for brightness, is replaced by its difference from
    the demonstrations' median image, and a patch's log-energy is added to all attention scores.
    """

    usual: Tensor  # the median image
    spread: Tensor

    def __init__(self, size: Size, num_cameras: int, pixels: int, patch: int) -> None:
        super().__init__()
        if pixels % patch:
            raise ValueError(f"--policy.patch {patch} does not divide images of {pixels} pixels")

        self.patches = nn.Conv2d(3, size.width, patch, stride=patch)
        self.register_buffer("usual", torch.full((num_cameras, 3, pixels, pixels), 127.5))
        self.register_buffer("spread", torch.full((num_cameras, 1, 1, 1), 127.5))

        # A random offset distinguishes cameras; with one it does no harm.
        offsets = 0.02 * torch.randn(num_cameras, 1, size.width)
        self.positions = nn.Parameter(patch_positions(pixels // patch, size.width)[None] + offsets)
        self.encoder = Stack(size, size.vision)

    def fit(self, images: Mapping[str, np.ndarray]) -> None:
        """Set the median image and the spread around it; camera to uint8 [M, H, W, 3]."""
        for camera, all_images in enumerate(images.values()):
            some = all_images[:: -(-len(all_images) // MAX_FIT_IMAGES)]
            usual = np.median(some, axis=0).astype(np.float32)
            self.usual[camera] = torch.from_numpy(usual).permute(2, 0, 1)
            self.spread[camera] = max(float(np.square(some - usual).mean()) ** 0.5, 1.0)

    def brightness(self, images: Tensor) -> Tensor:
        """Brightness of each image relative to the usual one, [B, C, 1, 1, 1]: the median ratio
        over lit pixels, since dark ones are noise. 1 if there are too few."""
        step = max(1, images.shape[-1] // 32)  # a thousand pixels are enough
        gray = images[..., ::step, ::step].float().mean(dim=2).flatten(2)
        usual = self.usual[..., ::step, ::step].mean(dim=1).flatten(1)
        lit = usual > DARK_GRAY
        num_lit = lit.sum(dim=-1)
        ratios = torch.where(lit, gray / usual.clamp_min(1), torch.inf).sort(dim=-1).values
        middle = (num_lit // 2).expand(len(images), -1)[..., None]
        is_enough = num_lit[:, None] >= MIN_LIT * lit.shape[-1]
        median = torch.where(is_enough, ratios.gather(-1, middle), 1.0)

        return median.clamp(*BRIGHTNESS_RANGE)[..., None, None]

    def forward(self, images: Tensor) -> ImageTokens:
        """[B, C, 3, H, W] uint8 -> tokens; attention stays within an image."""
        B = len(images)
        normalized = images.float() / self.brightness(images)
        difference = ((normalized - self.usual) / self.spread).flatten(0, 1)
        patch = self.patches.stride[0]
        energy = avg_pool2d(difference.square().mean(dim=1, keepdim=True), patch).flatten(1)
        salience = (energy + ENERGY_FLOOR).log()
        patches = self.patches(difference).flatten(2).transpose(1, 2)
        X = patches + self.positions.to(patches.dtype).repeat(B, 1, 1)
        X = self.encoder(X, salience)

        return ImageTokens(X.reshape(B, -1, X.shape[-1]), salience.reshape(B, -1))


def patch_positions(side: int, width: int) -> Tensor:
    """Initial positions of patches, [side * side, D], linear in row and column, so that one matrix
    can read a place (CoordConv, arXiv 1807.03247). From sines it was learned too late, or never."""
    places = (torch.arange(side) + 0.5) / side - 0.5
    rows, columns = (place.flatten() for place in torch.meshgrid(places, places, indexing="ij"))
    angles = 2 * torch.pi * torch.arange(width) / width

    # Their mean square over an image is 1/2.
    return 6**0.5 * (rows[:, None] * angles.sin() + columns[:, None] * angles.cos())


# Instructions as word ids: a small vocabulary, and hash buckets for other words.
PADDING = 0
VOCABULARY = tuple(Path(__file__).with_name("words.txt").read_text().split())
NUM_BUCKETS = 384
NUM_WORDS = 1 + len(VOCABULARY) + NUM_BUCKETS
MAX_WORDS = 24
_WORD_IDS = {word: number for number, word in enumerate(VOCABULARY, 1)}


def encode_words(texts: Sequence[str]) -> Tensor:
    """Word ids of B instructions, int64 [B, L >= 1], padded; case and punctuation are dropped."""

    def word_id(word: str) -> int:
        return _WORD_IDS.get(word, 1 + len(VOCABULARY) + zlib.crc32(word.encode()) % NUM_BUCKETS)

    words = [re.findall(r"[^\W_]+", text.lower())[:MAX_WORDS] or [""] for text in texts]
    length = max(map(len, words))
    return torch.tensor([[*map(word_id, row), *[PADDING] * (length - len(row))] for row in words])


class Language(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, size.width)
        self.positions = nn.Parameter(0.02 * torch.randn(MAX_WORDS, size.width))
        self.encoder = Stack(size, size.language)

    encode = staticmethod(encode_words)

    def forward(self, ids: Tensor) -> TextTokens:
        mask = ids != PADDING
        X = self.embedding(ids) + self.positions[: ids.shape[1]]
        return TextTokens(self.encoder(X, mask_to_bias(mask)), mask)

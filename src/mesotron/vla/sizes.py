"""The named sizes of the policy, from one that a CPU trains in a minute to 50 million weights."""

from typing import NamedTuple


class Size(NamedTuple):
    """Shape of a policy.

    Args:
        width: of every token.
        num_heads: of every attention.
        mlp: hidden width of an MLP over `width`.
        vision, language, fusion, action: layers of each part.
        patch: side of an image patch in pixels.
        word_tokens: whether fusion sees every word; otherwise their mean, which a small model
            learns faster.
    """

    width: int
    num_heads: int
    mlp: int
    vision: int
    language: int
    fusion: int
    action: int
    patch: int
    word_tokens: bool


SIZES = {
    "ci": Size(64, 4, 2, 1, 1, 1, 1, patch=4, word_tokens=False),
    "small": Size(256, 4, 4, 2, 1, 1, 2, patch=8, word_tokens=True),
    "base": Size(384, 6, 4, 4, 1, 2, 3, patch=8, word_tokens=True),
    "large": Size(512, 8, 4, 6, 2, 3, 4, patch=8, word_tokens=True),
}

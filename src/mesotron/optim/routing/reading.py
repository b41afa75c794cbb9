"""A reading: what one parameter is, and how its matrices lie in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """What a parameter is.

    Args:
        role: one word for the tables: "embedding", "head", "norm", "attention q", "expert", ...
        reason: why it was read so, for the person who audits the table.
        view: how its matrices lie in the tensor, in the string form of `mesotron.optim.views.View`.
        matrix: whether it is a hidden matrix, which a spectral filter may have.
        doubt: what could not be told; a sentence. A doubtful parameter needs an override.
    """

    role: str
    reason: str
    view: str = "whole"
    matrix: bool = False
    doubt: str = ""


def matrix(role: str, reason: str, view: str = "whole") -> Reading:
    """A hidden matrix, or several, for the spectral rule."""
    return Reading(role, reason, view, matrix=True)


def doubt(sentence: str) -> Reading:
    """A parameter that cannot be told; routing stops unless an override names it."""
    return Reading("unknown", "set by override", doubt=sentence)

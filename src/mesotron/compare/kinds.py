"""Which kind of run a recipe's name means."""

import difflib
from collections.abc import Sequence

from mesotron.compare.games import Games
from mesotron.compare.kind import Kind
from mesotron.compare.language import Language
from mesotron.compare.robots import Robots
from mesotron.recipes import RECIPES

# Recipes that are no recipes of `mesotron train`.
OTHERS: dict[str, type[Kind]] = {"snake": Games, "vla": Robots}


def make_kind(recipe: str, changes: Sequence[str] = ()) -> Kind:
    """The kind of a recipe, set up for it.

    Raises:
        ValueError: there is no recipe of that name; the text names the closest.

    Example:
        >>> make_kind("snake").name, make_kind("arith").name
        ('ppo', 'rlvr')
    """
    if recipe in OTHERS:
        return OTHERS[recipe](recipe, changes)
    if recipe in RECIPES:
        return Language(recipe, changes)
    known = (*RECIPES, *OTHERS)
    close = difflib.get_close_matches(recipe, known, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(f"unknown recipe {recipe!r}{hint}; recipes: {', '.join(known)}")

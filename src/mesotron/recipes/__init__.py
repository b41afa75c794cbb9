"""Whole runs by name: `mesotron train NAME`. A recipe is a function that returns a TrainConfig.

docs/papers.md gives the source of each value.
"""

import difflib
from collections.abc import Callable
from dataclasses import fields

from mesotron.config import PlanConfig, TrainConfig
from mesotron.recipes import arith, gsm8k, math, sums

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        arith.arith,
        arith.arith_sparse_collapse,
        arith.arith_mgrpo,
        sums.arith_smollm2,
        sums.arith_smollm2_fast,
        gsm8k.gsm8k_smollm2,
        gsm8k.qwen05_boxed_muon_sgd,
        gsm8k.qwen15_gsm8k_v1,
        gsm8k.qwen15_gsm8k_v2,
        gsm8k.qwen3_gsm8k_pion,
        gsm8k.qwen3_gsm8k_pion_gmpo,
        math.qwen3_math_pion,
        math.qwen3_math_pion_gmpo,
        math.qwen3_math_mgrpo,
    )
}


def make_recipe(name: str) -> TrainConfig:
    """The config of a recipe.

    Raises:
        ValueError: there is none of that name; the text names the closest.

    Example:
        >>> make_recipe("arith").model.name
        'tiny'
    """
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"unknown recipe {name!r}{hint}; recipes: {', '.join(RECIPES)}")
    return RECIPES[name]()


def make_plan(name: str) -> PlanConfig:
    """The plan of a recipe, without a pace.

    Example:
        >>> make_plan("arith").steps == make_recipe("arith").steps
        True
    """
    recipe = make_recipe(name)
    return PlanConfig(**{field.name: getattr(recipe, field.name) for field in fields(recipe)})


def describe_recipes() -> str:
    """Every recipe with the first line of what it is, for the help text."""
    width = max(map(len, RECIPES))
    lines = [f"  {name:<{width}}  {summary(recipe)}" for name, recipe in RECIPES.items()]
    return "\n".join(["recipes:", *lines])


def summary(recipe: Callable[[], TrainConfig]) -> str:
    """The first line of a recipe's text, without its full stop."""
    return (recipe.__doc__ or "").splitlines()[0].removesuffix(".")

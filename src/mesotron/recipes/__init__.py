"""Whole runs by name, such as `mesotron train arith`: tables of recipes.toml and their loader."""

from mesotron.recipes.load import (
    LORA_RATES,
    RATES,
    RECIPES,
    adapt,
    describe_recipes,
    make_plan,
    make_recipe,
)

__all__ = [
    "LORA_RATES",
    "RATES",
    "RECIPES",
    "adapt",
    "describe_recipes",
    "make_plan",
    "make_recipe",
]

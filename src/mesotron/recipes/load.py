"""Makes the config of a recipe from its table in recipes.toml."""

import tomllib
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from mesotron.config import PlanConfig, TrainConfig, aliases
from mesotron.config.base import from_plain, suggest

C = TypeVar("C", TrainConfig, PlanConfig)

_FILE = Path(__file__).with_name("recipes.toml")
_TABLES = tomllib.loads(_FILE.read_text(encoding="utf-8"))
RECIPES = {name: table["about"] for name, table in _TABLES.items()}
USES = {
    "try": "to try it",
    "own": "your own data",
    "gsm8k": "GSM8K",
    "paper": "to reproduce a paper",
    "touchy": "touchy, or for a comparison",
}
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")

# A tenth of the best for SmolLM2-135M on four tasks (benchmarks/tournament). On GSM8K a model of
# half a billion weights learns with Muon from 2e-6 to 2e-5; 6e-5 collapses (benchmarks/gsm8k).
RATES = {
    "adamw": 2e-6,
    "muon": 1e-5,
    "normuon": 1e-5,
    "pion": 2e-5,
    "muon_sgd": 1e-5,
}
# With LoRA only SmolLM2-135M was searched.
LORA_RATES = {"adamw": 4e-4, "muon": 5e-5}  # Muon by lora="product"; other rules take its rate


def make_recipe(name: str) -> TrainConfig:
    """The config of a recipe; ValueError names the closest one if there is none."""
    if Path(name).suffix in DATA_SUFFIXES or Path(name).exists():
        raise ValueError(f"{name!r} is not a recipe: give data of yours as --data {name}")

    name = aliases.RECIPES.get(name, name)
    if name not in RECIPES:
        known = ", ".join(RECIPES)
        raise ValueError(f"unknown recipe {name!r}{suggest(name, RECIPES)}; recipes: {known}")

    return _make(name)


def _make(name: str) -> TrainConfig:
    values = {"recipe": name} | _TABLES[name]
    values.pop("about")
    values.pop("use")
    based_on = values.pop("based_on", None)
    base = _make(based_on) if based_on else None

    return from_plain(TrainConfig, values, _FILE.name, base)


def make_plan(name: str) -> PlanConfig:
    recipe = make_recipe(name)
    return PlanConfig(**{field.name: getattr(recipe, field.name) for field in fields(recipe)})


def adapt(config: C, chosen: Collection[str]) -> C:
    """Fit the optimizer of the recipe `own` to what the user chose, by dotted names.

    The rate is that of the rule, and AdamW beside the matrices gets a tenth of it.
    """
    if config.recipe != "own":
        return config

    optim = config.optim
    lora = config.model.lora
    if lora and "optim.name" not in chosen:
        optim = replace(optim, name="adamw")

    if "optim.lr" not in chosen:
        rates = LORA_RATES if lora else RATES
        rate = rates.get(optim.name, rates["muon"])
        optim = replace(optim, lr=rate)

    if "optim.aux_lr" not in chosen:
        has_aux_rate = optim.name not in ("adamw", "muon_sgd")
        optim = replace(optim, aux_lr=optim.lr / 10 if has_aux_rate else None)

    return replace(config, optim=optim)


def describe_recipes(with_touchy: bool) -> str:
    """The recipes by use."""
    width = max(map(len, RECIPES))
    lines = []

    for use, title in USES.items():
        if use == "touchy" and not with_touchy:
            continue

        lines.append(f"recipes: {title}")
        for name, about in RECIPES.items():
            if _TABLES[name]["use"] == use:
                lines.append(f"  {name:<{width}}  {about.removesuffix('.')}")

    return "\n".join(lines)

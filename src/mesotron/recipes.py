"""Whole runs by name: `mesotron train NAME`. Each is a table of recipes.toml."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mesotron.config import OptimConfig, PlanConfig, TrainConfig
from mesotron.config.base import from_plain, suggest

_FILE = Path(__file__).with_suffix(".toml")
_TABLES = tomllib.loads(_FILE.read_text(encoding="utf-8"))
RECIPES = {name: table["about"] for name, table in _TABLES.items()}
# Chosen on four tasks of SmolLM2-135M (benchmarks/tournament), without and with LoRA.
RATES = {
    "adamw": 2e-5,
    "muon": 1e-4,
    "normuon": 1e-4,
    "pion": 2e-4,
    "muon_sgd": 1e-4,
}
LORA_RATES = {"adamw": 4e-4, "muon": 5e-5}  # Muon by lora="product"; other rules take its rate


def make_recipe(name: str) -> TrainConfig:
    """The config of a recipe; ValueError names the closest one if there is none."""
    if Path(name).suffix in (".jsonl", ".json", ".csv", ".parquet") or Path(name).exists():
        raise ValueError(f"{name!r} is not a recipe: give data of yours as --data {name}")

    if name not in RECIPES:
        known = ", ".join(RECIPES)
        raise ValueError(f"unknown recipe {name!r}{suggest(name, RECIPES)}; recipes: {known}")

    return _make(name)


def _make(name: str) -> TrainConfig:
    values = {"recipe": name} | _TABLES[name]
    values.pop("about")
    base = values.pop("based_on", None)

    return from_plain(TrainConfig, values, _FILE.name, _make(base) if base else None)


def make_plan(name: str) -> PlanConfig:
    recipe = make_recipe(name)
    return PlanConfig(**{field.name: getattr(recipe, field.name) for field in fields(recipe)})


def fit_optim(optim: OptimConfig, name: Any, lr: float | None, lora: int) -> OptimConfig:
    """The recipe own's optimizer; AdamW beside the matrices gets a tenth of their rate."""
    name = name or ("adamw" if lora else optim.name)
    if lr is None:
        lr = LORA_RATES.get(name, LORA_RATES["muon"]) if lora else RATES[name]

    aux_lr = None if name in ("adamw", "muon_sgd") else lr / 10
    return replace(optim, name=name, lr=lr, aux_lr=aux_lr)


def describe_recipes() -> str:
    width = max(map(len, RECIPES))
    lines = [f"  {name:<{width}}  {text.removesuffix('.')}" for name, text in RECIPES.items()]
    return "\n".join(["recipes:", *lines])


def run(config: TrainConfig) -> int:
    """`mesotron train`: train a recipe or resume a run, then write its page."""
    from mesotron.report.command import NAME, write
    from mesotron.rlvr import train
    from mesotron.runs.folder import warn_of_failure

    def write_page(path: Path) -> None:
        with warn_of_failure(NAME, path):
            write([path], path / NAME)
            print(f"page: {path / NAME}")

    return train.run(config, then=write_page)

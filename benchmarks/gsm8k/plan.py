"""Which runs the study has, which come next, and their command lines: pure functions.

PROTOCOL.md has the rules. A cell is a dictionary of plain values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mesotron.compare.search import Grid, GridSearch, search

Cell = dict[str, Any]
Done = dict[str, Cell]

PARTS = ("search", "headline", "smollm2", "guard", "questions", "pocket", "family", "tools")
TUNING_SEED = 130
HEADLINE_SEEDS = (290, 291, 292)
SMOLLM2_SEEDS = (293, 294, 295)
GUARD_SEEDS = (250, 251, 252, 253, 254)
TOOLS_SEEDS = (210, 211, 212)
FAMILY_SEEDS = {"gemma270m": (296, 297, 298), "qwen1.5b": (299,)}
POCKET_SEED = 215

STEPS = {"search": 50, "smollm2": 200, "pocket": 75, "tools": 60, "family": 100}
USUAL_STEPS = 100
GUARD_FACTOR = 8.0
TEMPERATURES = (0.6, 1.0, 1.4)
FACTORS = (0.25, 1.0, 4.0)  # of the pocket's rates

REST = "--optim.aux-lr 2e-6"
LORA = "--lora 16 --optim adamw"
FALLING = "--optim.clip all --optim.schedule linear --optim.warmup 0.05"
QWEN = "gsm8k_qwen05"


class Arm(NamedTuple):
    flags: str
    grid: Grid | None  # None has the one rate
    rate: float = 0.0


def grid(middle: float) -> Grid:
    return Grid(middle, factor=3.0, rates=3, extend=1)


# Middles are a fifth of the best rates of SmolLM2-135M (benchmarks/tournament), LoRA's a half.
ARMS = {
    "muon": Arm(f"{FALLING} --optim muon {REST}", grid(2e-5)),
    "adamw": Arm(f"{FALLING} --optim adamw", grid(4e-6)),
    "lora_adamw": Arm(f"{FALLING} {LORA}", grid(2e-4)),
    "pion": Arm(f"{FALLING} --optim pion --optim.cutoff aligned {REST}", grid(4e-5)),
    # GRPOConfig as it is: AdamW at 1e-6 falling linearly, DAPO's mean over tokens, one clip width.
    "trl": Arm(
        "--optim adamw --optim.schedule linear --optim.warmup 0 --objective.name dapo "
        "--objective.epsilon 0.2 --objective.epsilon-high 0.2",
        None,
        1e-6,
    ),
}
# What else is asked of Muon at its rate, on the headline's seeds.
QUESTIONS = {
    "sparse": "--reward sparse",
    "gmpo": "--objective.name gmpo",
    "vote": "--objective.name vote",
    "mgrpo": "--objective.name mgrpo",
}
FAMILY = {
    # A base model without a chat template: it gets a supervised start, and the rate of that size.
    "gemma270m": ("--sft-steps 300 --sft.lr 5e-5 --max-tokens 256", 4e-5),
    "qwen1.5b": (f"{LORA} --rollout.micro-batch 16", 2e-4),
}


def make(part: str, arm: str, rate: float, seed: int, flags: str = "") -> Cell:
    use = "tuning" if part == "search" else "reporting"
    return {"use": use, "part": part, "arm": arm, "rate": rate, "seed": seed, "flags": flags}


def key_of(cell: Cell) -> str:
    return f"{cell['part']}-{cell['arm']}-{cell['rate']:g}-{cell['seed']}"


def plan(parts: tuple[str, ...], done: Done) -> Iterator[Cell]:
    """The cells of these parts that are known so far; those after a search follow its choice."""
    for part in parts:
        yield from MAKERS[part](done)


# The search


def search_of(arm: str, done: Done) -> GridSearch:
    made = ARMS[arm].grid
    assert made is not None
    known: dict[int, float | None] = {}
    for k in range(-5, 6):
        cell = done.get(key_of(make("search", arm, made.rate(k), TUNING_SEED)))
        if cell is not None:
            known[k] = cell["accuracy"]

    return search(made, known)


def chosen_rate(arm: str, done: Done) -> float | None:
    """The rate that an arm reports at; None before its search is done."""
    made = ARMS[arm].grid
    if made is None:
        return ARMS[arm].rate

    found = search_of(arm, done)
    if not found.done or found.best is None:
        return None

    return made.rate(found.best)


def search_cells(done: Done) -> Iterator[Cell]:
    for arm, (flags, made, _) in ARMS.items():
        if made is not None:
            for k in search_of(arm, done).wanted:
                yield make("search", arm, made.rate(k), TUNING_SEED, flags)


# The reports, seed by seed: complete seeds are reported if time ends first


def headline_cells(done: Done) -> Iterator[Cell]:
    for seed in HEADLINE_SEEDS:
        for arm in ARMS:
            rate = chosen_rate(arm, done)
            if rate is not None:
                yield make("headline", arm, rate, seed, ARMS[arm].flags)


def smollm2_cells(_: Done) -> Iterator[Cell]:
    for seed in SMOLLM2_SEEDS:
        yield make("smollm2", "muon", 1e-4, seed)


def guard_cells(done: Done) -> Iterator[Cell]:
    rate = chosen_rate("muon", done)
    if rate is None:
        return

    for seed in GUARD_SEEDS:
        for guard in ("off", "rollback"):
            flags = f"{ARMS['muon'].flags} --guard {guard} --save-every 10 --keep 3"
            yield make("guard", guard, GUARD_FACTOR * rate, seed, flags)


def question_cells(done: Done) -> Iterator[Cell]:
    rate = chosen_rate("muon", done)
    if rate is None:
        return

    for seed in HEADLINE_SEEDS:
        for name, more in QUESTIONS.items():
            yield make("questions", name, rate, seed, f"{ARMS['muon'].flags} {more}")


def pocket_cells(done: Done) -> Iterator[Cell]:
    rate = chosen_rate("muon", done)
    if rate is None:
        return

    for factor in FACTORS:
        for temperature in TEMPERATURES:
            flags = f"{ARMS['muon'].flags} --rollout.temperature {temperature}"
            yield make("pocket", f"t{temperature}", factor * rate, POCKET_SEED, flags)


def family_cells(_: Done) -> Iterator[Cell]:
    for name, seeds in FAMILY_SEEDS.items():
        more, rate = FAMILY[name]
        for seed in seeds:
            yield make("family", name, rate, seed, f"{FALLING} {more}")


def tools_cells(done: Done) -> Iterator[Cell]:
    rate = chosen_rate("muon", done)
    if rate is None:
        return

    for seed in TOOLS_SEEDS:
        for name in ("with", "without"):
            flags = f"{ARMS['muon'].flags} --no-rollout.fast --batch 16"
            if name == "with":
                flags += " --tools benchmarks/gsm8k/calculator.py:calculate"

            yield make("tools", name, rate, seed, flags)


MAKERS = {
    "search": search_cells,
    "headline": headline_cells,
    "smollm2": smollm2_cells,
    "guard": guard_cells,
    "questions": question_cells,
    "pocket": pocket_cells,
    "family": family_cells,
    "tools": tools_cells,
}


# Command lines


class Places(NamedTuple):
    """Where models and problems lie."""

    models: str  # a folder with qwen0.5b.gguf and the others; or the tiny model, for a trial
    report: str  # GSM8K: its training and test problems
    tuning: str  # training problems alone, some held out


def model_of(cell: Cell, places: Places) -> str:
    name = cell["arm"] if cell["part"] == "family" else "qwen0.5b"
    return name_of("smollm2" if cell["part"] == "smollm2" else name, places.models)


def models_of(parts: Sequence[str], models: str) -> list[str]:
    """The models of these parts, as `mesotron train` takes them."""
    names: list[str] = []
    for part in parts:
        if part == "family":
            names += FAMILY
        else:
            names.append("smollm2" if part == "smollm2" else "qwen0.5b")

    return [name_of(name, models) for name in dict.fromkeys(names)]


def name_of(model: str, models: str) -> str:
    if models == "tiny":
        return "tiny"

    return model if model == "smollm2" else f"{models}/{model}.gguf"


def train_flags(cell: Cell, places: Places, more: str = "") -> list[str]:
    """The words behind `mesotron train`, without the run's folder and its limits."""
    part = cell["part"]
    recipe = "gsm8k_smollm2" if part == "smollm2" else QWEN
    is_tuning = cell["use"] == "tuning"

    flags = f"--data {places.tuning if is_tuning else places.report}"
    flags += f" --task.num-eval {300 if is_tuning else 1000}"
    flags += f" --steps {STEPS.get(part, USUAL_STEPS)} --eval-every {25 if is_tuning else 50}"
    flags += f" --seed {cell['seed']} --save-every 0 --keep 1 --guard off"
    flags += f" {cell['flags']} --lr {cell['rate']:g} {more}"

    return [recipe, "--model", model_of(cell, places), *last_of_each(flags.split())]


def last_of_each(words: list[str]) -> list[str]:
    """Flags with their values, each once: what comes last counts."""
    found: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word
            found.pop(flag, None)
            found[flag] = []
        else:
            found[flag].append(word)

    return [word for flag, values in found.items() for word in (flag, *values)]

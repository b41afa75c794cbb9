"""Which cells the study has, and which come next: pure functions of what is finished.

A cell is a dictionary of plain values; its `key` names it in files. What matters most comes first,
so that a study which runs out of time has lost the least.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.smollm2.levers import LEVERS

Cell = dict[str, Any]
PARTS = ("levers", "spectrum", "map", "gsm8k")
# Best rates of a search on sums (benchmarks/ARCHIVE.md), and the gains that make updates as large
# as AdamW's.
BEST_RATES = {
    "adamw": (1e-5, 1.0),
    "muon": (4e-5, 1.8),
    "pion_cutoff": (2e-5, 7.0),
}
FINAL_SEEDS = (1, 2, 3)  # of GSM8K; its search has used 0
MAP_FACTORS = (0.5, 2.0, 8.0)
MAP_SHAPES = ((32, 1), (8, 1), (32, 4), (8, 4))  # prompts of a rollout, updates with it
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GSM8K_FACTORS = (0.5, 1.0)
SEVERAL = 4  # updates with a rollout
WARM_GSM8K = {"part": "gsm8k", "stage": "warm", "seed": 0}


def key_of(cell: Cell) -> str:
    """A name for a cell, unique in the study."""
    names = ("part", "task", "stage", "optim", "objective", "rate", "gain", "steps", "seed")
    words = [str(cell[name]) for name in names if name in cell]
    return "/".join([*words, *cell.get("set", ())])


def make(part: str, stage: str, **values: Any) -> Cell:
    """A training cell; what is not said is the recipe's."""
    usual: Cell = {"optim": "muon", "objective": "grpo", "gain": 1.0, "seed": 0, "set": []}
    return {"part": part, "stage": stage} | usual | values


def plan(given: Any, done: dict[str, Cell]) -> list[Cell]:
    """All cells of the requested parts that are known so far, in order."""
    makers = {"levers": levers, "spectrum": spectrum, "map": step_map, "gsm8k": gsm8k}
    cells: list[Cell] = []
    for part in given.parts:
        cells += makers[part](given, done)
    return cells


def accuracy(cell: Cell) -> float:
    """The share of held-out problems solved."""
    return cell["solved"].count("1") / len(cell["solved"])


def died(cell: Cell) -> bool:
    """Whether a run's weights became no numbers, or the watch calls it dead."""
    return cell["diverged"] or cell["health"][0] in ("dead", "diverged")


def levers(given: Any, done: dict[str, Cell]) -> list[Cell]:
    """What might make it learn faster, all with one seed first."""
    cells = []
    for seed in given.lever_seeds:
        for name, (optim, rate, gain, changes) in LEVERS.items():
            if given.levers and name not in given.levers:
                continue
            cell = make("levers", name, optim=optim, rate=rate, gain=gain, set=[*changes])
            cells.append(cell | {"steps": given.final_steps, "seed": seed})
    return cells


def spectrum(given: Any, done: dict[str, Cell]) -> list[Cell]:
    """Gradients of supervised and of reinforcement learning, at the start and on the way; those of
    GSM8K, where its supervised start has been made, there."""
    places: list[Cell] = [{"steps": 0}, {"steps": given.spectrum_steps}]
    if key_of(WARM_GSM8K) in done:
        places.append({"task": "gsm8k", "steps": 0})

    cells = []
    for place in places:
        for source in ("rlvr", "sft"):
            cells.append({"part": "spectrum", "stage": source, **place, "seed": 0})
    return cells


def subject(cell: Cell) -> str:
    """The part whose task and warm start a cell has, if it is not its own."""
    return cell.get("task", cell["part"])


def warm_folder(state: Path, part: str) -> Path:
    """Where the model of a part's warm start lies."""
    return state / f"warm_{part}"


def step_map(given: Any, done: dict[str, Cell]) -> list[Cell]:
    """Step size x prompts of a batch x updates with each; as many rollouts everywhere."""
    cells = []
    for objective, shapes in (("grpo", MAP_SHAPES), ("gmpo", MAP_SHAPES[2:3])):
        for factor in MAP_FACTORS:
            for prompts, updates in shapes:
                changes = [f"rollout.prompts={prompts}", f"rollout.updates={updates}"]
                steps = given.map_rollouts * updates
                for name in BEST_RATES:
                    cell = make("map", f"x{factor:g}", optim=name, objective=objective)
                    cell |= scaled_rate(name, factor)
                    cells.append(cell | {"steps": steps, "set": changes})
    return cells


def scaled_rate(name: str, factor: float) -> Cell:
    """A multiple of an optimizer's best rate on sums, and its gain."""
    rate, gain = BEST_RATES[name]
    return {"rate": float(f"{factor * rate:.3g}"), "gain": gain}


MapRow = tuple[str, tuple[str, ...]]  # the objective, and prompts and updates as settings


def map_rows(cells: list[Cell]) -> dict[MapRow, list[Cell]]:
    """The map's cells row by row."""
    found: dict[MapRow, list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell["objective"], tuple(cell["set"])), []).append(cell)
    return found


def map_row(objective: str, shape: tuple[str, ...]) -> str:
    """A row's name.

    Example:
        >>> map_row("gmpo", ("rollout.prompts=32", "rollout.updates=4"))
        '32 prompts, 4 updates, gmpo'
    """
    prompts, updates = (word.split("=")[1] for word in shape)
    name = f"{prompts} prompts, {updates} update{'s' * (updates != '1')}"
    if objective == "grpo":
        return name

    return f"{name}, {objective}"


def gsm8k(given: Any, done: dict[str, Cell]) -> list[Cell]:
    """A second task, after a supervised start on its own training set: two rates each, fresh seeds
    at the one that samples more right answers, then several updates with each rollout."""
    if key_of(WARM_GSM8K) not in done:
        return [WARM_GSM8K]

    cells = []
    for factor in GSM8K_FACTORS:
        for name in BEST_RATES:
            cells.append(gsm8k_search(given, name, factor))

    best = []
    for name in BEST_RATES:
        searched = [gsm8k_search(given, name, factor) for factor in GSM8K_FACTORS]
        if all(key_of(cell) in done for cell in searched):
            best.append(max(searched, key=lambda cell: sampled_right(done[key_of(cell)])))

    for seed in FINAL_SEEDS:
        cells += [cell | {"stage": "final", "seed": seed} for cell in best]

    several = {"steps": SEVERAL * given.gsm8k_steps, "set": [f"rollout.updates={SEVERAL}"]}
    for objective in ("grpo", "gmpo"):
        changed = several | {"stage": "several", "objective": objective}
        cells += [cell | changed for cell in best]
    return cells


def gsm8k_search(given: Any, name: str, factor: float) -> Cell:
    """A run of the search: a multiple of the best rate on sums."""
    cell = make("gsm8k", "search", optim=name, **scaled_rate(name, factor))
    return cell | {"steps": given.gsm8k_steps}


def sampled_right(cell: Cell) -> float:
    """Right answers among those sampled in the second half of a run: GSM8K has more problems than
    a run draws, so they are of problems that it had not met."""
    shares = [value for _, value in cell["rows"]["facts/correct"]]
    return fmean(shares[len(shares) // 2 :])

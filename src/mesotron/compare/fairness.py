"""What makes a tournament fair: its rule in words, and the refusal of what would break it."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from mesotron.compare.kind import Kind
from mesotron.compare.record import Contender
from mesotron.compare.words import count
from mesotron.config import CompareConfig

# What may not change between two calls on one folder: its cells would not be comparable.
FIXED = ("factor", "seed", "search_seeds", "rates", "base_rate", "config")
# Problems that either half must have: with fewer nothing can be told apart.
LEAST_HALF = 10
# Problems that have such halves but by a rare accident.
ENOUGH = 4 * LEAST_HALF


def rule_in_words(config: CompareConfig, kind: Kind) -> list[str]:
    """How the comparison is made fair, for the page."""
    searched = count(config.search_seeds, "seed")
    return [
        "Every run of one seed has the same data order, and every run of the tournament the same "
        "start and the same held-out problems.",
        kind.unit,
        f"Every contender tries {config.rates} rates with {searched}, powers of {config.factor:g} "
        f"apart around the recipe's, {kind.base_rate:g}.",
        f"If the best rate is the smallest or the largest tried, up to {config.extend} more beyond "
        "it are tried; the table counts all trials.",
        "A rate is chosen by its score together with its neighbours' (half the weight its own, a "
        "quarter each), on one half of the held-out problems. The other half judges, with "
        f"{count(config.seeds, 'other seed')} for each contender.",
        "Intervals are 95 % bootstrap intervals over seeds and problems. Others are compared with "
        "the best by a t-test paired by seed and problem, with the variance clustered by both "
        "(that of seeds from all pairs together, where a pair's own is smaller), and p-values are "
        "Holm's for all pairs of contenders.",
    ]


def check_problems(kind: Kind) -> None:
    """Refuse a recipe whose problems cannot be halved; a hash halves them, never quite evenly."""
    if kind.num_problems < ENOUGH:
        raise ValueError(too_few(kind, kind.num_problems))


def too_few(kind: Kind, found: int) -> str:
    """The sentence on too few problems."""
    return (
        f"{found} problems to evaluate on are too few: one half chooses rates and the other "
        f"judges, so have {ENOUGH} or more (now --set {kind.problems_setting}="
        f"{attrgetter(kind.problems_setting)(kind.config)})"
    )


def refuse_another(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to go on in a folder with what would make its cells incomparable.

    Args:
        folder: of the tournament.
        old, new: the plan that it was begun with, and the one that is asked for.
    """
    for name in FIXED:
        if old[name] != new[name]:
            raise ValueError(
                f"{folder} holds a tournament with another {name} "
                f"({difference(old[name], new[name])}): give --out another name, or the flags "
                "that it was begun with"
            )
    if old["extend"] > new["extend"]:
        raise ValueError(
            f"{folder} holds a tournament with --extend {old['extend']}, which may grow but not "
            f"shrink to {new['extend']}, since rates beyond it may have been chosen: give "
            f"--extend {old['extend']} or more, or --out another name"
        )


def refuse_namesakes(folder: Path, old: Sequence[Contender], new: Sequence[Contender]) -> None:
    """Refuse a contender whose name stands for another one in a folder."""
    known = {one.name: one for one in old}
    for one in new:
        before = known.get(one.name, one)
        for name in ("optim", "objective"):
            was, now = getattr(before, name), getattr(one, name)
            if was != now:
                raise ValueError(
                    f"{folder} holds a contender {one.name} with another {name} ({was}, not "
                    f"{now}): give --out another name"
                )


def difference(old: object, new: object, name: str = "") -> str:
    """The first place at which two plain values differ, in words.

    Example:
        >>> difference({"a": {"b": 1}}, {"a": {"b": 2}})
        'a.b: 1, not 2'
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            if old.get(key) != new.get(key):
                return difference(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    return f"{name}: {old}, not {new}" if name else f"{old}, not {new}"

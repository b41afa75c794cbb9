"""The kinds of runs that can be compared: `mesotron train`, `ppo snake` and `vla train`."""

from collections.abc import Sequence

from mesotron.compare.games import SnakeKind
from mesotron.compare.kind import Kind, check_known
from mesotron.compare.language import LanguageKind
from mesotron.compare.robots import RobotKind
from mesotron.config import CompareConfig
from mesotron.recipes import RECIPES

KINDS: tuple[type[Kind], ...] = (LanguageKind, SnakeKind, RobotKind)
# Names in the place of a recipe that are none of `mesotron train`.
OTHERS: dict[str, type[Kind]] = {"snake": SnakeKind, "vla": RobotKind}


def make_kind(recipe: str, changes: Sequence[str] = ()) -> Kind:
    """The kind of run behind a recipe's name, with the changes of `--set`."""
    has_data = any(one.startswith("task.data=") for one in changes)
    if recipe == CompareConfig.recipe and has_data:
        recipe = "own"

    check_known("recipe", recipe, (*RECIPES, *OTHERS))
    kind = OTHERS.get(recipe, LanguageKind)

    return kind(recipe, changes)

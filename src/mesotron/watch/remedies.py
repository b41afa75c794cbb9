"""Remedies as data: what a guard changes before a run goes on.

A detector names its remedy in the words of the training config (`optim.lr`, `objective.beta`).
What a running trainer can really be told is another matter: `settings` knows that.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Change:
    """One part of a remedy.

    Args:
        field: dotted name of a config field, such as optim.lr.
        act: multiply by the value, set to it, or raise to at least it.
        value: the number or word.
    """

    field: str
    act: Literal["multiply", "set", "at_least"]
    value: Any

    def applied_to(self, old: Any) -> Any:
        """The field's new value.

        Example:
            >>> Change(field="optim.lr", act="multiply", value=0.5).applied_to(1e-3)
            0.0005
        """
        if self.act == "multiply":
            return old * self.value
        return max(old, self.value) if self.act == "at_least" else self.value

    def at_try(self, number: int) -> "Change":
        """The same remedy the n-th time: what did not help is not done again, but more of it.

        A factor is raised to the n-th power, a least value is doubled each time.

        Args:
            number: 1 for the first try.

        Example:
            >>> SMALLER_STEP.at_try(1).value, SMALLER_STEP.at_try(2).value
            (0.5, 0.25)
        """
        if self.act == "multiply":
            return replace(self, value=self.value**number)
        return (
            replace(self, value=self.value * 2 ** (number - 1)) if self.act == "at_least" else self
        )


SMALLER_STEP = Change(field="optim.lr", act="multiply", value=0.5)
KL_TO_START = Change(field="objective.beta", act="at_least", value=0.01)
TWO_PART = Change(field="reward.parts", act="set", value=("two_part",))
COOLER = Change(field="rollout.temperature", act="multiply", value=0.8)


def prescribe(changes: tuple[Change, ...], number: int, smaller: Change) -> tuple[Change, ...]:
    """The remedy of the n-th try: from the second on the step size is lowered in any case.

    Args:
        changes: what the detector names.
        number: 1 for the first try.
        smaller: the change of the step size, wherever one is called for; see `pace`.

    Example:
        >>> [change.field for change in prescribe((KL_TO_START,), 2, SMALLER_STEP)]
        ['objective.beta', 'optim.lr']
    """
    wanted = [
        smaller if change.field == smaller.field else change.at_try(number) for change in changes
    ]
    if number > 1 and smaller not in wanted:
        wanted.append(smaller)
    return tuple(wanted)

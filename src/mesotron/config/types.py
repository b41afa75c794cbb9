"""Types of settings that say which numbers they take. The standard library only."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass(frozen=True)
class Bounds:
    """Numbers that a setting takes: at least, above, at most, below."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.ge <= value <= self.le and self.gt < value < self.lt

    def __str__(self) -> str:
        words = {
            "at least": self.ge,
            "above": self.gt,
            "at most": self.le,
            "below": self.lt,
        }
        return " and ".join(f"{word} {x:g}" for word, x in words.items() if math.isfinite(x))


MAX_SEED = 2**32 - 1  # NumPy's
MAX_CUTOFF = math.sqrt(2 / 3)  # the highest that Pion's suppression steps can aim at
PION_STEPS = 5

Count = Annotated[int, Bounds(ge=1)]
Several = Annotated[int, Bounds(ge=2)]
Level = Annotated[int, Bounds(ge=1, le=5)]
Natural = Annotated[int, Bounds(ge=0)]
Seed = Annotated[int, Bounds(ge=0, le=MAX_SEED)]
Positive = Annotated[float, Bounds(gt=0)]
NonNegative = Annotated[float, Bounds(ge=0)]
NonPositive = Annotated[float, Bounds(le=0)]
Share = Annotated[float, Bounds(ge=0, le=1)]
PositiveShare = Annotated[float, Bounds(gt=0, le=1)]
Fraction = Annotated[float, Bounds(ge=0, lt=1)]

Device = Literal["auto", "cpu", "cuda"]

# Of optimizers
Cutoff = Annotated[float, Bounds(gt=0, le=MAX_CUTOFF)] | Literal["aligned", "noise"]
Promotion = Annotated[int, Bounds(ge=0, le=PION_STEPS)]
Scale = Positive | Literal["rms", "moonlight", "spectral"]
Schedule = Literal["constant", "linear", "cosine"]

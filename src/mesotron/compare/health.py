"""How a run ended, by its rows: healthy, drifting, dead or diverged."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from mesotron.compare.record import Verdict
from mesotron.runs.files import Row
from mesotron.watch.diagnosis import diagnose
from mesotron.watch.engine import Engine

# Errors of a run whose weights are not finite: before saving, and when PyTorch samples from them.
NOT_FINITE = ("weights are not finite", "probability tensor contains either `inf`, `nan`")


class Health(NamedTuple):
    verdict: Verdict
    cause: str | None
    story: str  # the watch's diagnosis in words


def health_of(rows: Sequence[Row], error: str = "") -> Health:
    """The watch's verdict, or that losses or weights (`error`) are not finite."""
    engine = Engine()
    events = []
    for row in rows:
        events += engine.update(row)

    diagnosis = diagnose(rows, engine, events)
    story = diagnosis.text()

    step = diverged_at(rows)
    if step is not None:
        return Health("diverged", diagnosis.cause, f"diverged at step {step}: {story}")

    if error:
        last = int(rows[-1]["step"])
        return Health("diverged", diagnosis.cause, f"diverged after step {last}: {error}")

    verdict: Verdict = "healthy" if diagnosis.condition == "unknown" else diagnosis.condition
    return Health(verdict, diagnosis.cause, story)


def diverged_at(rows: Sequence[Row]) -> int | None:
    """The first step with a loss that is not finite."""
    for row in rows:
        for name, value in row.items():
            is_loss = name == "loss" or name.startswith("loss/")
            if is_loss and not math.isfinite(value):
                return int(row["step"])

    return None


def is_not_finite(last_line: str) -> bool:
    """Whether a run's log ends with an error of weights that are not finite."""
    return any(error in last_line for error in NOT_FINITE)

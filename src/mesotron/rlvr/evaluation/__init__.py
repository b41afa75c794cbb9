"""Evaluation: completions, scores with intervals, transcripts, and `mesotron eval`.

Names load on first use: whoever reads transcripts of a run that is over needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesotron.rlvr.evaluation.measure import EvalResult as EvalResult
    from mesotron.rlvr.evaluation.measure import evaluate as evaluate
    from mesotron.rlvr.evaluation.transcripts import Transcript as Transcript
    from mesotron.rlvr.evaluation.transcripts import side_by_side as side_by_side

_HOME = {
    "EvalResult": "measure",
    "Transcript": "transcripts",
    "evaluate": "measure",
    "side_by_side": "transcripts",
}

__all__ = ["EvalResult", "Transcript", "evaluate", "side_by_side"]


def __getattr__(name: str) -> Any:
    """Import a name from its home on first use, and remember it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value

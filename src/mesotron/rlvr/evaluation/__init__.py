"""Evaluation: completions, scores with intervals, transcripts, and `mesotron eval`."""

from mesotron.rlvr.evaluation.measure import EvalResult, evaluate
from mesotron.rlvr.evaluation.transcripts import Transcript, side_by_side

__all__ = ["EvalResult", "Transcript", "evaluate", "side_by_side"]

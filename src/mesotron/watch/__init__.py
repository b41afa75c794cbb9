"""The watch: detectors over a run's metrics, its diagnosis, and readers of other tools' logs.

Imports neither torch nor transformers; `mesotron.Watch`, in `callback`, is loaded on first use.
"""

from mesotron.watch.detectors import DETECTORS, Action, Change, Detector, Event, Evidence
from mesotron.watch.engine import Engine
from mesotron.watch.tracks import Symptom

__all__ = ["DETECTORS", "Action", "Change", "Detector", "Engine", "Event", "Evidence", "Symptom"]

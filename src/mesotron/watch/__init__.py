"""The watch: detectors over a run's metrics, the story of a run, readers of other people's logs.

Knows no trainer and imports neither torch nor transformers; `mesotron.Watch`, the callback for a
Transformers or TRL trainer, is in `callback` and loads when it is asked for.
"""

from mesotron.watch.detectors import DETECTORS, Change, Detector
from mesotron.watch.engine import Engine
from mesotron.watch.events import Event, Evidence
from mesotron.watch.signs import Sign

__all__ = ["DETECTORS", "Change", "Detector", "Engine", "Event", "Evidence", "Sign"]

"""The watch: detectors over a run's metrics, the story of a run, readers of other people's logs.

Knows no trainer and imports neither torch nor transformers; `mesotron.Watch`, the callback for a
Transformers or TRL trainer, is in `callback` and loads when it is asked for.
"""

from mesotron.watch.detectors import DETECTORS, Detector
from mesotron.watch.engine import Engine
from mesotron.watch.events import Act, Event, Evidence
from mesotron.watch.remedies import Change
from mesotron.watch.signs import Sign

__all__ = ["DETECTORS", "Act", "Change", "Detector", "Engine", "Event", "Evidence", "Sign"]

"""Words that several configs share."""

from typing import Literal

OptimizerName = Literal["muon", "pion", "muon_sgd", "adamw"]

# Metadata of a field that may be given without its flag.
POSITIONAL = {"positional": True}

"""Words that several configs share."""

from typing import Literal

OptimizerName = Literal["muon", "pion", "muon_sgd", "adamw"]

# Metadata of a field that may be given without its flag.
POSITIONAL = {"positional": True}

# Metadata of a field that may be given anew when a run is continued: what a session may take and
# where it runs, not what the run is.
ANEW = {"anew": True}

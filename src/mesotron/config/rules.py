"""Names of the optimizers' update rules, read from the folders that define them.

A rule for matrices is one file in `optim/rules`, a rule for everything else one in
`optim/auxiliary`; the file has the rule's name. The files need torch, which the command line, the
comparison and JAX do not load for a name.
"""

from pathlib import Path

_OPTIM = Path(__file__).parents[1] / "optim"


def _names(folder: str) -> tuple[str, ...]:
    files = (_OPTIM / folder).glob("[!_]*.py")
    return tuple(sorted(file.stem for file in files))


SPECTRAL_RULES = _names("rules")
AUXILIARY_RULES = _names("auxiliary")
RULES = SPECTRAL_RULES + AUXILIARY_RULES
# Every rule for matrices with AdamW beside it, Muon with SGD beside it, and AdamW for all.
OPTIMIZERS = (*SPECTRAL_RULES, "muon_sgd", "adamw")

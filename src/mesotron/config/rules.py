"""The optimizers' update rules by name, for both frameworks.

A rule for matrices is one file of `optim/rules`, a rule for everything else one of
`optim/auxiliary`. Help, routing tables, the comparison and `mesotron.jax` take the names from here,
which imports no torch; a JAX twin of a rule has the same name.
"""

from mesotron.config.registry import Registry

SPECTRAL_RULES = Registry("rule for matrices", "mesotron.optim.rules")
AUXILIARY_RULES = Registry("auxiliary rule", "mesotron.optim.auxiliary")


def all_rules() -> tuple[str, ...]:
    return (*SPECTRAL_RULES, *AUXILIARY_RULES)


def optimizer_names() -> tuple[str, ...]:
    """Every rule for matrices with AdamW beside it, Muon with SGD beside it, and AdamW for all."""
    return (*SPECTRAL_RULES, "muon_sgd", "adamw")

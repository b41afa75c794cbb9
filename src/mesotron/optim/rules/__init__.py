"""The rules for matrices, one file each; importing this package registers all of them."""

from importlib import import_module

from mesotron.config.rules import SPECTRAL_RULES

for _name in SPECTRAL_RULES:
    import_module(f"{__name__}.{_name}")

"""The rules for everything but matrices, one file each; importing this package registers them."""

from importlib import import_module

from mesotron.config.rules import AUXILIARY_RULES

for _name in AUXILIARY_RULES:
    import_module(f"{__name__}.{_name}")

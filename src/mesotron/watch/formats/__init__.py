"""Log formats, one file each. A file in this folder is a format; no list elsewhere names it."""

from importlib import import_module
from pathlib import Path

from mesotron.watch.reader import FORMATS

for _file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"{__name__}.{_file.stem}")

__all__ = ["FORMATS"]

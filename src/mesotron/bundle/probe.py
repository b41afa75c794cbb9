"""Run on the target machine: `python3 probe.py > target.json`. The standard library only.

Prints what a bundle must fit to: Python, processor, C library, and every installed package with
what it asks for.
"""

import importlib.metadata
import json
import platform
import sys


def describe() -> dict[str, object]:
    """This interpreter and its packages, as plain values."""
    packages = {}
    for found in importlib.metadata.distributions():
        name = found.metadata["Name"]
        if name and name not in packages:  # the first on the path is the one that is imported
            packages[name] = {"version": found.version, "requires": found.requires or []}
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "machine": platform.machine(),
        "glibc": platform.libc_ver()[1],
        "packages": packages,
    }


if __name__ == "__main__":
    json.dump(describe(), sys.stdout, indent=1)
    print()

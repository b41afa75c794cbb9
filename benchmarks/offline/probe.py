"""Run on the target machine: `python3 probe.py > target.json`. Standard library only.

Prints what a bundle must fit: Python, processor, C library, and every installed package with its
requirements.
"""

import importlib.metadata
import json
import platform
import sys


def describe() -> dict[str, object]:
    packages = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        if name and name not in packages:  # the first on the path is the one that is imported
            packages[name] = {"version": package.version, "requires": package.requires or []}

    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "machine": platform.machine(),
        "glibc": platform.libc_ver()[1],
        "packages": packages,
    }


if __name__ == "__main__":
    json.dump(describe(), sys.stdout, indent=1)
    print()

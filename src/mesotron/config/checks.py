"""Values of any config that cannot be meant, refused before the work; the standard library only.

What a value means beside others is checked by the command that it belongs to.
"""

import math
import os
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path


def check_least(config: object, least: Mapping[str, int]) -> None:
    """Refuse a number below its least, or infinite; one that is None was not given, and passes.

    Args:
        config: of a command.
        least: by the names of fields, with dots for those of a part.

    Example:
        >>> from mesotron.config import TrainConfig
        >>> check_least(TrainConfig(), {"steps": 1, "rollout.micro_batch": 1})
    """
    for name, smallest in least.items():
        value = attrgetter(name)(config)
        flag = name.replace("_", "-")
        if value is not None and not value >= smallest:  # a NaN is refused too
            raise ValueError(f"--{flag} {value:g} must be at least {smallest}")
        if value == math.inf:
            raise ValueError(f"--{flag} inf must be a finite number")


def check_warmup(share: float) -> None:
    """Refuse a warm-up that is no share: Transformers would take 1 and more for a number of steps.

    Args:
        share: of the steps, over which the rate rises from 0.

    Example:
        >>> check_warmup(0.03)
    """
    if not 0 <= share < 1:
        raise ValueError(
            f"--optim.warmup {share:g} is a share of the steps: give a number from 0 to below 1"
        )


def check_writable(path: Path, name: str = "result.json") -> None:
    """Refuse a file that could not be written, before the minutes that its content takes.

    Args:
        path: of the file; its folder is made.
        name: proposed to who gave a folder.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it, such as {path / name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: name a file that can")

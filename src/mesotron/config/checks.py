"""Numbers of a config that cannot be meant; the standard library only.

What a number means beside others is checked by the command that it belongs to.
"""

import math
from collections.abc import Mapping
from operator import attrgetter


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

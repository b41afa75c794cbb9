"""Which of several processes this is, by the variables that launchers set (`accelerate launch`).

It can be asked before torch is imported. Without a launcher there is one process, the main one.
"""

import os


def num_processes() -> int:
    """How many processes run together.

    Example:
        >>> num_processes()
        1
    """
    return _number("WORLD_SIZE", 1)


def process_index() -> int:
    """The number of this process among all, from 0."""
    return _number("RANK", 0)


def local_index() -> int:
    """The number of this process among those of its machine, from 0: which GPU is its own."""
    return _number("LOCAL_RANK", 0)


def is_main() -> bool:
    """Whether this is the process that writes the run's folder and speaks.

    Example:
        >>> is_main()
        True
    """
    return process_index() == 0


def asks_for_sharding() -> bool:
    """Whether the launcher was told to use FSDP; Accelerate may still not take it up."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def _number(name: str, without: int) -> int:
    said = os.environ.get(name, str(without))
    if not said.isdecimal():
        raise ValueError(
            f"the variable {name}={said!r} should be a number, set by accelerate launch: unset it "
            "to run one process"
        )
    return int(said)

"""The device of a command's run: here, since this is the lowest room that knows torch."""

import torch

from mesotron.runs.processes import local_index


def choose_device(name: str, threads: int | None = None) -> torch.device:
    """The device that a config asks for; also sets torch's number of threads.

    Args:
        name: auto, cpu or cuda.
        threads: CPU threads; torch's own choice if None.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads {threads} must be at least 1")
        torch.set_num_threads(threads)
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but torch sees no CUDA device: use cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    # Of several processes each has a GPU of its own.
    return torch.device(name, local_index()) if name == "cuda" else torch.device(name)


def name_device(device: torch.device) -> str:
    """A device as env.json names it: a GPU by its own name.

    Example:
        >>> name_device(torch.device("cpu"))
        'cpu'
    """
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

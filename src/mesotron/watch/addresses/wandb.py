"""wandb://ENTITY/PROJECT/RUN: the history of runs in W&B, by its public API."""

import os
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from mesotron.watch.address import MAX_RUNS, address, write_history

TIMEOUT = 30  # seconds of one request
PAGE = 1000  # rows of one request
QUIET = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


@address(
    "wandb",
    form="ENTITY/PROJECT[/RUN]",
    about="a run of W&B by its id, or the newest 50 of a project, with your login",
    extra="wandb",
)
def wandb(place: str, folder: Path) -> Path:
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)

    client: Any = import_module("wandb")
    parts = place.strip("/").split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(f"wandb://{place:.80} must look like wandb://entity/project/run")

    path = "/".join(parts)
    try:
        api = client.Api(timeout=TIMEOUT)
        if len(parts) == 3:
            return save(api.run(path), folder)

        runs = api.runs(path, order="-created_at", per_page=MAX_RUNS)
        for run in islice(runs, MAX_RUNS):
            save(run, folder)
    except (client.errors.Error, TimeoutError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"wandb://{path} cannot be read: {reason:.300}") from error

    return folder


def save(run: Any, folder: Path) -> Path:
    return write_history(folder, run.name or run.id, run.scan_history(page_size=PAGE))

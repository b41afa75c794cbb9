"""hf://OWNER/NAME: the logs in a repository of the Hugging Face hub, by its own client."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from mesotron.watch.address import address
from mesotron.watch.reader import MAX_FILE

KINDS = {"datasets": "dataset", "models": "model", "spaces": "space"}
PLACE = re.compile(
    r"(?:(?P<kind>datasets|models|spaces)/)?(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>[\w.-]+))?(?:/(?P<inside>.+?))?/*"
)
# What logs of a repository are called.
LOGS = (
    "trainer_state.json",
    "*.jsonl",
    "*.wandb",
    "events.out.tfevents.*",
    "*metrics*.csv",
    "*metrics*.parquet",
    "*.db",
)
MAX_FILES = 200
MAX_TOTAL = 2**30
TIMEOUT = 30  # seconds of the list of files


@address(
    "hf",
    form="[datasets/]OWNER/NAME[@REVISION][/PATH]",
    about="the logs in a repository of the hub, or a file or folder of it",
    extra="hub",
)
def hf(place: str, folder: Path) -> Path:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    match = PLACE.fullmatch(place)
    if match is None or ".." in place.split("/"):
        raise ValueError(f"hf://{place:.80} must look like hf://owner/name/path")

    kind = KINDS[match["kind"] or "models"]
    where = {"repo_id": match["repository"], "repo_type": kind, "revision": match["revision"]}
    try:
        info: Any = HfApi().repo_info(**where, files_metadata=True, timeout=TIMEOUT)
        for name in choose(info.siblings or (), match["inside"] or "", place):
            hf_hub_download(filename=name, local_dir=folder, **where)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"hf://{place:.80} cannot be read: {reason:.300}") from error

    # The client keeps its notes beside the files, in a folder that the watch does not search.
    return folder / (match["inside"] or "")


def choose(files: Sequence[Any], inside: str, place: str) -> list[str]:
    """The logs among the files of a repository: the named one, or all below a folder."""
    sizes = {file.rfilename: file.size or 0 for file in files}
    if inside in sizes:
        names = [inside]
    else:
        below = f"{inside}/" if inside else ""
        names = [name for name in sizes if name.startswith(below) and is_log(name)]
        names = without_earlier(names)

    if not names:
        raise ValueError(f"hf://{place:.80} has no log: name a file of the repository")
    if len(names) > MAX_FILES or sum(sizes[name] for name in names) > min(MAX_TOTAL, MAX_FILE):
        raise ValueError(f"hf://{place:.80} has too many logs: name a folder or a file in it")

    return names


def is_log(name: str) -> bool:
    path = PurePosixPath(name)
    is_plain = not path.is_absolute() and ".." not in path.parts
    return is_plain and any(path.match(pattern) for pattern in LOGS)


def without_earlier(names: list[str]) -> list[str]:
    """The files without the states of checkpoints that a later one holds too."""
    latest: dict[str, tuple[int, str]] = {}
    kept = []
    for name in names:
        match = re.fullmatch(r"(.*?)checkpoint-(\d+)/trainer_state\.json", name)
        if match is None:
            kept.append(name)
            continue

        step = int(match[2])
        latest[match[1]] = max(latest.get(match[1], (-1, "")), (step, name))

    for above, (_, name) in latest.items():
        if f"{above}trainer_state.json" not in kept:
            kept.append(name)

    return kept

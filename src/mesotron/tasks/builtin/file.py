"""The user's own data, by the columns that they have."""

from mesotron.config import TaskConfig
from mesotron.tasks.own import read_own
from mesotron.tasks.registry import Loaded, task


@task(
    "file",
    about="`--data`: `.jsonl`, `.json`, `.csv`, `.parquet`, a folder, or a hub name",
    gold="`--data.columns gold=NAME`; an empty name means no gold",
)
def file(config: TaskConfig) -> Loaded:
    train, held_out, _ = read_own(config)
    return train, held_out

"""A run folder of our own, by its metrics.jsonl."""

from contextlib import suppress
from pathlib import Path

from mesotron.runs.files import read_json
from mesotron.runs.links import refuse_links
from mesotron.watch.formats.jsonl import JsonLines
from mesotron.watch.reader import log_format
from mesotron.watch.rows import step_count


@log_format("run", about="A run folder of Mesotron")
class RunMetrics(JsonLines):
    rank = 10
    suffixes = ()

    @classmethod
    def recognizes(cls, head: bytes) -> bool:
        return False

    @classmethod
    def run_files(cls, folder: Path) -> list[Path]:
        file = folder / "metrics.jsonl"
        if not file.is_file():
            return []

        if (folder / "config.json").is_file() and (folder / "env.json").is_file():
            refuse_links(folder)

        return [file]

    def planned_steps(self) -> float | None:
        with suppress(ValueError, OSError):
            return step_count(read_json(self.path.with_name("config.json")).get("steps"))

        return None

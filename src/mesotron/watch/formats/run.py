"""A run folder of our own, by its metrics.jsonl."""

from pathlib import Path

from mesotron.watch.formats.jsonl import JsonLines
from mesotron.watch.reader import log_format


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
        return [file] if file.is_file() else []

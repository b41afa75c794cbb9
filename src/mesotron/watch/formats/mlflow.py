"""Run folders of MLflow's file store: `metrics/<name>` has lines of time, value and step."""

from itertools import islice
from pathlib import Path

from mesotron.watch.reader import MAX_DOCUMENT, WholeReader, log_format
from mesotron.watch.rows import Row, to_number

MAX_FILES = 5000  # metrics of one run


@log_format("mlflow", about="A folder of `mlruns/`")
class Mlflow(WholeReader):
    rank = 40

    @classmethod
    def run_files(cls, folder: Path) -> list[Path]:
        is_run = (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()
        return [folder] if is_run else []

    @classmethod
    def size(cls, path: Path) -> int:
        return sum(file.stat().st_size for file in metric_files(path))

    def finish(self) -> list[Row]:
        if self.offset > MAX_DOCUMENT:
            raise ValueError(f"{self.path} has more than {MAX_DOCUMENT} bytes of metrics")

        rows: dict[float, Row] = {}
        for file in metric_files(self.path):
            name = file.relative_to(self.path / "metrics").as_posix()
            for step, value in _points(file):
                row = rows.setdefault(step, {"step": step})
                row[name] = value

        return [rows[step] for step in sorted(rows)]


def metric_files(folder: Path) -> list[Path]:
    entries = islice((folder / "metrics").rglob("*"), MAX_FILES)
    return sorted(entry for entry in entries if entry.is_file())


def _points(file: Path) -> list[tuple[float, float]]:
    """Step and value of each line that has both."""
    points = []
    text = file.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        cells = line.split()[:3]
        if len(cells) < 3:
            continue

        value = to_number(cells[1])
        step = to_number(cells[2])
        if value is not None and step is not None:
            points.append((step, value))

    return points

"""Config of the report."""

from dataclasses import dataclass, field
from pathlib import Path

from mesotron.config.fields import POSITIONAL


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Write a run, several runs or a tournament as one HTML page that needs nothing else."""

    paths: tuple[Path, ...] = field(default=(Path("runs/last"),), metadata=POSITIONAL)
    """Run folders, which are drawn over one another; or the folder of one tournament.
    A folder of runs stands for all of them. Logs that mesotron watch reads are read too."""

    out: Path | None = None
    """The HTML file; report.html in the run's or tournament's folder if not given,
    and in this folder for several runs."""

    live: bool = False
    """Write it again while the runs go on; the page in the browser follows by itself."""

    every: float = 10.0
    """Seconds between two looks with --live."""

"""One run of a comparison in a process of its own: `python -m mesotron.compare.cell FILE`."""

import sys
from pathlib import Path
from typing import Any

from mesotron.compare.kinds import KINDS
from mesotron.config import base
from mesotron.runs.files import read_json, write_json
from mesotron.runs.trust import code_names, search_working_folder


def cell_command(file: Path, kind: str, config: Any) -> list[str]:
    """The command that runs a config, which is written to a file."""
    write_json(file, {"kind": kind, "config": base.to_plain(config)})
    return [sys.executable, "-P", "-m", "mesotron.compare.cell", str(file)]


def run_cell(file: Path) -> int:
    values = read_json(file)
    kind = next(kind for kind in KINDS if kind.name == values["kind"])

    config: Any = base.from_plain(kind.config_type, values["config"], str(file))
    if code_names(config):  # of the tournament's own command: `Progress.settings` checked it
        search_working_folder()

    return kind.run(config)


if __name__ == "__main__":
    sys.exit(run_cell(Path(sys.argv[1])))

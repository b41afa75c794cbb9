"""The process of one cell: reads the config that the tournament wrote, and runs it.

    python -m mesotron.compare.cell cells/ID.json

What it prints is the cell's log; an error's last line is what the tournament says of it.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mesotron.config import SnakeConfig, TrainConfig, VlaTrainConfig
from mesotron.config.base import from_plain, to_plain
from mesotron.runs.files import write_json

COMMANDS: dict[str, tuple[type, str]] = {
    "rlvr": (TrainConfig, "mesotron.rlvr.train:run"),
    "ppo": (SnakeConfig, "mesotron.ppo:run"),
    "vla": (VlaTrainConfig, "mesotron.vla.command:run_train"),
}


def write_settings(path: Path, kind: str, config: Any) -> list[str]:
    """Write a cell's config, and return the words that start its process."""
    write_json(path, {"kind": kind, "config": to_plain(config)})
    return [sys.executable, "-m", "mesotron.compare.cell", str(path)]


def main(path: Path) -> int:
    """Run the config that a file holds; the kind's own exit code."""
    values = json.loads(path.read_text(encoding="utf-8"))
    config_type, target = COMMANDS[values["kind"]]
    module, function = target.split(":")
    config = from_plain(config_type, values["config"], str(path))
    return getattr(import_module(module), function)(config)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

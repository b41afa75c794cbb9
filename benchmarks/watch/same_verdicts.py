"""The JSON of `mesotron watch` on every log of a folder, to compare before and after a change.

    python -m benchmarks.watch.same_verdicts FOLDER before.json.gz

The first call, with the code before, writes the file; a later one, with the code after, names each
log whose JSON differs, and exits with 1 if there is one.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks._lib.results import read_json, write_json
from mesotron.config import WatchConfig
from mesotron.runs.console import SafeConsole
from mesotron.watch.alerts import Alerts
from mesotron.watch.command import to_json, watch_one


def records_of(folder: Path) -> dict[str, Any]:
    """The JSON of each log, or why it cannot be read, by its path in the folder."""
    console = SafeConsole(quiet=True)
    config = WatchConfig(path=folder)

    records: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.jsonl.gz")):
        name = str(path.relative_to(folder))
        try:
            record = watch_one(config, path, console, Alerts(())).record()
        except ValueError as error:
            records[name] = str(error).replace(str(folder), "")
            continue

        record.pop("path")
        records[name] = json.loads(to_json(record))

    return records


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the watch's JSON before and after")
    parser.add_argument("folder", type=Path)
    parser.add_argument("before", type=Path, help="written if it does not exist")
    given = parser.parse_args()

    now = records_of(given.folder)
    if not given.before.exists():
        write_json(now, given.before)
        print(f"{given.before}: {len(now)} logs")
        return 0

    before = read_json(given.before)
    changed = [
        name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)
    ]
    for name in changed:
        print(f"changed: {name}")

    print(f"{len(now)} logs, {len(changed)} changed")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())

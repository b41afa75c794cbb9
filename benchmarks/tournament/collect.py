"""Take the small files of a tournament into this folder, and write its page.

python -m benchmarks.tournament.collect runs/compare-arith --machine "2 quiet aarch64 cores"
"""

import argparse
import shutil
from pathlib import Path

from mesotron.compare.record import NAME, read_tournament
from mesotron.runs.console import spell_time

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", required=True, help="in words")
    parser.add_argument("--name", help="of the page; the recipe's if not given")
    words = parser.parse_args()
    record = read_tournament(words.folder)
    name = words.name or record.recipe
    for file in (NAME, "report.html"):
        shutil.copy(words.folder / file, HERE / f"{name}.{file}")
    command = " ".join(["mesotron", *record.environment["command"]])
    told = (words.folder / "standings.md").read_text(encoding="utf-8").split("\n", 2)[2]
    page = [
        f"# {record.recipe}: {len(record.contenders)} contenders",
        "",
        f"    {command}",
        "",
        f"{words.machine}; {len(record.cells)} runs, {record.workers} at once, in "
        f"{spell_time(record.wall)}. mesotron {record.environment['packages'].get('mesotron')}, "
        f"commit {record.environment['commit']}. The page with curves is "
        f"[{name}.report.html]({name}.report.html), everything as data "
        f"[{name}.{NAME}]({name}.{NAME}).",
        told,
    ]
    (HERE / f"{name}.md").write_text("\n".join(page), encoding="utf-8")
    print(HERE / f"{name}.md")


if __name__ == "__main__":
    main()

"""A vision-language-action policy: demonstrations, behavior cloning, closed-loop evaluation.

    python examples/vla_blocks.py

Two objects, 24 pixels, a small policy: some minutes on a CPU core. Needs the extra `vla`.
"""

import sys
from pathlib import Path

from mesotron import cli


def main(folder: Path, episodes: int = 300, steps: int = 500, scenes: int = 100) -> None:
    demos = str(folder / "demos")
    cli.main(["vla", "demos", "--out", demos, "--episodes", str(episodes)])

    words = ["vla", "train", demos, "--policy.size", "ci", "--steps", str(steps), "--lr", "1e-2"]
    cli.main([*words, "--out", str(folder / "run")])

    # Other cameras, and an instruction in other words.
    words = ["vla", "eval", str(folder / "run"), "--episodes", str(scenes)]
    cli.main([*words, "--perturb", "camera", "wording"])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "vla_blocks"))

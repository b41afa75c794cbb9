"""Where the time of a GRPO step goes, for plain TRL and for each option of ours added in turn.

    python -m benchmarks.speedrun.phases --out results/phases.json --seconds 60

Milliseconds of a step: first as it is, then by phase with the GPU waited for around each, which
makes the whole slower than it is. On a CPU: add --small.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.speedrun.children import Children, Results
from benchmarks.speedrun.entries import LADDER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/phases.json"))
    parser.add_argument("--model", help="a model folder or .gguf file instead of smollm2")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--names", nargs="+", default=list(LADDER))
    parser.add_argument("--set", nargs="*", default=[], help="NAME=VALUE settings of all")
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a random model, on a CPU")
    args = parser.parse_args()

    deadline = time.perf_counter() + args.seconds
    with (
        tempfile.TemporaryDirectory() as scratch,
        Children("benchmarks.speedrun.stopwatch:measure") as children,
    ):
        given = {
            "model": args.model,
            "small": args.small,
            "common": args.set,
            "warm": args.warm,
            "count": args.count,
        }
        results = Results(args.out)
        for name in args.names:
            left = deadline - time.perf_counter()
            if left < 3:
                break
            results.put(name, children.run(Path(scratch) / name, left, name=name, given=given))


if __name__ == "__main__":
    main()

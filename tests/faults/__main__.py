"""`make faults`: attack the product and print a table. See benchmarks/faults/README.md."""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

# What the children need, imported once. Jumanji, and with it PPO's own modules, would start JAX's
# threads.
IMPORTS = (
    "mesotron.recipes",
    "mesotron.report.command",
    "mesotron.rlvr.session",
    "torch",
    "mesotron.rlvr.sft",
    "mesotron.vla.session",
    "jax",
    "optax",
    "chex",
    "flax.linen",
    "orbax.checkpoint",
    "matplotlib.figure",
)


TRAIN_ONLY = {"misdeeds", "budgets", "kills"}  # parts that may need the first three alone


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=ROWS,
        default=list(ROWS),
    )

    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--damage",
        type=int,
        default=28,
        help="damaged files",
    )

    parser.add_argument(
        "--inputs",
        type=int,
        default=6000,
        help="fuzzed inputs",
    )

    parser.add_argument(
        "--each",
        type=int,
        default=2000,
        help="inputs for each reader of other people's files",
    )

    parser.add_argument(
        "--steps",
        type=int,
        default=2000,
        help="steps of the soak",
    )

    parser.add_argument(
        "--minutes",
        type=float,
        default=60,
        help="no new kills after this",
    )

    parser.add_argument("--cases", nargs="*", help="names of the runs to kill (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file whose sections are replaced")
    args = parser.parse_args()

    # Before the libraries are imported.
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "JAX_COMPILATION_CACHE_DIR": str(root / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    from faults.kills import REWARD, fork, make_demos, wait
    from support.rlvr_tiny import save_arith_model

    others = [name for name in args.cases or ["vla"] if name.startswith(("vla", "ppo"))]
    trains_only = set(args.only) <= TRAIN_ONLY and not others
    for name in IMPORTS[:3] if trains_only else IMPORTS:
        import_module(name)

    model = root / "model"
    made = [lambda: save_arith_model(model)]
    if not trains_only:
        made.append(lambda: make_demos(root / "demos"))

    for work in made:
        ended = wait(fork(lambda work=work: 0 * bool(work()), root / "log", root), root / "log")
        if ended.code != 0:
            raise RuntimeError(ended.text)

    (root / "earned.py").write_text(REWARD)
    found = {}
    for name in args.only:
        began = time.monotonic()
        found[name] = import_module(f"faults.{name}").attack(args, root, model)
        found[name]["minutes"] = round((time.monotonic() - began) / 60, 1)

        for line in found[name].get("failures", []):
            print(f"FAILED {name}: {line}", flush=True)

        if args.out is not None:
            if args.out.exists():
                saved = json.loads(args.out.read_text())
            else:
                saved = {}

            args.out.write_text(json.dumps(saved | found, indent=1) + "\n")

    print(table(found))
    good = all(one["good"] for one in found.values())
    if good:
        shutil.rmtree(root)

    return 0 if good else 1


ROWS = {
    "kills": "| kills of {cases} kinds of run, {by_kind} | {kills} in {runs} runs | {equal} runs "
    "bit-equal |",
    "damage": "| damaged files, full disks, two processes, a full pipe | {runs} | {equal} bit-equal"
    " or one sentence |",
    "fuzz": "| fuzzed inputs | {inputs} | {tracebacks} tracebacks |",
    "readers": "| inputs for {readers} readers, outside and processes watched | {inputs} | {bad} "
    "that ran, touched anything outside, or ended in a traceback |",
    "gifts": "| named cases of a stranger's folder: links, secrets, headers, templates | {runs} | "
    "{equal} one sentence, nothing else touched |",
    "strangers": "| attempts by a stranger's files | {runs} | {executed} executed |",
    "misdeeds": "| rewards that raise, hang or change the process | {runs} | {equal} keep the limit"
    " and every step |",
    "budgets": "| budgets and time limits | {runs} | at most {most_steps_over} steps over; before "
    "the first step {most_seconds_over_before_the_first_step} s |",
    "soak": "| soak of {steps} steps | {kills} kills | different files: {different}, memory "
    "{memory_mib[0]} to {memory_mib[1]} MiB, files {files[0]} to {files[1]} |",
}


def table(found: dict[str, Any]) -> str:
    rows = []
    for name, row in ROWS.items():
        if name in found:
            rows.append(row.format(**found[name]))

    return "\n".join(["| attack | tried | held |", "|---|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(main())

"""`make faults`: attack the product and print a table. See benchmarks/faults/README.md."""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SECTIONS = ("kills", "damage", "strangers", "budgets", "fuzz", "soak")


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--damage", type=int, default=28, help="damaged files")
    parser.add_argument("--inputs", type=int, default=6000, help="fuzzed inputs")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the soak")
    parser.add_argument("--minutes", type=float, default=60, help="no new kills after this")
    parser.add_argument("--cases", nargs="*", help="names of the runs to kill (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file whose sections are replaced")
    args = parser.parse_args()
    # Before the libraries are imported.
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                   "JAX_COMPILATION_CACHE_DIR": str(root / "jax"),
                   "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                   "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}  # fmt: skip
    from faults.kills import REWARD, fork, import_everything, make_demos, wait
    from support.rlvr_tiny import save_arith_model

    import_everything()
    model = root / "model"
    for work in (lambda: save_arith_model(model), lambda: make_demos(root / "demos")):
        ended = wait(fork(lambda work=work: 0 * bool(work()), root / "log", root), root / "log")
        if ended.code != 0:
            raise RuntimeError(ended.text)
    (root / "earned.py").write_text(REWARD)
    found = {}
    for name in args.only:
        began = time.monotonic()
        found[name] = globals()[f"run_{name}"](args, root, model)
        found[name]["minutes"] = round((time.monotonic() - began) / 60, 1)
        for line in found[name].get("failures", []):
            print(f"FAILED {name}: {line}", flush=True)
        if args.out is not None:
            saved = json.loads(args.out.read_text()) if args.out.exists() else {}
            args.out.write_text(json.dumps(saved | found, indent=1) + "\n")
    print(table(found))
    good = all(one["good"] for one in found.values())
    if good:
        shutil.rmtree(root)
    return 0 if good else 1


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_kills(args: Any, root: Path, model: Path) -> dict[str, Any]:
    from faults.kills import Tally, attack, make_cases

    cases = make_cases(model, root / "demos")
    cases = [case for case in cases if not args.cases or case.name in args.cases]
    tally, end = Tally(), time.monotonic() + args.minutes * 60
    for name, tally in attack(root, cases, seed=args.seed, kills=args.kills,
                              until=lambda: time.monotonic() > end):  # fmt: skip
        say(f"{tally.kills} kills, {tally.equal} of {tally.runs} runs equal ({name})")
    counts = {name: getattr(tally, name) for name in ("kills", "by_kind", "still")}
    return record(tally) | counts | {"cases": len(cases)}


def run_damage(args: Any, root: Path, model: Path) -> dict[str, Any]:
    from faults import damage
    from faults.kills import Tally, Victim, make_cases

    tally, rng = Tally(), random.Random(args.seed)
    cases = {case.name: case for case in make_cases(model, None)}
    victim = Victim(cases["grpo off"], root / "damage", root)
    damage.block_pipe(victim, tally)
    damage.run_twice(victim, tally)
    for limit in (600, 3000, 9000, 20_000):
        damage.fill_disk(victim, limit, tally)
    damage.damage_files(victim, rng, args.damage, tally)
    return record(tally)


def run_strangers(args: Any, root: Path, model: Path) -> dict[str, Any]:
    from faults.kills import Tally
    from faults.strangers import attempt_all

    tally = Tally()
    attempt_all(root, model, tally, say)
    return record(tally) | {"executed": tally.kills}


def run_budgets(args: Any, root: Path, model: Path) -> dict[str, Any]:
    from faults.budgets import spend_all
    from faults.kills import Tally

    tally = Tally()
    settings = spend_all(root, model, tally)
    beyond = [one["over"] / one["step_seconds"] for one in settings if one["steps"] > 0]
    before = [one["over"] for one in settings if one["steps"] <= 0]
    return record(tally) | {
        "settings": settings, "most_steps_over": round(max([*beyond, 0.0]), 2),
        "most_seconds_over_before_the_first_step": round(max([*before, 0.0]), 3),
    }  # fmt: skip


def run_fuzz(args: Any, root: Path, model: Path) -> dict[str, Any]:
    from faults import fuzz

    inputs, failures = {}, []
    for name, target in fuzz.TARGETS.items():
        try:
            inputs[name] = fuzz.fuzz(name, round(args.inputs * target.share), seed=args.seed)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            notes = " ".join(getattr(error, "__notes__", ()))
            failures.append(f"{name}: {type(error).__name__}: {error} {notes}"[:2000])
            say(failures[-1])
        say(f"{name}: {inputs.get(name, 'a traceback')}")
    return {"inputs": sum(inputs.values()), "by_target": inputs, "tracebacks": len(failures),
            "failures": failures, "good": not failures}  # fmt: skip


def run_soak(args: Any, root: Path, model: Path) -> dict[str, Any]:
    from faults.soak import soak

    return soak(root, model, args.steps, kills=12, seed=args.seed)


def record(tally: Any) -> dict[str, Any]:
    return {"runs": tally.runs, "equal": tally.equal, "failures": tally.failures,
            "good": not tally.failures}  # fmt: skip


def table(found: dict[str, Any]) -> str:
    lines = ["| attack | tried | held |", "|---|---|---|"]
    if one := found.get("kills"):
        kinds = ", ".join(f"{number} at {kind}s" for kind, number in one["by_kind"].items())
        lines.append(f"| kills of {one['cases']} kinds of run ({kinds}) | {one['kills']} in "
                     f"{one['runs']} runs | {one['equal']} runs bit-equal |")  # fmt: skip
    if one := found.get("damage"):
        lines.append(f"| damaged files, full disks, two processes, a full pipe | {one['runs']} | "
                     f"{one['equal']} bit-equal or one sentence |")  # fmt: skip
    if one := found.get("fuzz"):
        lines.append(f"| fuzzed inputs | {one['inputs']} | {one['tracebacks']} tracebacks |")
    if one := found.get("strangers"):
        lines.append(f"| attempts by a stranger's files | {one['runs']} | {one['executed']} "
                     "executed |")  # fmt: skip
    if one := found.get("budgets"):
        lines.append(f"| budgets and time limits | {one['runs']} | at most "
                     f"{one['most_steps_over']} steps over; before the first step "
                     f"{one['most_seconds_over_before_the_first_step']} s |")  # fmt: skip
    if one := found.get("soak"):
        memory, files = one["memory_mib"], one["files"]
        lines.append(f"| soak of {one['steps']} steps | {one['kills']} kills | "
                     f"{'different' if one['different'] else 'bit-equal'}, memory {memory[0]} to "
                     f"{memory[1]} MiB, files {files[0]} to {files[1]} |")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""Trains the runs of a list, each as one `mesotron train` process, and packs them.

    python -m benchmarks.watch.corpus held_out rescues --workers 2 --pack benchmarks/watch

Finished runs are not made again, stopped ones are continued. A packed file has every number that
the runs logged, rounded to six digits. Held-out runs are made by `labelled.py` and carry what it
measured under "labels", apart from the metrics; what became of a run is for `labels.py` to say.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks._lib.results import read_json, write_json
from benchmarks.watch.held_out_runs import held_out_runs
from benchmarks.watch.runs import Run, rescue_runs, tuning_runs
from mesotron.runs.files import read_rows

HERE = Path(__file__).parent
EVAL_EVERY = 10
# The runs of the tuning corpus were evaluated on fewer problems than the recipe has now.
TUNING_PROBLEMS = 100
# Seconds for a stopped run to save its checkpoint.
SAVING = 20
LISTS: dict[str, Callable[[], list[Run]]] = {
    "tuning": tuning_runs,
    "held_out": held_out_runs,
    "rescues": rescue_runs,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make runs of the corpus")
    add = parser.add_argument
    add("lists", nargs="+", choices=LISTS, help="which, in this order")
    add("--out", type=Path, default=Path("runs/watch"), help="folder of the runs")
    add("--pack", type=Path, default=HERE, help="folder of the packed files")
    add("--workers", type=int, default=os.cpu_count(), help="runs at once")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--cpu-workers", type=int, default=0, help="more runs at once, on the CPU")
    add("--seconds", type=float, default=math.inf, help="stop, resumable, after")
    add("--only", nargs="+", default=[], help="settings by name")
    add("--steps", type=int, help="fewer than the settings say, to try it out")
    given = parser.parse_args()
    given.until = time.monotonic() + given.seconds

    jobs = [(kind, run) for kind in given.lists for run in wanted(kind, given.only)]
    devices: SimpleQueue[str] = SimpleQueue()
    for device in [given.device] * given.workers + ["cpu"] * given.cpu_workers:
        devices.put(device)

    with ThreadPoolExecutor(given.workers + given.cpu_workers) as pool:
        list(pool.map(lambda job: make(*job, devices, given), jobs))

    for kind in given.lists:
        pack(kind, wanted(kind, given.only), given)


def wanted(kind: str, names: Sequence[str]) -> list[Run]:
    """The runs of a list, or those with these settings."""
    return [run for run in LISTS[kind]() if not names or run.setting.name in names]


def pack(kind: str, runs: list[Run], given: argparse.Namespace) -> None:
    """One file with every finished run of a list."""
    packed = []
    for run in runs:
        found = collect(run, given.out / kind / run.name)
        if found:
            packed.append(found)

    path = given.pack / f"{kind}.json.gz"
    write_json(packed, path)
    print(f"{len(packed)} of {len(runs)} runs in {path}, {path.stat().st_size:,} bytes")


def make(kind: str, run: Run, devices: SimpleQueue[str], given: argparse.Namespace) -> None:
    """Train one run unless it is finished or the time is up."""
    path = given.out / kind / run.name
    left = given.until - time.monotonic()
    if (path / "exit_code").exists() or left < 5:
        return

    device = devices.get()
    began = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)

    typed = command(kind, run, path, device, given.steps)
    with path.with_suffix(".log").open("a") as log:
        process = subprocess.Popen(typed, stdout=log, stderr=log, env=environment())
        try:
            code = process.wait(None if math.isinf(left) else left)
        except subprocess.TimeoutExpired:
            end(process)
            return
        finally:
            devices.put(device)

    if path.exists():
        (path / "exit_code").write_text(str(code))

    print(f"{run.name}: {device}, exit {code}, {time.monotonic() - began:.0f} s", flush=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Let a run save a checkpoint and exit; kill it if it does not."""
    process.terminate()
    try:
        process.wait(SAVING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def command(kind: str, run: Run, path: Path, device: str, steps: int | None = None) -> list[str]:
    """The run's command line; resumes a stopped one."""

    if kind == "held_out":
        program = [str(HERE / "labelled.py")]
    else:
        program = ["-m", "mesotron"]

    train = [sys.executable, *program, "train"]
    if (path / "config.json").exists():
        return [*train, "--resume", str(path)]

    flags = f"--out {path} --seed {run.seed} --steps {steps or run.setting.steps} --threads 1"
    flags += f" --device {device} --model.dtype float32 --eval-every {EVAL_EVERY}"
    if kind == "tuning":
        flags += f" --task.num-eval {TUNING_PROBLEMS}"

    if kind == "rescues":
        flags += " --guard rollback --save-every 5"
    else:
        flags += " --guard off --save-every 0"
    return [*train, *run.setting.flags.split(), *flags.split()]


def environment() -> dict[str, str]:
    """This environment with `gamed_rewards` importable, one thread and no network."""
    paths = str(HERE)
    if os.environ.get("PYTHONPATH"):
        paths += os.pathsep + os.environ["PYTHONPATH"]

    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    return os.environ | own


def collect(run: Run, path: Path) -> dict[str, Any] | None:
    """One run as the packed file holds it; None if it is not finished."""
    rows = read_rows(path / "metrics.jsonl")
    if not (path / "exit_code").exists() or not rows:
        return None

    config = read_json(path / "config.json")
    before = read_json(path / "before.json")
    after = None
    if (path / "after.json").exists():
        after = read_json(path / "after.json")

    return {
        "name": run.name,
        "setting": run.setting.name,
        "kind": run.setting.kind,
        "seed": run.seed,
        "flags": run.setting.flags,
        "device": config["device"],
        "exit_code": int((path / "exit_code").read_text()),
        "prompts": config["rollout"]["prompts"],
        "before": before["greedy"]["strict"]["value"],
        "after": after and after["greedy"]["strict"]["value"],
        "unchanged": after and unchanged(before, after),
        "labels": read_rows(path / "labels.jsonl"),
        "columns": columns_of(rows),
        "guarded": [row for row in read_rows(path / "events.jsonl") if row["kind"] != "watch"],
    }


def columns_of(rows: Sequence[dict[str, float]]) -> dict[str, list[float | None]]:
    """Every number that was logged, None where a row has none."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    return {name: [rounded(row.get(name)) for row in rows] for name in names}


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Share of the held-out problems whose greedy completion is the same as at the start."""
    first = {one["id"]: one["completion"] for one in before["transcripts"]}
    same = [first[one["id"]] == one["completion"] for one in after["transcripts"]]
    return sum(same) / len(same)


def rounded(value: float | None) -> float | None:
    """Six digits; NaN and infinities are kept."""
    return value if value is None else float(f"{value:.6g}")


if __name__ == "__main__":
    main()

"""Make the corpus: every run of `runs.py` as one `mesotron train` in a process of its own.

    python benchmarks/watch/corpus.py --workers 2
    python benchmarks/watch/corpus.py --workers 2 --rollback --pack benchmarks/watch/rescues.json.gz

Finished runs are not made again, stopped ones are continued. The packed file has every number that
the runs logged, rounded to six digits, and no label: `labels.py` gives those.
"""

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from runs import Run, corpus_runs, rescue_runs

from mesotron.runs.lines import read_rows

HERE = Path(__file__).parent
NUM_EVAL, EVAL_EVERY = 100, 10


def main() -> None:
    words = argparse.ArgumentParser(description="Make the corpus")
    words.add_argument("--out", type=Path, default=Path("runs/watch"), help="folder of the runs")
    words.add_argument("--pack", type=Path, default=HERE / "corpus.json.gz")
    words.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at once")
    words.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    words.add_argument("--cpu-workers", type=int, default=0, help="more runs at once, on the CPU")
    words.add_argument("--seconds", type=float, default=math.inf, help="stop, resumable, after")
    words.add_argument("--only", nargs="+", default=[], help="settings by name")
    words.add_argument("--steps", type=int, help="fewer than the settings say, to try it out")
    words.add_argument("--rollback", action="store_true", help="the rescues instead")
    given = words.parse_args()
    given.out = given.out / "rollback" if given.rollback else given.out
    given.until = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    runs = rescue_runs() if given.rollback else corpus_runs()
    runs = [run for run in runs if not given.only or run.setting.name in given.only]
    devices: SimpleQueue[str] = SimpleQueue()
    for device in [given.device] * given.workers + ["cpu"] * given.cpu_workers:
        devices.put(device)
    with ThreadPoolExecutor(given.workers + given.cpu_workers) as pool:
        list(pool.map(lambda run: make(run, devices, given), runs))
    packed = [found for run in runs if (found := collect(run, given.out / run.name))]
    with gzip.open(given.pack, "wt", encoding="utf-8", compresslevel=9) as file:
        json.dump(packed, file)
    print(f"{len(packed)} of {len(runs)} runs in {given.pack}, {given.pack.stat().st_size:,} bytes")


def make(run: Run, devices: SimpleQueue[str], given: argparse.Namespace) -> None:
    """Train one run unless it is finished; past the limit of time nothing is begun."""
    path, left = given.out / run.name, given.until - time.monotonic()
    if (path / "exit_code").exists() or left < 5:
        return
    device, began = devices.get(), time.monotonic()
    typed = command(run, path, device, given)
    with (given.out / f"{run.name}.log").open("a") as log:
        process = subprocess.Popen(typed, stdout=log, stderr=log, env=environment())
        try:
            code = process.wait(None if math.isinf(left) else left)
        except subprocess.TimeoutExpired:
            process.terminate()  # saves a checkpoint and exits
            process.wait()
            return
        finally:
            devices.put(device)
    if path.exists():
        (path / "exit_code").write_text(str(code))
    print(f"{run.name}: {device}, exit {code}, {time.monotonic() - began:.0f} s", flush=True)


def command(run: Run, path: Path, device: str, given: argparse.Namespace) -> list[str]:
    """The run as it would be typed; a stopped one is continued."""
    train = [sys.executable, "-m", "mesotron", "train"]
    if (path / "config.json").exists():
        return [*train, "--resume", str(path)]
    guard = ["rollback", "--save-every", "5"] if given.rollback else ["off", "--save-every", "0"]
    flags = f"--out {path} --seed {run.seed} --steps {given.steps or run.setting.steps} --threads 1"
    flags += f" --device {device} --model.dtype float32"
    flags += f" --task.num-eval {NUM_EVAL} --eval-every {EVAL_EVERY}"
    return [*train, *run.setting.flags.split(), *flags.split(), "--guard", *guard]


def environment() -> dict[str, str]:
    """This one, with `gamed_rewards` to be found and one thread for each run."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def collect(run: Run, path: Path) -> dict[str, Any] | None:
    """One run as the packed file holds it; None if it is not finished."""
    rows = read_rows(path / "metrics.jsonl")
    if not (path / "exit_code").exists() or not rows:
        return None
    config = json.loads((path / "config.json").read_text())
    before = json.loads((path / "before.json").read_text())
    after = path / "after.json"
    after = json.loads(after.read_text()) if after.exists() else None
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        "name": run.name,
        "setting": run.setting.name,
        "kind": run.setting.kind,
        "seed": run.seed,
        "half": run.half,
        "flags": run.setting.flags,
        "device": config["device"],
        "exit_code": int((path / "exit_code").read_text()),
        "prompts": config["rollout"]["prompts"],
        "before": before["greedy"]["strict"]["value"],
        "after": after and after["greedy"]["strict"]["value"],
        "unchanged": after and unchanged(before, after),
        "columns": {name: [rounded(row.get(name)) for row in rows] for name in names},
        "guarded": [row for row in read_rows(path / "events.jsonl") if row["kind"] != "watch"],
    }


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Share of the held-out problems whose greedy completion is the same as at the start."""
    first = {one["id"]: one["completion"] for one in before["transcripts"]}
    same = [first[one["id"]] == one["completion"] for one in after["transcripts"]]
    return sum(same) / len(same)


def rounded(value: float | None) -> float | None:
    """Six digits; NaN and infinities stay what they are."""
    return value if value is None else float(f"{value:.6g}")


if __name__ == "__main__":
    main()

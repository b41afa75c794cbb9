"""How large a report of many long runs is, how long it takes to write, and to open in a browser.

    python -m benchmarks.report.run --runs 20 --steps 2000 --out benchmarks/report/result.json

The runs are made up, with as many metrics as `mesotron train` logs; the browser is Debian's
chromium, headless. Numbers are of the machine that is named in the result.
"""

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from benchmarks._lib.results import write_json
from mesotron.config import TrainConfig
from mesotron.report import read_runs, render_runs
from mesotron.runs import RunFolder

NAMED = (
    "reward",
    "reward_std",
    "facts/correct",
    "facts/formatted",
    "facts/correct_unformatted",
    "entropy",
    "entropy/trajectory_q1",
    "entropy/trajectory_q3",
    "groups/zero_signal",
    "groups/all_right",
    "groups/all_wrong",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "facts/truncated",
    "completions/repetition",
    "learning_rate",
    "optim/muon/update_rms",
    "optim/adamw/update_rms",
    "grad_norm",
    "grad_norm/auxiliary",
    "time/step",
    "time/rollout",
    "time/optimizer",
    "num_tokens",
)
SCROLL = """
    const done = arguments[0], loaded = performance.getEntriesByType('navigation')[0].loadEventEnd;
    const began = performance.now();
    document.getElementById('is-it-learning').scrollIntoView({behavior: 'instant'});
    const wait = () => {
      const paths = document.querySelectorAll('.plot path').length;
      if (paths) done({loaded, drawn: performance.now() - began, paths});
      else requestAnimationFrame(wait);
    };
    requestAnimationFrame(wait);
"""
OTHERS = tuple(f"other/{k}" for k in range(45))


def make(path: Path, steps: int, seed: int) -> Path:
    noise = random.Random(seed)
    run = RunFolder.create(path, TrainConfig(steps=steps, seed=seed), {"device": "cpu"})
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {name: noise.gauss(0.5, 0.1) for name in (*NAMED, *OTHERS)}
            file.write(json.dumps({"step": step, **row}) + "\n")

    words = [str(noise.random()) for _ in range(60)]
    sample = {
        "prompt": "What is 3 + 4?",
        "completion": " ".join(words) + " \\boxed{7}",
        "reward": 1.0,
        "advantage": 0.0,
    }
    for step in range(1, steps, steps // 50):
        run.append("samples", {"step": step, **sample})
    return path


def open_page(page: Path, times: int) -> dict[str, float]:
    """Milliseconds until the page is loaded, and to draw the charts of one screen: medians."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in ("--headless=new", "--no-sandbox", "--window-size=1440,1000"):
        options.add_argument(flag)

    found = []
    for _ in range(times):
        with webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver")) as driver:
            driver.get(page.as_uri())
            found.append(driver.execute_async_script(SCROLL))

    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--times", type=int, default=5, help="how often it is opened")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    given = parser.parse_args()

    with tempfile.TemporaryDirectory() as root:
        paths = [make(Path(root) / f"run-{k}", given.steps, k) for k in range(given.runs)]
        began = time.perf_counter()
        runs = read_runs(paths)
        page = Path(root) / "report.html"
        page.write_text(render_runs(runs), encoding="utf-8")

        result = {
            "runs": given.runs,
            "steps": given.steps,
            "metrics": len(NAMED) + len(OTHERS),
            "megabytes": page.stat().st_size / 1e6,
            "seconds_to_write": time.perf_counter() - began,
            "milliseconds_to_open": open_page(page, given.times),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": os.getloadavg()[0],
        }

    write_json(result, given.out, indent=2)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

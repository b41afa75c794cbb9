"""Trains a small language model with each optimizer, each at its own best rate.

    python -m benchmarks.training --quick
    python -m benchmarks.training --threads 1 --out result.json.gz --plot rates.png

Text, initial weights and data order are the same for each seed; every optimizer's rate is searched
(see `search`); optimizers are ranked by held-out loss over seeds with an interval. The result holds
for this model size and length only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
import tyro

from benchmarks._lib.console import describe, progress, show_table
from benchmarks._lib.contenders import CONTENDERS, check_names
from benchmarks._lib.results import beside, write_result
from benchmarks._lib.rows import where
from benchmarks.training.language_model import Corpus, RunSettings, read_corpus, train
from benchmarks.training.plot import draw
from benchmarks.training.search import Ledger, Point, Search, interval
from mesotron.optim.device import choose_device

# A short run at the end of each search, on the clock of its own thread: a sweep lasts long enough
# for the machine to change under it.
SPEED_STEPS = 12
FULL = {
    "lrs": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "aux_sgd_lrs": (0.1, 0.3, 1.0),
    "seeds": (0, 1, 2),
    "steps": 120,
}
QUICK = {
    "optims": ("adamw", "adamw_split", "muon", "pion_noise"),
    "lrs": (2e-3, 1.6e-2),
    "aux_sgd_lrs": (0.3,),
    "seeds": (0,),
    "steps": 50,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Train a small language model with each optimizer, over learning rates and seeds."""

    optims: tyro.conf.Positional[tuple[str, ...]] = ()
    """Optimizers to compare, by name. If not given: all of them, or four with --quick."""

    lrs: tuple[float, ...] = ()
    """Learning rates to sweep for each optimizer; extended where the best one is at an edge.
    If not given: 0.002 0.004 0.008 0.016 0.032, or 0.002 0.016 with --quick."""

    aux_lr: float = 4e-3
    """AdamW's rate for embeddings, head and norms beside Muon and Pion."""

    aux_sgd_lrs: tuple[float, ...] = ()
    """SGD's rates for the same parameters in muon_sgd, swept as well.
    If not given: 0.1 0.3 1, or 0.3 with --quick."""

    seeds: tuple[int, ...] = ()
    """Seeds; the first searches the rates, all of them judge the best one and its neighbours.
    If not given: 0 1 2, or 0 with --quick."""

    steps: int | None = None
    """Optimizer steps of each run. If not given: 120, or 50 with --quick."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA if there is one."""

    threads: int | None = None
    """CPU threads; torch's own choice if not given."""

    quick: bool = False
    """A one-minute run, not for citation: fewer optimizers, steps, rates and seeds."""

    out: Path | None = None
    """Also write the result to this JSON file.
    The same command resumes an interrupted sweep from the .runs.jsonl file beside it."""

    plot: Path | None = None
    """Also draw rates and curves into this file (.png, .svg or .pdf)."""


def run(config: Config) -> int:
    """Run the sweep, print the table, write the JSON file and the plot."""
    config = complete(config)
    check(config)
    result = compare(config)
    rows = [table_row(entry) for entry in result["summary"]]
    show_table(title(result), HEADINGS, rows)

    if config.quick:
        print("Quick run, not for citation. The full comparison is in benchmarks/training.")

    if config.out is not None:
        write_result(result, config.out)

    if config.plot is not None:
        draw(result, config.plot)

    return 0


def complete(config: Config) -> Config:
    """Fill in missing values from the full or the quick preset."""
    preset = QUICK if config.quick else FULL
    missing = {}
    for name, v in preset.items():
        if getattr(config, name) in ((), None):
            missing[name] = v

    return replace(config, **missing)


def check(config: Config) -> None:
    check_names(config.optims, tuple(CONTENDERS))
    if config.steps is not None and config.steps < 1:
        raise ValueError(f"--steps {config.steps} must be at least 1")

    for rate in (*config.lrs, config.aux_lr, *config.aux_sgd_lrs):
        if not 0 < rate < math.inf:
            raise ValueError(f"learning rate {rate:g} must be above 0")

    if len(set(config.seeds)) < len(config.seeds):
        # Equal runs would make the interval too narrow.
        raise ValueError(f"--seeds {config.seeds} has duplicates")


@dataclass(frozen=True)
class Sweep:
    """What the runs of a comparison share."""

    config: Config
    device: torch.device
    corpus: Corpus
    ledger: Ledger
    say: Callable[[str], None]  # counts a run


def compare(config: Config) -> dict[str, Any]:
    """Search the rates of each optimizer and summarize."""
    device = choose_device(config.device, config.threads)
    corpus = read_corpus()
    about = describe(device)
    versions = {"mesotron": about["mesotron"], "torch": about["packages"]["torch"]}
    fixed = {"corpus": corpus.sha256[:16], "device": about["device"], **versions}
    ledger = Ledger(beside(config.out, ".runs.jsonl") if config.out else None, fixed)
    if ledger.runs:
        print(f"resuming: {len(ledger.runs)} finished runs in {ledger.path}", file=sys.stderr)

    names = check_names(config.optims, tuple(CONTENDERS))
    summary = []
    runs: list[dict[str, Any]] = []
    with progress(estimate_runs(config, names)) as say:
        sweep = Sweep(config, device, corpus, ledger, say)
        for name in names:
            entry, own = search_one(name, sweep)
            summary.append(entry)
            runs += own

    add_differences(summary)
    text = {"text": "pydoc_data.topics", "sha256": corpus.sha256, "train": len(corpus.train)}
    return {
        **about,
        "corpus": text,
        "steps": config.steps,
        "seeds": list(config.seeds),
        "aux_lr": config.aux_lr,
        "summary": sorted(summary, key=lambda entry: entry["mean"] or math.inf),
        "runs": [{name: value for name, value in run.items() if name != "key"} for run in runs],
    }


def search_one(name: str, sweep: Sweep) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An optimizer's row of the summary, and its runs."""
    config = sweep.config
    search = search_rates(name, sweep)
    best = search.run()

    runs = []
    for point, by_seed in search.losses.items():
        for seed in by_seed:
            settings = settings_for(name, point, seed, config)
            runs.append(sweep.ledger.get_or_run(settings.as_dict(), dict))

    sweep.say(f"{name}: speed")
    short = replace(settings_for(name, best, config.seeds[0], config), steps=SPEED_STEPS)
    measure = partial(train, short, sweep.corpus, sweep.device)
    record = sweep.ledger.get_or_run(short.as_dict() | {"kind": "speed"}, measure)

    entry = summarize(name, best, config.seeds, runs)
    return entry | {"steps_per_second": record["steps_per_second"]}, runs


def search_rates(name: str, sweep: Sweep) -> Search:
    config = sweep.config

    def measure(point: Point, seed: int) -> float:
        settings = settings_for(name, point, seed, config)
        aux = "" if point.aux_lr is None else f", aux {point.aux_lr:g}"
        sweep.say(f"{name} lr {point.lr:g}{aux}, seed {seed}")

        run = partial(train, settings, sweep.corpus, sweep.device)
        record = sweep.ledger.get_or_run(settings.as_dict(), run)
        if record["loss"] is None:
            return math.inf

        return record["loss"]

    return Search(measure, config.lrs, aux_grid(name, config), config.seeds, not config.quick)


def aux_grid(name: str, config: Config) -> tuple[float | None, ...]:
    """AdamW has one rate for all; SGD's rate is swept; the others share AdamW's for the rest."""
    if name == "adamw":
        return (None,)
    if name == "muon_sgd":
        return config.aux_sgd_lrs

    return (config.aux_lr,)


def settings_for(name: str, point: Point, seed: int, config: Config) -> RunSettings:
    assert config.steps is not None  # see complete()
    return RunSettings(
        optimizer=name, lr=point.lr, aux_lr=point.aux_lr, seed=seed, steps=config.steps
    )


def estimate_runs(config: Config, names: tuple[str, ...]) -> int:
    """Number of runs if no search leaves its grid."""
    first = sum(len(config.lrs) * len(aux_grid(name, config)) for name in names)
    judged = 1 if config.quick else 3
    return first + (judged * (len(config.seeds) - 1) + 1) * len(names)


def summarize(
    name: str, best: Point, seeds: tuple[int, ...], runs: list[dict[str, Any]]
) -> dict[str, Any]:
    at_best = where(runs, lr=best.lr, aux_lr=best.aux_lr)
    by_seed = {run["seed"]: run["loss"] for run in at_best}
    losses = [by_seed[seed] for seed in seeds]
    is_whole = None not in losses
    return {
        "optimizer": name,
        "lr": best.lr,
        "aux_lr": best.aux_lr,
        "losses": losses,
        "mean": fmean(losses) if is_whole else None,
        "interval": interval(losses) if is_whole else None,
        "num_runs": len(runs),
        "num_diverged": len(where(runs, loss=None)),
    }


def add_differences(summary: list[dict[str, Any]]) -> None:
    """Paired differences to AdamW: a seed shares weights and data, so its noise cancels."""
    base = where(summary, optimizer="adamw")
    for entry in summary:
        entry["versus_adamw"] = None
        entry["versus_adamw_interval"] = None
        if base and None not in (*base[0]["losses"], *entry["losses"]):
            pairs = zip(entry["losses"], base[0]["losses"], strict=True)
            differences = [loss - other for loss, other in pairs]
            entry["versus_adamw"] = fmean(differences)
            entry["versus_adamw_interval"] = interval(differences)


HEADINGS = ("optimizer", "lr", "aux lr", "held-out loss", "vs adamw", "steps/s", "runs", "diverged")


def table_row(entry: dict[str, Any]) -> list[str]:
    """One optimizer's row in the printed table and on the result page."""
    aux = "= lr" if entry["aux_lr"] is None else f"{entry['aux_lr']:g}"
    return [
        entry["optimizer"],
        f"{entry['lr']:g}",
        aux,
        with_interval(entry["mean"], entry["interval"], "{:.3f}"),
        with_interval(entry["versus_adamw"], entry["versus_adamw_interval"], "{:+.3f}"),
        f"{entry['steps_per_second']:.1f}",
        str(entry["num_runs"]),
        str(entry["num_diverged"]),
    ]


def with_interval(value: float | None, half_width: float | None, form: str) -> str:
    """Such as "2.041 ± 0.013"."""
    if value is None:
        return "–"
    return form.format(value) + ("" if half_width is None else f" ± {half_width:.3f}")


def title(result: dict[str, Any]) -> str:
    seeds = len(result["seeds"])
    return (
        f"held-out nats per character after {result['steps']} steps, {seeds} seed"
        f"{'s, mean and 95% interval' if seeds > 1 else ''}"
    )


if __name__ == "__main__":
    raise SystemExit(run(tyro.cli(Config, description=__doc__)))

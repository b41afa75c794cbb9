"""`mesotron bench train`: a small language model trained by each optimizer, compared fairly.

Same text, same initial weights and same data order for each seed; every optimizer's rate is
searched (see `sweep`); the verdict is held-out loss over seeds with an interval. It says who wins
at this size and length, and nothing about larger ones.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from mesotron.bench.console import (
    describe,
    progress,
    show_table,
    write_result,
)
from mesotron.bench.contenders import CONTENDERS, check_names
from mesotron.bench.corpus import Corpus, read_corpus
from mesotron.bench.language_model import RunSettings, train
from mesotron.bench.sweep import Ledger, Point, Search, interval
from mesotron.config import BenchTrainConfig
from mesotron.config.checks import check_writable
from mesotron.optim.device import choose_device
from mesotron.spectral.spectrum import check_picture

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


def run(config: BenchTrainConfig) -> int:
    """Run the sweep, print the table, write JSON and picture where asked."""
    config = complete(config)
    check(config)
    try:
        result = compare(config)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(way_on(config.out)) from None
    rows = [table_row(entry) for entry in result["summary"]]
    show_table(title(result), HEADINGS, rows)
    if config.quick:
        print("A quick look, not to cite. The full comparison is in benchmarks/training.")
    if config.out is not None:
        write_result(result, config.out)
    if config.plot is not None:
        from mesotron.bench.training_plot import draw

        draw(result, config.plot)
    return 0


def complete(config: BenchTrainConfig) -> BenchTrainConfig:
    """The config with what was not given: the values of the full sweep or of a quick look."""
    preset = QUICK if config.quick else FULL
    missing = {name: v for name, v in preset.items() if getattr(config, name) in ((), None)}
    return replace(config, **missing)


def check(config: BenchTrainConfig) -> None:
    """Refuse what could not be run, compared or written, before the first run."""
    check_names(config.optims, tuple(CONTENDERS))
    if config.steps is not None and config.steps < 1:
        raise ValueError(f"--steps {config.steps} must be at least 1")
    for rate in (*config.lrs, config.aux_lr, *config.aux_sgd_lrs):
        if not 0 < rate < math.inf:
            raise ValueError(f"a learning rate of {rate:g} cannot be searched: give one above 0")
    if len(set(config.seeds)) < len(config.seeds):
        # Equal runs would pass for a narrow interval.
        raise ValueError(f"seeds {config.seeds} name one twice: give each seed once")
    if config.out is not None:
        check_writable(config.out)
    if config.plot is not None:
        check_picture(config.plot)
        check_writable(config.plot)


def way_on(out: Path | None) -> str:
    """What a sweep that was stopped has kept."""
    if out is None:
        return "nothing was kept, --out FILE would keep the finished runs"
    return f"the same command continues from {runs_file(out)}"


def runs_file(out: Path) -> Path:
    """Where the finished runs of a sweep are kept."""
    return out.with_suffix(".runs.jsonl")


def compare(config: BenchTrainConfig) -> dict[str, Any]:
    """Search the rates of each optimizer and sum up."""
    device = choose_device(config.device, config.threads)
    corpus = read_corpus()
    about = describe(device)
    versions = {"mesotron": about["mesotron"], "torch": about["packages"]["torch"]}
    fixed = {"corpus": corpus.sha256[:16], "device": about["device"], **versions}
    ledger = Ledger(runs_file(config.out) if config.out else None, fixed)
    if ledger.runs:
        print(f"taking finished runs from {ledger.path}, {len(ledger.runs)} in it", file=sys.stderr)
    names = check_names(config.optims, tuple(CONTENDERS))
    summary, used = [], []
    with progress(estimate_runs(config, names)) as say:
        for name in names:
            search = search_rates(name, config, ledger, corpus, device, say)
            best = search.run()
            records = [
                settings_for(name, p, s, config) for p in search.losses for s in search.losses[p]
            ]
            runs = [ledger.get_or_run(r.as_dict(), dict) for r in records]
            summary.append(summarise(name, best, config.seeds, runs))
            say(f"{name}: speed")
            speed = replace(settings_for(name, best, config.seeds[0], config), steps=SPEED_STEPS)
            record = ledger.get_or_run(
                speed.as_dict() | {"kind": "speed"}, partial(train, speed, corpus, device)
            )
            summary[-1]["steps_per_second"] = record["steps_per_second"]
            used += runs
    add_differences(summary)
    return {
        **about,
        "corpus": {
            "text": "pydoc_data.topics",
            "sha256": corpus.sha256,
            "train": len(corpus.train),
        },
        "steps": config.steps,
        "seeds": list(config.seeds),
        "aux_lr": config.aux_lr,
        "summary": sorted(summary, key=lambda entry: entry["mean"] or math.inf),
        "runs": [{k: v for k, v in r.items() if k != "key"} for r in used],
    }


def search_rates(
    name: str,
    config: BenchTrainConfig,
    ledger: Ledger,
    corpus: Corpus,
    device: torch.device,
    say: Any,
) -> Search:
    """One optimizer's search, its runs taken from the ledger where they are done already."""

    def measure(point: Point, seed: int) -> float:
        settings = settings_for(name, point, seed, config)
        aux = "" if point.aux_lr is None else f", aux {point.aux_lr:g}"
        say(f"{name} lr {point.lr:g}{aux}, seed {seed}")
        record = ledger.get_or_run(settings.as_dict(), lambda: train(settings, corpus, device))
        return math.inf if record["loss"] is None else record["loss"]

    return Search(measure, config.lrs, aux_grid(name, config), config.seeds, not config.quick)


def aux_grid(name: str, config: BenchTrainConfig) -> tuple[float | None, ...]:
    """AdamW has one rate for all; SGD's rate is swept; the others share AdamW's for the rest."""
    if name == "adamw":
        return (None,)
    return config.aux_sgd_lrs if name == "muon_sgd" else (config.aux_lr,)


def settings_for(name: str, point: Point, seed: int, config: BenchTrainConfig) -> RunSettings:
    """The settings of one run."""
    assert config.steps is not None  # see complete()
    return RunSettings(
        optimizer=name, lr=point.lr, aux_lr=point.aux_lr, seed=seed, steps=config.steps
    )


def estimate_runs(config: BenchTrainConfig, names: tuple[str, ...]) -> int:
    """How many runs there will be if no search leaves its grid."""
    first = sum(len(config.lrs) * len(aux_grid(name, config)) for name in names)
    judged = 1 if config.quick else 3
    return first + (judged * (len(config.seeds) - 1) + 1) * len(names)


def summarise(
    name: str, best: Point, seeds: tuple[int, ...], runs: list[dict[str, Any]]
) -> dict[str, Any]:
    """The verdict on one optimizer from its runs."""
    at_best = {r["seed"]: r["loss"] for r in runs if (r["lr"], r["aux_lr"]) == best}
    losses = [at_best[seed] for seed in seeds]
    whole = [x for x in losses if x is not None]
    return {
        "optimizer": name,
        "lr": best.lr,
        "aux_lr": best.aux_lr,
        "losses": losses,
        "mean": fmean(whole) if len(whole) == len(losses) else None,
        "interval": interval(whole) if len(whole) == len(losses) else None,
        "num_runs": len(runs),
        "num_diverged": sum(r["loss"] is None for r in runs),
    }


def add_differences(summary: list[dict[str, Any]]) -> None:
    """Against AdamW, seed by seed: the seeds share weights and data, so their noise cancels."""
    base = next((e["losses"] for e in summary if e["optimizer"] == "adamw"), None)
    for entry in summary:
        entry["versus_adamw"] = entry["versus_adamw_interval"] = None
        if base is not None and None not in (*base, *entry["losses"]):
            pairs = [a - b for a, b in zip(entry["losses"], base, strict=True)]
            entry["versus_adamw"], entry["versus_adamw_interval"] = fmean(pairs), interval(pairs)


HEADINGS = ("optimizer", "lr", "aux lr", "held-out loss", "vs adamw", "steps/s", "runs", "diverged")


def table_row(entry: dict[str, Any]) -> list[str]:
    """One optimizer's line in the printed table and on the result page."""
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
    """What the table is about, in one line."""
    seeds = len(result["seeds"])
    return (
        f"held-out nats per character after {result['steps']} steps, {seeds} seed"
        f"{'s, mean and 95% interval' if seeds > 1 else ''}"
    )

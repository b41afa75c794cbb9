"""Times whole optimizer steps, momentum to weights, side by side in one run.

    python -m benchmarks.optim_step gpt2_124m --optims adamw_fused muon torch_muon --repeats 9

Every optimizer steps the same hidden matrices of a real model's shapes. Times are medians of
interleaved repeats and read as ratios to AdamW and to the floor, the bare matrix products of the
plain iteration. Also: memory, kernel launches, captured graphs, accuracy against a float64 SVD.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import tyro

from benchmarks._lib import accuracy
from benchmarks._lib.console import describe, progress, show_table
from benchmarks._lib.contenders import check_names
from benchmarks._lib.peers import PEERS, Built, Peer, Workbench
from benchmarks._lib.results import write_result
from benchmarks._lib.shapes import ModelShapes, Projection, find_shapes
from benchmarks._lib.timing import (
    bare_products,
    captured_seconds,
    count_launches,
    interleave,
    peak_extra_bytes,
    peak_flops,
    seconds,
    state_bytes,
    statistics_share,
)
from mesotron.optim.device import choose_device, filter_dtype

# Without --layers, a CPU steps as many layers as stay below this: about two seconds a step.
CPU_FLOPS = 50e9
# A peer whose dtype is emulated is timed on one matrix of at most this size; if the whole step
# would take longer than this, it is computed from that.
BEARABLE_SECONDS = 20.0
PROBE_FLOPS = 1e9
PROBE_SHAPE = Projection(288, 96)
FLOOR = "bare products"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Time whole optimizer steps against peers, as ratios in one run."""

    models: tyro.conf.Positional[tuple[str, ...]] = ("micro_192x576", "gpt2_124m")
    """Models whose matrix shapes are stepped, by name; weights are never loaded."""

    optims: tuple[str, ...] = ()
    """Optimizers to time; every one that is installed if not given."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA if there is one."""

    repeats: int = 5
    """Timed steps of each optimizer; the median is reported."""

    layers: int | None = None
    """Step only this many layers. If not given: all on CUDA, about two seconds' worth on a CPU."""

    embeddings: bool = False
    """Also step the embedding, by each optimizer's auxiliary rule."""

    buckets: bool = False
    """Also time our Muon on each matrix shape alone."""

    stats_cost: bool = False
    """Also measure what the statistics of a step cost."""

    accuracy: bool = True
    """Also compare every update with the float64 SVD."""

    threads: int | None = None
    """CPU threads; torch's own choice if not given."""

    out: Path | None = None
    """Also write the result to this JSON file."""


@dataclass(frozen=True)
class Setup:
    """What the measurements of a run share."""

    config: Config
    device: torch.device
    names: list[str]  # of the optimizers
    peak: float  # FLOPs per second of a large product
    say: Callable[[str], None]  # counts a measurement


def run(config: Config) -> int:
    """Time every model, print the tables, write the JSON file."""
    device = choose_device(config.device, config.threads)
    names = check_names(config.optims, tuple(PEERS))
    shapes = {model: find_shapes(model) for model in config.models}
    if config.repeats < 1 or (config.layers is not None and config.layers < 1):
        raise ValueError("--repeats and --layers must be at least 1")

    here, left_out = available(names, config, device)
    with progress(num_measurements(here, config, device)) as say:
        say("peak of a large product")
        peak = peak_flops(filter_dtype(device), device)
        setup = Setup(config, device, here, peak, say)
        models = [bench_model(setup, model, shape) for model, shape in shapes.items()]

        say("accuracy against float64")
        errors = accuracy.measure(here, device) if config.accuracy else []

    result = {
        **describe(device),
        "filter_dtype": str(filter_dtype(device)).removeprefix("torch."),
        "peak_gflops": peak / 1e9,
        "models": models,
        "accuracy": errors,
        "left_out": left_out,
    }
    show(result)
    if config.out is not None:
        write_result(result, config.out)
    return 0


def available(
    names: tuple[str, ...], config: Config, device: torch.device
) -> tuple[list[str], dict[str, str]]:
    """The optimizers that can run here, and why the others cannot."""
    reasons = {name: PEERS[name].missing(device) for name in names}
    if not config.embeddings and "muon_sgd" in reasons:
        reasons["muon_sgd"] = "equals muon on hidden matrices; it differs with --embeddings"

    left_out = {name: reason for name, reason in reasons.items() if reason}
    return [name for name in names if name not in left_out], left_out


def num_measurements(names: list[str], config: Config, device: torch.device) -> int:
    """Progress units of the whole run."""
    slow = sum(is_emulated(PEERS[name], device) for name in names)
    timed = (len(names) - slow + 1) * (1 + config.repeats) + slow + len(names)
    return 2 + len(config.models) * timed


def bench_model(setup: Setup, model: str, shape: ModelShapes) -> dict[str, Any]:
    """All measurements on one model's matrices."""
    config = setup.config
    layers = config.layers
    if layers is None and setup.device.type == "cpu":
        layers = shape.layers_within(CPU_FLOPS)

    shapes = shape.matrices(layers)
    bed = Workbench(shapes, shape.embedding if config.embeddings else None, setup.device)
    rows, floor = measure_rows(setup, bed)
    flops = sum(p.plain_flops for p in shapes)
    add_ratios(rows, floor, flops, setup.peak)

    return {
        "model": model,
        "layers": layers or shape.layers,
        "of_layers": shape.layers,
        "matrices": len(shapes),
        "parameters": sum(p.rows * p.cols for p in shapes),
        "plain_gflop": flops / 1e9,
        "floor_seconds": floor,
        "rows": rows,
        "buckets": bench_buckets(setup, shapes) if config.buckets else [],
    }


def measure_rows(setup: Setup, bed: Workbench) -> tuple[list[dict[str, Any]], float]:
    """A row for each optimizer, and the seconds of the bare products."""
    device = setup.device
    rows: dict[str, dict[str, Any]] = {name: {"optimizer": name} for name in setup.names}
    emulated = [name for name in setup.names if is_emulated(PEERS[name], device)]
    fast = [name for name in setup.names if name not in emulated]

    floor = bare_products(bed.shapes, filter_dtype(device), device)
    floors: list[float] = []
    for part in chunks(fast, bed.num_at_once()) or [[]]:
        floors += measure_part(setup, bed, part, floor, rows)

    for name in emulated:
        setup.say(f"{name}: emulated, timed once")
        rows[name] |= time_emulated(PEERS[name], bed.shapes, device)
    return list(rows.values()), median(floors)


def measure_part(
    setup: Setup,
    bed: Workbench,
    names: list[str],
    floor: Callable[[], Any],
    rows: dict[str, dict[str, Any]],
) -> list[float]:
    """Optimizers whose states fit into memory together, in turns with the bare products.

    Returns:
        The times of the bare products. The states are free again before the next part.
    """
    built = {name: bed.build(PEERS[name]) for name in names}
    steps = {FLOOR: floor} | {name: optimizers.step for name, optimizers in built.items()}
    times = interleave(steps, setup.config.repeats, setup.device, setup.say)

    for name in names:
        setup.say(f"{name}: memory")
        rows[name] |= {"seconds": median(times[name]), "all": times[name]}
        rows[name] |= describe_step(setup, bed, built[name])
    return times[FLOOR]


def describe_step(setup: Setup, bed: Workbench, built: Built) -> dict[str, Any]:
    """Memory, launches, the captured graph, and the cost of statistics."""
    device = setup.device
    repeats = setup.config.repeats
    found: dict[str, Any] = {
        "state_bytes_per_parameter": state_bytes(*built.optimizers) / bed.num_parameters,
        "peak_extra_bytes": peak_extra_bytes(built.step, device),
        "launches": count_launches(built.step, device),
        "graph_seconds": None,
        "note": "",
    }

    graph = captured_seconds(built.step, repeats, device)
    if isinstance(graph, str):
        found["note"] = f"no graph: {graph}"
    else:
        found["graph_seconds"] = graph

    is_ours = type(built.optimizers[0]).__module__.startswith("mesotron.")
    if setup.config.stats_cost and is_ours:
        found["stats_share"] = statistics_share(built.step, bed.shapes, 2 * repeats, device)
    return found


def is_emulated(peer: Peer, device: torch.device) -> bool:
    """Whether this peer forces a 16-bit dtype on hardware that has no units for it."""
    return peer.half and filter_dtype(device) == torch.float32


def time_emulated(peer: Peer, shapes: list[Projection], device: torch.device) -> dict[str, Any]:
    """A step that may take minutes: one matrix first, then all of them once if that is bearable.

    What is not timed is computed from the one matrix by FLOPs, and the note says so.
    """
    smallest = min(shapes, key=lambda p: p.plain_flops)
    probe = smallest if smallest.plain_flops <= PROBE_FLOPS else PROBE_SHAPE
    bed = Workbench([probe], None, device)
    built = bed.build(peer)
    time = seconds(built.step, device)
    factor = sum(p.plain_flops for p in shapes) / probe.plain_flops

    note = f"from one {probe.rows}x{probe.cols} matrix, x{factor:.4g} by FLOPs"
    if time * factor < BEARABLE_SECONDS:
        time = seconds(Workbench(shapes, None, device).build(peer).step, device)
        factor = 1.0
        note = "one step, not repeated"

    return {
        "seconds": time * factor,
        "all": [time],
        "state_bytes_per_parameter": state_bytes(*built.optimizers) / bed.num_parameters,
        "peak_extra_bytes": None,
        "launches": None,
        "graph_seconds": None,
        "note": f"16-bit products are emulated here; {note}",
    }


def add_ratios(rows: list[dict[str, Any]], floor: float, flops: int, peak: float) -> None:
    """Ratios to AdamW, to the floor and to torch.optim.Muon, and the efficiency."""
    by_name = {row["optimizer"]: row["seconds"] for row in rows}
    for row in rows:
        time = row["seconds"]
        spectral = PEERS[row["optimizer"]].filter is not None
        row["versus_adamw"] = _ratio(time, by_name.get("adamw_fused"))
        row["versus_floor"] = time / floor if spectral else None
        row["faster_than_torch_muon"] = _ratio(by_name.get("torch_muon"), time)
        row["efficiency"] = flops / peak / time if spectral else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def bench_buckets(setup: Setup, shapes: list[Projection]) -> list[dict[str, Any]]:
    """Our Muon on each shape alone: shows which one limits the efficiency."""
    device = setup.device
    rows = []
    for wide in dict.fromkeys(p.wide for p in shapes):
        members = [p for p in shapes if p.wide == wide]
        built = Workbench(members, None, device).build(PEERS["muon"])
        floor = bare_products(members, filter_dtype(device), device)
        steps = {"muon": built.step, FLOOR: floor}
        times = interleave(steps, setup.config.repeats, device, lambda text: None)

        muon = median(times["muon"])
        flops = sum(p.plain_flops for p in members)
        row = {
            "shape": list(wide),
            "matrices": len(members),
            "seconds": muon,
            "floor_seconds": median(times[FLOOR]),
            "efficiency": flops / setup.peak / muon,
        }
        rows.append(row)
    return rows


def chunks(items: list[Any], size: int) -> list[list[Any]]:
    """Consecutive parts of at most `size` items."""
    return [items[i : i + size] for i in range(0, len(items), size)]


# --- tables ---

HEADINGS = (
    "optimizer",
    "ms",
    "/ AdamW",
    "/ floor",
    "torch Muon /",
    "efficiency",
    "state B",
    "extra MB",
    "launches",
    "graph ms",
    "stats",
)


def show(result: dict[str, Any]) -> None:
    """Print every table of a result."""
    dtype = result["filter_dtype"]
    print(f"{result['device']}; large product {result['peak_gflops']:,.0f} GFLOP/s ", end="")
    print(f"in {dtype}; efficiency = plain FLOPs / that / time")
    for model in result["models"]:
        show_model(model)

    if result["accuracy"]:
        rows = [accuracy_row(row) for row in result["accuracy"]]
        title = "error of a step against the float64 SVD, worst of three spectra"
        show_table(title, ("optimizer", "shape", "error", f"plain {dtype}"), rows)

    for name, reason in result["left_out"].items():
        print(f"left out: {name}: {reason}")


def show_model(model: dict[str, Any]) -> None:
    part = f"{model['layers']} of {model['of_layers']} layers, {model['matrices']} matrices"
    title = f"{model['model']}: {part}, floor {model['floor_seconds'] * 1e3:.3g} ms"
    rows = [step_row(row) for row in model["rows"]]
    show_table(title, *without_empty(HEADINGS, rows))
    for row in model["rows"]:
        if row["note"]:
            print(f"  {row['optimizer']}: {row['note']}")

    if model["buckets"]:
        rows = [bucket_row(row) for row in model["buckets"]]
        headings = ("muon by shape", "matrices", "ms", "x floor", "efficiency")
        show_table(f"{model['model']}: by shape", headings, rows)


def without_empty(
    headings: tuple[str, ...], rows: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
    """Leave out the columns in which no row has a value, such as launches on a CPU."""
    filled = [i for i in range(len(headings)) if any(row[i] != "–" for row in rows)]
    return [headings[i] for i in filled], [[row[i] for i in filled] for row in rows]


def step_row(row: dict[str, Any]) -> list[str]:
    """One optimizer's line."""
    extra = row["peak_extra_bytes"]
    graph = row["graph_seconds"]
    numbers = [
        row["seconds"] * 1e3,
        row["versus_adamw"],
        row["versus_floor"],
        row["faster_than_torch_muon"],
        row["efficiency"],
        row["state_bytes_per_parameter"],
        None if extra is None else round(extra / 1e6, 1),
        row["launches"],
        None if graph is None else graph * 1e3,
    ]
    stats = f"{row['stats_share']:.2%}" if "stats_share" in row else "–"
    return [row["optimizer"], *map(number, numbers), stats]


def bucket_row(row: dict[str, Any]) -> list[str]:
    """One shape's line."""
    m, n = row["shape"]
    ratio = row["seconds"] / row["floor_seconds"]
    numbers = (row["matrices"], row["seconds"] * 1e3, ratio, row["efficiency"])
    return [f"{m}x{n}", *map(number, numbers)]


def accuracy_row(row: dict[str, Any]) -> list[str]:
    """One optimizer's error on one shape."""
    m, n = row["shape"]
    return [row["optimizer"], f"{m}x{n}", f"{row['error']:.1e}", f"{row['plain_error']:.1e}"]


def number(value: float | None) -> str:
    """Three significant digits; a dash for nothing."""
    if value is None:
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"

    return f"{value:.3g}"


if __name__ == "__main__":
    raise SystemExit(run(tyro.cli(Config, description=__doc__)))

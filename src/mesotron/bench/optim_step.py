"""`mesotron bench optim`: whole optimizer steps, momentum to weights, side by side in one run.

Every optimizer steps the same hidden matrices of a real model's shape; times are medians of
interleaved repeats and read as ratios to AdamW and to the floor, the bare products of the plain
iteration. Also: memory, launches, captured graphs, accuracy. Needs neither rich nor tyro:
`python -m mesotron.bench.optim_step --json-config '{"models": ["gpt2_124m"]}'`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mesotron.bench import accuracy
from mesotron.bench.console import (
    describe,
    progress,
    write_result,
)
from mesotron.bench.contenders import check_names
from mesotron.bench.peers import PEERS, Peer
from mesotron.bench.shapes import ModelShapes, Projection, find_shapes
from mesotron.bench.statistics_cost import statistics_share
from mesotron.bench.step_tables import show
from mesotron.bench.timing import (
    bare_products,
    captured_seconds,
    count_launches,
    interleave,
    peak_extra_bytes,
    peak_flops,
    seconds,
    state_bytes,
)
from mesotron.bench.workbench import Built, Workbench
from mesotron.config import BenchOptimConfig
from mesotron.config.checks import check_writable
from mesotron.optim.device import choose_device, filter_dtype

# Without --layers, a CPU steps as many layers as stay below this: about two seconds a step.
CPU_FLOPS = 50e9
# A peer whose dtype is emulated is timed on one matrix of at most this size; if the whole step
# would take longer than this, it is computed from that.
BEARABLE_SECONDS = 20.0
PROBE_FLOPS = 1e9
PROBE_SHAPE = Projection(288, 96)
FLOOR = "bare products"


def run(config: BenchOptimConfig) -> int:
    """Time every model, print the tables, write JSON where asked."""
    device = choose_device(config.device, config.threads)
    names = check_names(config.optims, tuple(PEERS))
    shapes = {model: find_shapes(model) for model in config.models}
    if config.repeats < 1 or (config.layers is not None and config.layers < 1):
        raise ValueError("bench optim needs at least one repeat and one layer")
    if config.out is not None:
        check_writable(config.out)
    here, left_out = available(names, config, device)
    with progress(num_measurements(here, config, device)) as say:
        say("peak of a large product")
        peak = peak_flops(filter_dtype(device), device)
        models = [
            bench_model(model, shape, here, config, device, peak, say)
            for model, shape in shapes.items()
        ]
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
    names: tuple[str, ...], config: BenchOptimConfig, device: torch.device
) -> tuple[list[str], dict[str, str]]:
    """The optimizers that can run here, and why the others cannot."""
    reasons = {name: PEERS[name].missing(device) for name in names}
    if not config.embeddings and "muon_sgd" in reasons:
        reasons["muon_sgd"] = "equals muon on hidden matrices; it differs with --embeddings"
    left_out = {name: reason for name, reason in reasons.items() if reason}
    return [name for name in names if name not in left_out], left_out


def num_measurements(names: list[str], config: BenchOptimConfig, device: torch.device) -> int:
    """Progress units of the whole run."""
    slow = sum(is_emulated(PEERS[name], device) for name in names)
    timed = (len(names) - slow + 1) * (1 + config.repeats) + slow + len(names)
    return 2 + len(config.models) * timed


def bench_model(
    model: str,
    shape: ModelShapes,
    names: list[str],
    config: BenchOptimConfig,
    device: torch.device,
    peak: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All measurements on one model's matrices."""
    layers = config.layers
    if layers is None and device.type == "cpu":
        layers = shape.layers_within(CPU_FLOPS)
    shapes = shape.matrices(layers)
    bed = Workbench(shapes, shape.embedding if config.embeddings else None, device)
    rows, floor = measure_rows(bed, names, config, say)
    flops = sum(p.plain_flops for p in shapes)
    add_ratios(rows, floor, flops, peak)
    return {
        "model": model,
        "layers": layers or shape.layers,
        "of_layers": shape.layers,
        "matrices": len(shapes),
        "parameters": sum(p.rows * p.cols for p in shapes),
        "plain_gflop": flops / 1e9,
        "floor_seconds": floor,
        "rows": rows,
        "buckets": bench_buckets(shapes, config, device, peak) if config.buckets else [],
    }


def measure_rows(
    bed: Workbench, names: list[str], config: BenchOptimConfig, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], float]:
    """A row for each optimizer, and the seconds of the bare products."""
    device, shapes = bed.device, bed.shapes
    floor = bare_products(shapes, filter_dtype(device), device)
    times: dict[str, list[float]] = {}
    rows: dict[str, dict[str, Any]] = {name: {"optimizer": name} for name in names}
    fast = [name for name in names if not is_emulated(PEERS[name], device)]
    for part in chunks(fast, bed.num_at_once()) or [[]]:
        built = {name: bed.build(PEERS[name]) for name in part}
        steps = {FLOOR: floor} | {name: optimizers.step for name, optimizers in built.items()}
        for name, found in interleave(steps, config.repeats, device, say).items():
            times.setdefault(name, []).extend(found)
        for name in part:
            say(f"{name}: memory")
            rows[name] |= {"seconds": median(times[name]), "all": times[name]}
            rows[name] |= describe_step(built[name], bed, config)
        del built, steps  # their states, before the next part allocates its own
    for name in names:
        if name not in fast:
            say(f"{name}: emulated, timed once")
            rows[name] |= time_emulated(PEERS[name], shapes, device)
    return list(rows.values()), median(times[FLOOR])


def describe_step(built: Built, bed: Workbench, config: BenchOptimConfig) -> dict[str, Any]:
    """Memory, launches, the captured graph, and the cost of statistics where asked for."""
    device = bed.device
    found: dict[str, Any] = {
        "state_bytes_per_parameter": state_bytes(*built.optimizers) / bed.num_parameters,
        "peak_extra_bytes": peak_extra_bytes(built.step, device),
        "launches": count_launches(built.step, device),
    }
    graph = captured_seconds(built.step, config.repeats, device)
    found["graph_seconds"] = graph if isinstance(graph, float) else None
    found["note"] = f"no graph: {graph}" if isinstance(graph, str) else ""
    if config.stats_cost and type(built.optimizers[0]).__module__.startswith("mesotron."):
        found["stats_share"] = statistics_share(built.step, bed.shapes, 2 * config.repeats, device)
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
        time, factor = seconds(Workbench(shapes, None, device).build(peer).step, device), 1.0
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


def bench_buckets(
    shapes: list[Projection], config: BenchOptimConfig, device: torch.device, peak: float
) -> list[dict[str, Any]]:
    """Our Muon on each shape alone: which of them holds the efficiency down."""
    rows = []
    for wide in dict.fromkeys(p.wide for p in shapes):
        members = [p for p in shapes if p.wide == wide]
        built = Workbench(members, None, device).build(PEERS["muon"])
        floor = bare_products(members, filter_dtype(device), device)
        times = interleave(
            {"muon": built.step, FLOOR: floor}, config.repeats, device, lambda text: None
        )
        muon, bare = median(times["muon"]), median(times[FLOOR])
        flops = sum(p.plain_flops for p in members)
        rows.append(
            {
                "shape": list(wide),
                "matrices": len(members),
                "seconds": muon,
                "floor_seconds": bare,
                "efficiency": flops / peak / muon,
            }
        )
    return rows


def chunks(items: list[Any], size: int) -> list[list[Any]]:
    """Consecutive parts of at most `size` items."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def main(words: list[str] | None = None) -> int:
    """The same benchmark where the command line's own libraries are missing."""
    parser = argparse.ArgumentParser(prog="python -m mesotron.bench.optim_step")
    parser.add_argument("--json-config", default="{}", help="fields of BenchOptimConfig as JSON")
    fields = json.loads(parser.parse_args(words).json_config)
    for key in ("models", "optims"):
        if key in fields:
            fields[key] = tuple(fields[key])
    if fields.get("out"):
        fields["out"] = Path(fields["out"])
    return run(BenchOptimConfig(**fields))


if __name__ == "__main__":
    raise SystemExit(main())

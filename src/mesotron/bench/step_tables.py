"""The tables of `mesotron bench optim`, made from its result alone."""

from __future__ import annotations

from typing import Any

from mesotron.bench.console import show_table

HEADINGS = (
    "optimizer",
    "ms",
    "/ AdamW",
    "/ floor",
    "torch Muon /",
    "efficiency",
    "state B",
    "extra MB",
)
HEADINGS += ("launches", "graph ms", "stats")


def show(result: dict[str, Any]) -> None:
    """Print every table of a result."""
    print(f"{result['device']}; large product {result['peak_gflops']:,.0f} GFLOP/s ", end="")
    print(f"in {result['filter_dtype']}; efficiency = plain FLOPs / that / time")
    for model in result["models"]:
        part = f"{model['layers']} of {model['of_layers']} layers, {model['matrices']} matrices"
        title = f"{model['model']}: {part}, floor {model['floor_seconds'] * 1e3:.3g} ms"
        show_table(title, *without_empty(HEADINGS, [step_row(row) for row in model["rows"]]))
        for row in model["rows"]:
            if row["note"]:
                print(f"  {row['optimizer']}: {row['note']}")
        if model["buckets"]:
            rows = [bucket_row(row) for row in model["buckets"]]
            headings = ("muon by shape", "matrices", "ms", "x floor", "efficiency")
            show_table(f"{model['model']}: by shape", headings, rows)
    if result["accuracy"]:
        rows = [accuracy_row(row) for row in result["accuracy"]]
        headings = ("optimizer", "shape", "error", f"plain {result['filter_dtype']}")
        show_table(
            "error of a step against the float64 SVD, worst of three spectra", headings, rows
        )
    for name, reason in result["left_out"].items():
        print(f"left out: {name}: {reason}")


def without_empty(
    headings: tuple[str, ...], rows: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
    """Leave out the columns in which no row has a value, such as launches on a CPU."""
    filled = [i for i in range(len(headings)) if any(row[i] != "–" for row in rows)]
    return [headings[i] for i in filled], [[row[i] for i in filled] for row in rows]


def step_row(row: dict[str, Any]) -> list[str]:
    """One optimizer's line."""
    extra = row["peak_extra_bytes"]
    return [
        row["optimizer"],
        number(row["seconds"] * 1e3),
        number(row["versus_adamw"]),
        number(row["versus_floor"]),
        number(row["faster_than_torch_muon"]),
        number(row["efficiency"]),
        number(row["state_bytes_per_parameter"]),
        number(None if extra is None else round(extra / 1e6, 1)),
        number(row["launches"]),
        number(None if row["graph_seconds"] is None else row["graph_seconds"] * 1e3),
        f"{row['stats_share']:.2%}" if "stats_share" in row else "–",
    ]


def bucket_row(row: dict[str, Any]) -> list[str]:
    """One shape's line."""
    m, n = row["shape"]
    ratio = row["seconds"] / row["floor_seconds"]
    cells = (row["matrices"], row["seconds"] * 1e3, ratio, row["efficiency"])
    return [f"{m}x{n}", *map(number, cells)]


def accuracy_row(row: dict[str, Any]) -> list[str]:
    """One optimizer's error on one shape."""
    m, n = row["shape"]
    return [row["optimizer"], f"{m}x{n}", f"{row['error']:.1e}", f"{row['plain_error']:.1e}"]


def number(value: float | None) -> str:
    """Three significant digits; a dash for nothing."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

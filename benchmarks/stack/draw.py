"""The picture of the page: `python -m benchmarks.stack.draw`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json

FOLDER = Path(__file__).parent

ROWS = {
    "smollm2-10": "SmolLM2\n10 tokens",
    "smollm2-256": "SmolLM2\n256 tokens",
    "qwen0.5b-256": "Qwen2.5-0.5B\n256 tokens",
    "qwen0.5b-512": "Qwen2.5-0.5B\n512 tokens",
    "qwen1.7b-256": "Qwen3-1.7B\n256 tokens",
    "qwen1.7b-512": "Qwen3-1.7B\n512 tokens",
}
CONTENDERS = {
    "TRL": ("plain TRL", "#bbbbbb"),
    "TRL + vLLM": ("TRL + vLLM", "#888888"),
    "fast": ("Mesotron, --rollout.fast", "#26418f"),
    "vLLM": ("Mesotron + vLLM", "#8fa3d4"),
}
WIDTH = 0.2  # of a bar; four of them and a gap fill a row's place


def main() -> None:
    draw(read_json(FOLDER / "result.json.gz")["cells"], FOLDER / "steps.png")


def draw(cells: dict[str, Any], out: Path) -> None:
    """Bars: a contender's step over that of the fastest one of its row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()

    for place, (contender, (label, color)) in enumerate(CONTENDERS.items()):
        positions = []
        heights = []
        for index, row in enumerate(ROWS):
            cell = cells.get(f"{row}/{contender}", {})
            if "step_ms" in cell:
                positions.append(index + place * WIDTH)
                heights.append(cell["step_ms"] / fastest(cells, row))

        axes.bar(positions, heights, WIDTH, label=label, color=color)

    axes.set_xticks([index + 1.5 * WIDTH for index in range(len(ROWS))])
    axes.set_xticklabels(ROWS.values(), fontsize=8)
    axes.set_ylabel("step / fastest step")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.legend(frameon=False, fontsize=8)
    save_picture(figure, out, dpi=110)


def fastest(cells: dict[str, Any], row: str) -> float:
    """Milliseconds of the fastest contender of a row."""
    steps = []
    for contender in CONTENDERS:
        cell = cells.get(f"{row}/{contender}", {})
        if "step_ms" in cell:
            steps.append(cell["step_ms"])

    return min(steps)


if __name__ == "__main__":
    main()

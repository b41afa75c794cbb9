"""Which GRPO runs fit which GPU, as `mesotron plan` estimates it: README's table.

    python -m benchmarks.plan.fits

For each model, method and size of GPU the first of these settings that fits: those of `--data`
(16 prompts x 8 completions of up to 512 tokens), then memory-saving flags, the cheapest first.
Writes fits.json beside this file and prints the table.
"""

from pathlib import Path

from benchmarks._lib.results import write_json
from mesotron import cli
from mesotron.config import GpuName, PlanConfig
from mesotron.rlvr.plan.estimate import predict
from mesotron.rlvr.plan.problems import lengths_of
from mesotron.rlvr.plan.shapes import find_shape
from mesotron.rlvr.train import resolve_own

MODELS = ("0.5B", "1.5B", "7B")
METHODS = {"full": "", "LoRA": "--lora 16", "QLoRA": "--lora 16 --model.load 4bit"}
GPUS: dict[str, GpuName] = {"12 GB": "3060", "16 GB": "4080", "24 GB": "4090", "80 GB": "h100"}
SAVINGS = (
    "",
    "--rollout.micro-batch 1",
    "--rollout.micro-batch 1 --model.gradient-checkpointing",
    "--rollout.micro-batch 1 --model.gradient-checkpointing --no-rollout.fast",
)
QUESTION_TOKENS = 60  # of GSM8K


def main() -> None:
    rows = []
    for model in MODELS:
        for method, method_flags in METHODS.items():
            cells = {size: first_that_fits(model, method_flags, gpu) for size, gpu in GPUS.items()}
            rows.append({"model": model, "method": method, "cells": cells})

    write_json(rows, Path(__file__).with_name("fits.json"))

    print(f"| | {' | '.join(GPUS)} |")
    for row in rows:
        words = []
        for cell in row["cells"].values():
            words.append(f"{cell['GiB']:.0f} GiB {cell['flags']}" if cell["fits"] else "no")

        print(f"| {row['model']}, {row['method']} | {' | '.join(words)} |")


def first_that_fits(model: str, method: str, gpu: GpuName) -> dict[str, str | float | bool]:
    """The first setting that fits, else the last one."""
    for flags in SAVINGS:
        needed, fits = estimate(model, f"{method} {flags}", gpu)
        if fits:
            break

    return {"flags": flags, "GiB": round(needed, 1), "fits": fits}


def estimate(model: str, flags: str, gpu: GpuName) -> tuple[float, bool]:
    """GiB of the run, and whether the GPU has them."""
    words = f"--model Qwen/Qwen2.5-{model}-Instruct --data openai/gsm8k --gpu {gpu} {flags}"
    config = resolve_own(
        cli.parse(PlanConfig, words.split(), "mesotron plan", cli.COMMANDS["plan"].presets)
    )

    shape = find_shape(config.model.name)
    assert shape is not None
    lengths = lengths_of(config, QUESTION_TOKENS, config.completion_tokens)
    prediction = predict(config, shape, gpu, lengths)
    return prediction.needed, prediction.fits


if __name__ == "__main__":
    main()

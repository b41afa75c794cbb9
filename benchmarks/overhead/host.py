"""What the host does in a rollout, by phase: everything but the model, whose completions are given.

    python -m benchmarks.overhead.host --out benchmarks/overhead/host.json

Plain TRL and ours on the speedrun's task, with SmolLM2's tokenizer and chat template. What would be
sampled is made up as the untrained SmolLM2 answers: mostly in the format, and some prose. There is
no forward or backward pass. Rounds alternate; medians of milliseconds on the clock.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._lib.random_model import random_model
from benchmarks._lib.results import write_json
from benchmarks.speedrun.contenders import Contestant, make_config
from benchmarks.speedrun.stopwatch import Stopwatch

Step = dict[str, float]  # milliseconds by phase
NAMES = {"TRL": "stock", "Mesotron": "muon"}  # as the speedrun calls them
PROMPTS = (32, 128)
PHASES = ("tokenize", "score", "rollout, rest")
FORMATTED = 0.88  # of 1,024 completions by SmolLM2
OTHERS = (
    "12",
    "4.5",
    "array([1, 9, 5])",
    "2b",
    "No",
    "A total of 7 + 2 =",
    "abc",
    "ANSWER:",
    "1:13",
    "8 + 6 = 12",
    "This is incorrect.",
    "0x4",
    "To arrive at the answer 21, let",
    "Consider the original expression: 7 - 5",
    "No, it's not. 14 is",
    "1 - 7 * 2 + 1",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="measured in each round")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()

    torch.set_num_threads(1)
    model = str(random_model(Path(tempfile.mkdtemp()) / "model", "smollm2"))

    found = {}
    for prompts in PROMPTS:
        steps: dict[str, list[Step]] = {name: [] for name in NAMES}
        for _ in range(given.rounds):
            for name in NAMES:
                steps[name] += measure(NAMES[name], model, prompts, given.steps)

        found[f"{prompts} x 8"] = {name: medians(own) for name, own in steps.items()}
        print(json.dumps(found), flush=True)

    if given.out:
        write_json(found, given.out, indent=1)


def medians(steps: list[Step]) -> Step:
    """Of each phase."""
    return {phase: round(median(step[phase] for step in steps), 1) for phase in steps[0]}


def measure(name: str, model: str, prompts: int, steps: int, warm: int = 4) -> list[Step]:
    """Milliseconds of the phases of each rollout after the first `warm`."""
    config = make_config(name, 0, model, False)
    config = replace(
        config,
        model=replace(config.model, dtype="float32"),
        rollout=replace(config.rollout, prompts=prompts, fast=True),
    )
    with tempfile.TemporaryDirectory() as folder:
        contestant = Contestant(name, config, Path(folder) / "run")
        trainer = contestant.trainer
        trainer.create_optimizer()
        trainer.model.train()
        trainer._generate_single_turn = sampler(contestant.parts.tokenizer)
        batches = iter(trainer.get_train_dataloader())

        rows = []
        for _ in range(warm + steps):
            watch = Stopwatch()
            watch.attach(trainer)
            batch = next(batches)
            began = time.perf_counter()
            trainer._generate_and_score_completions(batch)
            whole = time.perf_counter() - began - watch.spent["sample"]
            watch.detach()
            rows.append({p: 1e3 * watch.spent[p] for p in PHASES} | {"whole": 1e3 * whole})

        contestant.verifier.close()

    return rows[warm:]


def sampler(tokenizer: Any) -> Callable[..., tuple[list[list[int]], None]]:
    """In place of a model: the same completions for everybody."""
    chance = random.Random(0)

    def write(prompt_ids: Any, *_: Any) -> tuple[list[list[int]], None]:
        texts = []
        for _ in prompt_ids:
            if chance.random() < FORMATTED:
                texts.append(f"ANSWER: {chance.randrange(-9, 28)}")
            else:
                texts.append(chance.choice(OTHERS))

        encoded = tokenizer(texts)["input_ids"]
        return [[*ids[:9], tokenizer.eos_token_id] for ids in encoded], None

    return write


if __name__ == "__main__":
    main()

"""Run folders and tournaments as mesotron writes them, made up: for the tests of the report."""

import math
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

from mesotron.compare import record
from mesotron.compare.record import Cell, Contender, Standing, Threshold, Tournament
from mesotron.config import SnakeConfig, TrainConfig
from mesotron.config.base import to_plain
from mesotron.runs import RunFolder
from mesotron.runs.files import append_row

# Everything that a page must show and not obey.
ATTACK = (
    "</script><script>window.hacked=1</script>"
    '<img src="http://127.0.0.1:9/x.png" onerror="window.hacked=2">'
    "<a href=\"javascript:window.hacked=3\">x</a>' onmouseover='window.hacked=4'"
    '"><svg/onload=window.hacked=5>\u2028\u2029\u202eesrever\u2066\x00\x1b[2J\ud800 &lt;b&gt; '
    "\\boxed{<b>7</b>} --> ]]> {{7*7}} ${7*7} \\u003cscript\\u003e"
)


def make_row(step: int, steps: int, noise: random.Random) -> dict[str, float]:
    done = step / steps
    correct = min(max(0.2 + 0.5 * done + noise.gauss(0, 0.06), 0), 1)
    formatted = min(0.5 + done, 0.98)

    return {
        "step": step,
        "loss": noise.gauss(0, 0.01),
        "reward": 0.9 * correct + 0.1 * formatted,
        "reward_std": 0.4,
        "facts/correct": correct,
        "facts/formatted": formatted,
        "facts/correct_unformatted": 0.1 * (1 - done),
        "entropy": 1.2 - 0.7 * done + noise.gauss(0, 0.03),
        "entropy/trajectory_q1": 1.0 - 0.7 * done,
        "entropy/trajectory_q3": 1.4 - 0.7 * done,
        "groups/zero_signal": 0.2 + 0.2 * done,
        "groups/all_right": 0.1 + 0.2 * done,
        "groups/all_wrong": 0.1,
        "completions/mean_length": 20 + noise.gauss(0, 1),
        "completions/min_length": 12.0,
        "completions/max_length": 32.0,
        "optim/muon/update_rms": 1e-4 * (1 - 0.9 * done),
        "learning_rate": 6e-4 * (1 - done),
        "optim/adamw/update_rms": 2e-4 * (1 - 0.9 * done),
        "grad_norm": math.exp(noise.gauss(0, 0.3)),
        "time/step": 3.0,
        "num_tokens": 4000.0 * step,
        "my own/metric": noise.gauss(0, 1),
    }


def make_run(path: Path, steps: int = 20, seed: int = 0, **changed: Any) -> RunFolder:
    """A finished run of `mesotron train`; `changed` replaces whole files by name."""
    noise = random.Random(seed)
    environment = {"device": "cpu", "seed": seed, "python": "3"}
    run = RunFolder.create(path, TrainConfig(steps=steps, seed=seed), environment)
    rows = changed.get("rows") or [make_row(k + 1, steps, noise) for k in range(steps)]
    samples = changed.get("samples", [make_sample(1), make_sample(steps)])

    streams = {
        "metrics": rows,
        "events": changed.get("events", []),
        "samples": samples,
    }
    for stream, items in streams.items():
        for item in items:
            run.append(stream, item)  # pyright: ignore[reportArgumentType]

    run.save("before", {"transcripts": [make_transcript(k, k == 0) for k in range(4)]})
    run.save("after", {"transcripts": [make_transcript(k, k != 2) for k in range(4)]})

    if changed.get("finished", True):
        scores = {"before": (0.28, 0.22, 0.35), "after": (0.45, 0.38, 0.52)}
        scores["gain"] = (0.17, 0.1, 0.24)
        ends = ("value", "low", "high")
        result = {name: dict(zip(ends, score)) for name, score in scores.items()}

        run.finish(
            {
                "steps": steps,
                "problems": 4,
                "findings": [],
                **result,
            },
            lambda: "words",
        )

    return run


def make_event(step: int, severity: str = "warn", detector: str = "entropy_collapse") -> dict:
    return {
        "step": step,
        "severity": severity,
        "detector": detector,
        "diagnosis": "it fell",
        "remedy": "go back",
        "changes": [],
        "evidence": [],
        "kind": "watch",
    }


def make_sample(step: int, completion: str = "3 + 4 = 7\n\\boxed{7}") -> dict:
    return {
        "step": step,
        "prompt": "What is 3 + 4?",
        "completion": completion,
        "reward": 1.0,
        "advantage": 0.5,
    }


def make_transcript(number: int, correct: bool, **changed: Any) -> dict:
    answer = "7" if correct else "8"
    return {
        "id": f"p{number}",
        "question": f"What is 3 + 4 ({number})?",
        "gold": "7",
        "completion": f"3 + 4 = {answer}\n\\boxed{{{answer}}}",
        "answer": answer,
        "correct": correct,
        "correct_unformatted": False,
        "truncated": False,
        **changed,
    }


def make_snake(path: Path, updates: int = 12, runs: int = 2) -> RunFolder:
    folder = RunFolder.create(path, to_plain(SnakeConfig()), {"device": "cpu", "seed": 0})
    for step in range(1, updates + 1):
        each = [float(step + k) for k in range(runs)]
        times = {"time/seconds": 4.0 * step, "time/env_steps": 4096.0 * step}
        row = {
            "step": step,
            "episode/fruit": sum(each) / runs,
            "policy/entropy": 1.0,
            **times,
        }

        folder.append("metrics", row)
        for number, fruit in enumerate(each):
            append_row(
                path / "runs.jsonl",
                {
                    "step": step,
                    "run": number,
                    "episode/fruit": fruit,
                },
            )

    folder.finish(
        {
            "baselines": {
                "maximum": 35.0,
                "random_masked": 7.5,
                "random_unmasked": 0.2,
            },
            "runs": [{"seed": k} for k in range(runs)],
            "greedy_fruit": 30.25,
            "greedy_won": 0.5,
            "sampled_fruit": 29.5,
            "sampled_won": 0.25,
            "env_steps": 1.0,
            "seconds": 48.0,
        },
        lambda: "words",
    )
    return folder


def make_tournament(path: Path, names: tuple[str, ...] = ("adamw", "muon", "pion")) -> Tournament:
    """A finished tournament: a dead cell, a failed one, and a best rate on the edge."""
    cells = []
    standings = []
    for place, name in enumerate(names):
        for power in range(3):
            score = 0.4 + 0.05 * place - 0.08 * abs(power - 1)
            rate = 1e-4 * 4**power
            dead = name == "muon" and power == 2

            cells.append(
                make_cell(
                    path,
                    name,
                    rate,
                    100,
                    "search",
                    score,
                    dead,
                )
            )

        score = 0.45 + 0.05 * place
        behind = {}
        cells += [
            make_cell(
                path,
                name,
                4e-4,
                seed,
                "final",
                score,
            )
            for seed in range(2)
        ]

        if place < len(names) - 1:
            behind = {
                "behind": -0.05 * (2 - place),
                "behind_low": -0.1,
                "behind_high": 0.01,
            }
            behind |= {"p": 0.2, "p_holm": 0.4}

        standings.insert(
            0,
            make_standing(
                rank=len(names) - place,
                contender=name,
                rate=4e-4,
                seeds=[0, 1],
                score=score,
                low=score - 0.04,
                high=score + 0.04,
                by_seed=[score, score],
                seconds=60.0,
                tokens=8e4,
                threshold_seconds=30.0,
                trials=3,
                extended=0,
                edge="high" if place == 0 else None,
                dead=0,
                failed=0,
                **behind,
            ),
        )

    crashed = Cell(
        id="crashed",
        contender=names[0],
        objective="grpo",
        rate=6.4e-3,
        seed=100,
        stage="search",
        state="failed",
        why=f"out of memory {ATTACK[:40]}",
    )

    about = {"objective": "grpo", "about": "a contender"}
    made = Tournament(
        recipe="arith",
        kind="rlvr",
        measure="greedy accuracy",
        rule=["All had the same rollouts."],
        contenders=[
            Contender(
                name=name,
                optim=name,
                **about,
            )
            for name in names
        ],
        plan={"seeds": 2, "rates": 3},
        cells=[*cells, crashed],
        environment={"device": "cpu"},
        problems={"search": ["a"], "final": ["b"]},
        start={"search": 0.28, "final": 0.27},
        threshold=Threshold(metric="reward", value=0.4),
        standings=standings,
        words=["pion is first.", "adamw is behind by 0.1."],
    )

    record.write_tournament(path, made)
    return made


def make_record(cells: list[Cell], **values: Any) -> Tournament:
    empty = {
        "recipe": "",
        "kind": "vla",
        "measure": "",
        "rule": [],
        "contenders": [],
        "plan": {},
    }
    return Tournament(**empty | values, cells=cells)


def make_final(contender: str, seed: int = 0, **values: Any) -> Cell:
    return Cell(
        id=f"{contender}{seed}",
        contender=contender,
        objective="",
        rate=1.0,
        seed=seed,
        stage="final",
        state="done",
        **values,
    )


def make_standing(**values: Any) -> Standing:
    unknown: dict[str, Any] = {field.name: None for field in fields(Standing)}
    return Standing(**unknown | values)


def make_cell(
    path: Path, name: str, rate: float, seed: int, stage: Any, score: float, dead: bool = False
) -> Cell:
    key = f"{name}-{rate:g}-{seed}-{stage}"
    events = [make_event(8, "stop")] if dead else []
    make_run(path / "cells" / key, 10, seed, events=events)

    return Cell(
        id=key,
        contender=name,
        objective="grpo",
        rate=rate,
        seed=seed,
        stage=stage,
        state="done",
        run=f"cells/{key}",
        score=0.1 if dead else score,
        per_problem=[score],
        seconds=60.0,
        wall=80.0,
        tokens=8e4,
        steps=10,
        threshold_seconds=None if dead else 30.0,
        threshold_tokens=None if dead else 4e4,
        threshold_steps=None if dead else 5,
        verdict="dead" if dead else "healthy",
        cause="entropy_collapse" if dead else None,
        story="dead after step 8" if dead else "healthy",
    )

"""How often the watch raises a false alarm in long runs in which nothing goes wrong.

    python -m benchmarks.watch.flat_runs --runs 300

Simulated rewards of 1,000 steps: the mean over a few prompts of unequal difficulty, 8 completions
each, at 0.1 to 0.5, flat or learning 0.2 over the run. Only detectors that read the reward and the
groups' signal can speak.
"""

import argparse
from collections import Counter

import numpy as np

from benchmarks.watch.evaluate import events_of
from mesotron.watch import DETECTORS, Engine

STEPS = 1000
COMPLETIONS = 8
PROMPTS = (1, 2, 4, 8, 16)
LEVELS = (0.1, 0.15, 0.3, 0.5)
GAINS = (0.0, 0.2)


def rewards(draw: np.random.Generator, prompts: int, level: float, gain: float) -> np.ndarray:
    mean = (level + gain * np.arange(STEPS) / STEPS)[:, None]
    easy = draw.beta(1.2 * mean, 1.2 * (1 - mean), size=(STEPS, prompts))
    return draw.binomial(COMPLETIONS, easy).mean(1) / COMPLETIONS


def main() -> None:
    parser = argparse.ArgumentParser(description="Count false alarms in flat runs")
    parser.add_argument("--runs", type=int, default=300)
    draw = np.random.default_rng(11)
    counts = Counter[tuple[int, str]]()

    harmful = set()
    for detector in DETECTORS:
        if not detector.harmless:
            harmful.add(detector.name)

    for _ in range(parser.parse_args().runs):
        prompts = int(draw.choice(PROMPTS))
        values = rewards(draw, prompts, draw.choice(LEVELS), draw.choice(GAINS))
        events = events_of(({"reward": value} for value in values), Engine())
        severities = set()
        for event in events:
            if event.detector in harmful:
                severities.add(event.severity)

        counts.update((prompts, word) for word in {"runs", *severities})

    for prompts in PROMPTS:
        each = [f"{word} {counts[prompts, word]}" for word in ("runs", "stop", "warn")]
        print(f"{prompts} prompts: {', '.join(each)}")


if __name__ == "__main__":
    main()

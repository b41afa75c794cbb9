"""The four tasks of the protocol as files: training, validation and test problems of each.

Problems are split by what makes them the same problem (`key`), not by their text: the terms of a
sum in any order, the calculation of a word problem, a word and its mirror image, the numbers of a
countdown. Everything follows from the seed below.

    python -m benchmarks.tournament.tasks FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SEED = 2026
SIZES = {"train": 4096, "validation": 256, "test": 512}
DRAWS = 60_000  # problems to choose from
SYSTEM = "Reply with ANSWER: n."


@dataclass(frozen=True)
class Spec:
    draw: Callable[[random.Random], Iterator[tuple[str, Row]]]  # yields keys and rows
    max_tokens: int  # of a completion
    about: str


def sums(rng: random.Random) -> Iterator[tuple[str, Row]]:
    while True:
        terms = [rng.randint(1, 30)]
        question = str(terms[0])
        for _ in range(2):
            sign = rng.choice((-1, 1))
            number = rng.randint(1, 9)
            terms.append(sign * number)
            question += f" {'-' if sign < 0 else '+'} {number}"

        key = " ".join(map(str, sorted(terms)))
        yield key, {"question": f"{question} =", "answer": str(sum(terms))}


def words(rng: random.Random) -> Iterator[tuple[str, Row]]:
    from mesotron.tasks.builtin.arith import generate

    levels = (3, 4)
    problems = generate("train", DRAWS // 6, levels, SEED)
    more = generate("eval", 2000, levels, SEED)
    for problem in [*problems, *more]:
        answer = f"{problem.solution}\n#### {problem.gold}"
        yield str(problem.solution), {"question": problem.question, "answer": answer}


def spell(rng: random.Random) -> Iterator[tuple[str, Row]]:
    # The scorer is reasoning-gym's: anagrams are no answer.
    for row, entry in gym_rows("spell_backward", {"min_word_len": 4, "max_word_len": 5}, rng):
        word = entry["metadata"]["word"]
        key = min(word.lower(), word.lower()[::-1])
        if word.islower() and len(key) in (4, 5):
            yield key, row | {"question": f"Spell backward: {word}"}


def countdown(rng: random.Random) -> Iterator[tuple[str, Row]]:
    settings = {
        "min_numbers": 3,
        "max_numbers": 3,
        "min_value": 1,
        "max_value": 20,
        "min_target": 1,
        "max_target": 99,
    }
    for row, entry in gym_rows("countdown", settings, rng):
        numbers = entry["metadata"]["numbers"]
        target = entry["metadata"]["target"]
        key = " ".join(map(str, sorted(numbers)))
        shown = ", ".join(map(str, numbers))
        yield key, row | {"question": f"Make {target} from {shown}."}


def gym_rows(name: str, settings: Row, rng: random.Random) -> Iterator[tuple[Row, Row]]:
    """Rows that name their problem, by which the trainer finds its scorer, and their entries."""
    from mesotron.tasks.gym import KEY, make_dataset

    text = json.dumps(settings | {"size": DRAWS}, sort_keys=True)
    seed = rng.randrange(2**31)
    dataset = make_dataset(name, text, seed)
    for index in range(DRAWS):
        entry = dataset[index]
        yield {"answer": str(entry["answer"]), KEY: [name, text, seed, index]}, entry


TASKS: dict[str, Spec] = {
    "sums": Spec(sums, 10, "chained sums such as 17 - 4 + 9"),
    "words": Spec(words, 40, "word problems of one or two operations, with their steps"),
    "spell": Spec(spell, 14, "words of four or five letters spelled backward"),
    "countdown": Spec(countdown, 20, "an expression of three numbers that makes a target"),
}


def split_of(key: str) -> str:
    """Where a problem belongs: one key in eight is for validation, two are for the test."""
    from mesotron.tasks.problem import digest

    place = digest(key, SEED) % 8
    if place == 0:
        return "validation"
    return "test" if place < 3 else "train"


def make_task(name: str) -> dict[str, list[Row]]:
    """Rows with their `key`, by split."""
    made: dict[str, list[Row]] = {split: [] for split in SIZES}
    questions: set[str] = set()
    for key, row in TASKS[name].draw(random.Random(f"{name} {SEED}")):
        split = split_of(key)
        is_new = row["question"] not in questions
        if is_new and len(made[split]) < SIZES[split]:
            questions.add(row["question"])
            made[split].append(row | {"key": key})

        if all(len(made[split]) == size for split, size in SIZES.items()):
            return made

    counts = {split: len(rows) for split, rows in made.items()}
    raise ValueError(f"{name} has too few distinct problems: {counts}")


def write_tasks(folder: Path) -> None:
    """FOLDER/TASK/tuning and FOLDER/TASK/reporting share train.jsonl; test.jsonl holds the
    validation problems of the one and the test problems of the other."""
    for name in TASKS:
        if (folder / name / "reporting" / "test.jsonl").exists():
            continue

        made = make_task(name)
        for use, held_out in (("tuning", "validation"), ("reporting", "test")):
            write_rows(made["train"], folder / name / use / "train.jsonl")
            write_rows(made[held_out], folder / name / use / "test.jsonl")


def write_rows(rows: list[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]))

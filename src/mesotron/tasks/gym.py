"""Tasks of reasoning-gym (Apache-2.0): over 100 procedural datasets with their own scorers.

`rg:chain_sum` is one, `rg:chain_sum+leg_counting` a mixture. Problems follow from the seed, so a
problem is kept as its address (dataset, settings, seed, index) and made again to be scored.
"""

import ast
import contextlib
import json
import logging
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from mesotron.answers.facts import Facts
from mesotron.answers.formats import AnswerFormat
from mesotron.config import TaskConfig
from mesotron.config.base import suggest
from mesotron.runs.extras import require
from mesotron.tasks.problem import Problem, digest

log = logging.getLogger("mesotron")
PREFIX = "rg:"
GENERATED = 2_000  # default number of training problems
PER_LEVEL = 500  # the same with a curriculum, of each level
MAX_SEED = 2**31 - 1
DRAWS = 4  # per problem, at most
SCORER_SECONDS = 2.0  # of CPU time for one answer
MAX_SCORED = 4_096  # characters of an answer
KEY = "reasoning_gym"  # of a problem's columns
Address = tuple[str, str, int, int]  # dataset, settings as JSON, seed, index


class OutOfTime(BaseException):  # which no `except Exception` of a scorer or reward catches
    """A call used more CPU time than it may."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` after so much CPU time: math-verify and others use the alarm on the clock
    themselves. No limit outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)

    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def settings_of(config: TaskConfig, name: str) -> dict[str, Any]:
    """`min_terms=2,chain_sum.max_terms=4` as the settings of one dataset of a mixture."""
    from reasoning_gym.factory import DATASETS

    known = {item.name for item in fields(DATASETS[name][1])} - {"seed", "size"}

    found: dict[str, Any] = {}
    for item in filter(None, re.split(r",(?=[\w.]+=)", config.settings)):
        key, _, text = item.partition("=")
        dataset, _, key = key.rpartition(".")
        if dataset not in ("", name):
            continue
        if key not in known:
            raise ValueError(
                f"--task.settings {key!r} is no setting of {name}{suggest(key, known)}; it has "
                f"{', '.join(sorted(known))}"
            )

        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text

    return found


def num_levels(name: str) -> int:
    from reasoning_gym.factory import CURRICULA

    if name not in CURRICULA:
        return 1

    make: Any = CURRICULA[name]
    return max((len(one.levels) for one in make().attributes.values()), default=1)


@lru_cache(maxsize=256)
def make_dataset(name: str, settings: str, seed: int) -> Any:
    """A dataset; `settings` are JSON with its size; `difficulty` is a level of its curriculum."""
    from reasoning_gym.factory import CURRICULA, DATASETS

    given = json.loads(settings)
    level = given.pop("difficulty", None)
    make, config_type = DATASETS[name]

    values: dict[str, Any] = {}
    try:
        if level is not None and name in CURRICULA:
            make_curriculum: Any = CURRICULA[name]
            curriculum = make_curriculum()
            for key, one in curriculum.attributes.items():
                curriculum.set_attr_level(key, min(level, len(one.levels) - 1))

            made = curriculum.generate_configuration({"seed": seed, "size": given["size"]})
            values = {item.name: getattr(made, item.name) for item in fields(made)}

        config = config_type(
            **{
                **values,
                **given,
                "seed": seed,
            }
        )

        getattr(config, "validate", lambda: None)()  # two datasets have none
        return make(config=config)
    except (AssertionError, TypeError, ValueError) as error:
        reason = f" ({error})" if str(error) else ""
        raise ValueError(f"--task rg:{name} does not take {settings}{reason}") from error


def generate(config: TaskConfig, split: str, count: int) -> list[Problem]:
    """Distinct problems, the datasets of a mixture by their weights. With a curriculum as many of
    each level to train on, and so many over all levels to evaluate on."""
    require("gym", what=f"--task {config.name}")
    from reasoning_gym.factory import DATASETS

    names = config.name.removeprefix(PREFIX).split("+")
    for name in names:
        if name not in DATASETS:
            known = suggest(name, DATASETS) or "; see reasoning_gym.factory.DATASETS"
            raise ValueError(f"--task {config.name}: reasoning-gym has no dataset {name!r}{known}")

    weights = config.weights or (1.0,) * len(names)
    problems: dict[str, Problem] = {}
    for name, weight in zip(names, weights, strict=True):
        levels = levels_of(config, name)
        part = round(count * weight / sum(weights))
        for level in levels:
            given = settings_of(config, name)
            given |= {} if level is None else {"difficulty": level}
            share = part if split == "train" else -(-part // len(levels))
            given["size"] = DRAWS * share + 20  # some datasets repeat, some are made as a whole
            settings = json.dumps(given, sort_keys=True)

            problems |= _draw(
                config,
                (name, settings),
                level,
                split,
                share,
                problems,
            )

    return list(problems.values())


def levels_of(config: TaskConfig, name: str) -> list[int | None]:
    first = config.difficulty
    if config.curriculum is None:
        return [first]

    last = num_levels(name) - 1
    if last <= (first or 0):
        raise ValueError(f"--task.curriculum does not apply: rg:{name} has no level to rise to")

    return list(range(first or 0, last + 1))


def _draw(
    config: TaskConfig,
    which: tuple[str, str],
    level: int | None,
    split: str,
    count: int,
    known: Mapping[str, Problem],
) -> dict[str, Problem]:
    name, settings = which
    seed = digest(f"{split} {name} {level}", config.seed) % MAX_SEED
    dataset = make_dataset(name, settings, seed)

    found: dict[str, Problem] = {}
    for index in range(dataset.config.size):
        if len(found) == count:
            break

        entry = dataset[index]
        question = str(entry["question"]).strip()
        gold = entry["answer"]
        if question in known or question in found:
            continue

        label = f"{name}-{split}-{len(known) + len(found)}"
        columns = {KEY: [name, settings, seed, index]}
        answer = None if gold is None else str(gold)

        found[question] = Problem(
            question,
            answer,
            label,
            level,
            columns=columns,
        )

    return found


@lru_cache(maxsize=65_536)
def entry_of(address: Address) -> dict[str, Any]:
    name, settings, seed, index = address
    return make_dataset(name, settings, seed)[index]


def score(answer: str, address: Address) -> float:
    """The scorer's verdict from 0 to 1; 0 if it raises, hangs or returns anything else."""
    name, settings, seed, _ = address

    # Outside the limit: an import that is interrupted leaves broken modules behind.
    dataset = make_dataset(name, settings, seed)
    entry = entry_of(address)
    try:
        with cpu_limit(SCORER_SECONDS):
            value = float(dataset.score_answer(answer[:MAX_SCORED], entry))
    except (Exception, OutOfTime) as error:  # any of a hundred scorers on untrusted text
        log.debug("the scorer of rg:%s failed on %r: %r", name, answer[:80], error)
        return 0.0

    return min(1.0, max(0.0, value)) if value == value else 0.0


def regrade(
    facts: Sequence[Facts], texts: Sequence[str], rows: Sequence[Any], format: AnswerFormat
) -> list[Facts]:
    """Facts whose verdict is the task's own scorer's, where the rows have one."""
    graded = []
    for fact, text, row in zip(facts, texts, rows, strict=True):
        columns = row if isinstance(row, Mapping) else row and json.loads(row)
        if not columns or KEY not in columns:
            graded.append(fact)
            continue

        answer = format.extract(text, complete=not fact.truncated)
        value = 0.0 if answer is None else score(answer, tuple(columns[KEY]))
        graded.append(
            replace(
                fact,
                score=value,
                correct=value >= 1,
                graded=True,
                gold_unparseable=False,
            )
        )

    return graded

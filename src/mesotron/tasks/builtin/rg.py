"""Tasks of reasoning-gym (Apache-2.0): over 100 procedural datasets with their own scorers.

`rg:chain_sum` is one dataset, `rg:chain_sum+leg_counting` a mixture of two.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mesotron.config import TaskConfig
from mesotron.config.base import suggest
from mesotron.runs.extras import require
from mesotron.tasks import gym
from mesotron.tasks.generated import Split
from mesotron.tasks.problem import Problem, digest
from mesotron.tasks.registry import Loaded, task

PREFIX = "rg:"
NUM_TRAIN = 2_000
PER_LEVEL = 500  # training problems of each level of a curriculum
MAX_SEED = 2**31 - 1
DRAWS = 4  # per problem, at most: some datasets repeat themselves


@dataclass(frozen=True)
class Order:
    """Problems to draw from one dataset at one level."""

    dataset: str
    level: int | None
    split: Split
    count: int


def check(config: TaskConfig) -> None:
    """Refuse unknown datasets and settings, by making one problem."""
    generate(replace(config, seed=-1), "eval", 1)


@task(
    "rg",
    about="`rg:NAME`, a dataset of reasoning-gym, or `rg:A+B`, a mixture",
    gold="the dataset's; its own scorer decides",
    num_train=NUM_TRAIN,
    check=check,
)
def rg(config: TaskConfig) -> Loaded:
    usual = NUM_TRAIN if config.curriculum is None else PER_LEVEL
    count = usual if config.num_train is None else config.num_train

    held_out = generate(config, "eval", config.num_eval)
    return generate(config, "train", count), held_out


def generate(config: TaskConfig, split: Split, count: int) -> list[Problem]:
    """Distinct problems, the datasets of a mixture by their weights.

    With a curriculum there are `count` of each level to train on, and `count` over all levels to
    evaluate on.
    """
    require("gym", what=f"--task {config.name}")
    names = config.name.removeprefix(PREFIX).split("+")
    for name in names:
        check_dataset(config, name)

    weights = config.weights or (1.0,) * len(names)
    problems: dict[str, Problem] = {}
    for name, weight in zip(names, weights, strict=True):
        share = round(count * weight / sum(weights))
        levels = levels_of(config, name)
        if split == "eval":
            share = -(-share // len(levels))

        for level in levels:
            order = Order(name, level, split, share)
            problems |= draw(order, config, problems)

    return list(problems.values())


def check_dataset(config: TaskConfig, name: str) -> None:
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        known = suggest(name, DATASETS) or "; see reasoning_gym.factory.DATASETS"
        raise ValueError(f"--task {config.name}: reasoning-gym has no dataset {name!r}{known}")


def levels_of(config: TaskConfig, name: str) -> list[int | None]:
    lowest = config.difficulty
    if config.curriculum is None:
        return [lowest]

    highest = gym.num_levels(name) - 1
    if highest <= (lowest or 0):
        raise ValueError(f"--task.curriculum does not apply: rg:{name} has no level to rise to")

    return list(range(lowest or 0, highest + 1))


def draw(order: Order, config: TaskConfig, known: Mapping[str, Problem]) -> dict[str, Problem]:
    """New problems by their question, none of which is `known`."""
    name = order.dataset
    settings = gym.settings_of(config, name)
    if order.level is not None:
        settings["difficulty"] = order.level

    settings["size"] = DRAWS * order.count + 20  # some datasets are made as a whole
    text = json.dumps(settings, sort_keys=True)
    seed = digest(f"{order.split} {name} {order.level}", config.seed) % MAX_SEED
    dataset = gym.make_dataset(name, text, seed)

    drawn: dict[str, Problem] = {}
    for index in range(dataset.config.size):
        if len(drawn) == order.count:
            break

        entry = dataset[index]
        question = str(entry["question"]).strip()
        if question in known or question in drawn:
            continue

        gold = entry["answer"]
        drawn[question] = Problem(
            question=question,
            gold=None if gold is None else str(gold),
            id=f"{name}-{order.split}-{len(known) + len(drawn)}",
            level=order.level,
            columns={gym.KEY: [name, text, seed, index]},
        )

    return drawn

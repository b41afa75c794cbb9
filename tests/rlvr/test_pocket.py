"""The choice of `--lr auto` on synthetic forks whose gains are known."""

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mesotron import cli
from mesotron.config import OptimConfig, TrainConfig
from mesotron.rlvr.heats import decide
from mesotron.rlvr.pocket import (
    COST,
    FIRST,
    Fork,
    Heat,
    Sampled,
    Search,
    allow,
    choose,
    compare,
    from_record,
    is_admitted,
    judge,
    look_again,
    next_heat,
    next_look,
    spell_rate,
    spent,
    to_record,
)
from mesotron.runs import RunFolder

STEPS = 40
PROMPTS = 64


def gain(travelled: float, best: float = 0.05, dies: float = 0.2) -> float:
    """Reward above the start: it rises with the distance, and falls beyond that of death."""
    risen = 0.6 * (1 - math.exp(-3 * travelled / best))
    fallen = max(0.0, travelled - dies) / dies
    return max(risen - fallen, -0.3)


def grow(heat: Heat, rate: float, known: Fork | None = None, noise: float = 0.05, **shape) -> Fork:
    """A fork after a heat, as if trained; prompts are as hard in every fork."""
    steps = list(known.steps) if known else []
    travelled = steps[-1].travelled + rate if steps else 0.0
    for step in range(heat.first + 1, heat.last + 1):
        hard = random.Random(step)
        luck = random.Random(f"{step} {heat.factor}")
        rewards = {}
        for k in range(PROMPTS):
            level = 0.3 + 0.2 * hard.random() + gain(travelled, **shape)
            rewards[str(k)] = level + noise * luck.gauss(0, 1)

        steps.append(Sampled(step=step, travelled=travelled, rewards=rewards, drift={}))
        travelled += rate

    return Fork(
        factor=heat.factor,
        rate=rate,
        planned=rate * (STEPS - heat.first if known is None else STEPS) / 2,
        steps=tuple(steps),
        conditions=(*(known.conditions if known else ()), "healthy"),
    )


def run_search(recipe: float, **shape) -> Search:
    search = Search(step=0)
    allowance = allow(STEPS)
    while heat := next_heat(search, allowance):
        known = next((fork for fork in search.forks if fork.factor == heat.factor), None)
        search = search.with_fork(grow(heat, recipe * heat.factor, known, **shape))

    return Search(step=0, forks=search.forks, choice=choose(search.forks))


def test_a_rate_far_too_small_is_raised():
    search = run_search(1e-4)

    assert search.choice.factor >= 4
    assert max(fork.factor for fork in search.forks) == 4 * max(FIRST)


def test_a_rate_whose_run_would_die_is_lowered_although_it_leads_in_the_heat():
    search = run_search(3.2e-2)
    led = {fork.factor: fork.steps[-1].rewards["0"] for fork in search.forks}

    assert led[1.0] > led[0.25]
    assert search.choice.factor < 1


def test_without_a_difference_the_recipe_stays():
    search = run_search(2e-3, best=1e9)

    assert search.choice.factor == 1
    assert not search.choice.difference.is_clear


def test_a_fork_that_the_watch_calls_drifting_is_out_however_good():
    forks = run_search(1e-3).forks
    sick = []
    for fork in forks:
        is_big = fork.factor > 1
        sick.append(Fork(**{**vars(fork), "conditions": ("drifting",)}) if is_big else fork)

    assert choose(sick).factor <= 1
    assert all(factor <= 1 for factor in choose(sick).admitted)


def test_without_any_healthy_fork_the_smallest_that_can_continue_is_taken():
    broken = []
    for fork in run_search(1e-3).forks:
        condition = "drifting" if fork.factor < 4 else "not finite"
        broken.append(Fork(**{**vars(fork), "conditions": (condition,)}))

    choice = choose(broken)
    assert choice.factor == min(FIRST)
    assert not choice.admitted


@pytest.mark.parametrize("recipe", [1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
def test_the_search_stays_within_its_cost(recipe):
    assert spent([run_search(recipe)]) <= COST * STEPS


def test_pairs_cancel_what_prompts_share():
    forks = {fork.factor: fork for fork in run_search(1e-3, noise=0.0).forks}
    difference = compare(forks[16.0], forks[4.0])

    assert difference.error < 0.002  # of the prompts alone it is 0.005
    assert difference.is_clear
    assert compare(forks[4.0], forks[4.0]).mean == 0
    assert not compare(forks[4.0], forks[4.0]).is_clear


def look(rates_left: float, **shape) -> Search:
    search = Search(step=10)
    while heat := next_look(search, allow(200)):
        fork = grow(heat, 1e-3 * heat.factor, **shape)
        fork = Fork(**{**vars(fork), "planned": rates_left * heat.factor})
        search = search.with_fork(fork)

    return search


def test_a_later_look_doubles_only_what_was_previewed():
    search = look(0.01, best=0.005, noise=0.01)
    assert look_again(search.forks, reach=0.02).factor == 2

    far = look(0.1, best=0.005, noise=0.01)
    assert look_again(far.forks, reach=0.02).factor == 1


@pytest.mark.parametrize(("earlier", "factor"), [([1e-3], 2), ([1e-3, 1e-6], 2), ([1e-6], 1)])
def test_a_later_look_knows_how_far_the_forks_of_earlier_ones_went(tmp_path, earlier, factor):
    searches = [run_search(recipe) for recipe in earlier]
    present = look(0.02, best=0.005, noise=0.01)

    with RunFolder.create(tmp_path / "run", {}, {}) as run:
        for step in range(1, present.step + 1):
            run.append("metrics", {"step": step, "learning_rate": 1e-3})

        course = SimpleNamespace(run=run)
        assert decide(course, present, searches).factor == factor


def test_a_later_look_halves_a_rate_that_drifts():
    forks = list(look(0.01).forks)
    forks = [
        Fork(**{**vars(fork), "conditions": ("drifting",)}) if fork.factor == 1 else fork
        for fork in forks
    ]

    assert look_again(forks, reach=1.0).factor == 0.5


def test_the_record_reads_back_to_what_it_was():
    search = run_search(1e-3)
    text = json.dumps(to_record([search]))

    assert from_record(json.loads(text)) == (search,)
    with pytest.raises(ValueError, match="damaged"):
        from_record({"searches": [{"step": 0}]})

    unknown = json.loads(text)
    unknown["searches"][0]["choice"]["factor"] = 7.0
    with pytest.raises(ValueError, match="damaged"):
        from_record(unknown)


def test_an_unknown_error_is_null_in_the_record():
    search = run_search(1e-3)
    alone = compare(search.forks[0], replace(search.forks[1], steps=()))
    assert math.isinf(alone.error)

    choice = replace(search.choice, difference=alone)
    undecided = replace(search, choice=choice)
    text = json.dumps(to_record([undecided]), allow_nan=False)
    assert from_record(json.loads(text)) == (undecided,)


def test_reports_name_the_rate_that_was_found():
    search = run_search(1e-3)
    words = spell_rate(1e-4, to_record([search]))
    assert words.startswith(f"{search.choice.rate:.3g} ")
    assert "0.0001" in words

    for record in (None, to_record([replace(search, choice=None)])):
        assert spell_rate(1e-4, record) == "0.0001"


def test_the_watch_judges_heats():
    rows = [{"step": k, "reward": 0.5, "loss": 0.1, "grad_norm": 1.0} for k in range(4)]
    assert judge(rows) == "healthy"
    assert judge([*rows, {"step": 4, "loss": math.nan}]) == "not finite"

    fallen = [{"step": k, "reward": 0.7 if k < 8 else 0.02, "loss": 0.1} for k in range(16)]
    assert judge(fallen) in ("drifting", "dead")


def test_refusals_name_the_flag():
    for words in (
        "--lr auto --steps 10",
        "--lr auto --steps auto",
        "--lr auto --objective.name vote",
        "--lr-auto --lr 0",
    ):
        with pytest.raises(ValueError, match="--lr-auto"):
            cli.parse(TrainConfig, words.split())

    with pytest.raises(ValueError, match="--steps"):
        allow(10)


def test_auto_is_a_spelling_of_the_switch_and_keeps_the_recipes_rate():
    given = cli.parse(TrainConfig, ["--lr", "auto"], "mesotron train", cli.RECIPE)
    plain = cli.parse(TrainConfig, [], "mesotron train", cli.RECIPE)

    assert given.lr_auto
    assert given.optim == plain.optim
    assert given.optim.lr != OptimConfig().lr
    assert not plain.lr_auto


def a_fork(factor, travelled, planned, condition="healthy"):
    """After two steps, the second of which began at a distance from the start."""
    rewards = {str(k): 0.5 for k in range(8)}
    steps = [Sampled(step=k, travelled=k * travelled, rewards=rewards, drift={}) for k in (0, 1)]
    return Fork(
        factor=factor,
        rate=factor,
        planned=planned,
        steps=tuple(steps),
        conditions=(condition,),
    )


@pytest.mark.parametrize(
    ("factor", "travelled", "condition", "is_safe"),
    [
        (4.0, 1.5, "dead", False),  # it failed within the distance of the whole run
        (4.0, 2.0, "dead", False),
        (4.0, 2.5, "dead", True),  # farther out
        (8.0, 1.5, "dead", True),  # at a rate that is not near
        (0.5, 1.5, "dead", True),
        (4.0, 1.5, "healthy", True),
    ],
)
def test_a_rate_is_admitted_if_no_near_one_failed_within_its_distance(
    factor, travelled, condition, is_safe
):
    fork = a_fork(1.0, 1.0, 2.0)
    other = a_fork(factor, travelled, 9.0, condition)
    assert is_admitted(fork, [fork, other]) is is_safe


def test_a_rate_is_not_admitted_where_its_run_is_a_leap():
    fork = a_fork(1.0, 1.0, 3.0)
    assert is_admitted(fork, [fork])
    far = a_fork(1.0, 1.0, 3.5)
    assert not is_admitted(far, [far])
    assert is_admitted(far, [far, a_fork(8.0, 2.0, 9.0)])  # another one has gone farther
    assert not is_admitted(a_fork(1.0, 1.0, 2.0, "dead"), [fork])

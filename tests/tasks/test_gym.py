"""Tasks of reasoning-gym: splits, settings, mixtures, levels, scorers, and the curriculum."""

import json
import signal

import pytest

pytest.importorskip("reasoning_gym")

from mesotron.answers.formats import FORMATS
from mesotron.cli import main
from mesotron.config import TaskConfig
from mesotron.tasks import gym
from mesotron.tasks.load import load_task
from mesotron.tasks.rows import ROLLOUTS, Curriculum


def task(name="rg:chain_sum", **settings):
    return TaskConfig(
        name=name,
        num_train=40,
        num_eval=20,
        **settings,
    )


def test_problems_are_seeded_and_held_out():
    config = task(settings="min_terms=2,max_terms=2,min_digits=1,max_digits=1")
    first = load_task(config)
    assert first == load_task(config)

    train, held_out = ({p.question for p in part} for part in (first.train, first.eval))
    assert not train & held_out
    assert len(first.eval) == 20

    for problem in first.train:
        terms = problem.question.split(": ")[1].removesuffix("=")
        assert problem.gold == str(eval(terms))
        assert len(terms.split()) == 3

    other = load_task(task(settings=config.settings, seed=1))
    assert {p.question for p in other.train} != train


def test_mixtures_and_levels():
    mixed = load_task(task("rg:chain_sum+leg_counting", weights=(3.0, 1.0)))
    names = [p.id.split("-")[0] for p in mixed.train]
    assert (names.count("chain_sum"), names.count("leg_counting")) == (30, 10)

    easy, hard = (load_task(task(difficulty=level)).train for level in (0, 3))
    assert sum(len(p.question) for p in hard) > sum(len(p.question) for p in easy)

    levels = {p.level for p in load_task(task(curriculum=0.8)).train}
    assert levels == set(range(gym.num_levels("chain_sum")))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--task rg:chain_sums", "chain_sum"),
        ("--task rg:chain_sum --task.settings min_term=2", "min_terms"),
        ("--task rg:chain_sum --task.settings min_terms", "--task.settings"),
        ("--task rg:chain_sum --task.settings min_terms=9,max_terms=2", "chain_sum"),
        ("--task rg:chain_sum+products --data.weights 1", "--data.weights"),
        ("--task arith --task.difficulty 2", "--task.difficulty"),
        ("--task ariht", "arith"),
    ],
)
def test_mistakes_are_one_sentence(flags, named, capsys):
    assert main(["train", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error


def test_scorers_are_bounded_and_making_a_problem_again_is_not(monkeypatch):
    problem = load_task(task()).train[0]
    address = tuple(problem.columns[gym.KEY])
    make_dataset = gym.make_dataset
    limits = []

    def make(*place):
        limits.append(signal.getitimer(signal.ITIMER_PROF))
        return make_dataset(*place)

    monkeypatch.setattr(gym, "make_dataset", make)
    assert gym.score(problem.gold, address) == 1
    assert gym.score("no number", address) < 1
    assert set(limits) == {(0.0, 0.0)}

    dataset = gym.make_dataset(*address[:3])

    def replies(reply):
        monkeypatch.setattr(dataset, "score_answer", lambda answer, entry: reply())
        return gym.score("1", address)

    def hang():
        while True:
            pass

    assert [replies(lambda: 7), replies(lambda: -1), replies(lambda: float("nan"))] == [1, 0, 0]
    assert replies(lambda: 1 / 0) == 0

    monkeypatch.setattr(gym, "SCORER_SECONDS", 0.05)
    assert replies(hang) == 0


def test_the_scorer_decides_what_is_correct(judge):
    # A countdown has many right answers; the gold is one of them.
    config = TaskConfig(
        name="rg:countdown",
        num_train=4,
        num_eval=1,
    )

    problem = load_task(config).train[0]
    texts = [rf"\boxed{{{answer}}}" for answer in (problem.gold, "1 + 1")] + [problem.gold]
    facts = judge.judge(texts, [problem.gold] * 3, [False] * 3)
    facts = gym.regrade(facts, texts, [json.dumps(problem.columns)] * 3, FORMATS["boxed"])

    assert [fact.correct for fact in facts] == [True, False, False]
    assert facts[0].score == 1 > facts[1].score


def test_a_curriculum_rises():
    pools = [
        [{"id": f"{level}-{k}", "prompt": f"{level} {k}"} for k in range(4)] for level in "012"
    ]
    curriculum = Curriculum(pools, 0.75)
    rows = [{"id": "0-2", "prompt": "0 2", "row": 1}]

    assert curriculum.place(rows)[0] == {
        "id": "0-2",
        "prompt": "0 2",
        "row": 1,
    }
    for rate in [0.7, 0.8] * ROLLOUTS:
        curriculum.update(rate)

    assert (curriculum.level, curriculum.place(rows)[0]["prompt"]) == (2, "2 2")

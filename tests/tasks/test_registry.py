"""What holds for every registered task and reward, and for the registry."""

import pytest

from mesotron.answers.formats import FORMATS
from mesotron.config import RewardConfig, TaskConfig
from mesotron.config.registry import REWARDS, TASKS, Registry
from mesotron.rewards.call import make_reward
from mesotron.tasks.environment import Played
from mesotron.tasks.load import load_task

NEEDS_MORE = ("file", "rg")  # data, and the name of a dataset
GENERATED = [name for name in TASKS if not TASKS[name].reads_data and name not in NEEDS_MORE]


@pytest.mark.parametrize("name", TASKS.names())
def test_every_task_describes_itself(name):
    source = TASKS[name]
    assert source.name == name
    assert source.about
    assert source.format in FORMATS


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tasks_are_seeded_and_held_out(name):
    config = TaskConfig(name=name, num_train=30, num_eval=20)
    task = load_task(config)
    assert task == load_task(config)

    train = {problem.question for problem in task.train}
    held_out = {problem.question for problem in task.eval}
    assert (len(train), len(held_out)) == (30, 20)
    assert not train & held_out
    assert all(problem.gold and problem.id for problem in (*task.train, *task.eval))


# It pays what an episode earned, and knows nothing of completions.
OF_TEXT = [name for name in REWARDS if name != "environment"]


@pytest.mark.parametrize("name", OF_TEXT)
def test_every_reward_scores_each_completion_by_itself(judge, name):
    assert REWARDS[name].about
    reward = make_reward(RewardConfig(parts=(name,)), judge, max_tokens=100)

    texts = [r"\boxed{7}", r"\boxed{8}", "It is 7", ""]
    ids = [[1, 2, 3], [1] * 90, [4], []]
    golds = ["7"] * 4
    together = reward(texts, ids, golds, [False] * 4)
    apart = []
    for text, own_ids in zip(texts, ids, strict=True):
        apart += reward([text], [own_ids], ["7"], [False])

    assert together == apart
    assert all(-1 <= score <= 1.1 for score in together)


@pytest.mark.parametrize("name", OF_TEXT)
def test_rewards_that_need_gold_skip_completions_without(judge, name):
    reward = make_reward(RewardConfig(parts=(name,)), judge, max_tokens=10)
    (score,) = reward([r"\boxed{7}"], [[1]], [None], [False])
    assert (score is None) == REWARDS[name].needs_gold


def test_the_reward_of_an_environment_is_what_it_paid(judge):
    reward = make_reward(RewardConfig(parts=("environment",)), judge, max_tokens=10)
    rows = [{"played": Played(reward=0.7)}, {"played": None}, {}]
    assert reward(["a"] * 3, [[1]] * 3, [None] * 3, [False] * 3, rows) == [0.7, None, None]
    assert REWARDS["environment"].about


def test_a_name_is_given_once():
    registry = Registry("task", "mesotron.tasks.builtin")
    registry.add("mine", object(), "mine")

    assert "mine" in registry.names()
    with pytest.raises(ValueError, match="mine"):
        registry.add("mine", object(), "other")
    with pytest.raises(ValueError, match="arith"):
        registry.add("arith", object(), "mine")


def test_a_task_has_its_own_answer_format(monkeypatch):
    config = TaskConfig(name="sums")
    assert config.answer_format == "boxed"

    source = TASKS["sums"]
    monkeypatch.setitem(TASKS._entries, "sums", type(source)(**vars(source) | {"format": "answer"}))
    assert config.answer_format == "answer"
    assert TaskConfig(name="sums", format="hashes").answer_format == "hashes"

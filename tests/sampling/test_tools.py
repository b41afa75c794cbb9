"""Tools and environments: what trains, what is counted, what is refused, and evaluations."""

import asyncio
import os
from typing import ClassVar

import pytest
import torch
from datasets import Dataset

from mesotron import cli
from mesotron.config import ObjectiveConfig, TrainConfig
from mesotron.rewards.call import completion_texts, is_unfinished
from mesotron.runs.trust import code_names
from mesotron.sampling import tools
from mesotron.sampling.tools import Toolbox, load_toolbox
from support.rlvr_tiny import make_model, make_tokenizer, make_trainer, rows, spy

# A random model writes a + now and then: what follows it is the argument of a call.
CHAT = (
    "{% for m in messages %}{{ '= ' if m.role == 'assistant' else '' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %} + {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %} <eos> {% endfor %}"
    "{% if add_generation_prompt %}= {% endif %}"
)
ADD = {"name": "double", "arguments": {"number": "{content}"}}
CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<eos> =",
    "fields": {
        "tool_calls": {
            "open": "+",
            "close_pattern": r"<eos>|$",
            "content": "text",
            "repeats": True,
            "transform": {"type": "function", "function": ADD},
        },
        "content": {"close_pattern": r"<eos>|$", "content": "text"},
    },
}
OBJECTIVES = {
    "grpo": ObjectiveConfig(),
    "gmpo": ObjectiveConfig(name="gmpo"),
    "resample": ObjectiveConfig(name="dapo", dynamic_sampling="resample"),
    "vote": ObjectiveConfig(name="vote"),
}


def double(number: str) -> str:
    """Twice a number.

    Args:
        number: a digit.
    """
    return str(2 * int(number.split()[0]))


class Worlds:
    """An environment that counts its calls."""

    made: ClassVar[list] = []

    def __init__(self):
        self.calls = 0
        self.row = {}
        self.made.append(self)

    def reset(self, **row):
        self.calls = 0
        self.row = row
        return " 7"

    def double(self, number: str) -> str:
        """Twice a number.

        Args:
            number: a digit.
        """
        self.calls += 1
        return double(number)

    def get_reward(self):
        return float(self.calls)


def talking_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.response_template = CALLS

    return tokenizer


def chats():
    prompts = [[{"role": "user", "content": f"{a} + {a} ="}] for a in range(8)]
    return Dataset.from_dict({"prompt": prompts, "gold": [str(2 * a) for a in range(8)]})


def short(completions, **_):
    return [float(len(one)) + len(one[-1].get("content") or "") % 3 for one in completions]


def train(folder, objective, **more):
    parts = {
        "objective": OBJECTIVES[objective],
        "optim": "muon",
        "train_dataset": chats(),
        "processing_class": talking_tokenizer(),
        "reward_funcs": short,
        **more,
    }

    sizes = {
        "max_completion_length": 12,
        "per_device_train_batch_size": 16,
        "max_steps": 2,
    }

    trainer = make_trainer(folder, parts=parts, **sizes)
    batches = spy(trainer)
    trainer.train()

    return trainer, batches


@pytest.mark.filterwarnings("ignore:.*environment_factory")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_results_of_tools_are_read_and_do_not_train(tmp_path, objective):
    trainer, batches = train(tmp_path, objective, tools=[double])
    logged = rows(trainer)
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in logged)
    assert any(row["tools/call_frequency"] > 0 and row["tools/turns"] > 1 for row in logged)
    assert all(0 <= row["tools/unfinished"] <= 1 for row in logged)

    inside = [(batch["tool_mask"] == 0) & (batch["completion_mask"] == 1) for batch in batches]
    assert any(mask.any() for mask in inside)


@pytest.mark.filterwarnings("ignore:.*environment_factory")
def test_an_environment_gets_the_row_and_adds_its_reward(tmp_path):
    Worlds.made = []
    trainer, _ = train(tmp_path, "grpo", environment_factory=Worlds)
    assert trainer.reward_weights.tolist() == [1, 1]
    assert {"prompt", "gold"} <= Worlds.made[0].row.keys()
    assert any(row["rewards/Worlds/mean"] > 0 for row in rows(trainer))

    # Votes alone train.
    trainer, _ = train(tmp_path, "vote", environment_factory=Worlds)
    assert trainer.reward_weights.tolist() == [1, 0, 0]


def test_a_result_is_not_an_answer():
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function"}],
    }

    result = {
        "role": "tool",
        "name": "double",
        "content": r"\boxed{8}",
    }

    answer = {"role": "assistant", "content": r"\boxed{9}"}
    episodes = [[call], [call, result], [call, result, answer], "7"]
    assert completion_texts(episodes) == ["", "", r"\boxed{9}", "7"]
    assert [is_unfinished(one) for one in episodes] == [True, True, False, False]


@pytest.mark.parametrize("in_world", [False, True], ids=["tools", "environment"])
def test_an_evaluation_plays_whole_episodes(in_world):
    Worlds.made = []
    box = Toolbox([], Worlds) if in_world else Toolbox([double])
    data = chats()
    given = [{"gold": gold, "columns": {}} for gold in data["gold"]] * 8
    arguments = make_model(), talking_tokenizer(), list(data["prompt"]) * 8, given
    done, again = (box.play(*arguments, max_tokens=20, temperature=1.0) for _ in range(2))

    assert done == again
    plus = 13
    end = 1
    played = [one for one in done if end in one.ids]  # a first turn's end, then more

    assert played
    assert all(plus in one.ids for one in played)
    assert (sum(world.calls for world in Worlds.made) > 0) == in_world


SOURCE = """
def bare(x): return x
class Silent:
    pass
class Broken:
    def __init__(self): raise OSError("no display")
    def reset(self): pass
"""


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tools": ("own.py:bare",)}, "bare"),
        ({"tools": ("none.py:bare",)}, "none.py"),
        ({"environment": "own.py:Silent"}, "reset"),
        ({"environment": "own.py:Broken"}, "no display"),
    ],
)
def test_unusable_tools_are_refused(settings, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)
    assert code_names(TrainConfig(**settings))  # a run folder alone does not make them run

    with pytest.raises(ValueError, match=named):
        load_toolbox(TrainConfig(**settings))


MISDEEDS = """
import asyncio, os, time
def tool(kind: str) -> str:
    '''Does wrong.

    Args:
        kind: of wrong.
    '''
    if kind == "raises": raise OSError("no disk")
    if kind == "hangs": time.sleep(3600)
    if kind == "floods": return "x" * 10**7
    os.chdir("/")
    return "done"
async def slow() -> str:
    '''Waits.'''
    await asyncio.sleep(3600)
class World:
    def reset(self, **row): raise OSError("no disk")
    def get_reward(self): raise OSError("no disk")
    def look(self) -> str:
        '''Hangs.'''
        time.sleep(3600)
"""


@pytest.fixture
def misdeeds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_misdeeds.py").write_text(MISDEEDS)
    monkeypatch.setattr(tools, "SECONDS", 0.5)
    names = ("own_misdeeds.py:tool", "own_misdeeds.py:slow")
    config = TrainConfig(tools=names, environment="own_misdeeds.py:World")
    return load_toolbox(config)


@pytest.mark.parametrize(
    ("kind", "error"), [("raises", OSError), ("hangs", TimeoutError), ("floods", ValueError)]
)
def test_a_call_ends_and_its_result_fits(misdeeds, kind, error):
    tool, slow = misdeeds.tools
    with pytest.raises(error):
        tool(kind)
    with pytest.raises(TimeoutError):
        asyncio.run(slow())


def test_a_tool_cannot_change_the_working_folder(misdeeds, tmp_path):
    assert misdeeds.tools[0]("leaves") == "done"
    assert os.getcwd() == str(tmp_path)


def test_an_environment_that_fails_costs_its_completion(misdeeds):
    world = misdeeds.environment()
    assert type(world).__name__ == "World"
    assert (world.reset(), world.get_reward()) == (None, None)
    with pytest.raises(TimeoutError):
        world.look()


@pytest.mark.parametrize("flag", ["--tools", "--environment"])
def test_settings_and_models_that_cannot_call_tools_are_refused(flag, capsys):
    for words in (["--rollout.fast"], ["--objective.name", "mgrpo"]):
        assert cli.main(["train", flag, "own.py:x", *words]) == 2
        assert words[0] in capsys.readouterr().err

    with pytest.raises(ValueError, match="some/model"):
        Toolbox([double]).prepare(make_tokenizer(), "some/model")

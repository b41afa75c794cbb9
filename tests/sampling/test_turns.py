"""Episodes of environments: turns, masks, order, rewards, and what one bad episode may cost."""

import asyncio
import json
import os
import time
from contextlib import asynccontextmanager, suppress

import pytest
import torch
from datasets import Dataset

from mesotron.config import ObjectiveConfig
from mesotron.config.registry import ENVIRONMENTS
from mesotron.rewards.call import completion_texts
from mesotron.rlvr.trl_trainer import GRPOTrainer
from mesotron.sampling import turns
from mesotron.sampling.turns import TurnSampler, episode_metrics
from mesotron.tasks import environment as room
from mesotron.tasks.environment import Played, make_columns
from mesotron.tasks.problem import Problem
from support.rlvr_tiny import (
    EOS,
    make_model,
    make_tokenizer,
    make_trainer,
    rows,
    same,
    spy,
    weights,
)

NAME = "counter:a"
WORLD = 100  # a start from here on misbehaves


class Counter:
    """Asks twice; pays for short replies. Starts from WORLD on do something else first."""

    def __init__(self, name):
        self.name = name
        self.served = 0

    def problems(self, count):
        starts = range(min(count or 40, 40))
        return [Problem("1 + 1 =", None, columns=make_columns(NAME, k)) for k in starts]

    @asynccontextmanager
    async def serving(self):
        self.served += 1
        yield
        self.served -= 1

    async def play(self, start, writer):
        await misbehave(start)
        first = await writer.reply({"role": "user", "content": f"{start % 10} + 1 ="})
        text = "1 " * 10**6 if start == WORLD + 4 else "2 + 2 ="
        second = await writer.reply({"role": "user", "content": text})

        short = 1 / (1 + len(first["content"].split()))
        answered = float(second is not None)
        parts = {"short": short, "answered": answered}
        return Played(reward=short + answered, parts=parts, metrics={"start": start})


async def misbehave(start):
    if start == WORLD:
        raise OSError("the disk is gone")
    if start == WORLD + 1:
        await asyncio.sleep(3600)
    if start == WORLD + 2:
        time.sleep(3600)
    if start == WORLD + 3:
        os.chdir("/")
    if start == WORLD + 5:
        raise KeyError
    if start == WORLD + 6:
        raise SystemExit
    if start == WORLD + 7:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


MISDEEDS = {
    "raises": WORLD,
    "waits": WORLD + 1,
    "blocks": WORLD + 2,
    "floods": WORLD + 4,
    "raises nothing": WORLD + 5,
    "exits": WORLD + 6,
    "ignores its end": WORLD + 7,
}


@pytest.fixture(autouse=True)
def counter(monkeypatch):
    monkeypatch.setattr(ENVIRONMENTS, "_entries", dict(ENVIRONMENTS._entries))
    room.open_environment.cache_clear()
    room.environment("counter", about="a test's")(Counter)
    yield
    room.open_environment.cache_clear()


@pytest.fixture
def make_sampler():
    made = []

    def make():
        made.append(TurnSampler([NAME], make_tokenizer()))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()


@pytest.fixture
def sampler(make_sampler):
    return make_sampler()


def rows_of(*starts):
    return [{"columns": json.dumps(make_columns(NAME, start))} for start in starts]


def sevens(contexts, left):
    """Two digits and the end, whatever is asked."""
    return [[10, 10, EOS] for _ in contexts], [[-1.0, -2.0, -3.0] for _ in contexts]


def test_an_episode_is_what_both_said(sampler):
    (one,) = sampler.sample(rows_of(3), sevens, 40)

    roles = [message["role"] for message in one.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert completion_texts([one.messages[one.opening :]]) == ["7 7"]
    assert one.played == Played(
        reward=1 + 1 / 3, parts={"short": 1 / 3, "answered": 1}, metrics={"start": 3}
    )

    # What the environment said has no log-probability and does not train.
    own = [k for k, is_own in enumerate(one.written) if is_own]
    assert [one.ids[k] for k in own] == [10, 10, EOS] * 2
    assert [one.logprobs[k] for k in own] == [-1, -2, -3] * 2
    assert len(one.ids) == len(one.written) == len(one.logprobs) > len(own)

    replied = [token for token, is_own in zip(one.ids, one.written) if not is_own]
    text = make_tokenizer().decode(replied)
    assert "2 + 2 =" in text


@pytest.mark.parametrize("max_tokens", [2, 3, 5, 8, 12])
def test_an_episode_keeps_to_its_tokens(sampler, max_tokens):
    (one,) = sampler.sample(rows_of(3), sevens, max_tokens)
    assert 0 < len(one.ids) <= max_tokens
    assert one.written[-1] == 1  # nothing follows that the model has not answered
    assert one.completion().truncated == (max_tokens < 3)
    assert one.played.parts["answered"] == (one.turns == 2)


def test_a_batch_has_the_order_of_the_rows(sampler):
    asked = []

    def write(contexts, left):
        asked.append([list(context) for context in contexts])
        return sevens(contexts, left)

    starts = (5, 1, 7, 3)
    episodes = sampler.sample(rows_of(*starts), write, 40)
    assert [one.start for one in episodes] == list(starts)
    first = [make_tokenizer().decode(context).split()[1] for context in asked[0]]
    assert first == [str(start) for start in starts]


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_bad_episode_costs_itself_alone(sampler, misdeed, monkeypatch):
    monkeypatch.setattr(turns, "SECONDS", 1.0)
    monkeypatch.setattr(turns, "CANCELED", 1.0)
    monkeypatch.setattr(turns, "BLOCKED", 0.5)
    episodes = sampler.sample(rows_of(1, MISDEEDS[misdeed], 2), sevens, 40)

    assert [one.played is None for one in episodes] == [False, True, False]
    assert [bool(one.error) for one in episodes] == [False, True, False]
    assert all(one.is_over for one in episodes)

    metrics = episode_metrics(episodes)
    assert metrics["environment/counter_a/lost"] == pytest.approx(1 / 3)
    assert metrics["environment/counter_a/part/answered"] == 1
    assert metrics["environment/counter_a/metric/start"] == 1.5


def test_episodes_that_block_one_after_the_other_are_each_ended(sampler, monkeypatch):
    monkeypatch.setattr(turns, "BLOCKED", 1.0)
    monkeypatch.setattr(turns, "SECONDS", 1.5)
    episodes = sampler.sample(rows_of(WORLD + 2, WORLD + 2, 1), sevens, 40)
    assert [one.played is None for one in episodes] == [True, True, False]


def test_the_working_folder_is_set_back(sampler, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (one,) = sampler.sample(rows_of(WORLD + 3), sevens, 40)
    assert os.getcwd() == str(tmp_path)
    assert one.played is not None


def test_a_run_without_any_episode_stops(sampler):
    with pytest.raises(ValueError, match="the disk is gone"):
        sampler.sample(rows_of(WORLD, WORLD), sevens, 40)


def test_a_batch_without_any_episode_is_left_out(sampler):
    sampler.sample(rows_of(1), sevens, 40)
    for _ in range(2):
        assert sampler.sample(rows_of(WORLD), sevens, 40)[0].played is None

    with pytest.raises(ValueError, match="the disk is gone"):
        sampler.sample(rows_of(WORLD), sevens, 40)


def test_what_environments_share_is_held_until_the_end(sampler):
    sampler.sample(rows_of(1), sevens, 40)
    world = room.open_environment(NAME)
    assert world.served == 1

    sampler.close()
    sampler.close()
    assert world.served == 0


def test_an_interrupt_leaves_no_episode_behind(sampler):
    def write(contexts, left):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampler.sample(rows_of(1, 2), write, 40)

    assert not asyncio.all_tasks(sampler.loop) - {keeper for _, keeper in sampler.ends}


def test_an_evaluation_plays_the_same_episodes_again(sampler):
    arguments = make_model(), make_tokenizer(), None, rows_of(*range(8))
    first, again = (sampler.play(*arguments, max_tokens=16, temperature=1.0) for _ in range(2))
    assert first == again
    assert all(one.played is not None for one in first)

    greedy = sampler.play(*arguments, max_tokens=16)
    assert all(len(one.ids) <= 16 for one in greedy)


# Training


def paid(completions, played, **_):
    return [None if one is None else one.reward for one in played]


def trainer_of(folder, sampler, starts=tuple(range(8)), **changed):
    tokenizer = make_tokenizer()
    data = [
        {"id": str(start), "prompt": "1 + 1 =", "columns": json.dumps(make_columns(NAME, start))}
        for start in starts
    ]
    parts = {
        "train_dataset": Dataset.from_list(data),
        "processing_class": tokenizer,
        "reward_funcs": paid,
        "turns": sampler,
        "objective": ObjectiveConfig(),
        "optim": "muon",
    }
    settings = {"max_completion_length": 14, "max_steps": 4, **changed}
    return make_trainer(folder, GRPOTrainer, parts=parts, **settings)


def test_replies_of_the_environment_do_not_train(tmp_path, sampler):
    trainer = trainer_of(tmp_path, sampler)
    batches = spy(trainer)
    trainer.train()

    assert all("environment/counter_a/reward" in row for row in rows(trainer))
    assert all(row["tools/turns"] >= 1 for row in rows(trainer))
    for batch in batches:
        mask = batch["tool_mask"]
        assert (mask <= batch["completion_mask"]).all()
        assert batch["num_items_in_batch"] == mask.sum()

    replied = [(b["completion_mask"] - b["tool_mask"]).sum() for b in batches]
    assert sum(replied) > 0


def test_a_lost_episode_has_no_advantage(tmp_path, sampler):
    trainer = trainer_of(tmp_path, sampler, starts=(1, 2, 3, WORLD) * 2)
    batches = spy(trainer)
    trainer.train()

    losses = torch.tensor([row["loss"] for row in rows(trainer)])
    assert losses.isfinite().all()
    assert any(row["environment/counter_a/lost"] > 0 for row in rows(trainer))
    assert all(batch["advantages"].isfinite().all() for batch in batches)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_plays_what_it_would_have_played(tmp_path, make_sampler, stop):
    saving = {"save_strategy": "steps", "save_steps": 1}
    whole = trainer_of(tmp_path / "whole", make_sampler(), **saving)
    whole.train()

    resumed = trainer_of(tmp_path / "whole", make_sampler(), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))

    assert same(weights(whole), weights(resumed))

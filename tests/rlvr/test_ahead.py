"""Rollouts one step ahead: their order, their age, their weights, and exact resume."""

import threading
import time
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from mesotron.config import ObjectiveConfig
from mesotron.rlvr import grpo
from support import rlvr_tiny as tiny

DAPO = ObjectiveConfig(name="dapo")
TRUNCATED = {"vllm_importance_sampling_mode": "token_truncate"}


class Stop(TrainerCallback):
    """Ends training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_training_stop = True


def make_trainer(folder, parts: dict[str, Any] | None = None, **changed: Any) -> Any:
    own = {"objective": DAPO, "fast": True, "max_staleness": 1, **(parts or {})}
    settings = {"max_steps": 5, **TRUNCATED, **changed}
    return tiny.make_trainer(folder, parts=own, **settings)


def test_each_rollout_but_the_first_is_one_step_old(tmp_path):
    asked = []

    def reward(prompts, completions, **_):
        asked.append((threading.current_thread().name, tuple(prompts[::4])))
        return tiny.small_digits(completions)

    trainer = make_trainer(tmp_path, {"reward_funcs": reward})
    trainer.train()
    rows = tiny.rows(trainer)

    assert [row["sample/staleness_mean"] for row in rows] == [0, 1, 1, 1, 1]
    assert {name for name, _ in asked} == {"ahead"}

    # The first prompts are sampled twice; the last step begins no rollout.
    prompts = [each for _, each in asked]
    assert len(prompts) == 5
    assert prompts[0] == prompts[1]
    assert len(set(prompts)) == 4

    # The first rollout is of the weights of now, later ones are not.
    name = "sampling/importance_sampling_ratio"
    assert rows[0][f"{name}/max"] == pytest.approx(1, abs=1e-4)
    assert rows[2][f"{name}/max"] > 1.001
    assert rows[2][f"{name}/min"] < 0.999


def test_metrics_of_the_rollout_are_in_the_row_that_trains_on_it(tmp_path):
    usual = tiny.train(tmp_path, parts={"objective": DAPO, "fast": True})
    ahead = make_trainer(tmp_path, max_steps=3)
    ahead.train()

    new = {"sample/staleness_mean"}
    for one, other in zip(tiny.rows(usual), tiny.rows(ahead), strict=True):
        added = other.keys() - one.keys()
        assert not one.keys() - other.keys()
        assert {name for name in added if not name.startswith("sampling/")} == new

    row = tiny.rows(ahead)[-1]
    assert row["num_tokens"] == ahead.state.num_input_tokens_seen


def test_the_loss_weighs_tokens_by_the_truncated_ratio(tmp_path):
    """Against two plain passes, of the weights that sampled and of those that train."""
    trainer = make_trainer(tmp_path, max_steps=3, vllm_importance_sampling_clip_max=1.05)
    kept = tiny.spy(trainer)
    weights = []

    class Keep(TrainerCallback):
        def on_step_begin(self, *_, **__):
            weights.append(tiny.weights(trainer))

    trainer.add_callback(Keep())
    trainer.train()
    batch = kept[2]
    mask = batch["completion_mask"].bool()

    def logprobs(state):
        model = tiny.make_model()
        model.load_state_dict(state, strict=False)
        sequences = grpo.Sequences(
            prompt_ids=batch["prompt_ids"],
            prompt_mask=batch["prompt_mask"],
            completion_ids=batch["completion_ids"],
            completion_mask=batch["completion_mask"],
        )
        with torch.no_grad():
            return grpo.score_tokens(model, sequences).logprobs

    old = logprobs(weights[1])
    new = logprobs(weights[2])
    torch.testing.assert_close(batch["sampling_per_token_logps"][mask], old[mask])

    ratio = (new - old).exp()[mask]
    assert ratio.max() > 1.05
    row = tiny.rows(trainer)[2]
    name = "sampling/importance_sampling_ratio"
    assert row[f"{name}/max"] == pytest.approx(1.05)
    assert row[f"{name}/min"] == pytest.approx(ratio.min().item(), abs=1e-4)
    assert row[f"{name}/mean"] == pytest.approx(ratio.clamp(max=1.05).mean().item(), abs=1e-4)


@pytest.mark.parametrize(
    ("parts", "changed"),
    [
        ({}, {}),
        ({}, {"per_device_train_batch_size": 4, "steps_per_generation": 2}),
        ({"peft_config": LoraConfig(r=2, target_modules="all-linear")}, {}),
        ({"objective": "vote", "reward_funcs": None}, {}),
    ],
    ids=["plain", "two_updates", "lora", "vote"],
)
def test_a_killed_run_resumes_exactly(tmp_path, parts, changed):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, **changed}
    whole = make_trainer(tmp_path / "whole", parts, **saving)
    whole.train()

    killed = make_trainer(tmp_path / "killed", parts, **saving)
    killed.add_callback(Stop(3))
    killed.train()

    again = make_trainer(tmp_path / "killed", parts, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-3"))

    assert tiny.same(tiny.weights(again), tiny.weights(whole))
    for one, other in zip(tiny.rows(whole), tiny.rows(again), strict=True):
        for name in one.keys() - tiny.TIMES:
            assert other[name] == pytest.approx(one[name], nan_ok=True), name


def test_a_run_does_not_depend_on_which_is_faster(tmp_path):
    def slow(completions, **_):
        time.sleep(0.05)
        return tiny.small_digits(completions)

    quick = make_trainer(tmp_path)
    quick.train()
    waits = make_trainer(tmp_path, {"reward_funcs": slow})
    waits.train()

    assert tiny.same(tiny.weights(quick), tiny.weights(waits))


def test_rewards_are_called_while_a_step_trains(tmp_path):
    """Each reward after the first waits for the backward pass of a step."""
    trained = threading.Event()
    waited = []

    class Tell(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            trained.set()

    def reward(completions, **_):
        waited.append(not waited or trained.wait(60))
        trained.clear()
        return tiny.small_digits(completions)

    trainer = make_trainer(tmp_path, {"reward_funcs": reward})
    trainer.add_callback(Tell())
    trainer.train()

    assert waited == [True] * 5


def test_a_reward_that_fails_ends_the_run_at_the_step_that_needs_it(tmp_path):
    calls = []

    def reward(completions, **_):
        calls.append(len(completions))
        if len(calls) == 3:
            raise ZeroDivisionError
        return tiny.small_digits(completions)

    trainer = make_trainer(tmp_path, {"reward_funcs": reward})
    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert trainer.state.global_step == 2
    trainer.save_last_step()
    assert (tmp_path / "checkpoint-2").is_dir()


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ({"fast": False}, "fast"),
        ({"max_staleness": 2}, "0 or 1"),
        ({"objective": "mgrpo"}, "mgrpo"),
        ({"objective": ObjectiveConfig(name="grpo", dynamic_sampling="resample")}, "resample"),
    ],
    ids=["fast", "two", "anchor", "resample"],
)
def test_what_cannot_be_sampled_ahead_is_refused(tmp_path, parts, word):
    with pytest.raises(ValueError, match=word):
        make_trainer(tmp_path, parts)

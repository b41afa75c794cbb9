"""From configs to TRL's arguments: published values, batch sizes, traps."""

import logging

import pytest
from trl import GRPOConfig

from mesotron.config import ObjectiveConfig, OptimConfig, RolloutConfig
from mesotron.rlvr.objectives import (
    PUBLISHED,
    loss_arguments,
    resolve,
    trained_generations,
    trl_arguments,
    warn_if_on_policy,
)


def arguments(objective="grpo", rollout=None, optim=None, processes=1, **options):
    config = ObjectiveConfig(name=objective, **options)
    return trl_arguments(config, rollout or RolloutConfig(), optim or OptimConfig(), processes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_objective_makes_arguments_that_trl_takes(name, tmp_path):
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **arguments(name))
    assert config.generation_batch_size % config.num_generations == 0
    assert config.loss_type == PUBLISHED[name].loss_type


@pytest.mark.parametrize("name", PUBLISHED)
def test_resolving_twice_changes_nothing(name):
    once = resolve(name, 8)
    assert resolve(once, 8) == once


def test_an_entropy_bonus_is_constant_or_has_a_target():
    found = arguments(entropy_bonus=0.02)
    assert found["entropy_coef"] == 0.02
    assert "use_adaptive_entropy" not in found
    found = arguments(entropy_bonus=0.02, entropy_target=0.3)
    assert (found["entropy_coef"], found["entropy_target"]) == (0.02, 0.3)
    assert found["use_adaptive_entropy"] is True
    assert found["entropy_coef_max"] == 0.1  # TRL's own is 1
    assert arguments(entropy_bonus=0.5, entropy_target=0.3)["entropy_coef_max"] == 0.5
    assert not {name for name in arguments() if "entropy" in name}


def test_dr_grpo_comes_with_unscaled_rewards():
    assert arguments("dr_grpo")["scale_rewards"] == "none"


def test_cispo_comes_with_its_cap():
    assert arguments("cispo")["epsilon_high"] == 5.0


def test_gspo_and_dapo_clip_as_published():
    found = arguments("gspo", RolloutConfig(updates=4))
    assert (found["epsilon"], found["epsilon_high"]) == (3e-4, 4e-4)
    assert found["importance_sampling_level"] == "sequence"
    assert arguments("dapo")["epsilon_high"] == 0.28


def test_one_clip_width_is_for_both_sides():
    found = arguments("dapo", epsilon=0.1)
    assert (found["epsilon"], found["epsilon_high"]) == (0.1, 0.1)


def test_self_labelled_gmpo_clips_in_log_space():
    assert loss_arguments(resolve(ObjectiveConfig(name="vote", loss="gmpo"), 8))["epsilon"] == 0.4


@pytest.mark.parametrize(("name", "loss"), [("gmpo", "grpo"), ("gspo", "grpo"), ("vote", "gmpo")])
def test_one_update_per_rollout_is_said_to_change_nothing(name, loss, caplog):
    objective = ObjectiveConfig(name=name, loss=loss)
    with caplog.at_level(logging.WARNING, "mesotron"):
        warn_if_on_policy(objective, updates=2)
        assert not caplog.records
        warn_if_on_policy(objective, updates=1)
    assert "equals grpo" in caplog.text


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'mgpro' must be one of grpo"):
        resolve("mgpro", 8)


def test_a_quarter_of_the_group_votes_and_the_rest_trains():
    found = arguments("mgrpo", RolloutConfig(prompts=16, generations=8))
    assert found["num_generations"] == 6
    assert found["per_device_train_batch_size"] == 16 * 6
    merged = arguments("mgrpo", RolloutConfig(generations=8), loss_on_momentum=True)
    assert merged["num_generations"] == 8


def test_the_anchor_of_corewarding_votes_beside_the_whole_group():
    objective = resolve("corewarding", 8)
    assert (objective.momentum_generations, trained_generations(objective, 8)) == (8, 8)
    assert objective.momentum_schedule == "cosine"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "mgrpo", "momentum_generations": 8}, "leaves none"),
        ({"name": "mgrpo", "momentum_generations": 7}, "no baseline"),
    ],
)
def test_groups_that_cannot_train_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        resolve(ObjectiveConfig(**options), 8)


def test_batches_are_cut_into_updates_processes_and_micro_batches():
    rollout = RolloutConfig(prompts=8, generations=8, updates=2, micro_batch=4)
    found = arguments(rollout=rollout, processes=2)
    assert found["per_device_train_batch_size"] == 4
    assert found["gradient_accumulation_steps"] == 4  # 64 rows / 2 updates / 2 processes / 4
    assert found["steps_per_generation"] == 8


@pytest.mark.parametrize(
    ("rollout", "sentence"),
    [
        (RolloutConfig(prompts=3, generations=4, updates=5), "rollout.prompts"),
        (RolloutConfig(prompts=3, generations=4, micro_batch=5), "does not divide"),
    ],
)
def test_rows_that_do_not_divide_are_refused(rollout, sentence):
    with pytest.raises(ValueError, match=sentence):
        arguments(rollout=rollout)


def test_the_schedule_and_the_clip_come_from_the_optimizer():
    optim = OptimConfig(lr=3e-4, warmup=0.1, max_grad_norm=0.5)
    found = arguments(optim=optim)
    assert found["lr_scheduler_type"] == "constant_with_warmup"
    assert (found["learning_rate"], found["warmup_steps"]) == (3e-4, 0.1)
    assert arguments(optim=OptimConfig(schedule="cosine"))["lr_scheduler_type"] == "cosine"


def test_vllm_is_passed_on():
    assert arguments(rollout=RolloutConfig(vllm="server"))["vllm_mode"] == "server"
    assert "use_vllm" not in arguments()

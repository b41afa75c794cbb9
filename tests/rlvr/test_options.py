"""From configs to TRL's arguments: published values, batch sizes, refusals."""

import logging
from dataclasses import replace

import pytest
from trl import GRPOConfig

from mesotron.config import ObjectiveConfig, OptimConfig, RewardConfig, RolloutConfig, TrainConfig
from mesotron.rlvr.objectives import (
    PUBLISHED,
    check_updates,
    resolve,
    trained_generations,
    trl_arguments,
)
from mesotron.rlvr.train import check


def arguments(objective="grpo", rollout=None, optim=None, processes=1, **options):
    config = ObjectiveConfig(name=objective, **options)
    return trl_arguments(config, rollout or RolloutConfig(), optim or OptimConfig(), processes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_objective_makes_arguments_that_trl_takes(name, tmp_path):
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **arguments(name))
    assert config.generation_batch_size % config.num_generations == 0
    assert config.loss_type == PUBLISHED[name].loss_type
    objective = resolve(name, 8)
    assert resolve(objective, 8) == objective


def test_an_entropy_bonus_is_constant_or_has_a_target():
    args = arguments(entropy_bonus=0.02)
    assert args["entropy_coef"] == 0.02
    assert "use_adaptive_entropy" not in args
    args = arguments(entropy_bonus=0.02, entropy_target=0.3)
    assert (args["entropy_coef"], args["entropy_target"]) == (0.02, 0.3)
    assert args["use_adaptive_entropy"] is True
    assert args["entropy_coef_max"] == 0.1  # TRL's own is 1
    assert arguments(entropy_bonus=0.5, entropy_target=0.3)["entropy_coef_max"] == 0.5
    assert not {name for name in arguments() if "entropy" in name}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dr_grpo", {}, {"scale_rewards": "none"}),
        ("cispo", {}, {"epsilon_high": 5.0}),
        (
            "gspo",
            {"rollout": RolloutConfig(updates=4)},
            {"epsilon": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"},
        ),
        ("dapo", {}, {"epsilon_high": 0.28}),
        ("dapo", {"epsilon": 0.1}, {"epsilon": 0.1, "epsilon_high": 0.1}),  # both sides
        ("vote", {"loss": "gmpo"}, {"epsilon": 0.4}),  # in log space
    ],
)
def test_published_values(name, options, expected):
    assert expected.items() <= arguments(name, **options).items()


@pytest.mark.parametrize(("name", "loss"), [("gmpo", "grpo"), ("gspo", "grpo"), ("vote", "gmpo")])
def test_one_update_per_rollout_warns(name, loss, caplog):
    objective = ObjectiveConfig(name=name, loss=loss)
    with caplog.at_level(logging.WARNING, "mesotron"):
        check_updates(objective, updates=2)
        assert not caplog.records
        check_updates(objective, updates=1)
    assert "equals grpo" in caplog.text


def test_a_quarter_of_the_group_votes_and_the_rest_trains():
    args = arguments("mgrpo", RolloutConfig(prompts=16, generations=8))
    assert args["num_generations"] == 6
    assert args["per_device_train_batch_size"] == 16 * 6
    merged = arguments("mgrpo", RolloutConfig(generations=8), loss_on_momentum=True)
    assert merged["num_generations"] == 8


def test_the_anchor_of_corewarding_votes_beside_the_whole_group():
    objective = resolve("corewarding", 8)
    assert (objective.momentum_generations, trained_generations(objective, 8)) == (8, 8)
    assert objective.momentum_schedule == "cosine"


@pytest.mark.parametrize(("voters", "keyword"), [(8, "leaves none"), (7, "no baseline")])
def test_groups_that_cannot_train_and_unknown_names_are_refused(voters, keyword):
    with pytest.raises(ValueError, match=keyword):
        resolve(ObjectiveConfig(name="mgrpo", momentum_generations=voters), 8)
    with pytest.raises(ValueError, match="'mgpro'"):
        resolve("mgpro", 8)


def test_batches_are_split_into_updates_processes_and_micro_batches():
    rollout = RolloutConfig(prompts=8, generations=8, updates=2, micro_batch=4)
    args = arguments(rollout=rollout, processes=2)
    assert args["per_device_train_batch_size"] == 4
    assert args["gradient_accumulation_steps"] == 4  # 64 rows / 2 updates / 2 processes / 4
    assert args["steps_per_generation"] == 8


@pytest.mark.parametrize(
    ("rollout", "keyword"),
    [
        (RolloutConfig(prompts=3, generations=4, updates=5), "rollout.prompts"),
        (RolloutConfig(prompts=3, generations=4, micro_batch=5), "does not divide"),
    ],
)
def test_rows_that_do_not_divide_are_refused(rollout, keyword):
    with pytest.raises(ValueError, match=keyword):
        arguments(rollout=rollout)


def test_the_schedule_and_the_clip_come_from_the_optimizer():
    optim = OptimConfig(lr=3e-4, warmup=0.1, max_grad_norm=0.5)
    args = arguments(optim=optim)
    assert args["lr_scheduler_type"] == "constant_with_warmup"
    assert (args["learning_rate"], args["warmup_steps"]) == (3e-4, 0.1)
    assert arguments(optim=OptimConfig(schedule="cosine"))["lr_scheduler_type"] == "cosine"


def test_prompts_cannot_be_added_where_groups_span_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    rollout = RolloutConfig(prompts=3, generations=4)
    check(TrainConfig(rollout=rollout, out=tmp_path))
    more = ObjectiveConfig(dynamic_sampling="resample", dynamic_oversample=2)
    with pytest.raises(ValueError, match="dynamic_oversample"):
        check(TrainConfig(rollout=rollout, objective=more, out=tmp_path))


@pytest.mark.parametrize("name", ["vote", "mgrpo", "corewarding", "grpo"])
def test_an_unused_reward_is_reported(name, caplog):
    config = TrainConfig(objective=ObjectiveConfig(name=name))
    check(config)
    assert not caplog.records
    check(replace(config, reward=RewardConfig(parts=("two_part", "near"))))
    assert ("two_part + near" in caplog.text) == (name != "grpo")

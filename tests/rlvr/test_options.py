"""From configs and `--trl.KEY VALUE` to TRL's arguments: values, batch sizes, traps, refusals."""

import logging
import warnings
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments
from trl import GRPOConfig

from mesotron.cli import COMMANDS, parse
from mesotron.compare.change import change
from mesotron.config import (
    ObjectiveConfig,
    OptimConfig,
    PlanConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from mesotron.config.registry import OBJECTIVES
from mesotron.rlvr.lifecycle import checkpointing_argument, trainer_arguments
from mesotron.rlvr.objectives import resolve
from mesotron.rlvr.train import check
from mesotron.rlvr.trl_arguments import check_updates, trl_arguments
from mesotron.rlvr.trl_options import INSTEAD, grpo_fields, trl_options
from mesotron.runs import RunFolder


def arguments(objective="grpo", rollout=None, optim=None, processes=1, **options):
    config = ObjectiveConfig(name=objective, **options)
    return trl_arguments(config, rollout or RolloutConfig(), optim or OptimConfig(), processes)


def test_activation_checkpointing_goes_by_a_name_that_does_not_warn(tmp_path):
    named = {checkpointing_argument(): True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = TrainingArguments(str(tmp_path), use_cpu=True, **named)

    assert settings.gradient_checkpointing  # which TRL reads


@pytest.mark.parametrize("name", OBJECTIVES.names())
def test_every_objective_makes_arguments_that_trl_takes(name, tmp_path):
    config = GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        **arguments(name),
    )

    assert config.generation_batch_size % config.num_generations == 0
    objective = resolve(name, 8)
    assert resolve(objective, 8) == objective


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"entropy_bonus": 0.02}, {"entropy_coef": 0.02}),
        (
            {"entropy_bonus": 0.02, "entropy_target": 0.3},
            {
                "entropy_coef": 0.02,
                "entropy_target": 0.3,
                "use_adaptive_entropy": True,
                "entropy_coef_max": 0.1,
            },  # TRL's own is 1
        ),
        (
            {"entropy_bonus": 0.5, "entropy_target": 0.3},
            {
                "entropy_coef": 0.5,
                "entropy_target": 0.3,
                "use_adaptive_entropy": True,
                "entropy_coef_max": 0.5,
            },
        ),
    ],
)
def test_an_entropy_bonus_is_constant_or_has_a_target(options, expected):
    args = arguments(**options)
    assert {name: value for name, value in args.items() if "entropy" in name} == expected


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dr_grpo", {}, {"scale_rewards": "none"}),
        ("cispo", {}, {"epsilon_high": 5.0}),
        (
            "gspo",
            {"rollout": RolloutConfig(updates=4)},
            {
                "epsilon": 3e-4,
                "epsilon_high": 4e-4,
                "importance_sampling_level": "sequence",
            },
        ),
        ("dapo", {}, {"epsilon_high": 0.28}),
        ("dapo", {"epsilon": 0.1}, {"epsilon": 0.1, "epsilon_high": 0.1}),  # both sides
        ("vote", {"loss": "gmpo"}, {"epsilon": 0.4}),  # in log space
        # A quarter of the group votes and the rest trains; merged, all train.
        (
            "mgrpo",
            {"rollout": RolloutConfig(prompts=16, generations=8)},
            {"num_generations": 6, "per_device_train_batch_size": 16 * 6},
        ),
        (
            "mgrpo",
            {"rollout": RolloutConfig(generations=8), "loss_on_momentum": True},
            {"num_generations": 8},
        ),
        (
            "grpo",
            {
                "optim": OptimConfig(
                    lr=3e-4,
                    warmup=0.1,
                    max_grad_norm=0.5,
                )
            },
            {
                "lr_scheduler_type": "constant_with_warmup",
                "learning_rate": 3e-4,
                "warmup_steps": 0.1,
                "max_grad_norm": 0.5,
            },
        ),
        ("grpo", {"rollout": RolloutConfig(vllm="colocate")}, {"use_vllm": True}),
        # 64 rows are 2 updates of 2 processes and 4 micro-batches.
        (
            "grpo",
            {
                "processes": 2,
                "rollout": RolloutConfig(
                    prompts=8,
                    generations=8,
                    updates=2,
                    micro_batch=4,
                ),
            },
            {
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 4,
                "steps_per_generation": 8,
            },
        ),
    ],
)
def test_published_values_sizes_and_schedules(name, options, expected):
    assert expected.items() <= arguments(name, **options).items()


@pytest.mark.parametrize("vllm", ["colocate", "server"])
def test_vllm_is_corrected_token_by_token_where_the_loss_weighs_sequences(vllm, tmp_path):
    """TRL's own default corrects whole sequences, which VESPO does by itself."""
    rollout = RolloutConfig(vllm=vllm)
    vespo = arguments("vespo", rollout)
    assert (vespo["use_vllm"], vespo["vllm_mode"]) == (True, vllm)
    assert vespo["vllm_importance_sampling_mode"] == "token_truncate"

    grpo = arguments("grpo", rollout)
    assert (grpo["use_vllm"], grpo["vllm_mode"]) == (True, vllm)
    assert "vllm_importance_sampling_mode" not in grpo
    assert "use_vllm" not in arguments("vespo")


@pytest.mark.parametrize(("name", "loss"), [("gmpo", "grpo"), ("gspo", "grpo"), ("vote", "gmpo")])
def test_one_update_per_rollout_warns(name, loss, caplog):
    objective = ObjectiveConfig(name=name, loss=loss)
    with caplog.at_level(logging.WARNING, "mesotron"):
        check_updates(objective, updates=2)
        assert not caplog.records
        check_updates(objective, updates=1)

    assert "equals grpo" in caplog.text


@pytest.mark.parametrize(
    ("objective", "rollout", "keyword"),
    [
        ({"name": "mgrpo", "momentum_generations": 8}, {"generations": 8}, "leaves none"),
        ({"name": "mgrpo", "momentum_generations": 7}, {"generations": 8}, "no baseline"),
        (
            {},
            {
                "prompts": 3,
                "generations": 4,
                "updates": 5,
            },
            "rollout.prompts",
        ),
        (
            {},
            {
                "prompts": 3,
                "generations": 4,
                "micro_batch": 5,
            },
            "does not divide",
        ),
    ],
)
def test_groups_that_cannot_train_and_rows_that_do_not_divide_are_refused(
    objective, rollout, keyword
):
    with pytest.raises(ValueError, match=keyword):
        trl_arguments(ObjectiveConfig(**objective), RolloutConfig(**rollout), OptimConfig(), 1)


def test_prompts_cannot_be_added_where_groups_span_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    rollout = RolloutConfig(prompts=3, generations=4)
    check(TrainConfig(rollout=rollout, out=tmp_path))

    more = ObjectiveConfig(dynamic_sampling="resample", dynamic_oversample=2)
    with pytest.raises(ValueError, match="dynamic_oversample"):
        check(
            TrainConfig(
                rollout=rollout,
                objective=more,
                out=tmp_path,
            )
        )


@pytest.mark.parametrize("name", ["vote", "mgrpo", "corewarding", "grpo"])
def test_an_unused_reward_is_reported(name, caplog):
    config = TrainConfig(objective=ObjectiveConfig(name=name))
    check(config)
    assert not caplog.records
    check(replace(config, reward=RewardConfig(parts=("two_part", "near"))))

    assert ("two_part + near" in caplog.text) == (name != "grpo")


VLLM = {"rollout": RolloutConfig(vllm="colocate", updates=2)}


def options(*trl, **parts):
    return trl_options(TrainConfig(trl=trl, **parts))


def test_the_sources_give_the_fields_of_the_installed_config():
    assert set(grpo_fields()) == {f.name for f in fields(GRPOConfig) if f.init}


def test_what_a_run_sets_cannot_be_passed(tmp_path):
    config = TrainConfig(objective=ObjectiveConfig(entropy_target=0.3), **VLLM)
    model = SimpleNamespace(dtype=torch.float32)
    cpu = torch.device("cpu")
    own = trl_arguments(config.objective, config.rollout, config.optim)
    own |= trainer_arguments(config, cpu, model, RunFolder.create(tmp_path / "run", {}, {}))

    assert set(own) <= set(INSTEAD)


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("top_k=20", 20),
        ("top_entropy_quantile=0.2", 0.2),
        ("delta=4", 4.0),
        ("min_p=none", None),
        ("mask_truncated_completions=True", True),
        ("cache_implementation=static", "static"),
        ('generation_kwargs={"num_beams": 2}', {"num_beams": 2}),
        ("pad_to_multiple_of=8", 8),
    ],
)
def test_values_have_the_annotated_types(item, value):
    ((_, got),) = options(item).items()
    assert (type(got), got) == (type(value), value)


@pytest.mark.parametrize(
    ("items", "parts", "keyword"),
    [
        ("top_kk=3", {}, "top_k"),
        ("top_k=many", {}, "top_k"),
        ("delta=wide", {}, "float"),
        ("mask_truncated_completions=2", {}, "bool"),
        ("beta=0.1", {}, "--objective.beta"),
        ("hub_token=x", {}, "export"),
        ("logging_steps=5", {}, "leave it out"),
        ("top_k=20", VLLM, "correction"),
        ("repetition_penalty=1.1", VLLM, "correction"),
        ("vllm_importance_sampling_mode=tokens", VLLM, "token_mask"),
        ("vllm_importance_sampling_clip_max=2", {}, "--vllm"),
        ("off_policy_mask_threshold=0.5", {}, "one update"),
        ("min_p=0.1", VLLM, "correction"),
        ("", {"objective": ObjectiveConfig(name="kl_cov")}, "one update"),
        ("delta=4", {"objective": ObjectiveConfig(name="cispo")}, "cispo"),
        ("sapo_temperature_pos=2", {}, "no effect on grpo"),
        ("use_liger_kernel=true", {}, "--no-rollout.fast"),
        ("top_entropy_quantile=2", {}, "between"),
    ],
)
def test_mistakes_and_traps_are_refused(items, parts, keyword):
    with pytest.raises(ValueError, match=keyword):
        options(*items.split(), **parts)


def test_a_rollout_ahead_takes_the_options_of_the_correction():
    ahead = {"rollout": RolloutConfig(max_staleness=1)}
    assert options("vllm_importance_sampling_clip_max=2", **ahead)
    assert options("off_policy_mask_threshold=0.5", **ahead)
    with pytest.raises(ValueError, match="--vllm"):
        options("vllm_enable_sleep_mode=true", **ahead)

    mode = arguments(**ahead)["vllm_importance_sampling_mode"]
    assert mode == "token_truncate"


@pytest.mark.parametrize(
    "parts",
    [
        {"objective": ObjectiveConfig(name="mgrpo")},
        {"objective": ObjectiveConfig(name="grpo", dynamic_sampling="resample")},
        {"tools": ("own.py:add",)},
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused(parts):
    with pytest.raises(ValueError, match="--max-staleness"):
        TrainConfig(rollout=RolloutConfig(max_staleness=1), **parts)


@pytest.mark.parametrize("changed", [{"vllm": "colocate"}, {"fast": False}])
def test_sampling_ahead_needs_the_fast_sampler(changed):
    with pytest.raises(ValueError, match="--max-staleness"):
        RolloutConfig(max_staleness=1, **changed)


def test_traps_open_where_they_are_sound():
    assert options("top_k=20", "vllm_importance_sampling_correction=false", **VLLM)["top_k"] == 20
    assert options("off_policy_mask_threshold=0.5", **VLLM)
    assert options("off_policy_mask_threshold=0.5", "num_iterations=2")
    assert options("num_iterations=2", objective=ObjectiveConfig(name="kl_cov"))


def test_flags_toml_and_settings_give_the_same(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[trl]\ntop_k = 5\nmin_p = 0.1\ngeneration_kwargs = {num_beams = 2}\n")
    flags = ["--config", str(file), "--trl.top-k", "20", "--trl.mask_truncated_completions"]
    flags += ["--trl", "pad_to_multiple_of=8"]

    expected = {
        "top_k": 20,
        "min_p": 0.1,
        "generation_kwargs": {"num_beams": 2},
        "mask_truncated_completions": True,
        "pad_to_multiple_of": 8,
    }
    for kind, name in ((TrainConfig, "train"), (PlanConfig, "plan")):
        made = parse(kind, [*flags, "--steps", "3"], "mesotron", COMMANDS[name].presets)
        assert (trl_options(made), made.steps) == (expected, 3)

    assert trl_options(change(TrainConfig(), ["trl.top_k=3"])) == {"top_k": 3}

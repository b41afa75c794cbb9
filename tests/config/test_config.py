"""Bounds and cross-field checks live on the configs, whoever makes them; old names still work."""

import dataclasses
import math

import pytest

from mesotron import cli, config
from mesotron.cli import parse
from mesotron.compare.change import change
from mesotron.config import (
    OptimConfig,
    RolloutConfig,
    SnakeConfig,
    TaskConfig,
    TrainConfig,
    aliases,
)
from mesotron.config.base import (
    bounds_of,
    flag_of,
    flags_of,
    from_plain,
    to_plain,
    unchecked,
    validate,
)

CONFIGS = [kind for kind in vars(config).values() if dataclasses.is_dataclass(kind)]


def required(kind) -> dict[str, str]:
    items = dataclasses.fields(kind)
    return {item.name: "x" for item in items if item.default is dataclasses.MISSING}


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_are_frozen_documented_and_valid_by_default(kind):
    assert kind.__dataclass_params__.frozen
    assert all(item.kw_only for item in dataclasses.fields(kind))
    assert not kind.__doc__.startswith(f"{kind.__name__}(")  # the text dataclasses make up

    made = kind(**required(kind))
    assert from_plain(kind, to_plain(made)) == made
    assert len(flags_of(kind)) >= len(dataclasses.fields(kind))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_number_beyond_its_bounds_is_refused_by_its_flag(kind):
    for item in dataclasses.fields(kind):
        bounds = bounds_of(kind).get(item.name)
        if bounds is None:
            continue

        beyond = [bounds.ge - 1, bounds.gt, bounds.le + 1, bounds.lt]
        for value in [math.nan, *beyond]:  # infinity is never a value
            given = (value,) if isinstance(item.default, tuple) else value
            with pytest.raises(ValueError, match=f"{flag_of(item, kind.prefix)} "):
                kind(**required(kind), **{item.name: given})


@pytest.mark.parametrize(
    ("kind", "values", "flag"),
    [
        ("OptimConfig", {"rank": 2, "name": "adamw"}, "--optim.rank 2"),
        ("OptimConfig", {"cutoff": "noise"}, "--optim.cutoff noise"),
        (
            "OptimConfig",
            {
                "name": "pion",
                "cutoff": 0.3,
                "promote": 2,
            },
            "--optim.promote 2",
        ),
        ("OptimConfig", {"clip": "all", "max_grad_norm": 0.0}, "--optim.clip all"),
        ("PartsOptimConfig", {"promote": 1}, "--optim.promote 1"),
        ("TaskConfig", {"name": "gsm8k", "levels": (1,)}, "--task.levels"),
        ("TaskConfig", {"name": "file"}, "--task file"),
        ("TaskConfig", {"name": "gsm8k", "data": ("a", "b")}, "--data a b"),
        ("RewardConfig", {"parts": ()}, "--reward"),
        ("RewardConfig", {"parts": ("sparse", "sparse")}, "--reward"),
        ("RewardConfig", {"weights": (1.0, 2.0)}, "--reward.weights"),
        ("RewardConfig", {"weights": (0.0,)}, "--reward.weights"),
        ("RolloutConfig", {"vllm": "colocate", "top_p": 0.9}, "--rollout.top-p 0.9"),
        ("ObjectiveConfig", {"dynamic_oversample": 2.0}, "--objective.dynamic-oversample 2"),
        ("ObjectiveConfig", {"dynamic_max_rounds": 5}, "--objective.dynamic-max-rounds 5"),
        ("ObjectiveConfig", {"dynamic_choice": "widest"}, "--objective.dynamic-choice"),
        ("ObjectiveConfig", {"name": "dr_grpo", "scale_rewards": "group"}, "scale-rewards group"),
        (
            "ObjectiveConfig",
            {"dynamic_sampling": "resample", "scale_rewards": "batch"},
            "scale-rewards batch",
        ),
        ("ObjectiveConfig", {"name": "cispo", "epsilon": 0.2}, "--objective.epsilon 0.2"),
        ("ObjectiveConfig", {"name": "cispo", "epsilon_high": 0.28}, "--objective.epsilon-high"),
        ("ObjectiveConfig", {"name": "dapo", "loss": "gmpo"}, "--objective.loss gmpo"),
        ("ObjectiveConfig", {"name": "corewarding", "loss_on_momentum": True}, "corewarding"),
        ("ObjectiveConfig", {"tie": "abstain"}, "--objective.tie abstain"),
        ("ObjectiveConfig", {"name": "vote", "momentum": 0.9}, "--objective.momentum 0.9"),
        ("ObjectiveConfig", {"name": "corewarding", "entropy_filter": 2.0}, "entropy-filter 2"),
        ("ObjectiveConfig", {"momentum_generations": 4}, "momentum-generations 4"),
        ("TrainConfig", {"task": config.TaskConfig(num_eval=0)}, "--task.num-eval 0"),
        ("TrainConfig", {"time_limit": "soon"}, "--time-limit 'soon'"),
        ("TrainConfig", {"task": config.TaskConfig(num_train=9)}, "--task.num-train 9"),
        ("TrainConfig", {"reward": config.RewardConfig(parts=("overlong",))}, "overlong-buffer"),
        ("PlanConfig", {"calibrate": True, "seconds_per_step": 2.0}, "--calibrate"),
        ("CompareConfig", {"optims": ("muon", "muon")}, "--optims muon muon"),
        ("PolicyConfig", {"lora": 4}, "--policy.lora 4"),
        ("VlaTrainConfig", {"execute": 99}, "--execute 99"),
        ("DemosConfig", {"world": config.WorldConfig(perturbation="light")}, "perturbation light"),
        ("SnakeConfig", {"d_model": 30}, "--d-model 30"),
        ("SnakeConfig", {"num_minibatches": 7}, "--num-minibatches 7"),
        ("SnakeConfig", {"kl_coef": 0.1}, "--kl-coef 0.1"),
    ],
)
def test_an_unusable_value_is_refused_by_its_flag(kind, values, flag):
    with pytest.raises(ValueError, match=flag):
        getattr(config, kind)(**values)


def test_a_whole_may_be_put_together_unchecked():
    with unchecked():
        part = OptimConfig(promote=2)

    with pytest.raises(ValueError, match="promote"):
        validate(part)

    assert validate(dataclasses.replace(part, name="pion")).promote == 2


def test_old_flags_settings_and_keys_still_work():
    for args, fast in {
        "--rollout.engine fused --rollout.share-prompts": True,
        "--rollout.engine=graph": True,
        "--rollout.share_prompts": True,
        "--rollout.record=true --rollout.engine generate": True,
        "--rollout.engine generate": False,
        "--no-rollout.record": False,
    }.items():
        assert parse(TrainConfig, args.split()).rollout.fast is fast, args

    for args in ("--guard.precision 0.8", "--guard.precision=0.8", "--watch.precision 0.8"):
        assert parse(TrainConfig, args.split()).watch.precision == 0.8

    with pytest.raises(ValueError, match="engine graf"):
        parse(TrainConfig, ["--rollout.engine", "graf"])

    changed = change(TrainConfig(), ["rollout.engine=graph", "steps=3"])
    assert (changed.rollout.fast, changed.steps) == (True, 3)

    for values, fast in (
        (
            {
                "engine": "fused",
                "share_prompts": True,
                "record": False,
            },
            True,
        ),
        (
            {
                "engine": "generate",
                "share_prompts": False,
                "record": False,
            },
            False,
        ),
        ({"fast": True}, True),
    ):
        assert from_plain(TrainConfig, {"rollout": values}).rollout == RolloutConfig(fast=fast)


OLD_COLUMNS = {"question_column": "q", "answer_column": "answer"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"name": "gsm8k", "path": "x"}, TaskConfig(name="gsm8k", data=("x",))),
        ({"path": None, "data": ["x"]}, TaskConfig(data=("x",))),
        ({"name": "gsm8k", "path": "x", "data": ["y"]}, TaskConfig(name="file", data=("y",))),
        (
            {"name": "file", "path": "x", "data": [], "columns": "", **OLD_COLUMNS},
            TaskConfig(name="file", data=("x",), columns="prompt=q"),
        ),
    ],
)
def test_the_data_of_old_runs_are_found(old, new):
    assert from_plain(TrainConfig, {"task": old}).task == new


@pytest.mark.parametrize(("use_muon", "rule"), [(True, "muon"), (False, "adam")])
def test_muon_on_snake_has_an_old_name(use_muon, rule):
    assert from_plain(SnakeConfig, {"use_muon": use_muon, "optim": None}).rule == rule
    assert parse(SnakeConfig, [f"--use-muon={use_muon}"]).rule == rule


def test_mirrors_on_snake_have_old_names():
    old = {"wandb": True, "tensorboard": True}
    assert from_plain(SnakeConfig, old).report_to == ("wandb", "tensorboard")
    assert from_plain(SnakeConfig, dict.fromkeys(old, False)) == SnakeConfig()
    assert parse(SnakeConfig, ["--tensorboard"]).report_to == ("tensorboard",)


KINDS = [kind for kind in CONFIGS if kind.__name__ in aliases.REMOVED]


@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_setting_is_read_at_its_value_only(kind):
    for name, removed in aliases.REMOVED[kind.__name__].items():
        needed = required(kind)
        assert from_plain(kind, {**needed, name: removed.value}) == kind(**needed)
        with pytest.raises(ValueError, match=name):
            from_plain(kind, {**needed, name: "other"})


@pytest.mark.parametrize(
    ("command", "words", "flag"),
    [
        ("train", "--reward.near-unit 2", "--reward.near-unit"),
        ("ppo snake", "--no-action-mask", "--no-action-mask"),
        ("vla train", "--optim.momentum=0.9", "--optim.momentum"),
        ("compare snake", "--set action_mask=false", "action_mask"),
        ("eval tiny", "--batch 3", "--batch"),
    ],
)
def test_a_removed_flag_is_refused_with_what_to_do(command, words, flag, capsys):
    assert cli.main([*command.split(), *words.split()]) == 2
    error = capsys.readouterr().err
    assert f"{flag} " in error.replace("=", " ").replace("'", "")
    assert "no longer a setting" in error


def test_removed_settings_are_named_like_fields_of_existing_configs():
    assert {kind.__name__ for kind in KINDS} == aliases.REMOVED.keys()


def test_old_flags_for_data_are_read_as_those_of_today():
    words = "--task.name file --task.path x --task.question-column q --task.answer-column="
    task = parse(TrainConfig, [*words.split(), "--model", "tiny"]).task
    assert (task.data, task.columns) == (("x",), "prompt=q,gold=")


def test_plain_values_must_fit_their_types():
    for values in ({"steps": "5"}, {"steps": True}, {"optim": 3}, {"guard": "loud"}, {"stepz": 5}):
        with pytest.raises(ValueError, match=next(iter(values))):
            from_plain(TrainConfig, values)

"""`--trl.KEY VALUE`: every field of GRPOConfig in its type; traps and own fields are refused."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOConfig

from mesotron.cli import COMMANDS, parse
from mesotron.compare.kinds import change
from mesotron.config import ObjectiveConfig, PlanConfig, RolloutConfig, TrainConfig
from mesotron.rlvr.objectives import trl_arguments
from mesotron.rlvr.session import common_arguments
from mesotron.rlvr.trl_options import INSTEAD, grpo_fields, trl_options

VLLM = {"rollout": RolloutConfig(vllm="colocate", updates=2)}


def options(*trl, **parts):
    return trl_options(TrainConfig(trl=trl, **parts))


def test_the_sources_give_the_fields_of_the_installed_config():
    assert set(grpo_fields()) == {f.name for f in fields(GRPOConfig) if f.init}


def test_what_a_run_sets_cannot_be_passed():
    config = TrainConfig(objective=ObjectiveConfig(entropy_target=0.3), **VLLM)
    model, cpu = SimpleNamespace(dtype=torch.float32), torch.device("cpu")
    own = trl_arguments(config.objective, config.rollout, config.optim)
    own |= common_arguments(config, cpu, model, SimpleNamespace(checkpoints=""))
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
        ("vllm_importance_sampling_clip_max=2", {}, "--rollout.vllm"),
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
        "top_k": 20, "min_p": 0.1, "generation_kwargs": {"num_beams": 2},
        "mask_truncated_completions": True, "pad_to_multiple_of": 8,
    }  # fmt: skip
    for kind, name in ((TrainConfig, "train"), (PlanConfig, "plan")):
        made = parse(kind, [*flags, "--steps", "3"], "mesotron", COMMANDS[name].presets)
        assert (trl_options(made), made.steps) == (expected, 3)
    assert trl_options(change(TrainConfig(), ["trl.top_k=3"])) == {"top_k": 3}

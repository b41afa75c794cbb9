"""What ours relies on of TRL and Transformers: methods and functions with their parameters, and
attributes.

A version of TRL that changes one fails here, before it changes training silently. Versions that
`make oldest` and `make next` put aside are read, too, without importing them.
"""

import ast
import inspect
import tomllib
from pathlib import Path

import pytest
import trl
from packaging.requirements import Requirement

from mesotron.rlvr.trl_trainer import GRPOTrainer

ROOT = Path(__file__).parents[2]
TESTED = ("1.15", "1.16")

IMAGES = (
    "pixel_values, image_grid_thw, num_images, pixel_attention_mask, spatial_shapes, num_tiles, "
    "image_sizes, token_type_ids, mm_token_type_ids, image_position_ids"
)
STEP = {
    "_prepare_inputs": "self, generation_batch",
    "_generate_and_score_completions": "self, inputs",
    "_tokenize_prompts": "self, prompts",
    "_generate_single_turn": (
        "self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images"
    ),
    "_calculate_rewards": "self, inputs, prompts, completions, completion_ids_list",
    "_compute_loss": "self, model, inputs",
    "_get_per_token_logps_and_entropies": (
        "self, model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, "
        f"compute_aux_loss, {IMAGES}"
    ),
    "_clip_grad_norm": "self, model",
    "_get_learning_rate": "self",
}
PUBLIC = {
    "create_accelerator_and_postprocess": "self",
    "create_optimizer": "self, model",
    "log": "self, logs, start_time",
    "train": "self, resume_from_checkpoint, trial, ignore_keys_for_eval",
}
RESUME = {
    "_get_train_sampler": "self, dataset",
    "_save_checkpoint": "self, model, trial",
    "_save": "self, output_dir, state_dict",
    "_load_from_checkpoint": "self, resume_from_checkpoint, model",
    "_load_optimizer_and_scheduler": "self, checkpoint",
    "_load_best_model": "self",
    "_load_rng_state": "self, checkpoint",
}
OVERRIDDEN = STEP | PUBLIC | RESUME
CALLED = {"_generate": "self, prompts"}

FUNCTIONS = {
    ("models/utils.py", "disable_gradient_checkpointing"): "model, gradient_checkpointing_kwargs",
    ("trainer/utils.py", "use_adapter"): "model, adapter_name",
    ("trainer/utils.py", "split_tensor_dict"): "tensor_dict, num_chunks",
    ("trainer/utils.py", "add_fused_lm_head"): "model, temperature, cast_lm_head_to_fp32, outputs",
}
# What ours reads of a trainer, and in part sets.
ATTRIBUTES = (
    "_buffered_inputs",
    "_is_vlm",
    "_last_loaded_step",
    "_logs",
    "_metrics",
    "_pending_extra_logs",
    "_pending_metrics",
    "_step",
    "_tokenizer",
    "aux_loss_enabled",
    "beta",
    "environment_factories",
    "eos_token_ids",
    "epsilon_high",
    "epsilon_low",
    "importance_sampling_level",
    "mask_truncated_completions",
    "max_completion_length",
    "multi_objective_aggregation",
    "num_generations",
    "num_generations_eval",
    "off_policy_mask_threshold",
    "pad_to_multiple_of",
    "ref_model",
    "reward_func_names",
    "reward_weights",
    "rollout_func",
    "router_aux_loss_coef",
    "scale_rewards",
    "shuffle_dataset",
    "tools",
    "top_entropy_quantile",
    "use_vllm",
    "vllm_generation",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)


def versions() -> list[Path]:
    """The packages of TRL on this machine: the installed one, and those put aside."""
    aside = [ROOT / ".venv" / name / "trl" for name in ("oldest", "next")]
    found = [path for path in aside if path.is_dir()]
    return list(dict.fromkeys([Path(trl.__file__).parent, *found]))


@pytest.fixture(params=versions(), ids=lambda path: path.parent.name)
def source(request):
    return request.param


def functions_of(path: Path) -> dict[str, str]:
    """The functions and methods of a file, with their parameters."""
    functions = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            functions[node.name] = ", ".join(each.arg for each in named)

    return functions


def assigned_in(path: Path) -> set[str]:
    """The attributes that the methods of a file set on `self`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)

    return names


def test_the_supported_versions_are_those_below():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [Requirement(each) for each in project["optional-dependencies"]["rlvr"]]
    (supported,) = [each.specifier for each in needed if each.name == "trl"]

    major, minor = map(int, TESTED[-1].split("."))
    assert all(supported.contains(f"{version}.0") for version in TESTED)
    assert not supported.contains(f"{major}.{minor + 1}.0")
    assert trl.__version__.rpartition(".")[0] in TESTED


@pytest.mark.parametrize("name", [*OVERRIDDEN, *CALLED])
def test_a_method_has_the_parameters_that_ours_relies_on(name):
    parameters = inspect.signature(getattr(trl.GRPOTrainer, name)).parameters
    assert ", ".join(parameters) == (OVERRIDDEN | CALLED)[name]


def test_methods_of_every_version_have_the_parameters_that_ours_relies_on(source):
    methods = functions_of(source / "trainer" / "grpo_trainer.py")
    expected = OVERRIDDEN | CALLED
    shared = methods.keys() & expected.keys()  # others are inherited from Transformers

    assert STEP.keys() - {"_clip_grad_norm", "_get_learning_rate"} <= shared
    assert {name: methods[name] for name in shared} == {name: expected[name] for name in shared}


def test_functions_of_every_version_have_the_parameters_that_ours_relies_on(source):
    for (file, name), parameters in FUNCTIONS.items():
        assert functions_of(source / file)[name] == parameters


def test_every_version_sets_the_attributes_that_ours_relies_on(source):
    assert set(ATTRIBUTES) <= assigned_in(source / "trainer" / "grpo_trainer.py")


def test_no_other_method_is_overridden():
    ours = GRPOTrainer.__mro__[: GRPOTrainer.__mro__.index(trl.GRPOTrainer)]
    replaced = {name for cls in ours for name in vars(cls) if name in dir(trl.GRPOTrainer)}
    assert {name for name in replaced if not name.startswith("__")} == set(OVERRIDDEN)

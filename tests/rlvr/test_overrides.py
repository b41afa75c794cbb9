"""The methods of TRL and Transformers that ours override or call, with their parameters.

A new version of TRL that changes one fails here, before it changes training silently.
"""

import inspect

import pytest
import trl

from mesotron.rlvr.trl_trainer import GRPOTrainer

TESTED = ("1.15", "1.16")  # with Transformers 5.22

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
    "_load_rng_state": "self, checkpoint",
}
OVERRIDDEN = STEP | PUBLIC | RESUME
CALLED = {"_generate": "self, prompts"}


def test_this_version_of_trl_is_one_of_those_below():
    assert trl.__version__.rpartition(".")[0] in TESTED


@pytest.mark.parametrize("name", [*OVERRIDDEN, *CALLED])
def test_a_method_has_the_parameters_that_ours_relies_on(name):
    parameters = inspect.signature(getattr(trl.GRPOTrainer, name)).parameters
    assert ", ".join(parameters) == (OVERRIDDEN | CALLED)[name]


def test_no_other_method_is_overridden():
    ours = GRPOTrainer.__mro__[: GRPOTrainer.__mro__.index(trl.GRPOTrainer)]
    replaced = {name for cls in ours for name in vars(cls) if name in dir(trl.GRPOTrainer)}
    assert {name for name in replaced if not name.startswith("__")} == set(OVERRIDDEN)

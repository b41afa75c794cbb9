"""`fast=True` inside a trainer: what it turns on, and that training stays the same."""

from unittest.mock import Mock

import pytest
import torch
import trl
from peft import LoraConfig
from transformers import OPTConfig, OPTForCausalLM

from mesotron.config import ObjectiveConfig, TrainConfig
from mesotron.rlvr import parts as parts_of_run
from mesotron.rlvr.fast_paths import FastPaths, choose_fast_paths
from mesotron.rlvr.passes.blocks import PLAIN, RaggedPass
from mesotron.sampling.decoder import FusedSampler
from mesotron.sampling.graphs import GraphSampler, Sampling
from mesotron.tasks.rows import RowBatch, Rows
from support import rlvr_tiny as tiny

# PyTorch warns once that this CPU multiplies bfloat16 without mkldnn.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

PROMPTS = [[5, 13, 6, 14], [4, 13, 14]]


def lora(**more):
    return LoraConfig(
        r=4,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        **more,
    )


def train(folder, sampler=FusedSampler, parts=None, **settings):
    """With this sampler as the only fast path."""
    trainer = tiny.make_trainer(folder, parts=parts, **settings)
    trainer.fast = FastPaths(sampler)
    trainer.train()

    return trainer


def test_off_by_default_and_with_vllm_only_prompts_are_shared(tmp_path):
    trainer = tiny.make_trainer(tmp_path)
    assert trainer.fast == FastPaths()
    assert trainer.shared_prompts is None
    trainer.use_vllm = True

    assert choose_fast_paths(trainer) == FastPaths(None, share_prompts=True)


@pytest.mark.parametrize(
    ("settings", "parts", "paths", "reason"),
    [
        ({}, {}, FastPaths(FusedSampler, True), "no GPU"),
        ({}, {"peft_config": lora()}, FastPaths(FusedSampler, True), "no GPU"),
        ({}, {"peft_config": lora(use_dora=True)}, FastPaths(GraphSampler, True), "wrapped"),
        ({"min_p": 0.1}, {}, FastPaths(None, True), "min_p"),
        ({"repetition_penalty": 1.2}, {}, FastPaths(None, True), "repetition_penalty"),
        ({"attention": "eager"}, {}, FastPaths(), "eager"),
    ],
)
def test_what_is_left_out_is_logged(tmp_path, caplog, settings, parts, paths, reason):
    model = tiny.make_model()
    settings = dict(settings)
    model.set_attn_implementation(settings.pop("attention", "sdpa"))

    trainer = tiny.make_trainer(
        tmp_path,
        parts={
            "fast": True,
            "model": model,
            **parts,
        },
        **settings,
    )

    assert trainer.fast == paths
    (message,) = [text for text in caplog.messages if "rollout.fast" in text]
    assert reason in message


def test_a_model_with_learned_positions_shares_no_prompts(tmp_path, caplog):
    """Packed rows count from the padding on, which only rotary positions forgive."""
    words = tiny.make_model().config.vocab_size
    size = {"hidden_size": 16, "ffn_dim": 16}
    config = OPTConfig(
        vocab_size=words, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16, **size
    )
    trainer = tiny.make_trainer(tmp_path, parts={"fast": True, "model": OPTForCausalLM(config)})

    assert trainer.shared_prompts is None
    assert any("absolute positions" in text for text in caplog.messages)


def test_nearly_greedy_the_fast_samplers_train_like_generate(tmp_path):
    """At a temperature of 1e-4 the draws do not matter: same completions, same steps."""
    samplers = (None, GraphSampler, FusedSampler)
    settings = {"temperature": 1e-4, "beta": 0.1}
    plain, *others = (train(tmp_path, one, max_steps=2, **settings) for one in samplers)

    assert plain.sampler is None
    for trainer, sampler in zip(others, samplers[1:], strict=True):
        assert isinstance(trainer.sampler, sampler)
        for row, own in zip(tiny.rows(plain), tiny.rows(trainer), strict=True):
            assert row["completions/mean_length"] == own["completions/mean_length"]

        for name, weight in tiny.weights(plain).items():
            torch.testing.assert_close(tiny.weights(trainer)[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "record", "whole_groups"),
    [
        ({"beta": 0.1, "mask_truncated_completions": True}, False, True),
        ({"gradient_accumulation_steps": 4, "loss_type": "dapo"}, True, True),
        # The entropy bonus is a mean over a micro-batch, so its rows stay as TRL shuffled them.
        (
            {
                "gradient_accumulation_steps": 2,
                "steps_per_generation": 4,
                "entropy_coef": 0.05,
            },
            True,
            False,
        ),
    ],
)
def test_shared_prompts_make_the_same_steps_also_in_micro_batches(
    tmp_path, settings, record, whole_groups
):
    """On the CPU a recorded pass runs without graphs."""
    parts = {"train_dataset": tiny.long_sums()}
    plain = tiny.make_trainer(tmp_path, parts=parts, **settings)
    plain.train()
    shared = tiny.make_trainer(tmp_path, parts={**parts, "fast": True}, **settings)
    shared.fast, shared.shared_prompts.record = FastPaths(share_prompts=True), record
    lengths = []
    forward = shared.model.model.forward
    prompts = []
    compute = shared._compute_loss

    def watched_forward(*args, **named):
        lengths.append(named["input_ids"].shape[1])
        return forward(*args, **named)

    def watched_loss(model, batch):
        prompts.append(len(batch["prompt_ids"].unique(dim=0)))
        return compute(model, batch)

    shared.model.model.forward, shared._compute_loss = watched_forward, watched_loss
    shared.train()
    assert max(lengths) > 16  # a prompt and several completions
    assert (max(prompts) == 2) == whole_groups  # groups of 4 in 8 rows
    assert (shared.shared_prompts.recorder is not None) == record

    regrouped = whole_groups and "gradient_accumulation_steps" in settings

    # The logged entropy is a mean over micro-batches.
    tiny.assert_same_steps(plain, shared, ["loss"] if regrouped else ["loss", "entropy"])


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1, "mask_truncated_completions": True},
        {"entropy_coef": 0.05, "loss_type": "dapo"},
        *({"objective": name} for name in ("gmpo", "gspo", "cispo", "clip_cov", "sapo")),
    ],
    ids=str,
)
def test_ragged_rows_make_the_same_steps(tmp_path, settings):
    """By plain functions in place of the kernels; two updates on a rollout."""
    parts = {"train_dataset": tiny.long_sums()}
    settings = dict(settings)
    if "objective" in settings:
        parts["objective"] = settings.pop("objective")

    settings |= {"steps_per_generation": 2}
    plain = tiny.make_trainer(tmp_path, parts=parts, **settings)
    plain.train()

    trainer = tiny.make_trainer(tmp_path, parts={**parts, "fast": True}, **settings)
    trainer.fast = FastPaths(share_prompts=True)
    autocast = trainer.accelerator.autocast
    ragged = RaggedPass(autocast, trainer.bonus is not None, PLAIN)
    trainer.shared_prompts.ragged = Mock(side_effect=ragged)
    trainer.train()

    assert trainer.shared_prompts.ragged.call_count >= 3
    tiny.assert_same_steps(plain, trainer, ["loss", "entropy"])


def test_recorded_passes_train_adapters_alone(tmp_path):
    parts = {
        "fast": True,
        "peft_config": lora(),
        "train_dataset": tiny.long_sums(),
    }

    trainer = tiny.make_trainer(
        tmp_path,
        parts=parts,
        beta=0.1,
        bf16=True,
    )

    trainer.shared_prompts.record = True
    start = tiny.weights(trainer)
    trainer.train()
    moved = set()
    for n, weight in tiny.weights(trainer).items():
        if not torch.equal(weight, start[n]):
            moved.add(n)

    assert moved
    assert all("lora_" in name for name in moved)
    assert isinstance(trainer.sampler, FusedSampler)


def test_further_rounds_reuse_the_decoders_and_a_new_temperature_is_used(tmp_path):
    """Rounds of 3 groups of 4, then calls with 2 groups and 1: half of 12 rows holds the last."""
    objective = ObjectiveConfig(
        name="grpo",
        dynamic_sampling="resample",
        dynamic_tolerance=1.0,  # more than any spread of rewards
    )

    trainer = train(tmp_path, parts={"objective": objective}, per_device_train_batch_size=12)
    assert max(row["dynamic/rounds"] for row in tiny.rows(trainer)) > 1

    for number in (8, 4):
        completions, _ = trainer._generate_single_turn([PROMPTS[0]] * number, None, {}, 4)
        assert len(completions) == number

    assert {shape[0] for shape in trainer.sampler.decoders} == {12, 6}
    trainer.temperature = 0.5
    trainer._generate_single_turn([PROMPTS[0]], None, {}, 1)

    assert trainer.sampler.sampling.temperature == 0.5


def test_copies_of_a_lora_model_have_its_adapters(tmp_path):
    """TRL's head sits below PEFT: a copy that kept it would run the original's layers."""
    model = tiny.make_model()
    with torch.no_grad():  # far from uniform, so that rounding does not decide
        for p in model.parameters():
            p.add_(0.4 * torch.randn_like(p))

    trainer = tiny.make_trainer(tmp_path, parts={"model": model, "peft_config": lora()})
    arguments = trainer.model, [tiny.EOS], 0, Sampling(temperature=0.0)
    narrow = GraphSampler(*arguments, dtype=torch.bfloat16)
    samplers = narrow, GraphSampler(*arguments), FusedSampler(*arguments)

    assert {p.dtype for p in narrow.copy.parameters()} == {torch.bfloat16}
    first = [sampler.sample(PROMPTS, 4) for sampler in samplers]

    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.5 * torch.randn_like(p))

    second = [sampler.sample(PROMPTS, 4) for sampler in samplers]
    assert first == [first[0]] * 3
    assert second == [second[0]] * 3
    assert second != first


def test_training_on_rows_is_training_on_a_dataset(tmp_path):
    data = (tiny.make_data(), Rows.from_dict(tiny.make_data().to_dict()))
    a, b = (train(tmp_path, parts={"train_dataset": one}, max_steps=2) for one in data)
    assert b.data_collator is RowBatch
    assert tiny.same(tiny.weights(a), tiny.weights(b))


@pytest.mark.parametrize("oversample", [1, 2])
def test_prompts_are_tokenized_once_and_before_their_rollout(tmp_path, monkeypatch, oversample):
    calls = []
    for name in ("_generate", "_tokenize_prompts", "compute_loss"):
        own = getattr(trl.GRPOTrainer, name)

        def record(*args, own=own, name=name, **named):
            calls.append(name)
            return own(*args, **named)

        monkeypatch.setattr(trl.GRPOTrainer, name, record)

    extra = {"dynamic_sampling": "resample", "dynamic_max_rounds": 1}
    objective = ObjectiveConfig(
        name="grpo",
        dynamic_oversample=oversample,
        **extra,
    )

    data = Rows.from_dict(tiny.make_data().to_dict())
    trainer = train(tmp_path, parts={"train_dataset": data, "objective": objective})
    first = ["_generate", "_tokenize_prompts", "compute_loss"]
    later = ["_tokenize_prompts", "_generate", "compute_loss"]

    assert calls[:9] == first + later + later
    calls.clear()

    prompts = [*["1 + 2 ="] * 3, "4 =", *["1 + 2 ="] * 2]
    for _ in range(2):
        ids = [row.tolist() for row in trainer._tokenize_prompts(prompts)[0]]
        assert ids == trainer.processing_class(text=prompts)["input_ids"]

    assert len(calls) == 1


@pytest.mark.parametrize("peft_config", [None, lora()], ids=["whole", "lora"])
def test_an_evaluation_has_the_weights_own_precision(tmp_path, monkeypatch, peft_config):
    """At a rate of 0 with bfloat16 products: the same logits before and after."""
    trainer = tiny.make_trainer(
        tmp_path, parts={"peft_config": peft_config}, max_steps=1, bf16=True, learning_rate=0.0
    )
    ids = torch.tensor(PROMPTS[:1])
    seen = []

    def look(model, *_, **__):
        seen.append(model.eval()(ids).logits)
        return Mock(to_json=dict)

    monkeypatch.setattr(parts_of_run, "evaluate", look)
    parts = Mock(config=TrainConfig())
    parts_of_run.evaluate_part(parts, trainer.model, "before")
    trainer.train()
    replaced = trainer.model(ids).logits
    parts_of_run.evaluate_part(parts, trainer.model, "after")

    assert torch.equal(*seen)
    assert not torch.equal(replaced, seen[0])
    assert torch.equal(trainer.model(ids).logits, replaced)  # the trainer's forward is back

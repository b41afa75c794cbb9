"""`--model.load 4bit|8bit`: LoRA on rounded weights with every optimizer, really run on the CPU."""

import pytest
import torch
from peft import get_peft_model

from mesotron.config import ModelConfig, OptimConfig, PlanConfig, RolloutConfig, TrainConfig
from mesotron.rlvr.estimate import SHAPES, Lengths, predict
from mesotron.rlvr.models import load_model, lora_config
from mesotron.rlvr.optimizer import build_optimizer
from support import rlvr_tiny as tiny

pytest.importorskip("bitsandbytes")
QLORA = ModelConfig(lora=4, load="4bit")


def weights_of(model, trained):
    named = model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad == trained}


@pytest.mark.parametrize(
    ("load", "optim"),
    [
        ("4bit", OptimConfig(name="muon")),
        ("4bit", OptimConfig(name="muon", lora="product")),
        ("4bit", OptimConfig(name="muon_sgd")),
        ("4bit", OptimConfig(name="pion")),
        ("4bit", OptimConfig(name="adamw")),
        ("8bit", OptimConfig(name="muon", lora="product")),
    ],
)
def test_every_optimizer_steps_adapters_on_rounded_weights(load, optim):
    config = ModelConfig(lora=4, load=load)
    base, _ = load_model(config)
    whole, _ = load_model(ModelConfig())
    assert base.get_memory_footprint() < whole.get_memory_footprint()
    torch.manual_seed(0)  # of A; from some Pion filters a whole block out
    model = get_peft_model(base, lora_config(config))
    for p in model.parameters():
        p.data = p.data.bfloat16() if p.requires_grad else p.data  # as TRL rounds them
    optimizer = build_optimizer(model, optim)
    before, frozen = weights_of(model, True), weights_of(model, False)
    ids = torch.randint(5, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # B starts at 0: A moves from the second step on
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    after = weights_of(model, True)
    assert {p.dtype for p in after.values()} == {torch.float32}
    assert all(not torch.equal(after[name], before[name].float()) for name in after)
    assert tiny.same(frozen, weights_of(model, False))


def test_a_quantized_run_resumes_exactly(tmp_path):
    """TRL rounds the adapters to bfloat16 before the checkpoint's are loaded."""

    def make():
        torch.manual_seed(0)
        model, tokenizer = load_model(QLORA)
        parts = {"model": model, "processing_class": tokenizer, "peft_config": lora_config(QLORA)}
        parts |= {"optim": "muon", "objective": "grpo"}  # its KL term turns the adapters off
        parts["reward_funcs"] = lambda completion_ids, **_: [sum(x) % 7 for x in completion_ids]
        return tiny.make_trainer(
            tmp_path, parts=parts, max_steps=2, save_strategy="steps", save_steps=1
        )

    whole, resumed = make(), make()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert tiny.same(weights_of(whole.model, True), weights_of(resumed.model, True))


def test_it_needs_lora_and_plain_sampling():
    with pytest.raises(ValueError, match="--lora"):
        ModelConfig(load="4bit")
    for rollout in (RolloutConfig(fast=True), RolloutConfig(vllm="colocate")):
        with pytest.raises(ValueError, match="TRL's own sampling"):
            TrainConfig(model=QLORA, rollout=rollout)


def test_the_plan_knows_the_rounded_weights():
    def weights(load):
        model = ModelConfig(name="qwen3-1.7b", dtype="bfloat16", lora=16, load=load)
        plan = predict(PlanConfig(model=model), SHAPES["qwen3-1.7b"], "h200", Lengths(64, 96, 96))
        return plan.memory["weights"]

    linear = SHAPES["qwen3-1.7b"].linear / 2**30
    assert weights("full") - weights("4bit") == pytest.approx(linear * 1.48)
    assert weights("full") - weights("8bit") == pytest.approx(linear * 0.99)

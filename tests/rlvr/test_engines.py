"""Graphs that sample inside a trainer: whose weights, in which precision, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from mesotron.config import ObjectiveConfig
from mesotron.rlvr import session
from mesotron.rlvr.checkpoint import load_adapter
from mesotron.rlvr.sampling.draw import Sampling
from mesotron.rlvr.sampling.fused_decoder import FusedSampler
from mesotron.rlvr.sampling.graph_sampler import GraphSampler
from mesotron.rlvr.wrapping import as_loaded
from support.rlvr_tiny import EOS, make_model, make_trainer, rows, same, weights

# PyTorch says once that this CPU multiplies bfloat16 without mkldnn.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

ENGINES = pytest.mark.parametrize("engine", ["graph", "fused"])
PROMPTS = [[5, 13, 6, 14], [4, 13, 14]]


def lora():
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def steep_model():
    """Far from uniform, so that rounding does not decide which token is the likeliest."""
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.4 * torch.randn_like(p))
    return model


def watch_sampling(trainer):
    """(rows, the first layer's down projection as the sampler has it) of every call from now on."""
    calls, make = [], trainer._make_sampler

    def make_watched(sampling):
        sampler = make(sampling)
        sample = sampler.sample

        def note(prompts, *rest):
            found = sample(prompts, *rest)
            fused = isinstance(sampler, FusedSampler)
            layer = sampler.model.model.layers[0].mlp.down_proj.weight
            held = sampler.weights.layers[0].down if fused else layer
            calls.append((len(prompts), held.detach().clone()))
            return found

        sampler.sample = note
        return sampler

    trainer._make_sampler = make_watched
    return calls


@ENGINES
def test_the_anchors_completions_are_sampled_from_the_anchor(tmp_path, engine):
    objective = ObjectiveConfig(name="mgrpo", momentum=0.5, momentum_generations=2, beta=0.0)
    trainer = make_trainer(tmp_path, parts={"engine": engine, "objective": objective}, max_steps=2)
    calls, down = watch_sampling(trainer), "model.layers.0.mlp.down_proj.weight"
    starts, make = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: (
        starts.append(weights(trainer)[down]) or make(inputs)
    )
    trainer.train()
    assert [number for number, _ in calls] == [8, 4, 8, 4]
    own, theirs = ([held for _, held in calls[k::2]] for k in (0, 1))
    assert torch.equal(own[0], starts[0])
    assert torch.equal(own[1], starts[1])
    assert torch.equal(theirs[0], starts[0])
    torch.testing.assert_close(theirs[1], (starts[0] + starts[1]) / 2)
    assert not torch.equal(theirs[1], own[1])


@ENGINES
def test_stopped_and_resumed_ends_with_the_same_weights(tmp_path, engine):
    def train(name, steps, resume=None):
        objective = ObjectiveConfig(name="grpo", dynamic_sampling="resample", dynamic_tolerance=0.2)
        trainer = make_trainer(
            tmp_path / name, parts={"engine": engine, "objective": objective}, max_steps=steps,
            save_strategy="steps", save_steps=1, steps_per_generation=2,
            gradient_accumulation_steps=1,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return weights(trainer)

    whole = train("whole", 6)
    half = tmp_path / "whole" / "checkpoint-3"  # in the middle of a rollout buffer
    assert same(train("again", 6, str(half)), whole)


def test_rounds_that_fill_gaps_reuse_the_graphs(tmp_path):
    """Rounds of 1 or 2 groups of 4, after one of 3: a half of 12 rows holds the first."""
    objective = ObjectiveConfig(name="grpo", dynamic_sampling="resample", dynamic_tolerance=0.3)
    parts = {"engine": "fused", "objective": objective}
    trainer = make_trainer(tmp_path, parts=parts, per_device_train_batch_size=12)
    trainer.train()
    assert max(row["dynamic/rounds"] for row in rows(trainer)) > 1
    for number in (8, 4):
        found, _ = trainer._generate_single_turn([PROMPTS[0]] * number, None, {}, 4)
        assert len(found) == number
    assert {shape[0] for shape in trainer._sampler.slates} == {12, 6}


def test_lora_is_sampled_in_bfloat16_and_followed(tmp_path):
    """TRL's head sits below PEFT: a copy that kept it would run the original's layers."""
    trainer = make_trainer(tmp_path, parts={"model": steep_model(), "peft_config": lora()})
    greedy = Sampling(temperature=0.0)
    plain = GraphSampler(trainer.model, [EOS], 0, greedy)
    narrow = GraphSampler(trainer.model, [EOS], 0, greedy, dtype=torch.bfloat16)
    first = narrow.sample(PROMPTS, 4)
    assert first == plain.sample(PROMPTS, 4)
    ran = []
    for name, model in (("original", trainer.model), ("copy", narrow.copy)):
        layer = model.get_base_model().model.layers[0].mlp.down_proj.base_layer
        layer.register_forward_hook(lambda m, a, out, name=name: ran.append((name, out.dtype)))
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.5 * torch.randn_like(p))
    second = narrow.sample(PROMPTS, 4)
    assert set(ran) == {("copy", torch.bfloat16)}
    assert second == plain.sample(PROMPTS, 4)
    assert second != first


def test_lora_trains_on_what_graphs_sample(tmp_path):
    trainer = make_trainer(tmp_path, parts={"engine": "graph", "peft_config": lora()}, bf16=True)
    start = weights(trainer)
    trainer.train()
    moved = {n for n, weight in weights(trainer).items() if not torch.equal(weight, start[n])}
    assert trainer._sampler.copy is not None
    assert moved
    assert all("lora_" in name for name in moved)


@pytest.mark.parametrize("peft_config", [None, lora()], ids=["whole", "lora"])
def test_an_evaluation_is_in_the_weights_own_precision(tmp_path, monkeypatch, peft_config):
    """At a rate of 0 with bfloat16 products: the same logits before and after."""
    trainer = make_trainer(
        tmp_path, parts={"peft_config": peft_config}, max_steps=1, bf16=True, learning_rate=0.0
    )
    ids = torch.tensor(PROMPTS[:1])

    class Logits:
        def __init__(self, model, *_):
            with torch.no_grad():
                self.found = model.eval()(ids).logits

        def to_json(self):
            return {"logits": self.found}

    monkeypatch.setattr(session, "measure", Logits)
    parts: Any = SimpleNamespace(tokenizer=None, task=None, config=None, judge=None)

    def evaluate(name):
        return session.evaluate_part(parts, trainer.model, name)["logits"]

    before = evaluate("before")
    trainer.train()
    hung = trainer.model(ids).logits
    assert torch.equal(evaluate("after"), before)
    assert not torch.equal(hung, before)
    assert torch.equal(trainer.model(ids).logits, hung)  # the trainer's own way is back


def test_what_was_hung_is_back_after_an_error(tmp_path):
    trainer = make_trainer(tmp_path)
    held = vars(trainer.model)["forward"]
    with pytest.raises(ValueError, match="exactly one of"), as_loaded(trainer.model):
        trainer.model()
    assert vars(trainer.model)["forward"] is held


def test_an_adapter_that_lacks_a_weight_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, parts={"peft_config": lora()})
    trainer.model.save_pretrained(tmp_path)
    load_adapter(trainer.model, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    saved = load_file(path)
    saved.pop(next(name for name in saved if "up_proj.lora_B" in name))
    save_file(saved, path)
    with pytest.raises(ValueError, match=r"different adapter: .*up_proj\.lora_B"):
        load_adapter(trainer.model, tmp_path)


@pytest.mark.parametrize(
    ("settings", "parts", "told"),
    [
        ({"min_p": 0.1}, {}, "does not go with min_p"),
        ({"repetition_penalty": 1.2}, {}, "does not go with repetition_penalty"),
        ({"use_transformers_continuous_batching": True}, {}, "does not go with use_transformers"),
        ({}, {"engine": "fused", "peft_config": lora()}, "does not go with LoRA"),
    ],
)
def test_what_it_cannot_sample_is_refused_when_the_trainer_is_built(
    tmp_path, settings, parts, told
):
    with pytest.raises(ValueError, match=told):
        make_trainer(tmp_path, parts={"engine": "graph"} | parts, **settings)

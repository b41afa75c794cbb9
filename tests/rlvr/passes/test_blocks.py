"""Passes over ragged rows against one padded row per completion."""

import copy
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GemmaConfig, GemmaForCausalLM, MistralConfig, MistralForCausalLM
from trl.trainer.utils import add_fused_lm_head

from mesotron.rlvr.passes.blocks import PLAIN, RaggedPass, hidden_states, ragged_obstacle
from mesotron.rlvr.passes.ragged import lay_out
from support.rlvr_tiny import NETWORKS, make_groups, make_network

LAYOUTS = [
    {"groups": (4, 4, 4)},
    {"groups": (1, 3, 2), "T": 7},  # prompts of different numbers of completions
    {"groups": (1, 1, 1)},
    {"groups": (2, 3), "P": 1},  # prompts without a token of their own
]


def plain(model, batch, temperature):
    """TRL's head on padded rows."""
    model = copy.deepcopy(model)
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    ids, mask, T = batch
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-T] = -100
    out = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)

    return model, (out.log_probs[:, -T:], out.entropy[:, -T:])


def batch_of(seed=1, **settings):
    ids, mask, T = make_groups(seed, **settings)
    if settings.get("P") == 1:
        mask[:, 0] = 1
    return ids, mask, T


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("settings", LAYOUTS)
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_are_those_of_padded_rows(kind, settings, entropy):
    model = make_network(kind, tie_word_embeddings=kind != "llama")
    batch = batch_of(**settings)
    other, expected = plain(model, batch, 0.7)

    scores = RaggedPass(nullcontext, entropy, PLAIN)(model, *batch, 0.7)
    for a, b in zip(scores, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

    assert scores[1].requires_grad == entropy
    draw = torch.Generator().manual_seed(3)
    weigh = [torch.randn(x.shape, generator=draw) for x in scores]
    for values in (scores, expected):
        loss = (weigh[0] * values[0]).sum()
        (loss + (weigh[1] * values[1]).sum() if entropy else loss).backward()

    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", NETWORKS)
def test_hidden_states_equal_float64(kind):
    """Of the last tokens, which see the whole row; norms and angles of the model are float32."""
    model = make_network(kind).double()
    ids, mask, T = batch_of(groups=(3, 2))
    ragged = lay_out(ids, mask, T)
    hidden = hidden_states(model, ragged, PLAIN)[ragged.lead :]
    expected = model.model(input_ids=ids, attention_mask=mask).last_hidden_state

    scored = mask[:, -T:] != 0
    torch.testing.assert_close(hidden, expected[:, -T - 1 : -1][scored], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("on", [True, False])
def test_adapters_are_part_of_the_products_and_can_be_switched_off(on):
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(make_network(), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)

    batch = batch_of()
    with nullcontext() if on else model.disable_adapter():
        expected = plain(model.get_base_model(), batch, 1.0)[1]
        scores = RaggedPass(nullcontext, ops=PLAIN)(model, *batch, 1.0)

    for a, b in zip(scores, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_rows_that_do_not_count_change_nothing():
    """A masked completion is no token at all."""
    ids, mask, T = batch_of(groups=(3, 3))
    model = make_network()
    run = RaggedPass(nullcontext, ops=PLAIN)
    whole = run(model, ids, mask, T, 1.0)
    kept = torch.arange(6) != 2

    mask[2, -T:] = 0
    ids[2, -T:] = 0
    part = run(model, ids, mask, T, 1.0)
    assert not part[0][2].any()
    torch.testing.assert_close(part[0][kept], whole[0][kept], atol=1e-5, rtol=1e-5)


def test_checkpointed_layers_give_the_same_gradients():
    batch = batch_of()
    gradients = []
    for kwargs in (None, {"use_reentrant": False}):
        model = make_network().train()
        if kwargs:
            model.gradient_checkpointing_enable(kwargs)

        logprobs, _ = RaggedPass(nullcontext, ops=PLAIN)(model, *batch, 1.0)
        logprobs.sum().backward()
        gradients.append([p.grad for p in model.parameters()])

    assert any(layer.gradient_checkpointing for layer in model.model.layers)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_which_models_have_these_blocks():
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    mistral = MistralForCausalLM(MistralConfig(**sizes, sliding_window=None))
    assert ragged_obstacle(mistral) is None
    batch = batch_of()
    scores = RaggedPass(nullcontext, ops=PLAIN)(mistral, *batch, 1.0)
    torch.testing.assert_close(scores[0], plain(mistral, batch, 1.0)[1][0], atol=1e-5, rtol=1e-5)

    assert "Gemma" in ragged_obstacle(GemmaForCausalLM(GemmaConfig(**sizes)))
    assert "gelu" in ragged_obstacle(make_network(hidden_act="gelu"))
    assert "6 places" in ragged_obstacle(make_network(head_dim=6))

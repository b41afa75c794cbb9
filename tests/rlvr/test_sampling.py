"""Which tokens may be drawn, against Transformers' rules; spoiled weights leave no trace."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TopKLogitsWarper, TopPLogitsWarper

from mesotron.rlvr.sampling.draw import Sampling
from mesotron.rlvr.sampling.fused_decoder import FusedSampler
from mesotron.rlvr.sampling.graph_sampler import GraphSampler

CUTS = [(20, 0.8), (3, 0.5), (0, 0.9), (5, 1.0), (1, 0.1)]


@pytest.mark.parametrize(("top_k", "top_p"), CUTS)
def test_the_same_tokens_may_be_drawn_as_by_generate(top_k, top_p):
    logits = 2 * torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    wanted = logits
    if top_k:
        wanted = TopKLogitsWarper(top_k)(None, wanted)  # type: ignore[arg-type]
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(None, wanted)  # type: ignore[arg-type]
    found = Sampling(top_k=top_k, top_p=top_p).cut(logits.softmax(-1))
    assert torch.equal(found > 0, wanted.isfinite())
    torch.testing.assert_close(found / found.sum(-1, keepdim=True), wanted.softmax(-1))


@pytest.mark.parametrize("make", [GraphSampler, FusedSampler])
def test_a_rollout_of_spoiled_weights_leaves_nothing_behind(make):
    """As when a run goes back to an earlier checkpoint: the keys and values held NaN."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.4,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    sampler = make(model, [51], 0, Sampling(temperature=0.0))
    prompts = [[5, 6, 7], [8, 9]]
    wanted = sampler.sample(prompts, 8)
    weight = model.model.layers[0].self_attn.k_proj.weight.data
    kept = weight.clone()
    weight.fill_(torch.nan)
    sampler.sample(prompts, 8)
    weight.copy_(kept)
    assert sampler.sample(prompts, 8) == wanted

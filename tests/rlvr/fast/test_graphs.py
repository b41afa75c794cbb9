"""Sampling with a static cache, and on a GPU a captured graph, against `generate` and theory."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mesotron.rlvr.fast.decoder import FusedSampler
from mesotron.rlvr.fast.graphs import GraphSampler, Sampling, round_rows

EOS, PAD, VOCABULARY = 1, 0, 50
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU"))]  # fmt: skip


SAMPLERS = pytest.mark.parametrize("make", [GraphSampler, FusedSampler])


def make_model(kind=LlamaForCausalLM, **extra):
    torch.manual_seed(0)
    configs = {LlamaForCausalLM: LlamaConfig, Qwen2ForCausalLM: Qwen2Config}
    config = configs[kind](
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,  # far from uniform, so that greedy paths are not ties
        **extra,
    )
    return kind(config).eval()


def random_prompts(count: int = 6):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def by_generate(model, prompt: list[int], max_tokens: int) -> list[int]:
    """The greedy completion of one prompt alone: no padding, no batch."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return out[0, len(prompt) :].tolist()


@SAMPLERS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen2ForCausalLM])
def test_greedy_equals_generate(kind, device, make):
    model = make_model(kind).to(device)
    prompts = random_prompts()
    prompts = [*prompts, prompts[2], prompts[0]]  # as in groups
    sampler = make(model, [EOS], PAD, Sampling(temperature=0.0))
    wanted = [by_generate(model, prompt, 20) for prompt in prompts]
    assert sampler.sample(prompts, 20) == wanted
    assert sampler.sample(prompts, 20) == wanted  # nothing is left over from the first call


@SAMPLERS
@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_changed_in_place_are_seen(device, make):
    model = make_model().to(device)
    sampler = make(model, [EOS], PAD, Sampling(temperature=0.0))
    prompts = random_prompts()
    before = sampler.sample(prompts, 12)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    after = sampler.sample(prompts, 12)
    assert after == [by_generate(model, prompt, 12) for prompt in prompts]
    assert after != before


def test_prompts_that_are_alike_are_read_once():
    group = [5, 6, 7]
    sampler = GraphSampler(make_model(), [EOS], PAD)
    ids, mask, rows = sampler.pad_left([group, [8], group, [5, 6, 7]])
    assert rows.tolist() == [0, 1, 0, 0]
    assert ids.tolist() == [[PAD] * 29 + group, [PAD] * 31 + [8]]
    assert torch.equal(mask, ids != PAD)


def cut(row: list[int], ends: set[int]) -> list[int]:
    """A row up to its first end, which is kept."""
    last = next((k for k, token in enumerate(row) if token in ends), len(row))
    return row[: last + 1]


@SAMPLERS
@pytest.mark.parametrize("device", DEVICES)
def test_rows_end_at_their_ending_token(device, make):
    model = make_model().to(device)
    prompts = random_prompts(8)
    free = make(model, [VOCABULARY + 1], PAD, Sampling(temperature=0.0))
    endless = free.sample(prompts, 16)
    end = endless[0][4]  # a token that greedy decoding writes
    stopped = make(model, [end], PAD, Sampling(temperature=0.0)).sample(prompts, 16)
    assert stopped == [cut(row, {end}) for row in endless]
    other = next(token for row in endless for token in row if token != end and end not in row)
    both = make(model, [end, other], PAD, Sampling(temperature=0.0)).sample(prompts, 16)
    assert both == [cut(row, {end, other}) for row in endless]
    assert both != stopped


@SAMPLERS
@pytest.mark.parametrize("device", DEVICES)
def test_draws_follow_the_softmax(device, make):
    """The first token of many equal prompts against the model's own probabilities."""
    model = make_model(tie_word_embeddings=False).to(device)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)
    prompt = random_prompts(1)[0]
    logits = model(torch.tensor([prompt], device=device)).logits[0, -1].float()
    number = 4000
    torch.manual_seed(3)
    rows = make(model, [EOS], PAD, Sampling(temperature=0.7)).sample([prompt] * number, 1)
    counts = torch.bincount(torch.tensor([row[0] for row in rows]), minlength=VOCABULARY)
    wanted = (logits / 0.7).softmax(-1).cpu()
    error = (wanted * (1 - wanted) / number).sqrt()
    assert ((counts / number - wanted).abs() < 5 * error + 1e-3).all()


def test_top_p_keeps_the_most_likely_token():
    probs = torch.tensor([[0.1, 0.5, 0.25, 0.15]])
    assert Sampling(top_p=0.7).truncate(probs).nonzero()[:, 1].tolist() == [1, 2]
    assert Sampling(top_p=1e-6).truncate(probs).nonzero()[:, 1].tolist() == [1]
    drawn = Sampling(top_k=1).draw(probs.log().repeat(100, 1))
    assert drawn.unique().tolist() == [1]


@pytest.mark.parametrize(("top_k", "top_p"), [(20, 0.8), (3, 0.5), (0, 0.9), (5, 1.0)])
def test_truncation_equals_that_of_transformers(top_k, top_p):
    logits = 2 * torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    wanted = logits
    if top_k:
        wanted = TopKLogitsWarper(top_k)(None, wanted)  # type: ignore[arg-type]
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(None, wanted)  # type: ignore[arg-type]
    probs = Sampling(top_k=top_k, top_p=top_p).truncate(logits.softmax(-1))
    assert torch.equal(probs > 0, wanted.isfinite())
    torch.testing.assert_close(probs / probs.sum(-1, keepdim=True), wanted.softmax(-1))


@SAMPLERS
@pytest.mark.parametrize("device", DEVICES)
def test_the_seed_decides_also_when_graphs_are_captured_again(device, make):
    model = make_model().to(device)
    prompts = random_prompts()
    sampler = make(model, [EOS], PAD)

    def draw():
        torch.manual_seed(7)
        return sampler.sample(prompts, 12)

    first = draw()
    assert draw() == first
    sampler.decoders.clear()
    assert draw() == first
    torch.manual_seed(8)
    assert sampler.sample(prompts, 12) != first


def test_the_model_is_left_as_it_was():
    model = make_model().train()
    GraphSampler(model, [EOS], PAD).sample(random_prompts(), 4)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


@SAMPLERS
def test_any_number_of_rows_needs_few_shapes(make):
    """Filled up with idle rows, greedy completions are what they were."""
    model, prompts = make_model(), random_prompts(9)
    sampler = make(model, [EOS], PAD, Sampling(temperature=0.0))
    wanted = sampler.sample(prompts, 8)
    sampler.decoders.clear()
    for number in range(1, 10):
        assert sampler.sample(prompts[:number], 8, usual=9) == wanted[:number]
    assert {shape[0] for shape in sampler.decoders} == {9, 5, 3}


@pytest.mark.parametrize("usual", [1, 9, 12, 250, 256])
def test_three_sizes_hold_any_rows_up_to_the_usual_ones(usual):
    sizes = [round_rows(rows, usual) for rows in range(1, usual + 1)]
    assert all(size >= rows for rows, size in enumerate(sizes, start=1))
    assert set(sizes) == {-(-usual // part) for part in (1, 2, 4)}
    assert round_rows(usual + 1, usual) == usual + 1


def test_few_shapes_are_kept():
    sampler = GraphSampler(make_model(), [EOS], PAD)
    for rows in range(1, 12):
        sampler.sample([[5, 6]] * rows, 2)
    assert [shape[0] for shape in sampler.decoders] == [*range(4, 12)]
    sampler.sample([[5, 6], [5] * 33], 2)
    assert len(sampler.decoders) == 8
    assert max(sampler.decoders) == (11, 32, 2)
    assert (2, 64, 2) in sampler.decoders


@SAMPLERS
def test_nan_weights_leave_nothing_in_the_cache(make):
    """As after a rollback to an earlier checkpoint: keys and values held NaN."""
    model = make_model()
    sampler = make(model, [VOCABULARY + 1], PAD, Sampling(temperature=0.0))
    prompts = [[5, 6, 7], [8, 9]]
    wanted = sampler.sample(prompts, 8)
    weight = model.model.layers[0].self_attn.k_proj.weight.data
    kept = weight.clone()
    weight.fill_(torch.nan)
    sampler.sample(prompts, 8)
    weight.copy_(kept)
    assert sampler.sample(prompts, 8) == wanted


def test_a_copy_in_another_dtype_follows_the_model():
    model = make_model()
    sampler = GraphSampler(model, [EOS], PAD, dtype=torch.bfloat16)
    copy = sampler.copy
    assert {p.dtype for p in copy.parameters()} == {torch.bfloat16}
    assert copy.model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    sampler.refresh()
    assert copy.model.norm.weight.unique().item() == 3.0


SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}


def test_unsupported_models_are_refused():
    eager = make_model()
    eager.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="sdpa"):
        GraphSampler(eager, [EOS], PAD)
    with pytest.raises(ValueError, match="sliding"):
        GraphSampler(make_model(Qwen2ForCausalLM, **SLIDING), [EOS], PAD)
    with pytest.raises(ValueError, match="Linear"):
        FusedSampler(torch.nn.Linear(2, 2), [EOS], PAD)
    for changed in ({"mlp_bias": True}, {"hidden_act": "gelu"}):
        with pytest.raises(ValueError, match="biases or activations"):
            FusedSampler(make_model(**changed), [EOS], PAD)

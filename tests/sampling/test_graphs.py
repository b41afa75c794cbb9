"""Sampling with a static cache, and a captured graph on GPUs, against `generate` and theory."""

import os
from contextlib import contextmanager

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from mesotron.sampling import decoder, graphs
from mesotron.sampling.decoder import FusedSampler
from mesotron.sampling.graphs import GraphSampler, Sampling, sizes_of
from support.rlvr_tiny import NETWORKS, make_network

EOS = 1
PAD = 0
VOCABULARY = 50
GREEDY = Sampling(temperature=0.0)
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
SAMPLERS = pytest.mark.parametrize("make", [GraphSampler, FusedSampler])


def make_model(kind="llama", **extra):
    # Far from uniform, so that greedy paths are not ties.
    return make_network(kind, initializer_range=0.4, **extra).eval()


def random_prompts(count: int = 4):
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
@DEVICES
@pytest.mark.parametrize("kind", NETWORKS)
def test_greedy_equals_generate_also_after_the_weights_changed(monkeypatch, kind, device, make):
    monkeypatch.setattr(decoder, "SPAN", 16)  # 14, 27 and 40 tokens
    model = make_model(kind).to(device)
    prompts = random_prompts()
    prompts = [*prompts, prompts[2], prompts[0]]  # as in groups
    sampler = make(model, [EOS], PAD, GREEDY)

    expected = [by_generate(model, prompt, 40) for prompt in prompts]
    for _ in range(2):  # nothing is left over from the first call
        assert sampler.sample(prompts, 40) == expected

    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))

    changed = sampler.sample(prompts, 40)
    assert changed == [by_generate(model, prompt, 40) for prompt in prompts]
    assert changed != expected


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interprets the kernels")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_kernels_equal_generate(monkeypatch, kind):
    monkeypatch.setattr(decoder.triton, "available", lambda device: True)
    model = make_model(kind)
    prompts = random_prompts(2) * 2
    sampler = FusedSampler(model, [EOS], PAD, GREEDY)

    assert sampler.weights.kernels is not None
    expected = [by_generate(model, prompt, 4) for prompt in prompts]
    assert sampler.sample(prompts, 4) == expected

    for one in sampler.decoders.values():
        one.cache.fill_(torch.nan)  # what broken weights leave is not read again

    assert sampler.sample(prompts, 4) == expected


def cut(row: list[int], ends: set[int]) -> list[int]:
    last = next((k for k, token in enumerate(row) if token in ends), len(row))
    return row[: last + 1]


@SAMPLERS
@DEVICES
def test_rows_end_at_their_ending_token(device, make):
    model = make_model().to(device)
    prompts = random_prompts(8)
    free = make(model, [VOCABULARY + 1], PAD, GREEDY)
    endless = free.sample(prompts, 16)
    end = endless[0][4]  # a token that greedy decoding writes
    stopped = make(model, [end], PAD, GREEDY).sample(prompts, 16)

    assert stopped == [cut(row, {end}) for row in endless]
    other = next(token for row in endless for token in row if token != end and end not in row)
    both = make(model, [end, other], PAD, GREEDY).sample(prompts, 16)

    assert both == [cut(row, {end, other}) for row in endless]
    assert both != stopped


@DEVICES
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(0.8, top_k=30, top_p=0.95)])
def test_rows_that_end_leave_and_change_no_other(monkeypatch, device, sampling):
    """Also for calls with fewer rows than usual."""
    model = make_model(tie_word_embeddings=False).to(device)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)

    prompts = [prompt for prompt in random_prompts(8) for _ in range(4)]
    sampler = FusedSampler(model, list(range(2, 12)), PAD, sampling)

    def sample():
        torch.manual_seed(3)
        return sampler.sample(prompts[:30], 40, usual=32)

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "sizes_of", lambda B: [B])
        expected = sample()

    assert [one.size for one in sampler.decoders.values()] == [32]
    sampler.decoders.clear()
    for _ in range(2):  # the first call leaves nothing behind
        assert sample() == expected

    assert all(one.size < 32 for one in sampler.decoders.values())
    assert len({len(row) for row in expected}) > 4

    sampler.sample(prompts, 10)  # too short
    assert {one.size for one in sampler.decoders.values() if one.N == 10} == {32}


@SAMPLERS
def test_batches_that_fit_into_memory_change_nothing(monkeypatch, make):
    prompts = random_prompts(9)
    sampler = make(make_model(), [EOS], PAD, prompt_length=64)

    def sample():
        torch.manual_seed(3)
        return sampler.sample(prompts, 8)

    expected = sample()
    monkeypatch.setattr(sampler, "rows_at_once", lambda rows, longest: 4)
    assert sample() == expected
    assert {shape[:2] for shape in sampler.decoders} == {(9, 64), (4, 64), (1, 64)}


def test_sizes_fill_tiles():
    assert sizes_of(256) == [256, 192, 128, 96, 64, 48, 32, 16]
    assert sizes_of(9) == [9, 8]
    assert sizes_of(1) == [1]


@SAMPLERS
@DEVICES
def test_draws_follow_the_softmax(device, make):
    """The first token of many equal prompts against the model's own probabilities."""
    model = make_model(tie_word_embeddings=False).to(device)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)

    prompt = random_prompts(1)[0]
    logits = model(torch.tensor([prompt], device=device)).logits[0, -1].float()
    number = 1000
    torch.manual_seed(3)
    rows = make(model, [EOS], PAD, Sampling(temperature=0.7)).sample([prompt] * number, 1)
    counts = torch.bincount(torch.tensor([row[0] for row in rows]), minlength=VOCABULARY)
    expected = (logits / 0.7).softmax(-1).cpu()
    error = (expected * (1 - expected) / number).sqrt()

    assert ((counts / number - expected).abs() < 5 * error + 1e-3).all()


@pytest.mark.parametrize(("top_k", "top_p"), [(20, 0.8), (3, 0.5), (0, 0.9), (5, 1.0)])
def test_truncation_equals_that_of_transformers(top_k, top_p):
    logits = 2 * torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)  # type: ignore[arg-type]

    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)  # type: ignore[arg-type]

    probs = Sampling(top_k=top_k, top_p=top_p).truncate(logits.softmax(-1))
    assert torch.equal(probs > 0, expected.isfinite())

    torch.testing.assert_close(probs / probs.sum(-1, keepdim=True), expected.softmax(-1))


@SAMPLERS
@DEVICES
def test_draws_depend_on_the_seed_also_when_graphs_are_captured_again(device, make):
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


@SAMPLERS
def test_any_number_of_rows_needs_few_shapes(make):
    """Idle rows fill up a shape and do not change greedy completions."""
    model = make_model().train()
    prompts = random_prompts(9)
    sampler = make(model, [EOS], PAD, GREEDY)
    expected = sampler.sample(prompts, 8)

    assert model.training  # the model is left as it was
    assert all(p.requires_grad for p in model.parameters())

    sampler.decoders.clear()
    for number in range(1, 10):
        assert sampler.sample(prompts[:number], 8, usual=9) == expected[:number]

    assert {shape[0] for shape in sampler.decoders} == {9, 5, 3}


def test_at_most_eight_shapes_are_kept_and_equal_prompts_read_once():
    sampler = GraphSampler(make_model(), [EOS], PAD)
    for rows in range(1, 12):
        sampler.sample([[5, 6]] * rows, 2)

    assert [shape[0] for shape in sampler.decoders] == [*range(4, 12)]
    sampler.sample([[5, 6], [5] * 33], 2)
    assert len(sampler.decoders) == 8
    assert max(sampler.decoders) == (11, 32, 2)
    assert (2, 64, 2) in sampler.decoders

    prompts = sampler.pad_left([[5, 6, 7], [8], [5, 6, 7]])
    assert prompts.rows.tolist() == [0, 1, 0]
    assert prompts.ids.tolist() == [[PAD] * 29 + [5, 6, 7], [PAD] * 31 + [8]]
    assert torch.equal(prompts.mask, prompts.ids != PAD)


@SAMPLERS
def test_nan_weights_leave_nothing_in_the_cache(make):
    """As after a rollback to an earlier checkpoint."""
    model = make_model()
    prompts = [[5, 6, 7], [8, 9]]
    sampler = make(model, [VOCABULARY + 1], PAD, GREEDY)
    expected = sampler.sample(prompts, 8)
    weight = model.model.layers[0].self_attn.k_proj.weight.data
    kept = weight.clone()
    weight.fill_(torch.nan)
    sampler.sample(prompts, 8)
    weight.copy_(kept)

    assert sampler.sample(prompts, 8) == expected


def test_unsupported_models_are_refused():
    """Beside eager attention and DoRA, which the trainer's tests meet."""
    sliding = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 0,
    }
    for make, model, reason in (
        (GraphSampler, make_model("qwen2", **sliding), "sliding"),
        (FusedSampler, torch.nn.Linear(2, 2), "Linear"),
        (FusedSampler, make_model(mlp_bias=True), "biases or activations"),
        (FusedSampler, make_model(hidden_act="gelu"), "biases or activations"),
    ):
        with pytest.raises(ValueError, match=reason):
            make(model, [EOS], PAD)


def test_one_thread_captures_at_a_time(monkeypatch):
    """PyTorch's captures share a stream and wait for the device, which a capture forbids."""
    held = []

    @contextmanager
    def capture(graph, pool, capture_error_mode):
        held.append((graph, pool, capture_error_mode, graphs.CAPTURING.locked()))
        yield

    monkeypatch.setattr(torch.cuda, "graph", capture)
    with graphs.captured("a graph", "a pool"):
        assert not graphs.CAPTURING.acquire(blocking=False)

    assert held == [("a graph", "a pool", "thread_local", True)]
    assert not graphs.CAPTURING.locked()

"""One row for a prompt and its completions, against a row for each: the same numbers."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from mesotron.rlvr.fast.packing import IGNORED, find_groups, pack_groups

V, P, T = 50, 9, 5


def make_model(kind):
    torch.manual_seed(0)
    configs = {LlamaForCausalLM: LlamaConfig, Qwen2ForCausalLM: Qwen2Config}
    config = configs[kind](
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return kind(config).double()


def make_batch(groups=(3, 1, 4)):
    """Shuffled rows of groups of several sizes, prompts and completions of several lengths."""
    draw = torch.Generator().manual_seed(2)
    ids, mask = [], []
    for number, size in enumerate(groups):
        prompt = torch.randint(1, V, (P,), generator=draw)
        for k in range(size):
            ids.append(torch.cat([prompt, torch.randint(1, V, (T,), generator=draw)]))
            seen = torch.ones(P + T, dtype=torch.long)
            seen[: 2 * number] = 0
            seen[P + T - k :] = 0
            mask.append(seen)
    order = torch.randperm(len(ids), generator=draw)
    return torch.stack(ids)[order], torch.stack(mask)[order]


def logprobs(model, ids, seen, places, labels):
    """[rows, tokens] of the labels, 0 where nothing is scored."""
    logits = model(input_ids=ids, attention_mask=seen, position_ids=places).logits
    found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(labels == IGNORED, 0.0)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen2ForCausalLM])
def test_log_probabilities_and_gradients_are_those_of_single_rows(kind):
    model, (ids, mask) = make_model(kind), make_batch()
    weigh = torch.randn(len(ids), T, dtype=torch.double, generator=torch.Generator().manual_seed(3))
    labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED)
    plain = logprobs(model, ids[:, :-1], mask[:, :-1], None, labels)[:, -T:]
    packed = pack_groups(ids, mask, T)
    assert packed is not None
    assert packed.ids.shape == (3, P - 1 + 4 * T)
    seen, places = packed.visible(), packed.frame.positions(ids.device)
    found = packed.unpack(logprobs(model, packed.ids, seen, places, packed.labels))
    torch.testing.assert_close(found, plain, atol=1e-12, rtol=0)
    wanted = torch.autograd.grad((weigh * plain).sum(), list(model.parameters()))
    given = torch.autograd.grad((weigh * found).sum(), list(model.parameters()))
    for a, b in zip(given, wanted, strict=True):
        # Norms and angles are float32 inside of a float64 model.
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_rows_that_share_nothing_are_left_as_they_are():
    ids, mask = make_batch(groups=(1, 1, 1, 2))
    assert pack_groups(ids, mask, T) is None


def test_padding_is_no_token():
    """A prompt that begins with the padding's id is another than the shorter one."""
    same = torch.tensor([[0, 5, 6], [0, 5, 6], [0, 5, 6]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 1]])
    found = find_groups(same.masked_fill(mask == 0, -1))
    assert len(found.first) == 2
    assert found.largest == 2
    assert sorted(found.slots.tolist()) == [0, 1, 2]


def test_long_completions_of_a_short_prompt_stay_as_they_are():
    """Fewer tokens, but many times the pairs that attention looks at."""
    ids = torch.ones(8, 16 + 64, dtype=torch.long)
    assert pack_groups(ids, ids, 64) is None
    assert pack_groups(ids, ids, 4) is not None

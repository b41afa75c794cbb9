"""The head and the draw as kernels, against the plain form: logits, cumulative sums, a search."""

import os

import pytest
import torch
from torch.nn.functional import linear

from mesotron.sampling.decode import choose

head = pytest.importorskip("mesotron.sampling.kernels.head")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU or TRITON_INTERPRET=1", allow_module_level=True)


def make_case(rows: int, E: int, V: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, E, generator=generator).to(dtype).to(DEVICE)
    weight = (3 * torch.randn(V, E, generator=generator) / E**0.5).to(dtype).to(DEVICE)
    numbers = torch.rand(rows + 3, 5, generator=generator).to(DEVICE)
    slots = torch.randperm(rows + 3, generator=generator)[:rows].to(DEVICE)
    count = torch.tensor([2], device=DEVICE)

    return x, weight, head.Draws(numbers, slots, count)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("rows", "E", "V"), [(1, 64, 128), (5, 40, 50), (33, 80, 700)])
def test_equals_the_plain_form(rows, E, V, temperature):
    x, weight, draws = make_case(rows, E, V)
    tokens, logprobs = head.draw(x, weight, temperature, draws)

    logits = linear(x.double(), weight.double())
    draw = draws.numbers[draws.slots, draws.count] if temperature else None
    expected = choose(logits, temperature, None if draw is None else draw.double())
    assert torch.equal(tokens, expected)

    exact = (logits / (temperature or 1.0)).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies bfloat16 as integers")
def test_low_precision_keeps_the_sum_in_float32():
    x, weight, draws = make_case(16, 64, 300, torch.bfloat16)
    tokens, logprobs = head.draw(x, weight, 1.0, draws)

    logits = linear(x.double(), weight.double())
    exact = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-4, atol=1e-4)


def test_draws_at_the_ends_take_tokens_that_can_be_drawn():
    """The first and the last token of positive probability, beyond which there are others."""
    weight = torch.full((300, 16), -100.0, device=DEVICE)
    weight[[7, 140, 260]] = 0.0
    x = torch.ones(4, 16, device=DEVICE)
    numbers = torch.tensor([[0.0], [0.5], [1 - 2.0**-24], [0.34]], device=DEVICE)
    slots = torch.arange(4, device=DEVICE)

    draws = head.Draws(numbers, slots, torch.zeros(1, dtype=torch.long, device=DEVICE))
    tokens, logprobs = head.draw(x, weight, 1.0, draws)
    assert tokens.tolist() == [7, 140, 260, 140]
    torch.testing.assert_close(logprobs.exp(), torch.full_like(logprobs, 1 / 3))


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_broken_weights_give_a_token_of_the_vocabulary():
    x, weight, draws = make_case(4, 16, 130)
    for temperature in (0.0, 1.0):
        tokens, _ = head.draw(x * torch.nan, weight, temperature, draws)
        assert ((tokens >= 0) & (tokens < 130)).all()

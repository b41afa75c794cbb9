"""GMPO's loss against hand-worked cases, and its identities with GRPO and GSPO."""

from math import exp, log

import pytest
import torch

from mesotron.rlvr.objectives.gmpo import correction_weight
from support.losses import gradient, loss_of, make_inputs, value_of


def test_two_sequences_by_hand():
    d = [[0.6, 0.2, 9.0], [-0.6, 0.8, -0.2]]
    mask = [[1, 1, 0], [1, 1, 1]]
    inputs = make_inputs(d, [2.0, -1.0], mask)

    # A > 0: 0.6 is clipped to 0.4; A < 0: -0.6 to -0.4, 0.8 stays. The 9.0 is padding.
    first = exp((0.4 + 0.2) / 2)
    second = exp((-0.4 + 0.8 - 0.2) / 3)
    loss = loss_of(inputs)

    assert loss.mean.value.item() == pytest.approx(-(2 * first - second) / 2)
    assert loss.metrics["clip_ratio/high_max"] == pytest.approx(1 / 2)
    assert loss.metrics["clip_ratio/low_mean"] == pytest.approx(1 / 5)

    # Clipped tokens and padding have no gradient; |o| does not shrink where tokens clip.
    expected = torch.tensor([[0, -first / 2, 0], [0, second / 6, second / 6]]).double()
    torch.testing.assert_close(gradient(inputs), expected)

    halved = {"sampler_ratio": torch.tensor([[0.5], [1.0]])}
    weighted = make_inputs(d, [2.0, -1.0], mask, terms=halved)
    torch.testing.assert_close(gradient(weighted), expected * torch.tensor([[0.5], [1.0]]))


@pytest.mark.parametrize(
    ("d", "A", "options", "loss"),
    [
        # The clip is one-sided and in log space.
        (-3.0, 1.0, {}, -exp(-3.0)),
        (3.0, -1.0, {}, exp(3.0)),
        (3.0, 1.0, {"epsilon_high": 0.1}, -exp(0.1)),
        (-3.0, -1.0, {"epsilon": 0.1}, exp(-0.1)),
        # delta bounds the side without a clip.
        (3.0, -1.0, {"delta": 2.0}, 2.0),
        (0.3, 1.0, {"delta": 2.0}, -exp(0.3)),
    ],
)
def test_one_token_by_hand(d, A, options, loss):
    assert value_of(make_inputs([[d]], [A], **options)) == pytest.approx(loss)


def test_sequences_without_advantage_or_tokens_have_no_gradient():
    inputs = make_inputs([[1e4, 1e4]], [0.0])  # the weight overflows
    assert value_of(inputs) == 0
    assert gradient(inputs).abs().sum() == 0

    inputs = make_inputs([[0.3, 0.1], [0.2, 0.2]], [1.0, 1.0], [[0, 0], [1, 1]])
    assert gradient(inputs)[0].tolist() == [0, 0]
    assert gradient(inputs)[1].abs().min() > 0


@pytest.mark.parametrize("d", [0.9, -0.9])
def test_nothing_is_clipped_where_the_advantage_is_zero(d):
    """Its tokens have no gradient, so the clip takes none away."""
    metrics = loss_of(make_inputs([[d, d], [d, d]], [0.0, 1.0])).metrics
    high = 0.5 if d > 0 else 0.0

    assert metrics["clip_ratio/high_mean"] == high
    assert metrics["clip_ratio/low_mean"] == 0
    assert metrics["clip_ratio/region_mean"] == high


def test_tokens_outside_the_token_mask_count_as_ratio_one():
    terms = {"high_entropy": torch.tensor([[1, 0]])}
    masked = make_inputs([[0.3, 0.2]], [1.0], terms=terms)

    assert value_of(masked) == pytest.approx(-exp(0.3 / 2))
    assert gradient(masked)[0, 1] == 0


def grpo(inputs, low=0.2, high=0.2, sequence=False):
    """GRPO (or GSPO) as written: the mean over sequences of the mean over tokens."""
    d = inputs.logprobs
    A = inputs.advantages[:, None]
    sizes = inputs.mask.sum(1)
    if sequence:
        d = ((d * inputs.mask).sum(1) / sizes)[:, None].expand_as(d)

    ratio = d.exp()
    loss = -torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
    return ((loss * inputs.mask).sum(1) / sizes).mean()


@pytest.mark.parametrize("sequence", [False, True], ids=["grpo", "gspo"])
def test_on_policy_the_gradient_is_that_of_grpo_and_gspo(sequence):
    torch.manual_seed(0)
    mask = (torch.arange(7) < torch.tensor([[7], [1], [4], [5], [2]])).long()
    inputs = make_inputs(torch.zeros(5, 7), torch.randn(5), mask)

    other = torch.autograd.grad(grpo(inputs, sequence=sequence), inputs.logprobs)[0]
    torch.testing.assert_close(gradient(inputs), other)


def test_without_a_clip_it_is_gspo_and_never_larger_than_grpo():
    torch.manual_seed(0)
    d = 0.5 * torch.randn(6, 9)
    A = torch.randn(6)
    unclipped = {"epsilon": 50.0, "epsilon_high": 50.0}
    wide = {"low": 1.0, "high": 1e9}

    inputs = make_inputs(d, A, **unclipped)
    gspo = grpo(inputs, sequence=True, **wide)
    torch.testing.assert_close(loss_of(inputs).mean.value, gspo)

    # By the inequality of the means, sequence by sequence.
    for k in range(6):
        one = make_inputs(d[k : k + 1], A[k : k + 1], **unclipped)
        assert abs(value_of(one)) <= abs(grpo(one, **wide).item())


def test_correction_ratios_become_one_weight_per_sequence():
    """Ratios of tokens by their geometric mean; those of sequences stay as they are."""
    ratio = torch.tensor([[2.0, 8.0, 5.0], [0.0, 3.0, 1.0]])
    weight, kept = correction_weight(ratio, torch.tensor([[1, 1, 0], [1, 1, 0]]))
    torch.testing.assert_close(weight, torch.tensor([exp((log(2) + log(8)) / 2), 3.0]))
    assert kept.tolist() == [[True, True, True], [False, True, True]]

    weight, kept = correction_weight(torch.tensor([[0.0], [2.5]]), torch.ones(2, 3))
    assert weight.tolist() == [0.0, 2.5]
    assert kept.all()

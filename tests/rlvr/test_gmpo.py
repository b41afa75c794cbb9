"""GMPO's loss against hand-worked cases, and its identities with GRPO and GSPO."""

from dataclasses import replace
from math import exp, log

import pytest
import torch

from mesotron.rlvr.losses import LossInputs, correction_weight, cov_loss, gmpo_loss


def batch(d, advantages, mask=None, **options) -> LossInputs:
    """Log-ratios d over an old policy of zeros."""
    d = torch.as_tensor(d, dtype=torch.float64).requires_grad_()
    return LossInputs(
        logprobs=d,
        old_logprobs=torch.zeros_like(d),
        advantages=torch.as_tensor(advantages, dtype=torch.float64),
        mask=torch.ones_like(d) if mask is None else torch.as_tensor(mask),
        **options,
    )


def gradient(inputs: LossInputs) -> torch.Tensor:
    return torch.autograd.grad(gmpo_loss(inputs).loss, inputs.logprobs)[0]


def test_two_sequences_by_hand():
    inputs = batch([[0.6, 0.2, 9.0], [-0.6, 0.8, -0.2]], [2.0, -1.0], [[1, 1, 0], [1, 1, 1]])

    # A > 0: 0.6 is clipped to 0.4; A < 0: -0.6 to -0.4, 0.8 stays. The 9.0 is padding.
    first = exp((0.4 + 0.2) / 2)
    second = exp((-0.4 + 0.8 - 0.2) / 3)
    out = gmpo_loss(inputs)

    assert out.loss.item() == pytest.approx(-(2 * first - second) / 2)
    assert out.metrics["clip_ratio/high_max"] == pytest.approx(1 / 2)
    assert out.metrics["clip_ratio/low_mean"] == pytest.approx(1 / 5)

    # Clipped tokens and padding have no gradient; |o| does not shrink where tokens clip.
    expected = torch.tensor([[0, -first / 2, 0], [0, second / 6, second / 6]]).double()
    torch.testing.assert_close(gradient(inputs), expected)
    weighted = replace(inputs, sequence_weight=torch.tensor([0.5, 1.0]))
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
    assert gmpo_loss(batch([[d]], [A], **options)).loss.item() == pytest.approx(loss)


def test_sequences_without_advantage_or_tokens_have_no_gradient():
    inputs = batch([[1e4, 1e4]], [0.0])  # the weight overflows
    assert gmpo_loss(inputs).loss.item() == 0
    assert gradient(inputs).abs().sum() == 0

    inputs = batch([[0.3, 0.1], [0.2, 0.2]], [1.0, 1.0], [[0, 0], [1, 1]])
    assert gradient(inputs)[0].tolist() == [0, 0]
    assert gradient(inputs)[1].abs().min() > 0


def test_tokens_outside_the_token_mask_count_as_ratio_one():
    masked = batch([[0.3, 0.2]], [1.0], token_mask=torch.tensor([[1, 0]]))
    assert gmpo_loss(masked).loss.item() == pytest.approx(-exp(0.3 / 2))
    assert gradient(masked)[0, 1] == 0


def grpo(d, A, mask, low=0.2, high=0.2, sequence=False):
    """GRPO (or GSPO) as written: the mean over sequences of the mean over tokens."""
    if sequence:
        d = ((d * mask).sum(1) / mask.sum(1))[:, None].expand_as(d)

    ratio = d.exp()
    loss = -torch.minimum(ratio * A[:, None], ratio.clamp(1 - low, 1 + high) * A[:, None])
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


@pytest.mark.parametrize("sequence", [False, True], ids=["grpo", "gspo"])
def test_on_policy_the_gradient_is_that_of_grpo_and_gspo(sequence):
    torch.manual_seed(0)
    mask = (torch.arange(7) < torch.tensor([[7], [1], [4], [5], [2]])).long()
    inputs = batch(torch.zeros(5, 7), torch.randn(5), mask)
    other = grpo(inputs.logprobs, inputs.advantages, inputs.mask, sequence=sequence)
    torch.testing.assert_close(gradient(inputs), torch.autograd.grad(other, inputs.logprobs)[0])


def test_without_a_clip_it_is_gspo_and_never_larger_than_grpo():
    torch.manual_seed(0)
    d = 0.5 * torch.randn(6, 9)
    A = torch.randn(6)
    inputs = batch(d, A, epsilon=50.0, epsilon_high=50.0)
    wide = {"low": 1.0, "high": 1e9}

    gspo = grpo(
        inputs.logprobs,
        inputs.advantages,
        inputs.mask,
        sequence=True,
        **wide,
    )

    torch.testing.assert_close(gmpo_loss(inputs).loss, gspo)
    # By the inequality of the means, sequence by sequence.
    for k in range(6):
        one = batch(d[k : k + 1], A[k : k + 1], epsilon=50.0, epsilon_high=50.0)
        arithmetic = grpo(one.logprobs, one.advantages, one.mask, **wide)
        assert abs(gmpo_loss(one).loss) <= abs(arithmetic)


def test_correction_ratios_become_one_weight_per_sequence():
    """Ratios of tokens by their geometric mean; those of sequences stay as they are."""
    ratio = torch.tensor([[2.0, 8.0, 5.0], [0.0, 3.0, 1.0]])
    weight, alive = correction_weight(ratio, torch.tensor([[1, 1, 0], [1, 1, 0]]))
    torch.testing.assert_close(weight, torch.tensor([exp((log(2) + log(8)) / 2), 3.0]))

    assert alive.tolist() == [[True, True, True], [False, True, True]]
    weight, alive = correction_weight(torch.tensor([[0.0], [2.5]]), torch.ones(2, 3))
    assert weight.tolist() == [0.0, 2.5]
    assert alive.all()


@pytest.mark.parametrize("penalty", [False, True], ids=["clip_cov", "kl_cov"])
def test_covariance_losses_treat_the_tokens_of_the_paper(penalty):
    """A float64 oracle, token by token."""
    d = [[0.1, 1.2, -0.3], [0.4, -0.2, 5.0]]
    A = [3.0, -1.0]
    mask = [[1, 1, 1], [1, 1, 0]]
    old = torch.tensor([[-0.5, -6.0, -4.0], [-5.0, -0.1, 0.0]], dtype=torch.float64)

    inputs = batch(
        d,
        A,
        mask,
        epsilon=1.0,
        epsilon_high=1.0,
        num_tokens=5.0,
    )

    logprobs = (inputs.logprobs.detach() + old).requires_grad_()
    share = 0.3 if penalty else 0.4  # one or two tokens of five
    inputs = replace(
        inputs,
        logprobs=logprobs,
        old_logprobs=old,
        cov_share=share,
    )

    tokens = [(b, t) for b in range(2) for t in range(3) if mask[b][t]]
    mean_A = sum(A[b] for b, _ in tokens) / 5
    mean_p = sum(logprobs[one].item() for one in tokens) / 5
    cov = {(b, t): (A[b] - mean_A) * (logprobs[b, t].item() - mean_p) for b, t in tokens}

    clips = {(b, t) for b, t in tokens if not penalty and d[b][t] > log(2) and A[b] > 0}
    if penalty:  # the largest covariance
        treated = {max(cov, key=cov.__getitem__)}
    else:  # all covariances within (1, 5) of tokens that are not clipped
        treated = {one for one in tokens if 1 < cov[one] < 5 and one not in clips}
        assert len(treated) == 2

    loss = torch.zeros((), dtype=torch.float64)
    for b, t in tokens:
        change = logprobs[b, t] - old[b, t]
        value = A[b] * (change.exp().clamp(max=2.0) if (b, t) in clips else change.exp())
        if (b, t) in treated:
            value = value - change.abs() if penalty else 0.0

        loss = loss - value / 5

    out = cov_loss(inputs, penalty=penalty)
    assert out.loss.item() == pytest.approx(loss.item())

    slopes = [torch.autograd.grad(one, logprobs)[0] for one in (out.loss, loss)]
    torch.testing.assert_close(*slopes)
    assert out.metrics["cov/treated"] == pytest.approx(len(treated) / 5)
    assert out.metrics["clip_ratio/high_mean"] == pytest.approx(len(clips) / 5)

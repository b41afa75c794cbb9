"""Clip-Cov and KL-Cov against a float64 oracle, token by token."""

from math import log

import pytest
import torch

from support.losses import gradient, loss_of, make_inputs

D = [[0.1, 1.2, -0.3], [0.4, -0.2, 5.0]]
OLD = [[-0.5, -6.0, -4.0], [-5.0, -0.1, 0.0]]
A = [3.0, -1.0]
MASK = [[1, 1, 1], [1, 1, 0]]
TOKENS = [(b, t) for b in range(2) for t in range(3) if MASK[b][t]]


def make(name, share):
    return make_inputs(
        D,
        A,
        MASK,
        old=OLD,
        objective=name,
        num_tokens=5.0,
        epsilon=1.0,
        epsilon_high=1.0,
        cov_share=share,
    )


def covariances() -> dict[tuple[int, int], float]:
    logprobs = {(b, t): D[b][t] + OLD[b][t] for b, t in TOKENS}
    mean_A = sum(A[b] for b, _ in TOKENS) / 5
    mean_p = sum(logprobs.values()) / 5

    return {(b, t): (A[b] - mean_A) * (logprobs[b, t] - mean_p) for b, t in TOKENS}


def assert_is(inputs, loss, num_treated):
    result = loss_of(inputs)
    assert result.mean.value.item() == pytest.approx(loss.item())
    assert result.metrics["cov/treated"] == pytest.approx(num_treated / 5)

    expected = torch.autograd.grad(loss, inputs.logprobs)[0]
    torch.testing.assert_close(gradient(inputs), expected)


def test_clip_cov_leaves_out_tokens_within_the_range():
    inputs = make("clip_cov", 0.4)  # two of five
    d = inputs.logprobs - inputs.old_logprobs
    is_clipped = {(b, t) for b, t in TOKENS if D[b][t] > log(2) and A[b] > 0}

    left_out = set()
    for token, cov in covariances().items():
        if 1 < cov < 5 and token not in is_clipped:
            left_out.add(token)

    assert len(left_out) == 2
    loss = torch.zeros((), dtype=torch.float64)
    for b, t in set(TOKENS) - left_out:
        loss = loss - A[b] * d[b, t].exp().clamp(max=2.0 if A[b] > 0 else torch.inf) / 5

    assert_is(inputs, loss, 2)
    share = loss_of(inputs).metrics["clip_ratio/high_mean"]
    assert share == pytest.approx(len(is_clipped) / 5)


def test_kl_cov_penalizes_the_token_with_the_largest_covariance():
    inputs = make("kl_cov", 0.3)  # one of five
    d = inputs.logprobs - inputs.old_logprobs
    cov = covariances()
    largest = max(cov, key=cov.__getitem__)

    loss = d[largest].abs() / 5
    for b, t in TOKENS:
        loss = loss - A[b] * d[b, t].exp() / 5

    assert_is(inputs, loss, 1)

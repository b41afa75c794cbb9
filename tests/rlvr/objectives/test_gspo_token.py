"""GSPO-token against equation 14 of its paper, and its identity with GSPO."""

from math import exp

import pytest
import torch

from support.losses import gradient, loss_of, make_inputs, value_of

D = [[0.3, -0.1, 0.2, 7.0], [0.05, 0.2, -0.4, -0.1], [-0.3, -0.2, 0.1, 0.0]]
A = [1.5, -0.5, -1.0]
MASK = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]


def make(name, **more):
    level = "sequence" if name == "gspo" else "token"
    widths = {"epsilon": 0.2, "epsilon_high": 0.1}
    return make_inputs(D, A, MASK, objective=name, level=level, **(widths | more))


def test_value_and_gradient_are_those_of_gspo():
    token = make("gspo_token")
    sequence = make("gspo")

    assert value_of(token) == pytest.approx(value_of(sequence))
    torch.testing.assert_close(gradient(token), gradient(sequence))
    # Sequences are clipped as a whole; a mean over tokens counts the longer ones more.
    for name in ("clip_ratio/low_min", "clip_ratio/high_max"):
        assert loss_of(token).metrics[name] == loss_of(sequence).metrics[name]
    assert loss_of(token).metrics["clip_ratio/low_mean"] == pytest.approx(2 / 9)


def test_two_sequences_by_hand():
    """sg[s] times A over the tokens; the first is clipped, since exp(0.4 / 3) is above 1.1."""
    second = exp((0.05 + 0.2 - 0.4 - 0.1) / 4)
    third = exp((-0.3 - 0.2) / 2)
    assert third < 0.8  # clipped

    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected[1] = 0.5 * second / (3 * 4)
    torch.testing.assert_close(gradient(make("gspo_token")), expected)


def test_a_weight_of_a_token_acts_on_its_gradient_alone():
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    weighted = make("gspo_token", terms={"sampler_ratio": weight})
    torch.testing.assert_close(gradient(weighted), gradient(make("gspo_token")) * weight)

    # GSPO's one ratio spreads it over the sequence.
    sequence = gradient(make("gspo", terms={"sampler_ratio": weight}))
    assert sequence[1, 1] != 0

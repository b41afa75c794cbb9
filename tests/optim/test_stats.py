"""stats(): every number against its definition, computed here from weights and gradients."""

import pytest
import torch
from optim.test_step import param
from torch import nn

from mesotron.optim import AdamW, Muon, Pion
from mesotron.optim.matrix import apply_filter
from mesotron.spectral import high_pass, muon, pion


def changes(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    before = [p.detach().clone() for p in params]
    optimizer.step()
    return [p.detach() - b for p, b in zip(params, before, strict=True)]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Muon, "muon"),
        (lambda p, **o: Pion(p, cutoff=0.5, **o), "pion"),
        (AdamW, "adamw"),
        (lambda p, **o: Muon([{"params": p, "rule": "sgd"}], **o), "sgd"),
    ],
)
def test_update_rms_is_the_change_really_made(make, name):
    # Auxiliary rules measure a sample; these fit into it whole.
    params = [param(8, 24), param(24, 8, seed=1), param(6, 6, seed=2)]
    optimizer = make(params, lr=0.1, weight_decay=0.0)
    assert optimizer.stats() == {"skipped": 0.0}

    for seed in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        made = torch.cat([change.flatten().double() for change in changes(params, optimizer)])

    rms = made.square().mean().sqrt().item()
    assert optimizer.stats()[f"{name}/update_rms"] == pytest.approx(rms, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "filter"), [({"promote": 2}, pion(2)), ({"cutoff": 0.5}, high_pass(0.5))]
)
def test_concentration_and_passed_rank_are_means_over_blocks(options, filter):
    params = [param(6, 10, seed=k) for k in range(3)]
    optimizer = Pion(params, **options)
    optimizer.step()
    X = torch.stack([p.grad for p in params])
    energy = torch.linalg.svdvals(X).square()
    concentration = (energy.square().sum(1) / energy.sum(1).square()).mean().item()
    passed = torch.linalg.svdvals(apply_filter(X, filter).X).square().sum(1).mean().item()
    stats = optimizer.stats()

    assert stats["pion/concentration"] == pytest.approx(concentration, rel=1e-4)
    assert stats["pion/passed_rank"] == pytest.approx(passed, rel=1e-3, abs=1e-6)


def test_dead_blocks_are_those_whose_filtered_norm_vanishes():
    strong = param(16, 16)
    spread = param(16, 16)
    strong.grad = torch.outer(torch.randn(16), torch.randn(16))
    spread.grad = torch.eye(16)  # each direction holds 1/16 of the energy: far below 0.8165
    optimizer = Pion([strong, spread], promote=0, weight_decay=0.0)
    made = changes([strong, spread], optimizer)
    stats = optimizer.stats()

    assert (stats["pion/dead_blocks"], stats["pion/blocks"]) == (0.5, 2)
    assert made[0].norm() > 1e-4
    assert made[1].norm() < 1e-12


def test_blocks_without_gradient_or_rate_are_not_dead():
    p = param(4, 6, 10)
    p.grad[1:] = 0
    optimizer = Muon(
        [
            {
                "params": [p],
                "rule": "muon",
                "view": "stack",
            }
        ],
        lr=0.0,
    )

    optimizer.step()
    stats = optimizer.stats()
    assert (stats["muon/blocks"], stats["muon/dead_blocks"], stats["muon/update_rms"]) == (4, 0, 0)

    one = apply_filter(p.grad[:1].clone(), muon())
    assert stats["muon/passed_rank"] == pytest.approx(one.passed.item(), rel=1e-4)


def test_cosine_is_the_mean_over_parameters_of_step_against_gradient():
    params = [param(6, 10), param(10, 6, seed=1), param(6, 10, seed=2)]
    for p, scale in zip(params, (1.0, 1e10, 1e-20), strict=True):
        p.grad *= scale

    optimizer = Muon(
        params,
        weight_decay=0.0,
        lr=1.0,
        nesterov=False,
    )
    for factor, sign in ((1.0, 1), (-0.5, -1)):  # the second gradients turn around
        for p in params:
            p.grad *= factor

        made = changes(params, optimizer)
        cosines = [
            nn.functional.cosine_similarity(
                -change.flatten(), (p.grad / p.grad.abs().max()).flatten(), dim=0
            ).item()
            for p, change in zip(params, made, strict=True)
        ]

        found = optimizer.stats()["muon/cosine"]
        assert found == pytest.approx(sum(cosines) / 3, abs=1e-3)
        assert sign * found > 0.5

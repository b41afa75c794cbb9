"""Spectra before and after the filter against an SVD of the optimizer's step."""

import pytest
import torch
from optim.test_contracts import set_gradients
from torch import nn

from mesotron.optim import adamw, muon, pion
from mesotron.optim.spectra import MAX_VALUES, choose_blocks, measure_spectrum


def step(optimizer: torch.optim.Optimizer, model: nn.Module, seed: int = 0) -> None:
    set_gradients(model, seed=seed)
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (muon, {"nesterov": False}),
        (pion, {"cutoff": "noise"}),
        (muon, {"filter": "low_rank", "rank": 3}),
    ],
)
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_the_spectrum_is_that_of_the_step(make, options, shape):
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False), nn.Linear(shape[0], 4))
    scale = {
        "lr": 20**-0.5,
        "scale": 1.0,
        "weight_decay": 0.0,
    }  # a direction's step is then 1

    optimizer = make(model, **scale, **options, dtype="float32")
    step(optimizer, model, 1)
    before = model[0].weight.detach().clone()
    step(optimizer, model, 2)
    (block,) = choose_blocks(optimizer, 1)
    found = measure_spectrum(optimizer, block)

    assert found is not None
    moved = torch.linalg.svdvals(before - model[0].weight.detach())
    assert found["shape"] == [12, 20]
    assert sorted(found["after"], reverse=True) == pytest.approx(moved.tolist(), abs=2e-3)
    assert found["before"][0] == 1.0


def test_a_head_is_a_block_and_a_large_one_is_thinned():
    model = nn.Sequential(nn.Linear(240, 400, bias=False), nn.Linear(400, 4))
    optimizer = muon(model, overrides={"0.weight": {"view": "rows:2"}})
    step(optimizer, model)
    (block,) = choose_blocks(optimizer, 3)
    found = measure_spectrum(optimizer, block)

    assert found is not None
    assert found["shape"] == [200, 240]  # one of two heads
    assert len(found["rank"]) == len(found["before"]) == len(found["after"]) == MAX_VALUES
    assert (found["rank"][0], found["rank"][-1]) == (1, 200)


def test_no_spectrum_without_a_spectral_rule_or_a_gradient():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    assert choose_blocks(adamw(model)) == []

    optimizer = muon(model)
    (block,) = choose_blocks(optimizer)
    assert measure_spectrum(optimizer, block) is None

    step(optimizer, model)
    block.param.grad = torch.full_like(block.param, float("nan"))
    assert measure_spectrum(optimizer, block) is None


def test_blocks_are_spread_over_the_model_and_measuring_changes_nothing():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    optimizer = muon(model)
    assert [row.name for row in optimizer.table] == [name for name, _ in model.named_parameters()]

    step(optimizer, model)
    chosen = choose_blocks(optimizer)
    assert [block.name for block in chosen] == ["0.weight", "2.weight", "5.weight", "8.weight"]

    def everything() -> list[torch.Tensor]:
        states = []
        for state in optimizer.state.values():
            for value in state.values():
                states.append(value)

        return [x.detach().clone() for x in (*model.parameters(), *states, torch.get_rng_state())]

    before = everything()
    for block in chosen:
        measure_spectrum(optimizer, block)

    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))

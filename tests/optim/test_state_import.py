"""State imported from other Muons: the next step is the one they would have made."""

import copy

import pytest
import torch
from optim.test_contracts import set_gradients
from torch import nn

from mesotron.optim import Muon, import_state

peer = pytest.importorskip("muon")  # Keller Jordan's package


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 12))


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim == 2]


def vectors(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim < 2]


# torch.optim.Muon and KellerJordan's filter in bfloat16, which torch says is slow on this CPU.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def torch_muon(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(matrices(module), lr=0.1, adjust_lr_fn="match_rms_adamw")


def keller_jordans(module: nn.Module) -> torch.optim.Optimizer:
    return peer.SingleDeviceMuonWithAuxAdam(
        [
            {
                "params": matrices(module),
                "use_muon": True,
                "lr": 0.1,
                "weight_decay": 0.0,
            },
            {
                "params": vectors(module),
                "use_muon": False,
                "lr": 0.1,
                "betas": (0.9, 0.95),
            },
        ]
    )


OURS = {
    "scale": "spectral",
    "weight_decay": 0.0,
    "betas": (0.9, 0.95),
    "eps": 1e-10,
}


@pytest.mark.parametrize(
    ("make", "options", "imported"),
    [(torch_muon, {"weight_decay": 0.1}, 2), (keller_jordans, OURS, 4)],
)
def test_another_muon_goes_on_as_ours(make, options, imported):
    theirs = model()
    source = make(theirs)
    for seed in range(3):
        set_gradients(theirs, seed=seed)
        source.step()

    ours = copy.deepcopy(theirs)
    start = copy.deepcopy(theirs)
    order = [*matrices(ours), *vectors(ours)][:imported]
    optimizer = Muon(order, lr=0.1, **options)

    assert import_state(optimizer, source.state_dict(), params=order) == imported
    for module, stepper in ((theirs, source), (ours, optimizer)):
        set_gradients(module, seed=9)
        stepper.step()

    named = [dict(module.named_parameters()) for module in (ours, theirs, start)]
    for name, p in named[0].items():
        if p.ndim == 2:  # bfloat16 agrees to two digits
            step = p - named[2][name]
            wanted = named[1][name] - named[2][name]
            assert (step - wanted).norm() < 0.15 * wanted.norm()
        else:
            torch.testing.assert_close(p, named[1][name], rtol=1e-5, atol=1e-6)


def test_the_live_optimizer_is_a_source_too_and_nothing_is_shared():
    module = model()
    source = torch.optim.Muon(matrices(module))
    set_gradients(module, seed=0)
    source.step()
    optimizer = Muon(module.parameters())

    assert import_state(optimizer, source) == 2
    p = matrices(module)[0]
    kept = source.state[p]["momentum_buffer"].clone()

    assert torch.equal(optimizer.state[p]["momentum_buffer"], kept)
    optimizer.step()
    assert torch.equal(source.state[p]["momentum_buffer"], kept)


def test_a_sum_becomes_a_mean_in_the_dtype_that_it_is_kept_in_here():
    p = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    buffer = torch.ones(4, 4, dtype=torch.bfloat16)

    source = {"state": {0: {"momentum": buffer}}, "param_groups": [{"params": [0]}]}
    for kept, dtype in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        optimizer = Muon([p], momentum=0.9, momentum_dtype=kept)
        import_state(optimizer, source, params=[p], form="sum")
        mean = torch.full((4, 4), 0.1, dtype=dtype)
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], mean)


@pytest.mark.parametrize(
    ("state", "options", "word"),
    [
        ({"exp_avg": torch.zeros(4, 4)}, {}, "momentum_buffer"),
        ({"momentum_buffer": torch.zeros(3, 4)}, {}, r"\(3, 4\)"),
        ({"momentum_buffer": torch.zeros(4, 4)}, {"form": "ema"}, "form='ema'"),
        ({"momentum_buffer": torch.zeros(4, 4)}, {"params": None}, "params="),
        ({"momentum_buffer": torch.zeros(4, 4)}, {"params": []}, "params="),
    ],
)
def test_bad_sources_are_rejected(state, options, word):
    p = nn.Parameter(torch.zeros(4, 4))
    source = {"state": {0: state}, "param_groups": [{"params": [0]}]}
    with pytest.raises(ValueError, match=word):
        import_state(Muon([p]), source, **{"params": [p], **options})

    with pytest.raises(ValueError, match="model"):
        import_state(Muon([p]), torch.optim.Muon([nn.Parameter(torch.zeros(4, 4))]))

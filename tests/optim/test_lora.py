"""LoRA as a product against a float64 oracle: closed form, unit, gauge, zero B, second order."""

import copy
from collections import OrderedDict

import peft
import pytest
import torch
from torch import Tensor, nn

import mesotron
from mesotron.optim import Muon
from mesotron.optim.clipping import clip_gradients
from mesotron.spectral.scale import step_scale
from support.watch_streams import diagnosis_of

LORA_SCALE = 2.0
EXACT = {
    "filter": "polar_express",
    "steps": 12,
    "dtype": "float64",
}  # the polar factor
LR = 0.01
M = 24
N = 36
E = LR * step_scale("rms", M, N)


def lora_pair(rank: int) -> tuple[nn.Parameter, nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    A, B, G = (
        torch.randn(*x, generator=generator).double() for x in ((rank, N), (M, rank), (M, N))
    )

    return nn.Parameter(A / N**0.5), nn.Parameter(B * 0.01), G


def polar(X: Tensor) -> Tensor:
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    return (U * (sigma > 1e-9 * sigma[0].clamp_min(1e-30))) @ Vh


def optimizer_of(A: Tensor, B: Tensor, **options) -> Muon:
    group = {
        "params": [A, B],
        "rule": options.pop("rule", "muon"),
        "pairs": [LORA_SCALE],
    }

    group |= {"view": options.pop("view", None)}
    options = {"lora_unit": "direction", **options}
    options = {
        "momentum": 0.0,
        "nesterov": False,
        "weight_decay": 0.0,
        **EXACT,
        **options,
    }

    return Muon([group], lr=LR, **options)


def step(A: Tensor, B: Tensor, optimizer: Muon, G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Changes of A, B and s B A for a gradient G of the loss in W."""
    A.grad = LORA_SCALE * B.detach().mT @ G
    B.grad = LORA_SCALE * G @ A.detach().mT
    before = A.detach().clone(), B.detach().clone()
    optimizer.step()
    dA = A.detach() - before[0]
    dB = B.detach() - before[1]

    return dA, dB, LORA_SCALE * (B.detach() @ A.detach() - before[1] @ before[0])


def norm(X: Tensor) -> float:
    return torch.linalg.matrix_norm(X, 2).item()


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_the_change_of_the_product_is_the_closed_form(rank):
    A, B, G = lora_pair(rank)
    B.data *= 1e3  # far above the damping, which the closed form lacks
    A0 = A.detach().clone()
    B0 = B.detach().clone()
    dA, dB, _ = step(A, B, optimizer_of(A, B), G)
    onto_rows = torch.linalg.pinv(A0) @ A0
    onto_columns = B0 @ torch.linalg.pinv(B0)
    S = polar(G @ onto_rows) + polar(onto_columns @ G)
    change = LORA_SCALE * (dB @ A0 + B0 @ dA)
    torch.testing.assert_close(change / norm(change), -S / norm(S), atol=1e-5, rtol=1e-5)

    assert norm(change) == pytest.approx(E, rel=0.05)  # the power iteration errs by about 1%


def test_the_first_step_from_zero_b_moves_b_alone_by_the_whole_budget():
    A, B, G = lora_pair(4)
    B.data.zero_()
    optimizer = optimizer_of(A, B)
    dA, _, change = step(A, B, optimizer, G)

    assert not dA.any()
    assert torch.linalg.svdvals(change)[:4].tolist() == pytest.approx([E] * 4, rel=1e-6)

    # Four directions of M moved, each as Muon's: the statistics are those of the product.
    rms = (change.square().mean() ** 0.5).item()
    assert optimizer.stats()["muon/update_rms"] == pytest.approx(rms, rel=1e-6)
    assert optimizer.stats()["muon/passed_rank"] == pytest.approx(4, rel=1e-6)


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_in_the_rms_unit_every_rank_moves_the_product_by_the_same_rms(rank):
    A, B, G = lora_pair(rank)
    B.data.zero_()
    _, _, change = step(A, B, optimizer_of(A, B, lora_unit="rms"), G)

    assert change.square().mean().sqrt().item() == pytest.approx(0.2 * LR, rel=1e-6)
    for _ in range(5):  # B has grown, and A moves too
        *_, change = step(A, B, optimizer_of(A, B, lora_unit="rms"), G)

    assert change.square().mean().sqrt().item() == pytest.approx(0.2 * LR, rel=0.5)
    with pytest.raises(ValueError, match="lora_unit"):
        optimizer_of(A, B, lora_unit="spectral")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "rule": "pion",
            "promote": 2,
            "filter": "pion",
            "steps": None,
        },
        {"view": "rows:4"},
        {"view": "cols:3"},
        {"view": "rows:12+6+6"},
    ],
    ids=["muon", "pion", "rows", "cols", "sections"],
)
def test_the_gauge_changes_nothing(options):
    """With momentum and decay, over 20 steps from B = 0."""
    A, B, _ = lora_pair(4)
    B.data.zero_()
    R = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).double()
    other_A = nn.Parameter(torch.linalg.solve(R, A.detach()))
    other_B = nn.Parameter(B.detach() @ R)

    setup = {
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.1,
        **options,
    }

    first = optimizer_of(A, B, **setup)
    second = optimizer_of(other_A, other_B, **setup)

    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        G = torch.randn(M, N, generator=generator).double()
        step(A, B, first, G)
        step(other_A, other_B, second, G)

    product = (B @ A).detach()
    assert product.norm() > 0

    torch.testing.assert_close((other_B @ other_A).detach(), product, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("growth", "cause"), [(1, None), (30, "update_explosion")])
def test_the_watch_alarms_for_a_larger_gradient_but_not_for_a_longer_a(growth, cause):
    A, B, G = lora_pair(2)
    B.data.zero_()
    optimizer = optimizer_of(A, B, momentum=0.95)
    length = A.norm().item()
    generator = torch.Generator().manual_seed(0)

    rows = []
    for k in range(100):
        optimizer.param_groups[0]["lr"] = LR * min(k / 10, 1)
        noisy = G + 0.3 * torch.randn(M, N, generator=generator).double()
        noisy *= growth if k >= 80 else 1
        A.grad = LORA_SCALE * B.detach().mT @ noisy
        B.grad = LORA_SCALE * noisy @ A.detach().mT
        total = clip_gradients(optimizer, 1.0).total.item()

        rows.append(
            {
                "step": k,
                "reward": 0.5,
                "grad_norm": total,
            }
        )

        optimizer.step()

    assert A.norm().item() > 10 * length
    assert diagnosis_of(rows).cause == cause


def test_heads_are_filtered_apart():
    A, B, G = lora_pair(4)
    B.data.zero_()

    _, _, change = step(A, B, optimizer_of(A, B, view="rows:4"), G)
    for block in change.unflatten(0, (4, -1)):  # max(6, 36) inputs: the same budget
        assert norm(block) == pytest.approx(E, rel=1e-6)


def test_the_second_order_term_stays_below_half_a_step():
    A, B, _ = lora_pair(4)
    B.data.zero_()
    optimizer = optimizer_of(A, B, momentum=0.9)

    generator = torch.Generator().manual_seed(2)
    for k in range(12):
        if k == 2:
            optimizer.param_groups[0]["lr"] = 10 * LR  # a jump right after the start

        e = optimizer.param_groups[0]["lr"] * step_scale("rms", M, N)
        G = torch.randn(M, N, generator=generator).double()
        dA, dB, change = step(A, B, optimizer, G)

        assert LORA_SCALE * norm(dB @ dA) <= 0.5 * e
        assert norm(change) <= 1.5 * e


def test_decay_shrinks_the_product_and_a_zero_gradient_moves_nothing_else():
    A, B, G = lora_pair(4)
    before = (B @ A).detach()
    step(A, B, optimizer_of(A, B, weight_decay=2.0), 0 * G)
    torch.testing.assert_close((B @ A).detach(), before * (1 - LR * 2.0))


def test_a_non_finite_gradient_skips_the_pair():
    A, B, G = lora_pair(4)
    optimizer = optimizer_of(A, B)
    before = A.detach().clone(), B.detach().clone()
    A.grad = torch.full_like(A, float("nan"))
    B.grad = G @ A.detach().mT
    optimizer.step()

    assert torch.equal(A, before[0])
    assert torch.equal(B, before[1])
    assert optimizer.stats()["muon/skipped"] == 1
    assert not optimizer.state[B]


def adapted(dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    torch.manual_seed(0)
    layers = {
        "embed": nn.Embedding(7, 12),
        "up": nn.Linear(12, 20),
        "relu": nn.ReLU(),
    }

    layers |= {"down": nn.Linear(20, 12), "head": nn.Linear(12, 7)}
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["up", "down"],
        **options,
    )

    return peft.get_peft_model(nn.Sequential(OrderedDict(layers)), config).to(dtype)


@pytest.mark.parametrize(
    ("options", "scale", "dtype"),
    [
        ({}, 2.0, torch.float32),
        ({"use_rslora": True}, 4.0, torch.bfloat16),
        ({"use_dora": True}, 2.0, torch.float32),
        ({"lora_bias": True}, 2.0, torch.float32),
    ],
    ids=["lora", "rslora", "dora", "bias"],
)
def test_peft_adapters_train_and_resume(options, scale, dtype):
    model = adapted(dtype, **options)
    optimizer = mesotron.muon(model, 0.02, lora="product")
    group = next(g for g in optimizer.param_groups if g["pairs"])

    assert group["pairs"] == [scale, scale]
    names = [name.rsplit(".", 3)[1] for name in group["param_names"]]
    assert names == ["lora_A", "lora_B"] * 2

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        ids = torch.arange(7)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids).float(), ids)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        return losses

    start = train(model, optimizer)[0]
    twin = copy.deepcopy(model)
    other = mesotron.muon(twin, 0.02, lora="product")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    losses = train(model, optimizer)

    assert losses == train(twin, other)
    assert losses[-1] < start


def test_half_a_pair_is_refused():
    model = adapted()
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and "lora_A" not in name)

    with pytest.raises(ValueError, match="lora_B"):
        mesotron.muon(model, lora="product")

    A, B, _ = lora_pair(4)
    for params, pairs, match in (([A, B], [1.0, 2.0], "pairs"), ([B, A], [1.0], "LoRA pair")):
        with pytest.raises(ValueError, match=match):
            Muon(
                [
                    {
                        "params": params,
                        "rule": "muon",
                        "pairs": pairs,
                    }
                ]
            )


@pytest.mark.parametrize("lr", [0.005, 0.5])
def test_the_leash_caps_the_product(lr):
    model = adapted()
    rho = 0.05
    optimizer = mesotron.muon(model, lr, lora="product", leash=rho)
    group = next(g for g in optimizer.param_groups if g["pairs"])
    generator = torch.Generator().manual_seed(0)

    grads = [torch.randn(p.shape, generator=generator) for p in group["params"]]
    for _ in range(40):
        for p, grad in zip(group["params"], grads, strict=True):
            p.grad = grad
        optimizer.step()

    (far,) = (v for key, v in optimizer.stats().items() if key.endswith("/distance"))
    A, B = group["params"][:2]
    start = torch.linalg.matrix_norm(model.base_model.model.up.base_layer.weight, 2).item()

    assert 0.2 * rho < norm((2.0 * B @ A).detach()) / start <= far <= 1.3 * rho
    with pytest.raises(ValueError, match="product"):
        mesotron.muon(model, leash=rho)


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("loaded", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_product_goes_on_in_another_dtype(saved, loaded):
    def make(dtype) -> tuple[list[nn.Parameter], Muon]:
        generator = torch.Generator().manual_seed(0)
        shapes = ((2, 6), (5, 2))
        params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
        group = {"params": params, "rule": "muon", "pairs": [2.0], "start_norms": [1.0]}
        return params, Muon([group], lr=0.02, leash=0.3)

    def step(params, optimizer, seed) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)

        optimizer.step()

    params, optimizer = make(saved)
    step(params, optimizer, 1)
    others, resumed = make(loaded)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)

    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(params, optimizer, 2)
    step(others, resumed, 2)

    coarsest = max(torch.finfo(dtype).eps for dtype in (saved, loaded))
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(q.double(), p.double(), rtol=0, atol=1e-5 + 2 * coarsest)
        (momentum,) = resumed.state[q].values()
        assert momentum.dtype == torch.promote_types(loaded, torch.float32)

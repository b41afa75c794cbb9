"""The 25 correctness traps that other Muons fell into, one test each.

Not here: 7 every coefficient set is tested at sigma = 1 and on rank-one, orthogonal and diagonal
inputs in test_matrix, the rest below; 8 concerns optax; 11 and 13 are questions of routing:
test_routing (what a view cuts: test_views); 21 sharded views: test_sharded, flat shards below; 25
kernel limits: test_kernels.
"""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from mesotron.optim import matrix
from mesotron.optim import step as spectral_step
from mesotron.optim.device import filter_dtype, round_stochastically
from mesotron.optim.groups import sort_parameters
from mesotron.optim.optimizers import Muon, Pion
from mesotron.optim.step import group_filter, work_dtype
from mesotron.spectral import cubic, make_filter, muon, pion, polar_express, response
from mesotron.spectral.scale import step_scale


def param(*shape: int, dtype=torch.float32, seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))
    p.grad = torch.randn(*shape, generator=generator).to(dtype)
    return p


def moved(p: nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The change of p in one step."""
    before = p.detach().clone()
    optimizer.step()
    return p.detach() - before


# torch says once that this CPU multiplies bfloat16 slowly.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_trap_01_normalising_does_not_reach_into_the_momentum(kept, nesterov):
    p = param(6, 10, dtype=torch.bfloat16)
    p.grad *= 1e-3
    optimizer = Muon([p], nesterov=nesterov, dtype=kept, momentum_dtype=kept)
    optimizer.step()
    buffer = optimizer.state[p]["momentum_buffer"]
    torch.testing.assert_close(buffer.float(), 0.05 * p.grad.float(), rtol=0.02, atol=1e-8)


@pytest.mark.parametrize("nesterov", [True, False])
def test_trap_02_the_gradient_is_not_work_space(nesterov):
    p = param(6, 10)
    before = p.grad.clone()
    optimizer = Muon([p], nesterov=nesterov, momentum=0.0)
    optimizer.step()
    assert torch.equal(p.grad, before)
    assert optimizer.state[p]["momentum_buffer"].data_ptr() != p.grad.data_ptr()


@pytest.mark.parametrize("scale", [1e-12, 1e-20, 1e-30])
def test_trap_03_tiny_gradients_make_a_full_step(scale):
    p, q = param(6, 10), param(6, 10)
    q.grad *= scale
    torch.testing.assert_close(moved(q, Muon([q])), moved(p, Muon([p])), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("scale", [1e10, 1e20, 1e30, 1e37])
def test_trap_04_huge_gradients_make_a_full_step(scale):
    p, q = param(6, 10), param(6, 10)
    q.grad *= scale
    torch.testing.assert_close(moved(q, Muon([q])), moved(p, Muon([p])), rtol=1e-3, atol=1e-6)


def test_trap_05_an_expert_without_tokens_gets_no_step_and_harms_no_other():
    p, q = param(4, 6, 10), param(4, 6, 10)
    p.grad[2] = 0
    groups = [{"params": [p, q], "rule": "muon", "view": "stack", "weight_decay": 0.0}]
    before, other = p.detach().clone(), q.detach().clone()
    optimizer = Muon(groups)
    optimizer.step()
    change, full = p.detach() - before, q.detach() - other
    assert not change[2].any()
    assert full[2].any()
    keep = [0, 1, 3]
    torch.testing.assert_close(change[keep], full[keep], rtol=0, atol=1e-6)


def test_trap_06_a_bad_gradient_neither_poisons_nor_hides():
    p, q = param(6, 10), param(6, 10, seed=1)
    optimizer = Muon([p, q])
    optimizer.step()
    before, state = p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()
    p.grad[0, 0] = float("nan")
    other = q.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)
    assert torch.equal(optimizer.state[p]["momentum_buffer"], state)
    assert not torch.equal(q, other)
    assert optimizer.stats()["muon/skipped"] == 1
    assert not torch.isfinite(p.grad).all(), "the loss scaler must still see it"
    p.grad = torch.ones_like(p)
    assert moved(p, optimizer).isfinite().all()


def test_trap_06_one_bad_expert_skips_its_whole_parameter():
    p = param(4, 6, 10)
    p.grad[1, 0, 0] = float("inf")
    optimizer = Muon([{"params": [p], "rule": "muon", "view": "stack"}])
    assert not moved(p, optimizer).any()
    assert optimizer.stats()["skipped"] == 1


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 8, 12])
def test_trap_07_every_length_of_every_schedule_keeps_the_sign(steps):
    # A short list that is cycled can send sigma = 1, that is a rank-one gradient, backward.
    filters = [muon(steps), cubic(steps), polar_express(steps)]
    for filter in (*filters, *(pion(k, steps) for k in range(steps + 1))):
        assert len(filter.steps) == steps
        assert response(filter, 1.0) > 0.2  # two steps of Polar Express have come no further
        assert (response(filter, np.linspace(0, 1, 501)) >= 0).all()


@pytest.mark.parametrize("scale", ["rms", "moonlight", "spectral", 2.0])
def test_trap_09_a_transposed_storage_makes_the_transposed_step(scale):
    p, q = param(6, 10), param(6, 10)
    stored = nn.Parameter(q.detach().t().contiguous())
    stored.grad = q.grad.t().contiguous()
    step = moved(p, Muon([p], scale=scale))
    group = {"params": [stored], "rule": "muon", "view": "T"}
    torch.testing.assert_close(moved(stored, Muon([group], scale=scale)).t(), step)


def test_trap_09_spectral_scale_reads_outputs_over_inputs():
    assert step_scale("spectral", 40, 10) == 2.0
    assert step_scale("spectral", 10, 40) == 1.0
    tall, wide = param(40, 10), param(10, 40)
    for p, norm in ((tall, 2.0), (wide, 1.0)):
        step = moved(p, Muon([p], lr=0.1, scale="spectral", filter="cubic", weight_decay=0.0))
        assert torch.linalg.matrix_norm(step, 2).item() == pytest.approx(0.1 * norm, rel=0.01)


def test_trap_10_a_convolution_is_scaled_by_its_flattened_shape():
    p = param(64, 4, 3, 3)
    optimizer = Muon([p], lr=0.1, filter="cubic", weight_decay=0.0)
    step = moved(p, optimizer)
    assert step.square().mean().sqrt().item() == pytest.approx(
        0.2 * 0.1 * (36 / 36) ** 0.5, rel=0.01
    )
    assert optimizer.stats()["muon/update_rms"] == pytest.approx(0.02, rel=0.01)


def test_trap_12_stacked_experts_are_separate_matrices():
    stack = param(3, 6, 10)
    alone = [nn.Parameter(stack.detach()[k].clone()) for k in range(3)]
    for k, p in enumerate(alone):
        p.grad = stack.grad[k].clone()
    Muon([{"params": [stack], "rule": "muon", "view": "stack"}]).step()
    Muon(alone).step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in alone]))


def test_trap_12_a_stack_is_never_guessed():
    with pytest.raises(ValueError, match="view='stack'"):
        Muon([param(3, 6, 10)])


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32)])
def test_trap_14_the_rate_means_the_same_for_every_shape(shape):
    p = param(*shape)
    step = moved(p, Muon([p], lr=1e-2, filter="polar_express", weight_decay=0.0))
    # AdamW's usual step has an element RMS of 0.2 lr.
    assert step.square().mean().sqrt().item() == pytest.approx(0.2 * 1e-2, rel=0.05)


def test_trap_15_a_mean_and_a_sum_of_gradients_give_the_same_steps():
    p = param(6, 10)
    optimizer = Muon([p], momentum=0.9, weight_decay=0.0, lr=0.1)
    total = torch.zeros(6, 10)
    for seed in range(5):
        p.grad = torch.randn(6, 10, generator=torch.Generator().manual_seed(seed))
        total = 0.9 * total + p.grad
        look = p.grad + 0.9 * total
        step = moved(p, optimizer)
        expected = matrix.apply_filter(look[None].clone(), muon()).X[0] * -0.1 * 0.2 * 10**0.5
        torch.testing.assert_close(step, expected, rtol=1e-3, atol=1e-5)


def test_trap_16_bfloat16_gradients_meet_a_float32_buffer():
    p = param(6, 10, dtype=torch.bfloat16)
    optimizer = Muon([p])
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize("kept", ["bfloat16", "float32"])
def test_trap_16_the_momentum_dtype_is_a_choice_with_small_drift(kept):
    p = nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([p], lr=0.0, momentum_dtype=kept)
    exact = torch.zeros(8, 8, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        p.grad = torch.randn(8, 8, generator=generator)
        exact = 0.95 * exact + 0.05 * p.grad.double()
        optimizer.step()
    buffer = optimizer.state[p]["momentum_buffer"]
    assert buffer.dtype == getattr(torch, kept)
    drift = ((buffer.double() - exact).norm() / exact.norm()).item()
    assert drift < (0.02 if kept == "bfloat16" else 1e-5)


def test_trap_17_small_steps_arrive_in_bfloat16_weights():
    torch.manual_seed(0)
    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = Muon([p], lr=1e-3, weight_decay=0.0, filter="cubic")
    gradient = torch.linalg.qr(torch.randn(64, 64)).Q
    for _ in range(50):  # each step is 2e-4 at an element, far below bfloat16's 1/128 at 1
        p.grad = gradient.bfloat16()
        optimizer.step()
    change = p.detach().float() - 1
    expected = -50 * 1e-3 * 0.2 * 8 * gradient
    cosine = torch.nn.functional.cosine_similarity(change.flatten(), expected.flatten(), dim=0)
    assert cosine > 0.8, "rounded to nearest nothing would have moved"
    slope = (change * expected).sum() / expected.square().sum()
    assert slope.item() == pytest.approx(1, abs=0.1)


def test_trap_17_random_rounding_keeps_the_mean_and_what_is_exact():
    torch.manual_seed(0)
    values = torch.full((100_000,), 1 + 0.3 / 128)
    out = torch.empty_like(values, dtype=torch.bfloat16)
    round_stochastically(values, out, seed=0)
    assert set(out.tolist()) == {1.0, 1 + 1 / 128}
    assert out.double().mean().item() == pytest.approx(1 + 0.3 / 128, abs=5e-5)
    exact = torch.tensor([0.0, -2.5, float("inf"), -float("inf"), float("nan")])
    same = torch.empty(5, dtype=torch.bfloat16)
    round_stochastically(exact, same, seed=0)
    torch.testing.assert_close(same.float(), exact, equal_nan=True)


def test_trap_18_clipping_before_the_step_does_not_shrink_it():
    p, q = param(6, 10), param(6, 10)
    torch.nn.utils.clip_grad_norm_([q], 1e-6)
    torch.testing.assert_close(moved(q, Muon([q])), moved(p, Muon([p])), rtol=1e-3, atol=1e-6)


def test_trap_19_gradients_are_filtered_once_a_step(monkeypatch):
    calls = []
    plain = matrix.apply_filter
    monkeypatch.setattr(
        "mesotron.optim.step.apply_filter",
        lambda X, filter: calls.append(len(X)) or plain(X, filter),
    )
    layer = nn.Linear(10, 6, bias=False)
    optimizer = Muon(layer.parameters())
    for _ in range(4):
        layer(torch.randn(3, 10)).square().sum().backward()
    assert calls == []
    optimizer.step()
    assert calls == [1]


def test_trap_20_a_parameter_without_gradient_is_not_decayed():
    p, q = param(6, 10), param(6, 10)
    q.grad = None
    before = q.detach().clone()
    optimizer = Muon([p, q], lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(q, before)
    assert q.grad is None
    assert q not in optimizer.state or not optimizer.state[q]


@pytest.mark.parametrize("mark", [{"_fsdp_flattened": True}, {"ds_id": 3}])
@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_trap_21_flat_shards_are_refused(rule, mark):
    p = nn.Parameter(torch.zeros(60))
    for key, value in mark.items():
        setattr(p, key, value)
    with pytest.raises(ValueError, match="fully_shard"):
        Muon([{"params": [p], "rule": rule}])


def test_trap_22_one_checkpoint_holds_every_state_and_setting():
    p, bias = param(6, 10), param(6)
    optimizer = Pion([p, bias], lr=1e-3, cutoff=0.3)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = Pion([param(6, 10), param(6)], lr=0.5, promote=1)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for group, saved in zip(resumed.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in saved.items() if k != "params"
        }
    kinds = [set(resumed.state[q]) for group in resumed.param_groups for q in group["params"]]
    assert kinds == [{"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}]


def test_trap_22_a_checkpoint_older_than_an_option_still_loads():
    p = param(6, 10)
    optimizer = Muon([p])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["batched"]
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.param_groups[0]["batched"] is True


def test_trap_22_a_checkpoint_of_another_rule_is_refused():
    p = param(6, 10)
    plain, adam = Muon([p]), torch.optim.AdamW([p])
    adam.step()
    plain.step()
    with pytest.raises(ValueError, match="import_state"):
        Pion([p]).load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="another optimizer"):
        plain.load_state_dict(adam.state_dict())


def test_trap_23_one_scheduler_moves_every_group_and_a_tensor_rate():
    p, bias = param(6, 10), param(6)
    optimizer = Muon([p, bias], lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    first = optimizer.stats()
    scheduler.step()
    assert [group["lr"].item() for group in optimizer.param_groups] == [pytest.approx(0.05)] * 2
    optimizer.step()
    assert optimizer.stats()["muon/update_rms"] == pytest.approx(first["muon/update_rms"] / 2)


def test_trap_23_tensor_and_float_rates_share_a_batch():
    p, q = param(6, 10), param(6, 10)
    groups = [{"params": [p], "lr": torch.tensor(0.1)}, {"params": [q], "lr": 0.1}]
    optimizer = Muon(groups)
    optimizer.step()
    torch.testing.assert_close(p.detach(), q.detach())
    assert len(optimizer.stats()) > 8


def test_trap_23_one_cycle_moves_adams_first_beta_and_not_the_momentum_of_matrices():
    # torch cycles `betas` where an optimizer has them; Muon's momentum must be cycled by hand.
    p, bias = param(6, 10), param(6)
    optimizer = Muon([p, bias], momentum=0.95)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    assert {group["betas"][0] for group in optimizer.param_groups} == {0.95}  # of 0.9
    assert {group["momentum"] for group in optimizer.param_groups} == {0.95}


@pytest.mark.parametrize("batched", [True, False])
def test_trap_24_batching_keeps_a_tolerance_and_can_be_turned_off(batched):
    torch.manual_seed(0)
    alone, first = param(24, 40), param(24, 40)
    others = [param(24, 40, seed=k) for k in range(1, 9)]
    step = moved(alone, Muon([alone], batched=batched))
    together = moved(first, Muon([first, *others], batched=batched))
    if batched:
        torch.testing.assert_close(together, step, rtol=0, atol=1e-5)
    else:
        assert torch.equal(together, step)


def test_trap_cpu_the_filter_does_not_run_in_emulated_bfloat16():
    found = filter_dtype(torch.device("cpu"))
    assert found in (torch.float32, torch.bfloat16)
    p = param(6, 10)
    optimizer = Muon([p])
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32


# Refusals: the value and the way out.


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Muon([]), "empty list"),
        (lambda: Muon(["weight"]), "str 'weight'"),
        (lambda: Muon([param(4, 4)], lr=-1.0), "lr=-1.0"),
        (lambda: Muon([param(4, 4)], lr=float("nan")), "lr=nan"),
        (lambda: Muon([param(4, 4)], lr=torch.tensor([0.1])), "without dimensions"),
        (lambda: Muon([param(4, 4)], momentum=1.0), "momentum=1.0"),
        (lambda: Muon([param(4, 4)], momentum=torch.tensor([0.9])), "without dimensions"),
        (lambda: Muon([param(4, 4)], weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda: Muon([param(4, 4)], betas=(0.9, 1.0)), "betas"),
        (lambda: Muon([param(4, 4)], scale="rsm"), "rsm"),
        (lambda: Muon([param(4, 4)], scale=-2.0), "scale=-2.0"),
        (lambda: Muon([param(4, 4)], filter="muno"), "muno"),
        (lambda: Muon([param(4, 4)], dtype="float16"), "float16"),
        (lambda: Muon([param(4, 4)], aux="adam"), "aux='adam'"),
        (lambda: Muon([{"params": [param(4, 4)], "rule": "sdg"}]), "sdg"),
        (lambda: Muon([{"params": [param(4)], "rule": "muon"}]), "rule='adamw'"),
        (lambda: Pion([{"params": [param(4, 4)], "filter": "cubic"}]), "rule='muon'"),
        (lambda: Muon([param(4, 4)], rank=2), "low_rank"),
        (lambda: Muon([{"params": [param(4, 4)], "view": "rows:3"}]), "rows:3"),
        (lambda: Pion([param(4, 4)], promote=2, cutoff=0.3), "cutoff=0.3"),
        (lambda: Pion([param(4, 4)], promote=9), "promote=9"),
        (lambda: Pion([param(4, 4)], cutoff="edge"), "edge"),
    ],
)
def test_refusals_name_the_value(make, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        make()


def test_a_refused_group_is_not_kept():
    optimizer = Muon([param(4, 4)])
    with pytest.raises(ValueError, match="view='stack'"):
        optimizer.add_param_group({"params": [param(3, 4, 4)]})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = Muon(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def test_a_muon_group_inside_pion_has_muons_filter():
    p, q = param(6, 10), param(6, 10)
    optimizer = Pion([{"params": [p], "rule": "muon"}, {"params": [q]}], cutoff=0.3)
    assert [group["filter"] for group in optimizer.param_groups] == ["muon", "pion"]
    reference = param(6, 10)
    torch.testing.assert_close(moved(p, optimizer), moved(reference, Muon([reference])))
    assert not torch.equal(p, q)


def test_a_group_of_the_other_rule_leaves_the_constructors_filter_alone():
    pion = {"params": [param(6, 6)], "rule": "pion", "promote": 1}
    inside_muon = Muon([pion], filter="low_rank", rank=2).param_groups[0]
    assert group_filter(inside_muon) == make_filter("pion", promote=1)
    muon = {"params": [param(6, 6)], "rule": "muon"}
    inside_pion = Pion([muon], cutoff="noise", steps=2).param_groups[0]
    assert group_filter(inside_pion) == make_filter("muon")


def seeds_of(optimizer, steps: int, monkeypatch) -> list[int]:
    """Every seed that the optimizer rounds with."""
    seeds = []
    original = spectral_step.round_stochastically

    def recording(values, out, seed):
        seeds.append(seed)
        original(values, out, seed)

    with monkeypatch.context() as patch:
        patch.setattr(spectral_step, "round_stochastically", recording)
        for _ in range(steps):
            optimizer.step()
    return seeds


def test_random_bits_differ_by_step_parameter_and_window_and_not_by_run(monkeypatch):
    def make():
        fused = [param(8, 6, dtype=torch.bfloat16, seed=k) for k in range(2)]
        whole = [param(4, 6, dtype=torch.bfloat16, seed=k) for k in range(3)]
        groups = [{"params": fused, "view": "rows:5+3"}, {"params": whole}]
        return Muon(groups, dtype="float32"), whole

    optimizer, _ = make()
    seeds = seeds_of(optimizer, 4, monkeypatch)
    assert len(set(seeds)) == len(seeds) == 4 * (2 * 2 + 3)
    assert max(seeds) < 2**32, "a CPU generator reads no more"
    assert seeds_of(make()[0], 4, monkeypatch) == seeds

    other, whole = make()
    whole[0].grad = None  # a parameter's bits do not depend on which others step
    assert set(seeds_of(other, 4, monkeypatch)) < set(seeds)


def test_parameters_of_one_group_on_two_devices_are_stepped_apart():
    here, there = param(5), nn.Parameter(torch.empty(5, device="meta"))
    matrix_there = nn.Parameter(torch.empty(4, 4, device="meta"))
    for p in (there, matrix_there):
        p.grad = torch.empty_like(p)
    found = sort_parameters(Muon([here, there, param(4, 4), matrix_there]).param_groups)
    assert [[x.param.device.type for x in places] for places in found.auxiliary.values()] == [
        ["cpu"],
        ["meta"],
    ]
    assert [device.type for device in found.spectral] == ["cpu", "meta"]
    numbers = [x.number for d in (found.auxiliary, found.spectral) for v in d.values() for x in v]
    assert sorted(numbers) == [0, 1, 2, 3]


def test_an_exact_svd_gets_float32_where_products_get_bfloat16(monkeypatch):
    monkeypatch.setattr(spectral_step, "filter_dtype", lambda device: torch.bfloat16)
    for name, expected in (("low_rank", torch.float32), ("muon", torch.bfloat16)):
        (group,) = Muon([param(4, 4)], filter=name).param_groups
        assert work_dtype(group, torch.bfloat16, torch.device("cpu")) == expected


def test_how_long_a_large_gradient_outweighs_those_after_it():
    """docs/optimizers.md and `clip_gradients` say 23 steps: ten times as large, mu = 0.95."""
    gradients = torch.eye(40)  # they have nothing in common
    momentum = torch.zeros(40)
    for step, gradient in enumerate(gradients):
        size = 10.0 if step == 0 else 1.0
        spectral_step.update_momentum(size * gradient, momentum, 0.95, None)
        if momentum[1:].norm() > momentum[0]:
            break
    assert step == 24

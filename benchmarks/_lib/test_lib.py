"""The shared tools measure what they claim: shapes, floors, memory, oracles, peers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks._lib import accuracy
from benchmarks._lib.peers import LR, PEERS, Workbench
from benchmarks._lib.shapes import SHAPES, Projection
from benchmarks._lib.timing import (
    bare_products,
    interleave,
    peak_extra_bytes,
    replaced_collectors,
    state_bytes,
    statistics_share,
)
from mesotron.optim import apply_filter, step_scale
from mesotron.spectral import high_pass, muon, pion

CPU = torch.device("cpu")
# Parameters of the hidden matrices by the models' public configs, in millions.
MILLIONS = {
    "gpt_30m": 25.2,
    "gpt2_124m": 84.9,
    "smollm2_135m": 106.2,
}
MILLIONS |= {
    "qwen2_5_0_5b": 357.8,
    "qwen3_1_7b": 1409.3,
    "llama3_8b": 6979.3,
}


@pytest.mark.parametrize("model", MILLIONS)
def test_shapes_add_up_to_the_model(model):
    shape = SHAPES[model]
    total = sum(p.rows * p.cols for p in shape.matrices())
    assert total / 1e6 == pytest.approx(MILLIONS[model], abs=0.05)
    assert shape.layers_within(1.0) == 1

    for p in shape.layer:
        length = p.cols if p.axis == "cols" else p.rows
        assert p.heads == 0 or length % p.heads == 0


def test_floor_is_the_products_of_the_plain_iteration():
    shapes = [Projection(24, 8), Projection(8, 24), Projection(16, 16)]
    step = bare_products(shapes, torch.float32, CPU)
    with FlopCounterMode(display=False) as counted:
        step()

    assert counted.get_total_flops() == sum(p.plain_flops for p in shapes)


def test_repeats_are_interleaved_after_warm_up():
    calls = []
    steps = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = interleave(steps, 2, CPU, lambda text: None)

    assert calls == ["a", "b"] * 3
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}


def test_state_bytes_and_auxiliary_optimizer():
    bench = Workbench([Projection(24, 16)], None, CPU)
    for name, expected in (("adamw_fused", 8), ("muon", 4)):
        built = bench.build(PEERS[name])
        built.step()
        per_parameter = state_bytes(*built.optimizers) / bench.num_parameters

        assert per_parameter == pytest.approx(expected, abs=0.05)  # AdamW has a step counter

    bench = Workbench([Projection(24, 16)], (40, 16), CPU)
    before = bench.embedding.detach().clone()
    built = bench.build(PEERS["muon_sgd"])
    built.step()

    assert isinstance(built.optimizers[1], torch.optim.SGD)
    assert not torch.equal(before, bench.embedding)


def test_peak_memory_is_held_at_one_time():
    def step():
        for _ in range(3):
            torch.empty(1000, 256).add_(1).mul(2.0)  # two tensors of 1.024 MB at a time

    assert peak_extra_bytes(step, CPU) == pytest.approx(2 * 1.024e6, rel=0.01)


@pytest.mark.parametrize("filter", [muon(), pion(promote=2), high_pass("noise")], ids=str)
@pytest.mark.parametrize("kind", accuracy.KINDS)
def test_exact_update_matches_the_filter_in_float64(filter, kind):
    G = accuracy.make_gradient(kind, 24, 40)
    exact = accuracy.exact_update(G, filter)
    filtered = apply_filter(G.clone()[None], filter).X[0]
    plain = accuracy.plain_update(G, filter, torch.float64)

    assert accuracy.relative_error(filtered, exact, 1.0) < 1e-6
    assert accuracy.relative_error(plain, exact, 1.0) < 1e-10
    assert accuracy.relative_error(3 * exact, exact, None) < 1e-12
    assert accuracy.relative_error(torch.flip(G, [0]), exact, None) > 0.1


def test_our_steps_are_as_exact_as_claimed():
    rows = accuracy.measure(["muon", "polar_express", "pion", "pion_noise"], CPU)
    assert len(rows) == 4 * len(accuracy.CPU_SHAPES)

    for row in rows:
        assert row["plain_error"] < 1e-5
        assert row["error"] < 1e-2, row  # below the plain bfloat16 iteration's


@pytest.mark.parametrize("name", [n for n in PEERS if not PEERS[n].per_head])
def test_every_peer_steps_downhill(name):
    if PEERS[name].missing(CPU):
        pytest.skip(str(PEERS[name].missing(CPU)))
    G = accuracy.make_gradient("spiked", 16, 24)
    assert float((accuracy.peer_update(PEERS[name], G) * G).sum()) > 0


def test_collectors_are_replaced_and_restored():
    bench = Workbench([Projection(24, 16)], None, CPU)
    built = bench.build(PEERS["muon"])

    optimizer = built.optimizers[0]
    with replaced_collectors(lambda method: lambda *values: None):
        built.step()
        assert "whole/update_rms" not in optimizer.stats()

    built.step()
    assert 0 < optimizer.stats()["whole/update_rms"] < 2 * LR * step_scale("rms", 24, 16)
    assert 0 < statistics_share(built.step, bench.shapes, 3, CPU) < 1

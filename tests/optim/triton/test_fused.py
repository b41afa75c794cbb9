"""The fused step against the plain one: compiled on a GPU, in Triton's interpreter elsewhere."""

import copy
import os

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU or TRITON_INTERPRET=1", allow_module_level=True)

from mesotron.optim import Muon, Pion  # noqa: E402
from mesotron.optim import triton as kernels  # noqa: E402
from mesotron.optim.kernels import KernelSteps  # noqa: E402
from mesotron.optim.triton import elementwise  # noqa: E402

pytestmark = [
    # Triton's interpreter makes scalars of arrays of one element.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    # PyTorch warns once that this CPU multiplies bfloat16 without mkldnn.
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning"),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
STEPS = 2 if INTERPRETED else 5  # the interpreter takes seconds for a step


@pytest.fixture(autouse=True)
def _kernels_on_any_device(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(kernels, "available", lambda device: True)


def make_groups():
    generator = torch.Generator().manual_seed(0)

    def p(*shape):
        return torch.nn.Parameter(torch.randn(*shape, generator=generator).to(DEVICE))

    return [
        {
            "params": [p(48, 80), p(80, 48), p(144, 160)],
            "rule": "muon",
            "name": "whole",
        },
        {
            "params": [p(64, 48)],
            "rule": "muon",
            "view": "rows:4",
            "name": "rows",
        },
        {
            "params": [p(48, 64)],
            "rule": "muon",
            "view": "cols:4",
            "name": "cols",
        },
        {
            "params": [p(40, 48)],
            "rule": "muon",
            "view": "rows:16+16+8",
            "name": "fused",
        },
        {
            "params": [p(3, 32, 48)],
            "rule": "muon",
            "view": "stack",
            "name": "stack",
        },
        {
            "params": [p(24, 48)],
            "rule": "muon",
            "view": "rows:4%2",
            "name": "interleaved",
        },
        {
            "params": [p(16, 4, 3, 3)],
            "rule": "muon",
            "view": "conv",
            "name": "conv",
        },
        {"params": [p(48)], "rule": "adamw", "name": "vectors"},
    ]


def run(fused, cls=Muon, steps=STEPS, poison=None, work=None, groups=None, **options):
    groups = groups or make_groups()
    optimizer = cls(
        groups,
        lr=0.02,
        weight_decay=0.1,
        fused=fused,
        dtype=work,
        **options,
    )

    generator = torch.Generator().manual_seed(1)
    params = [p for g in optimizer.param_groups for p in g["params"]]
    for step in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE)

        if poison is not None and step == 1:
            params[poison].grad.view(-1)[3] = float("nan")

        optimizer.step()

    return params, optimizer


INTERLEAVED = 7
VECTORS = 9  # places among the parameters of `make_groups`


def distance(ours, theirs, start):
    moved = (theirs.double() - start.double()).norm()
    return ((ours.double() - theirs.double()).norm() / moved).item()


# The interpreter takes half a minute for each of these; a GPU a moment.
slow_here = [pytest.mark.slow] if INTERPRETED else []
SETTINGS = [
    (Muon, {}),
    (Pion, {"cutoff": 0.3}),
    pytest.param(Muon, {"nesterov": False}, marks=slow_here),
    pytest.param(Muon, {"filter": "polar_express"}, marks=slow_here),
    pytest.param(Muon, {"momentum_dtype": "bfloat16"}, marks=slow_here),
    pytest.param(Pion, {"promote": 2}, marks=slow_here),
    pytest.param(Pion, {"promote": 4}, marks=slow_here),
    pytest.param(Pion, {"cutoff": "noise"}, marks=slow_here),
]


@pytest.mark.parametrize(("cls", "options"), SETTINGS)
def test_fused_is_closer_to_float64_than_plain_bfloat16(cls, options):
    starts = []
    for g in make_groups():
        for p in g["params"]:
            starts.append(p.detach().clone())

    exact, plain = run(False, cls, work="float64", **options)
    rough, _ = run(False, cls, work="bfloat16", **options)

    fused, optimizer = run(None, cls, **options)
    for number, (a, b, c, start) in enumerate(
        zip(
            fused,
            exact,
            rough,
            starts,
            strict=True,
        )
    ):
        if number == INTERLEAVED:  # takes the plain step, in whatever dtype it chooses
            continue
        assert distance(a, b, start) <= max(0.5 * distance(c, b, start), 1e-3)

    (plan,) = optimizer._kernels.plans.values()
    assert plan._taken.count(True) == 8  # all but the interleaved view, not plain matrices

    expected = plain.stats()
    found = optimizer.stats()
    assert expected.keys() == found.keys()
    assert found["whole/blocks"] == 3
    assert found["rows/blocks"] == 4

    for key, value in expected.items():
        loose = 0.15 if key.endswith("cosine") else 0.02  # the cosine is sampled
        # The plain step filters in bfloat16 on a GPU.
        share = 0.05 if key.startswith("interleaved") else 0.02
        assert found[key] == pytest.approx(value, abs=loose, rel=share), key


def test_a_noise_cutoff_on_small_blocks_is_closer_to_float64_than_plain_bfloat16():
    # 64 rows are one tile on the diagonal: an unsymmetric part in it grows from step to step.
    generator = torch.Generator().manual_seed(0)
    U = torch.randn(64, 4, generator=generator)
    V = torch.randn(4, 448, generator=generator)
    grad = (torch.randn(64, 448, generator=generator) + 0.5 * U @ V).to(DEVICE)

    ends = []
    for options in ({"dtype": "float64"}, {"dtype": "bfloat16"}, {}):
        p = torch.nn.Parameter(torch.zeros(64, 448, device=DEVICE))
        p.grad = grad.clone()
        Pion([p], lr=0.02, cutoff="noise", **options).step()
        ends.append(p.detach())

    exact, rough, fused = ends
    start = torch.zeros_like(exact)
    assert distance(fused, exact, start) < distance(rough, exact, start)


def test_a_nan_in_one_head_skips_its_parameter_and_no_other():
    def train(**given):
        groups = [group | {"params": group["params"][:1]} for group in make_groups()[:2]]
        return run(None, groups=groups, **given)

    clean, _ = train(steps=1)
    poisoned, optimizer = train(steps=2, poison=1)
    other, _ = train(steps=2)

    assert torch.equal(poisoned[1], clean[1])
    assert torch.equal(poisoned[0], other[0])
    assert optimizer.stats()["rows/skipped"] == 1


def test_bfloat16_weights_are_rounded_without_a_bias():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.ones(64, 64, device=DEVICE, dtype=torch.bfloat16))
    optimizer = Muon([{"params": [p], "rule": "muon"}], lr=4e-4, weight_decay=0.0)
    p.grad = torch.eye(64, device=DEVICE, dtype=torch.bfloat16)

    for _ in range(15):
        optimizer.step()

    # Rounding to nearest would not move at all.
    moved = 1 - p.detach().float().diagonal().mean().item()
    rate = optimizer.stats()["muon/passed_rank"] ** 0.5 / 8
    assert moved == pytest.approx(15 * 4e-4 * 1.6 * rate, rel=0.5)


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
def test_a_captured_graph_follows_the_learning_rate():
    starts = [p.detach().clone() for g in make_groups() for p in g["params"]]

    def train(captured):
        lr = torch.tensor(0.02, device=DEVICE)
        optimizer = Muon(make_groups()[:7], lr=lr)

        params = [p for g in optimizer.param_groups for p in g["params"]]
        for p, seed in zip(params, range(99), strict=False):
            generator = torch.Generator().manual_seed(seed)
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                optimizer.step()

        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()

        for value in (0.02, 0.005):
            lr.fill_(value)
            graph.replay() if captured else optimizer.step()

        torch.cuda.synchronize()
        return [p.detach().clone() for p in params], optimizer.stats()

    expected, stats = train(False)
    found, captured_stats = train(True)
    for a, b, start in zip(found, expected, starts, strict=False):
        assert distance(a, b, start) < 1e-3

    assert captured_stats["whole/update_rms"] == pytest.approx(stats["whole/update_rms"], rel=1e-3)


def step_once(view="whole", transposed=False, **options):
    """One step of one matrix, and whether the kernels took it."""
    p = torch.nn.Parameter(torch.zeros(48, 80, device=DEVICE))
    gradient = torch.randn(48, 80, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    p.grad = gradient.T.contiguous().T if transposed else gradient

    optimizer = Muon(
        [
            {
                "params": [p],
                "rule": "muon",
                "view": view,
            }
        ],
        lr=0.02,
        **options,
    )

    optimizer.step()
    (plan,) = optimizer._kernels.plans.values()

    return p.detach(), sum(plan._taken) == 1


@pytest.mark.parametrize(
    "options",
    [{"filter": "low_rank"}, {"momentum_dtype": "float64"}, {"transposed": True}],
    ids=str,
)
def test_unsupported_settings_take_the_plain_step(options):
    found, taken = step_once(**options)
    expected, _ = step_once(fused=False, **options)
    assert not taken
    assert torch.equal(found, expected)
    assert found.abs().max() > 0


def test_gradients_may_move_and_groups_be_replaced_between_steps():
    p = torch.nn.Parameter(torch.zeros(48, 80, device=DEVICE))
    optimizer = Muon([{"params": [p], "rule": "muon"}], lr=0.02)

    bucket = torch.randn(48 * 80 + 4, device=DEVICE)
    for offset, lr in ((0, 0.02), (1, 0.02), (1, 0.0)):
        # As views into a communication bucket do once it is rebuilt.
        p.grad = bucket[offset : offset + 48 * 80].view(48, 80)
        if lr == 0:
            optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": lr}

        before = p.detach().clone()
        optimizer.step()
        assert torch.equal(p, before) == (lr == 0)


def test_more_blocks_than_a_launch_takes_are_split(monkeypatch):
    expected, _ = step_once(view="rows:3")
    monkeypatch.setattr(elementwise, "LARGEST_GRID", 2)
    found, taken = step_once(view="rows:3")

    assert taken
    assert distance(found, expected, torch.zeros_like(found)) < 1e-3


def replay(change=lambda step, optimizer, params: None, captures=True, steps=8, dtype=None):
    """Train with gradients that move; the final parameters and the last plan's graph."""
    groups = make_groups()
    del groups[5]  # takes the plain step, which no graph holds

    if dtype is not None:
        for group in groups:
            group["params"] = [torch.nn.Parameter(p.detach().to(dtype)) for p in group["params"]]

    optimizer = Muon(groups, lr=0.02, weight_decay=0.1)
    params = [p for g in optimizer.param_groups for p in g["params"]]
    generator = torch.Generator().manual_seed(1)

    kept = []
    for step in range(steps):
        for p in params:
            grad = torch.randn(p.shape, generator=generator)
            p.grad = grad.to(DEVICE, p.dtype)
            kept.append(p.grad)  # so that the next ones are elsewhere

        change(step, optimizer, params)
        if not captures:
            optimizer._kernels = KernelSteps()  # a new plan never replays

        optimizer.step()

    (plan,) = optimizer._kernels.plans.values()
    return [p.detach().clone() for p in params], plan._graph, optimizer.stats()


def schedule(step, optimizer, params):
    for group in optimizer.param_groups:
        group["lr"] = 0.02 / (1 + step)


def poison(step, optimizer, params):
    if step == 5:
        params[0].grad.view(-1)[0] = float("nan")
        params[-1].grad[0] = float("inf")


def reload(step, optimizer, params):
    if step == 4:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def drop(step, optimizer, params):
    if step in (4, 5):
        params[1].grad = None


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("change", [schedule, poison, reload, drop])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replayed_step_is_bit_equal_to_launched_ones(change, dtype):
    found, graph, stats = replay(change, dtype=dtype)
    expected, none, launched = replay(change, captures=False, dtype=dtype)
    assert none is None
    assert graph is not None or change is drop  # which waits longer for the next capture
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert stats == launched


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
def test_a_new_set_of_gradients_is_captured_after_a_longer_wait():
    _, graph, _ = replay(drop, steps=24)
    assert graph is not None

"""One table of optimizers times one list of contracts: a new optimizer gets its tests by adding a
row to `OPTIMIZERS`."""

import copy
import io
import logging
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mesotron.config.rules import SPECTRAL_RULES
from mesotron.optim import AdamW, Muon, MuonSGD, NorMuon, Pion, RoutedOptimizer, muon


def _with(cls: type[RoutedOptimizer], **fixed) -> Callable[..., RoutedOptimizer]:
    return lambda params, **options: cls(params, **{**fixed, **options})


OPTIMIZERS = {
    "muon": _with(Muon),
    "muon_plain_momentum": _with(Muon, nesterov=False),
    "polar_express": _with(Muon, filter="polar_express"),
    "low_rank": _with(Muon, filter="low_rank", rank=3),
    "muon_sgd": _with(MuonSGD),
    "normuon": _with(NorMuon),
    "leash": _with(Muon, leash=0.02),
    "normuon_leash": _with(NorMuon, leash=0.02),
    "pion_promote": _with(Pion, promote=2),
    "pion_cutoff": _with(Pion, cutoff=0.3),
    "pion_noise": _with(Pion, cutoff="noise"),
    "adamw": _with(AdamW),
}
# A rule without a row is tested by its own defaults; Pion's let at most one direction pass.
for _name in SPECTRAL_RULES:
    if _name not in (*OPTIMIZERS, "pion"):
        OPTIMIZERS[_name] = _with(SPECTRAL_RULES[_name].optimizer)

every = pytest.mark.parametrize("name", OPTIMIZERS)
spectral = pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "adamw"])


class Tiny(nn.Module):
    """A wide, a tall and a square matrix, two equal ones, a convolution, biases and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.wide = nn.Linear(24, 8)
        self.square = nn.Linear(8, 8)
        self.twin = nn.Linear(8, 8, bias=False)
        self.tall = nn.Linear(8, 20)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.conv(x).flatten(1))
        return self.tall(self.twin(self.square(x).tanh())) * self.gain


def build(name: str, seed: int = 0, dtype=torch.float32, **options):
    torch.manual_seed(seed)
    model = Tiny().to(dtype)
    return model, OPTIMIZERS[name](model.parameters(), **{"lr": 0.01, **options})


def data(seed: int, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 2, 4, 4, generator=generator)
    return x.to(dtype), torch.randn(16, 20, generator=generator).to(dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x, y = data(seed, next(model.parameters()).dtype)
    return (model(x) - y).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> float:
    loss = torch.zeros(())
    for seed in seeds:
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()

    return loss.item()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_close(found: list[Tensor], expected: list[Tensor], atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def set_gradients(model: nn.Module, scale: float = 1.0, seed: int = 7) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


@every
def test_it_learns(name):
    model, optimizer = build(name, lr=0.05)
    before = loss_of(model, 0).item()

    for _ in range(10):
        train(model, optimizer, range(1))

    assert loss_of(model, 0).item() < 0.9 * before


def state_dtypes(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, torch.dtype]:
    return {key: x.dtype for key, x in optimizer.state[p].items()}


def wanted_dtypes(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, torch.dtype]:
    """Moments are as wide as the weights and at least float32; a start is as the weights are."""
    wide = torch.promote_types(p.dtype, torch.float32)
    fixed = {"step": torch.float32, "start_norm": torch.float32, "start": p.dtype}
    return {key: fixed.get(key, wide) for key in optimizer.state[p]}


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_states_keep_their_dtype_and_load_onto_the_device_of_the_weights(name, dtype):
    model, optimizer = build(name, dtype=dtype)
    set_gradients(model)
    optimizer.step()

    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(p.isfinite().all() for p in model.parameters())

    with torch.device("meta"):  # a device that every machine has
        twin, resumed = build(name, dtype=dtype)

    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert state_dtypes(optimizer, p) == wanted_dtypes(optimizer, p)
        assert state_dtypes(resumed, q) == state_dtypes(optimizer, p)
        assert {x.device.type for x in resumed.state[q].values()} == {"meta"}


@every
def test_loading_no_state_makes_none(name):
    """Accelerate reloads an optimizer before FSDP2 replaces its parameters: entries of the old
    ones would be in no group, and could not be saved."""
    _, optimizer = build(name)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@every
@pytest.mark.parametrize("loaded", DTYPES, ids=str)
@pytest.mark.parametrize("saved", DTYPES, ids=str)
def test_a_run_goes_on_in_another_dtype(name, saved, loaded):
    """The state gets the dtype of a fresh run's, and its values; the next step is the same one."""
    model, optimizer = build(name, dtype=saved)
    set_gradients(model)
    optimizer.step()

    twin, resumed = build(name, dtype=loaded)
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        wanted = wanted_dtypes(resumed, q)
        if "start" in wanted:  # never rounded
            wanted["start"] = saved

        assert state_dtypes(resumed, q) == wanted
        for key, value in optimizer.state[p].items():
            torch.testing.assert_close(
                resumed.state[q][key], value, rtol=1e-6, atol=1e-30, check_dtype=False
            )

    for module, stepper in ((model, optimizer), (twin, resumed)):
        set_gradients(module, seed=8)
        stepper.step()

    coarsest = max(torch.finfo(dtype).eps for dtype in (saved, loaded))
    ends = [[w.double() for w in weights(module)] for module in (model, twin)]
    assert_close(ends[1], ends[0], atol=1e-4 + 3 * coarsest)
    assert resumed.stats()["skipped"] == 0


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # rounded by chance
def test_a_resumed_run_equals_an_uninterrupted_one(name, dtype):
    model, optimizer = build(name, dtype=dtype)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(3, 6))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, resumed = build(name, seed=1, dtype=dtype, lr=0.5)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])

    assert resumed.param_groups[0]["lr"] == 0.01
    train(again, resumed, range(3, 6))
    assert_equal(weights(again), weights(model))


@every
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_continue_identically_and_independently(name, copier):
    model, optimizer = build(name)
    train(model, optimizer, range(2))
    twin, other = copier((model, optimizer))

    fresh = other.stats()
    assert fresh.pop("skipped") == 0
    assert all(key.endswith("/distance") for key in fresh), "of no step, only of the weights"
    train(model, optimizer, range(2, 4))
    train(twin, other, range(2, 4))
    assert_equal(weights(twin), weights(model))

    assert other.stats() == optimizer.stats()
    train(model, optimizer, range(4, 5))
    assert not torch.equal(weights(twin)[0], weights(model)[0])


@every
def test_precision_accumulation_and_batching_change_only_rounding(name):
    def run(dtype=torch.float32, parts: int = 1, **options) -> list[Tensor]:
        model, optimizer = build(name, dtype=dtype, **options)
        for seed in range(3):
            optimizer.zero_grad()
            x, y = data(seed, dtype)
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                ((model(a) - b).square().mean() / parts).backward()

            optimizer.step()

        return [w.float() for w in weights(model)]

    plain = run()
    assert_close(run(batched=False), plain, atol=1e-4)

    # Adam divides a gradient near zero by itself, and a direction at a cutoff may tip either way.
    for other in (run(torch.float64), run(parts=8)):
        assert_close(other, plain, atol=2e-4)


@every
def test_a_schedule_and_a_tensor_rate_equal_setting_the_rate_by_hand(name):
    rate = torch.tensor(0.01)
    scheduled = build(name)
    by_hand = build(name)
    tensor = build(name, lr=rate)

    scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled[1], lambda k: 1 / (1 + k))
    for k in range(4):
        rate.fill_(0.01 / (1 + k))
        for group in by_hand[1].param_groups:
            group["lr"] = 0.01 / (1 + k)

        for pair in (scheduled, by_hand, tensor):
            train(*pair, range(k, k + 1))

        scheduler.step()

    assert_close(weights(scheduled[0]), weights(by_hand[0]), atol=1e-7)
    assert_close(weights(tensor[0]), weights(by_hand[0]), atol=1e-5)
    assert tensor[1].stats().keys() == by_hand[1].stats().keys()


@every
def test_a_closure_and_named_parameters_give_the_same_step(name):
    plain = build(name)
    model = build(name)[0]
    optimizer = OPTIMIZERS[name](model.named_parameters(), lr=0.01)
    names = sorted(n for group in optimizer.param_groups for n in group["param_names"])

    assert names == sorted(n for n, _ in model.named_parameters())
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()

        return loss.item()

    assert optimizer.step(closure) == train(*plain, range(1))
    assert calls == [True]

    assert_equal(weights(model), weights(plain[0]))


@every
@pytest.mark.parametrize("scale", [1e-38, 1e37])
def test_gradients_of_any_scale_are_read_only_and_matrices_ignore_the_scale(name, scale):
    ends = []
    for factor in (1.0, scale):
        model, optimizer = build(name)
        set_gradients(model, factor)
        before = [(p.grad.data_ptr(), p.grad.clone()) for p in model.parameters()]
        optimizer.step()

        for p, (place, gradient) in zip(model.parameters(), before, strict=True):
            assert p.grad.data_ptr() == place
            assert torch.equal(p.grad, gradient)

        assert all(value == value for value in optimizer.stats().values()), "no NaN in stats"
        ends.append([w for w in weights(model) if w.ndim >= 2])

    assert all(w.isfinite().all() for w in ends[1])
    if name != "adamw":
        assert_close(*ends, atol=1e-4)


@every
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_weight_decay_is_decoupled(name, decay):
    model, optimizer = build(name, lr=0.1, weight_decay=decay)
    before = weights(model)
    set_gradients(model, 0.0)
    optimizer.step()

    expected = []
    for w in before:
        is_leashed = "leash" in name and w.ndim >= 2  # to its start, where it still is
        expected.append(w if is_leashed else (1 - 0.1 * decay) * w)

    assert_close(weights(model), expected, atol=1e-7 * decay)

    assert all(value == value for value in optimizer.stats().values()), "no NaN in stats"


@every
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_non_finite_gradient_skips_only_its_parameter(name, bad, caplog):
    model, optimizer = build(name)
    clean, reference = build(name)
    train(model, optimizer, range(1))
    train(clean, reference, range(1))
    before = weights(model)
    state = copy.deepcopy(optimizer.state[model.square.weight])

    for m in (model, clean):
        set_gradients(m)

    model.square.weight.grad[2, 3] = bad
    model.square.bias.grad[1] = bad

    with caplog.at_level(logging.WARNING, "mesotron"):
        optimizer.step()

    reference.step()
    names = [key for key, _ in model.named_parameters()]
    for key, old, new, expected in zip(
        names,
        before,
        weights(model),
        weights(clean),
        strict=True,
    ):
        if key.startswith("square"):
            assert torch.equal(new, old)
        else:
            torch.testing.assert_close(new, expected, rtol=0, atol=1e-5)

    assert_equal(list(optimizer.state[model.square.weight].values()), list(state.values()))
    stats = optimizer.stats()
    assert stats["skipped"] == 2
    assert all(value == value for value in stats.values()), "no NaN in stats"

    skipped = [count for key, count in stats.items() if key.endswith("/skipped") and count]
    assert sum(skipped) == 2
    assert caplog.text.count("not finite") == len(skipped)

    set_gradients(model)  # and a clean gradient recovers
    optimizer.step()
    assert optimizer.stats()["skipped"] == 0
    assert model.square.weight.isfinite().all()
    assert not torch.equal(model.square.weight, before[names.index("square.weight")])


@every
def test_parameters_without_gradients_are_unchanged(name):
    model, optimizer = build(name, lr=0.1, weight_decay=0.5)
    before = copy.deepcopy(model)
    assert optimizer.step() is None

    assert_equal(weights(model), weights(before))
    set_gradients(model)
    model.square.zero_grad()
    optimizer.step()
    assert_equal(weights(model.square), weights(before.square))

    assert not optimizer.state[model.square.weight]
    assert not torch.equal(model.wide.weight, before.wide.weight)

    model.zero_grad()
    model.requires_grad_(False)

    with pytest.raises(ValueError, match="LoRA"):
        optimizer.step()


@every
def test_layout_does_not_matter(name):
    ends = []
    for odd in (False, True):
        model, optimizer = build(name)
        for seed in range(3):
            set_gradients(model, seed=seed)
            if odd and seed:  # the state has the first layout
                model.to(memory_format=torch.channels_last)
                grad = model.conv.weight.grad.contiguous(memory_format=torch.channels_last)
                model.conv.weight.grad = grad
                model.wide.weight.grad = model.wide.weight.grad.t().contiguous().t()
                model.tall.weight.data = torch.stack([model.tall.weight.data] * 2, 2)[:, :, 0]

            optimizer.step()

        ends.append(weights(model))

    assert_close(ends[1], ends[0], atol=1e-6)


@every
def test_a_group_may_be_added_later(name):
    model, optimizer = build(name)
    train(model, optimizer, range(1))
    late = nn.Linear(8, 8)
    optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.1})
    before = weights(late)
    set_gradients(model)
    set_gradients(late)
    optimizer.step()

    assert not torch.equal(late.weight, before[0])
    assert not torch.equal(late.bias, before[1])
    assert len({group["name"] for group in optimizer.param_groups}) == len(optimizer.param_groups)

    copy.deepcopy(optimizer).add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


@every
def test_mixed_dtypes_and_empty_tensors_in_one_group(name):
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    params = []
    for d in dtypes:
        for s in ((4, 6), (5,)):
            params.append(nn.Parameter(torch.randn(*s, dtype=d)))

    before = [p.detach().clone() for p in params]
    empty = [nn.Parameter(torch.zeros(shape)) for shape in ((0, 5), (0,))]
    optimizer = OPTIMIZERS[name]([*empty, *params], lr=0.1)

    for p in (*empty, *params):
        p.grad = torch.randn_like(p)

    optimizer.step()
    for p, old in zip(params, before, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, old)


@spectral
def test_unbatched_bits_do_not_depend_on_neighbors(name):
    ends = []
    for alone in (True, False):
        torch.manual_seed(0)
        model = Tiny()
        params = [model.square.weight] if alone else list(model.parameters())
        optimizer = OPTIMIZERS[name](params, batched=False)
        set_gradients(model)
        optimizer.step()
        ends.append(model.square.weight.detach().clone())

    assert torch.equal(*ends)


def test_a_compiled_step_equals_the_plain_one():
    ends = []
    for compiled in (False, True):
        model, optimizer = build("muon")

        if compiled:
            step = torch.compile(optimizer.step, backend="eager")
        else:
            step = optimizer.step

        for seed in range(3):  # it once failed at the second call
            set_gradients(model, seed=seed)
            step()

        ends.append(weights(model))

    assert_equal(*ends)


@pytest.mark.parametrize("name", ["muon", "muon_sgd"])
def test_a_counter_may_be_a_number_and_narrow_weights_take_a_float32_state(name):
    model, optimizer = build(name)
    train(model, optimizer, range(2))

    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = 2

    for dtype in (torch.float32, torch.bfloat16):
        other, resumed = build(name, dtype=dtype)
        resumed.load_state_dict(saved)
        set_gradients(other, scale=10.0)
        before = weights(other)
        resumed.step()

        assert not any(torch.equal(a, b) for a, b in zip(weights(other), before, strict=True))


@every
def test_a_step_on_meta_tensors_reads_no_values(name):
    with torch.device("meta"):
        model = Tiny()

    optimizer = OPTIMIZERS[name](model.parameters())
    for p in model.parameters():
        p.grad = torch.empty_like(p)

    optimizer.step()
    assert all(optimizer.state[p] for p in model.parameters())


@every
def test_a_step_inside_a_device_context_is_the_same_step(name):
    """A model may be trained where the next one is built, on another default device."""
    ends = []
    for inside in (False, True):
        model, optimizer = build(name)
        for seed in range(2):
            set_gradients(model, seed=seed)
            with torch.device("meta") if inside else torch.device("cpu"):
                optimizer.step()
                stats = optimizer.stats()

        ends.append((weights(model), stats))

    assert_equal(ends[1][0], ends[0][0])
    assert ends[1][1] == ends[0][1]


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_inside_autocast_is_the_same_step(name, dtype):
    """A loop may keep its whole body in one autocast context."""
    ends = []
    for enabled in (False, True):
        model, optimizer = build(name, dtype=dtype)
        for seed in range(2):
            set_gradients(model, seed=seed)
            with torch.autocast("cpu", torch.bfloat16, enabled):
                optimizer.step()
                stats = optimizer.stats()
                assert torch.is_autocast_enabled("cpu") == enabled

        ends.append((weights(model), stats))

    assert_equal(ends[1][0], ends[0][0])
    assert ends[1][1] == ends[0][1]


def test_a_closure_computes_in_the_autocast_of_its_caller():
    model, optimizer = build("muon")
    dtypes = []

    def closure() -> float:
        set_gradients(model)
        dtypes.append(model.wide(torch.ones(1, 24)).dtype)
        return 0.0

    with torch.autocast("cpu", torch.bfloat16):
        optimizer.step(closure)

    assert dtypes == [torch.bfloat16]


def test_a_group_and_a_builder_take_the_auxiliary_rule():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    groups = [{"params": [params[0]], "aux": "sgd"}, {"params": [params[1]]}]
    assert [g["rule"] for g in Muon(groups).param_groups] == ["sgd", "adamw"]
    rules = [(g["rule"], g["lr"]) for g in muon(nn.Linear(4, 4), aux="sgd").param_groups]

    assert rules == [("muon", 1e-3), ("sgd", 0.1)]


def test_state_is_not_given_to_other_parameters():
    def make(name: str, prefix: str = ""):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        model = nn.ModuleDict({"module": model}) if prefix else model

        return muon(model, overrides={f"{prefix}{name}.weight": "adamw"})

    saved = make("1").state_dict()
    make("1", "module.").load_state_dict(saved)

    with pytest.raises(ValueError, match="overrides"):
        make("2").load_state_dict(saved)


def test_flat_parameters_of_zero_are_refused_with_the_fsdp2_command():
    _, optimizer = build("muon")
    for group in optimizer.param_groups:  # as DeepSpeed ZeRO-1 and 2 do after building
        flat = torch.cat([p.detach().flatten() for p in group["params"]]).requires_grad_()
        flat.grad = torch.ones_like(flat)
        group["params"] = [flat]

    with pytest.raises(ValueError, match="--fsdp_version 2"):
        optimizer.step()


def test_shards_of_fsdp1_and_zero3_are_refused_when_the_optimizer_is_built():
    class FlatParameter(nn.Parameter):
        pass

    shown = nn.Parameter(torch.zeros(4, 4))
    shown._fsdp_flattened = True
    empty = nn.Parameter(torch.zeros(0))
    empty.ds_id = 0

    for p in (FlatParameter(torch.zeros(4, 4)), shown, empty):
        for cls in (Muon, AdamW):
            with pytest.raises(ValueError, match="--fsdp_version 2"):
                cls([p])

    plain = nn.Parameter(torch.zeros(4, 4))
    plain._fsdp_flattened = False
    plain.ds_id = None
    assert Muon([plain]).param_groups

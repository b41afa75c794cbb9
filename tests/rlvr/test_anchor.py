"""The momentum policy: its average, swapping it into the model, its checkpoint."""

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from mesotron.rlvr.anchor import Anchor, momentum_at
from support import rlvr_tiny


def make_model(dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).to(dtype)


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by)


def copy_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# For momentum 0.9: 0.9 (0.1 * 1) + 0.1 * 2 = 0.29.
@pytest.mark.parametrize(("momentum", "moved"), [(0.9, 0.29), (0.0, 2.0), (1.0, 0.0)])
def test_the_average_and_its_distance_by_hand(momentum, moved):
    model = make_model()
    start, anchor = copy_of(model), Anchor().start(model)
    for _ in range(2):
        move(model, 1.0)
        anchor.update(model, momentum)
    means = list(anchor.weights.values())
    for mean, old in zip(means, start, strict=True):
        torch.testing.assert_close(mean, old + moved)
    if momentum in (0, 1):  # exact at the ends
        assert all(map(torch.equal, means, copy_of(model) if momentum == 0 else start))
    now = torch.cat([p.flatten() for p in copy_of(model)])
    distance = (now - torch.cat([w.flatten() for w in means])).norm() / now.norm()
    away, size = anchor.moved.tolist()
    assert (away / size) ** 0.5 == pytest.approx(distance.item(), rel=1e-5)


def test_a_bfloat16_model_has_a_float32_average_that_moves():
    model = make_model(torch.bfloat16)
    for p in model.parameters():
        nn.init.ones_(p)
    anchor = Anchor().start(model)
    first = {name: mean.clone() for name, mean in anchor.weights.items()}
    move(model, 2**-6)
    for _ in range(3):
        anchor.update(model, 0.99)
    for name, mean in anchor.weights.items():
        assert mean.dtype == torch.float32
        assert not torch.equal(mean, first[name])
        assert torch.equal(mean.bfloat16(), first[name].bfloat16())  # bfloat16 would stand still


def test_it_replaces_the_models_weights_and_restores_them_to_the_bit():
    model = make_model()
    anchor = Anchor().start(model)
    start, addresses = copy_of(model), [p.data_ptr() for p in model.parameters()]
    move(model, 1.0)
    trained = copy_of(model)

    def fail() -> None:
        with anchor.in_place_of(model):
            assert all(map(torch.equal, copy_of(model), start))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert all(map(torch.equal, copy_of(model), trained))
    assert addresses == [p.data_ptr() for p in model.parameters()]


def test_another_models_checkpoint_is_refused():
    model, anchor = make_model(), Anchor()
    state = Anchor().start(model).state_dict()
    state["tensors"] |= {"0.weight": torch.zeros(9, 9)}
    anchor.load_state_dict(state)
    # Resumed inside a rollout, an anchor that follows every optimizer step is updated first.
    with pytest.raises(ValueError, match="does not fit"):
        anchor.update(model, 0.9)


def test_the_cosine_ends_where_the_anchor_hardly_moves():
    values = [momentum_at(k / 10, 0.99, "cosine") for k in range(11)]
    assert values[0] == 0.99
    assert values[-1] == pytest.approx(1 - 1e-5)
    assert values == sorted(values)
    assert momentum_at(0.5, 1.0, "cosine") == 1.0
    assert momentum_at(7.0, 0.99) == 0.99


def test_a_mean_of_the_last_models_starts_as_a_plain_mean():
    model, mean = make_model(), Anchor()
    start = copy_of(model)
    for moved in (1.0, 1.5, 2.0, 2.5, 3.125):  # the last is 0.75 * 2.5 + 0.25 * 5
        move(model, 1.0)
        mean.add(model, decay=0.75)
        for weight, old in zip(mean.weights.values(), start, strict=True):
            torch.testing.assert_close(weight, old + moved)


def test_a_run_ends_with_its_averaged_weights(tmp_path):
    seen: list[dict[str, list[torch.Tensor]]] = []

    class Look(TrainerCallback):
        def on_step_end(self, *_, **__):
            own = copy_of(trainer.policy)
            with trainer.averaged():
                seen.append({"own": own, "average": copy_of(trainer.policy)})
            assert all(map(torch.equal, copy_of(trainer.policy), own))

    trainer = rlvr_tiny.make_trainer(
        tmp_path, max_steps=3, learning_rate=1e-2, parts={"optim": "muon", "average": 0.9}
    )
    trainer.add_callback(Look())
    trainer.train()
    first, second, last = seen
    assert all(map(torch.equal, first["own"], first["average"]))
    assert not all(map(torch.equal, second["own"], second["average"]))
    for one, two, mean in zip(first["own"], second["own"], second["average"], strict=True):
        torch.testing.assert_close(mean, (one + two) / 2)
    assert all(map(torch.equal, last["average"], copy_of(trainer.policy)))
    assert trainer.average.updates == 3
    for decay in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="average"):
            rlvr_tiny.make_trainer(tmp_path / "refused", parts={"average": decay})

"""The probe of a gradient's signal inside a trainer, against gradients taken by hand."""

import pytest
import torch

import mesotron
from mesotron.config import ObjectiveConfig
from mesotron.probes import gradient_snr
from mesotron.rlvr.callbacks import SnrProbe, measure_snr, step_parts
from support.rlvr_tiny import make_trainer, rows, same, weights

CASES = {
    "one pass": {"per_device_train_batch_size": 8},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_ratio_of_the_parts_gradients(tmp_path, case):
    trainer = make_trainer(tmp_path, mesotron.GRPOTrainer, max_steps=2, **CASES[case])
    found = []

    class Spy(SnrProbe):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            parts = list(step_parts(trainer))
            own = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}
            gradients = []
            for part in parts:
                trainer.model.zero_grad()
                trainer._compute_loss(trainer.model, part).backward()
                gradients.append([p.grad.clone() for p in trainer.model.parameters()])
            for name, p in trainer.model.named_parameters():
                p.grad = own[name].clone()
            measured = measure_snr(trainer)
            for name, p in trainer.model.named_parameters():
                assert torch.equal(p.grad, own[name])
            found.append((len(parts), measured, gradient_snr(gradients)))

    trainer.add_callback(Spy(1, trainer))
    trainer.train()
    assert len(rows(trainer)) == len(found) == 2
    for number, measured, expected in found:
        assert number == (4 if case == "one pass" else 2)
        assert measured == pytest.approx(expected, rel=1e-4)
        assert expected["gradient/noise"] > 0


@pytest.mark.parametrize("case", CASES)
def test_training_is_not_moved_by_a_bit(tmp_path, case):
    """An entropy target moves its bonus once a step, however often the loss is asked for."""
    objective = ObjectiveConfig(name="grpo", beta=0.0, entropy_bonus=0.02, entropy_target=9.0)
    parts, settings = {"objective": objective}, {"max_steps": 3, **CASES[case]}
    alone = make_trainer(tmp_path / "alone", parts=parts, **settings)
    alone.train()
    looked_at = make_trainer(tmp_path / "looked_at", parts=parts, **settings)
    looked_at.callback_handler.callbacks.insert(0, SnrProbe(1, looked_at))
    looked_at.train()
    assert all("gradient/snr" in row for row in rows(looked_at))
    coefficients = [[row["entropy_coef"] for row in rows(x)] for x in (alone, looked_at)]
    assert coefficients[0] == pytest.approx([0.025, 0.03, 0.035])
    assert coefficients[0] == coefficients[1]
    assert same(weights(alone), weights(looked_at))


def test_shards_are_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="needs whole gradients"):
        SnrProbe(5, trainer)

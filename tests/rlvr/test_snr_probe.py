"""The gradient SNR probe inside a trainer, against gradients taken by hand."""

import pytest
import torch

import mesotron
from mesotron.config import ObjectiveConfig
from mesotron.probes import gradient_snr
from mesotron.rlvr.callbacks import SnrProbe, measure_snr, step_parts
from support.rlvr_tiny import make_trainer, rows, same, train, weights

ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("settings", "num_parts"), [({"per_device_train_batch_size": 8}, 4), (ACCUMULATED, 2)]
)
def test_it_is_the_snr_of_the_gradients_of_the_parts(tmp_path, settings, num_parts):
    trainer = make_trainer(tmp_path, mesotron.GRPOTrainer, max_steps=2, **settings)
    results = []

    class Spy(SnrProbe):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            parts = list(step_parts(trainer))
            params = list(trainer.model.parameters())
            own = [p.grad.clone() for p in params]

            gradients = []
            for part in parts:
                trainer.model.zero_grad()
                trainer._compute_loss(trainer.model, part).backward()
                gradients.append([p.grad.clone() for p in params])

            for p, grad in zip(params, own, strict=True):
                p.grad = grad.clone()

            measured = measure_snr(trainer)
            assert all(torch.equal(p.grad, grad) for p, grad in zip(params, own, strict=True))

            results.append((len(parts), measured, gradient_snr(gradients)))

    trainer.add_callback(Spy(1, trainer))
    trainer.train()
    assert len(rows(trainer)) == len(results) == 2

    for number, measured, expected in results:
        assert number == num_parts
        assert measured == pytest.approx(expected, rel=1e-4)
        assert expected["gradient/noise"] > 0


def test_training_is_the_same_to_the_bit(tmp_path):
    """An entropy target changes its bonus once a step, however often the loss is computed."""
    objective = ObjectiveConfig(
        name="grpo",
        beta=0.0,
        entropy_bonus=0.02,
        entropy_target=9.0,
    )

    parts = {"objective": objective}
    settings = {"max_steps": 2, **ACCUMULATED}
    alone = train(tmp_path / "alone", parts=parts, **settings)
    probed = make_trainer(tmp_path / "probed", parts=parts, **settings)
    probed.callback_handler.callbacks.insert(0, SnrProbe(1, probed))
    probed.train()

    assert all("gradient/snr" in row for row in rows(probed))
    coefficients = [[row["entropy_coef"] for row in rows(x)] for x in (alone, probed)]
    assert coefficients[0] == pytest.approx([0.025, 0.03])
    assert coefficients[0] == coefficients[1]
    assert same(weights(alone), weights(probed))

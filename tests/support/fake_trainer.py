"""What callbacks read of a trainer, without a model."""

from types import SimpleNamespace
from typing import Any

from mesotron.rlvr.trl_trainer import GRPOTrainer


class FakeTrainer(SimpleNamespace):
    """TRL's fields as given, with our trainer's own methods that read them."""

    ahead: Any = None
    samples = GRPOTrainer.samples
    note = GRPOTrainer.note
    last_micro_batches = GRPOTrainer.last_micro_batches
    micro_batches_done = GRPOTrainer.micro_batches_done
    forget_rollouts = GRPOTrainer.forget_rollouts

    def _logged(self) -> Any:
        return self._metrics["train"]

"""Going back inside a running trainer: weights and optimizer of a checkpoint, the rest goes on.

The step counter, the schedule, the order of the data and the random states are not rewound: the
time is spent, files stay append-only, and a Trainer's loop cannot be rewound from inside. What was
sampled by the policy that failed is thrown away. Weights in shards are put back by trainers that
write whole ones, as ours do.
"""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from mesotron.runs.checkpoints import MANIFEST, damage, list_checkpoints
from mesotron.watch.settings import is_grpo


@runtime_checkable
class RestoresPolicy(Protocol):
    """A trainer that has checkpoints of its own kind, and knows how to go back to one."""

    def restore_policy(self, checkpoint: Path) -> None:
        """Take weights, optimizer state and whatever follows the weights from a checkpoint."""
        ...


class Plain:
    """The checkpoints of a plain Transformers trainer.

    Args:
        trainer: whose.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def restore_policy(self, checkpoint: Path) -> None:
        """Weights as Transformers resumes them, and the optimizer's state."""
        self.trainer._load_from_checkpoint(str(checkpoint))
        state = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        self.trainer.optimizer.load_state_dict(state)


def as_restorer(trainer: Any) -> RestoresPolicy:
    """The trainer itself if it knows how to go back, else what does it for a plain one."""
    return trainer if isinstance(trainer, RestoresPolicy) else Plain(trainer)


def refuse_what_cannot_go_back(trainer: Any) -> None:
    """Say at the start what a rollback could not do hours later."""
    flat = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    if trainer.is_deepspeed_enabled or flat:
        raise ValueError(
            "guard='rollback' puts weights back, which DeepSpeed and FSDP1 keep in flat shards: "
            "use guard='stop' with them, FSDP2, or plain data parallelism"
        )
    if trainer.args.save_only_model:
        raise ValueError(
            "guard='rollback' needs the optimizer's state, which save_only_model=True leaves out "
            "of checkpoints: turn it off, or use guard='stop'"
        )
    if trainer.is_fsdp_enabled and not isinstance(trainer, RestoresPolicy):
        raise ValueError(
            "guard='rollback' reads whole weights of a checkpoint, and this trainer writes shards "
            "under FSDP: use mesotron.GRPOTrainer, or guard='stop'"
        )


def whole_checkpoints(root: Path) -> set[int]:
    """Steps of the checkpoints of a folder that can be gone back to.

    Args:
        root: a Trainer's output folder. Checkpoints with a manifest are checked against it, others
            must have come to their last file.
    """
    return {
        found.step for found in list_checkpoints(root)
        if (damage(found.path) is None if (found.path / MANIFEST).exists()
            else (found.path / "trainer_state.json").exists())
    }  # fmt: skip


def go_back(trainer: Any, checkpoint: Path) -> None:
    """Put weights and optimizer where a checkpoint has them; learning rates stay as they are.

    Args:
        trainer: any `transformers.Trainer`, between two steps.
        checkpoint: one of its own.
    """
    rates = [{key: group[key] for key in ("lr", "initial_lr") if key in group}
             for group in trainer.optimizer.param_groups]  # fmt: skip
    as_restorer(trainer).restore_policy(checkpoint)
    for group, kept in zip(trainer.optimizer.param_groups, rates, strict=True):
        group.update(kept)
    if is_grpo(trainer):
        trainer._buffered_inputs = None  # TRL then samples anew

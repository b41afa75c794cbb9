"""Exact checkpoints for Transformers trainers: killed and resumed equals uninterrupted, bit by bit.

Transformers' checkpoints are pickles and not atomic. These are safetensors and JSON (`state.py`),
written to a draft folder and renamed:

    model.safetensors      weights, or adapter_model.safetensors
    optimizer.*            optimizer, scheduler and gradient scaler; one per process if sharded
    process-K.*            what process K alone knows: random states, prompt stream, averages
    trainer_state.json     counters of Transformers
    averaged/              with an average of the weights: the model that is evaluated

vLLM's random states are not saved.
"""

import copy
import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from mesotron.models.adapters import WHOLE, load_adapter
from mesotron.rlvr.state import (
    Shard,
    load_state,
    random_state,
    restore_random_state,
    save_state,
)
from mesotron.runs import checkpoints
from mesotron.runs.best import BestCheckpoint
from mesotron.runs.own_code import end_copy

# The mixin calls methods of the trainer that follows it in the bases.
if TYPE_CHECKING:
    Mixin = Any
else:
    Mixin = object

log = logging.getLogger(__name__)
# Averages of weights are as large as the model and change only after a step: they are not copied.
AVERAGES = ("anchor", "average")


class SafeCheckpoints(Mixin):
    """Mixin for any Transformers trainer: atomic checkpoints without pickle.

    `class MyTrainer(SafeCheckpoints, trl.SFTTrainer)`. Add whatever else must survive a kill, such
    as a prompt stream, to `stateful` before calling `train`.
    """

    stateful: dict[str, Stateful]
    resumed_from: Path | None = None
    last_step: dict[str, Any] | None = None  # the state when it ended, until the weights change
    best: BestCheckpoint | None = None  # which checkpoint no pruning removes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stateful = {}
        self.owner = os.getpid()
        super().__init__(*args, **kwargs)

    def own_state(self) -> dict[str, Any]:
        """What a kind of trainer saves per process beyond random states; override it."""
        return {}

    def plain_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A process's state as it is written; override it for what is still being computed."""
        return state

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restore what `own_state` returned."""

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; True resumes from the newest complete checkpoint of the output folder."""
        checkpoint: Path | None = None
        if resume_from_checkpoint is True:
            checkpoint = find_newest(Path(self.args.output_dir or "."))
        elif resume_from_checkpoint:
            checkpoint = Path(resume_from_checkpoint)
            if wrong := checkpoints.damage(checkpoint):
                raise ValueError(f"the checkpoint is damaged: {wrong}; resume from an earlier one")

        if checkpoint is not None:
            self.resumed_from = checkpoint

        with frozen_objects():
            return super().train(str(checkpoint) if checkpoint else None, **kwargs)

    # Writing

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        end_copy(self.owner)
        root = Path(self._get_output_dir(trial))
        step = self.state.global_step
        draft = checkpoints.draft_path(root, step)
        self.store_flos()
        self._name_best(root, step)

        try:
            all_or_none(lambda: self._start(root, step), step)
            all_or_none(lambda: self._write(draft), step)
            all_or_none(lambda: self._publish(root, step), step)
        except (OSError, SafetensorError, ValueError) as error:
            checkpoints.remove(draft)
            raise checkpoints.explain_failed_write(error, root, step) from error

    def save_now(self) -> None:
        """Save the present state, which need not be that after a step."""
        self._save_checkpoint(self.model, trial=None)

    def _name_best(self, root: Path, step: int) -> None:
        """Note which checkpoint is the best: by our evaluations, and by those of Transformers."""
        if self.best is not None:
            self.best.written(step)

        best = self.state.best_global_step
        is_free = self.args.load_best_model_at_end or self.state.best_model_checkpoint is None
        if best and is_free:  # else the watch has named the last healthy one
            path = root / f"checkpoint-{best}"
            if best == step or path.exists():
                self.state.best_model_checkpoint = str(path)

    def _start(self, root: Path, step: int) -> None:
        refuse_non_finite_weights(self.model, step)
        if self.args.should_save:
            checkpoints.start(root, step)

    def _write(self, draft: Path) -> None:
        """Each process writes its own state; the main one writes the rest."""
        if self.is_deepspeed_enabled or (self.is_fsdp_enabled and not self.accelerator.is_fsdp2):
            raise ValueError("flat shards (DeepSpeed, FSDP1) cannot be saved exactly: use FSDP2")

        weights = self._gathered_weights() if self.is_fsdp_enabled else None
        steps = self._stepping_state()

        if self.args.should_save:
            self._save(str(draft), weights)
            self.state.save_to_json(str(draft / "trainer_state.json"))

        if self.args.should_save or self.is_fsdp_enabled:
            save_state(draft, self._optimizer_file(), steps)

        own = self.last_step or self.process_state()
        save_state(draft, f"process-{self.args.process_index}", self.plain_state(own))

    def _publish(self, root: Path, step: int) -> None:
        if not self.args.should_save:
            return

        checkpoints.publish(checkpoints.draft_path(root, step))
        if self.args.save_total_limit:
            kept = self.best.name if self.best is not None else None
            checkpoints.prune(
                root, self.args.save_total_limit, step, self.state.best_model_checkpoint, kept
            )

    def _gathered_weights(self) -> dict[str, Any]:
        """Whole weights of a sharded model, tied ones once; every process must call this."""
        tied = self.model.all_tied_weights_keys
        whole = self.accelerator.get_state_dict(self.model)
        return {name: weight for name, weight in whole.items() if name not in tied}

    def _stepping_state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }

    def process_state(self) -> dict[str, Any]:
        """What each process saves."""
        stateful = {}
        for name, part in self.stateful.items():
            state = part.state_dict()
            stateful[name] = state if name in AVERAGES else copy.deepcopy(state)

        state = {
            "random": random_state(),
            "stateful": stateful,
            "tokens": self.state.num_input_tokens_seen,
            **self.own_state(),
        }
        if self.best is not None:
            state["best"] = self.best.state()

        return state

    def save_last_step(self) -> None:
        """After an error, save as if training had stopped when the last whole step ended. Every
        process must call this."""
        path = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        if self.last_step is None or not self.state.global_step or path.exists():
            return

        self.state.num_input_tokens_seen = self.last_step["tokens"]
        self.current_flos = 0  # of the step that failed
        with suppress(ValueError):  # such as a full disk; the first error matters
            self.save_now()

    def _optimizer_file(self) -> str:
        # One file, or one per process where each has a part of the state.
        if self.is_fsdp_enabled:
            return f"optimizer-{self.args.process_index}"

        return "optimizer"

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # Weights and tokenizer; Transformers would add its arguments as a pickle.
        folder = output_dir or self.args.output_dir
        self.model.save_pretrained(folder, state_dict=state_dict)

        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    # Reading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        model = model or self.model
        if (folder / "adapter_model.safetensors").exists():
            load_adapter(model, folder)
            return

        files = sorted(folder.glob("model*.safetensors"))
        if not files:
            raise ValueError(
                f"{folder} has no weights as safetensors: resume from another checkpoint"
            )

        saved: dict[str, Any] = {}
        for path in files:
            saved |= load_file(path)

        # Shards whole weights where the model is sharded, and copies them where it is not.
        missing, unexpected = set_model_state_dict(model, saved, options=WHOLE)

        tied = set(model.all_tied_weights_keys)  # saved once, under the other name
        wrong = [*unexpected, *(set(missing) - tied)]
        if wrong:
            raise ValueError(f"{folder} holds a different model: {', '.join(wrong[:3])}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return

        own = self._load_process_state(checkpoint)  # refuses another number of processes
        steps = self._load_optimizer(Path(checkpoint))
        self.lr_scheduler.load_state_dict(steps["scheduler"])

        scaler = self.accelerator.scaler
        if scaler is not None and steps["scaler"] is not None:
            scaler.load_state_dict(steps["scaler"])

        for name, part in self.stateful.items():
            if name not in own["stateful"]:
                raise ValueError(f"{checkpoint} has no state of {name}: it was written without")

            part.load_state_dict(own["stateful"][name])

        self.load_best(own, Path(checkpoint).parent)
        self.load_own_state(own)

    def take_weights(self, checkpoint: Path) -> None:
        """The weights of a checkpoint alone."""
        self._load_from_checkpoint(str(checkpoint))

    def take_best(self, checkpoint: Path) -> None:
        """Which checkpoint was the best when this one was written."""
        self.load_best(self._load_process_state(str(checkpoint)), checkpoint.parent)

    def load_best(self, own: dict[str, Any], root: Path) -> None:
        """Which checkpoint was the best, by what a process saved in one of `root`."""
        if self.best is not None:
            self.best.load(own.get("best"), root)

    def _load_optimizer(self, checkpoint: Path) -> dict[str, Any]:
        steps = load_state(checkpoint, self._optimizer_file())
        shard_like_parameters(steps["optimizer"], self.optimizer)
        self.optimizer.load_state_dict(steps["optimizer"])

        return steps

    def _load_best_model(self) -> None:
        """Called by Transformers with `load_best_model_at_end`, when training is over."""
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            restore_random_state(self._load_process_state(checkpoint)["random"])

    def _load_process_state(self, checkpoint: str) -> dict[str, Any]:
        writers = len(list(Path(checkpoint).glob("process-*.json")))
        if writers != self.args.world_size:
            raise ValueError(
                f"{checkpoint} was written by {writers} processes and cannot be resumed exactly by "
                f"{self.args.world_size}: start as many as before"
            )

        return load_state(Path(checkpoint), f"process-{self.args.process_index}")

    def restore_policy(self, checkpoint: Path) -> None:
        """Go back to a checkpoint's weights, optimizer and averages in the middle of training, for
        `watch.rollback`; schedule, data order, random states and counters continue."""
        self._load_from_checkpoint(str(checkpoint))
        self._load_optimizer(checkpoint)
        if self.best is not None:
            self.best.undone()

        averages = [name for name in AVERAGES if name in self.stateful]
        if averages:
            own = self._load_process_state(str(checkpoint))["stateful"]
            for name in averages:
                self.stateful[name].load_state_dict(own[name])


def find_newest(root: Path) -> Path:
    """The newest complete checkpoint in a folder."""
    newest, damaged = checkpoints.newest_whole(root)
    for wrong in damaged:
        log.warning("skipping a damaged checkpoint: %s", wrong)

    if newest is None:
        raise ValueError(f"{root} has no complete checkpoint to resume from")

    return newest.path


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Keep what exists out of garbage collection. Every few steps Python would search all of the
    libraries' objects, for 0.3 s, in vain."""
    if gc.get_freeze_count() > 0:  # by the caller, who would not want it undone
        yield
        return

    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def shard_like_parameters(state: dict[str, Any], optimizer: Any) -> None:
    """Turn the `Shard`s of an optimizer's state into tensors sharded like their parameters."""
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]

    numbers = []
    for group in state["param_groups"]:
        numbers += group["params"]

    for number, parameter in zip(numbers, parameters, strict=True):
        tensors = state["state"].get(number, {})
        for key, value in tensors.items():
            if isinstance(value, Shard):
                tensors[key] = value.like(parameter)


# Failures of writing: named, and raised in every process


def all_or_none(action: Callable[[], None], step: int) -> None:
    """Run an action in every process; a failure in one is raised in all, so that none waits."""
    from accelerate.utils import gather_object

    error: Exception | None = None
    try:
        action()
    except Exception as raised:  # raised below, once the other processes know
        error = raised

    own = None if error is None else f"{type(error).__name__}: {error}"
    errors = gather_object([own])
    if error is not None:
        raise error

    for number, text in enumerate(errors):
        if text is not None:
            raise ValueError(
                f"process {number} could not write its part of the checkpoint of step {step} "
                f"({text}); earlier checkpoints are complete: fix that and resume"
            )


def refuse_non_finite_weights(model: nn.Module, step: int) -> None:
    """Raise ValueError rather than overwrite good checkpoints with NaN or infinite weights."""
    weights = []
    for p in model.parameters():
        weight = p.to_local() if isinstance(p, DTensor) else p
        if weight.numel() and weight.is_floating_point():
            weights.append(weight.detach())

    peaks = torch._foreach_norm(weights, float("inf")) if weights else []  # pyright: ignore
    if not all(bool(peak.isfinite()) for peak in peaks):
        raise ValueError(
            f"weights are not finite after step {step}, so training stopped and this step was not "
            "saved: continue from an earlier checkpoint (--model) with a smaller --lr"
        )

"""Exact resume of Transformers and TRL trainers: killed and resumed equals left alone, bit by bit.

TRL's own checkpoints are pickles, are not atomic, leave out the rollout buffer (a run resumed
inside one samples again) and forget how often the data was shuffled (past the first epoch a
resumed run reads other prompts). Here: safetensors and JSON, written aside and renamed.

Overridden of Transformers 5.22 and TRL 1.16: train, _save_checkpoint, _save, _load_from_checkpoint,
_load_optimizer_and_scheduler, _load_scaler, _load_rng_state, _get_train_sampler. Sampling with
vLLM has random states of its own, which are not kept.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from mesotron.rlvr.checkpoints.safeguards import (
    all_or_none,
    explain_failed_write,
    refuse_flat_shards,
    refuse_spoiled_weights,
)
from mesotron.rlvr.checkpoints.state import (
    Shard,
    load_state,
    random_state,
    restore_random_state,
    save_state,
)
from mesotron.rlvr.objectives.anchor import trainable
from mesotron.rlvr.shards import is_sharded
from mesotron.runs import checkpoints

# The classes are mixins: the trainer they call comes after them in the bases.
if TYPE_CHECKING:
    Mixin = Any
else:
    Mixin = object

log = logging.getLogger(__name__)
# Checkpoints hold whole weights, each under its name; LoRA's leave the frozen ones out.
WHOLE = StateDictOptions(full_state_dict=True, strict=False)


class Stateful(Protocol):
    """Something of a trainer's that must survive a kill: an anchor policy, a prompt queue."""

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        ...

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave; they come on the CPU."""
        ...

    def values(self) -> Any:
        """The rest, as JSON holds it."""
        ...

    def load_values(self, values: Any) -> None:
        """Take back what `values` gave."""
        ...


class SafeCheckpoints(Mixin):
    """Mixin for any Transformers trainer: atomic checkpoints without pickle, named when damaged.

    `class MyTrainer(SafeCheckpoints, trl.SFTTrainer)`. What else must survive goes to `stateful`
    before `train` is called.
    """

    stateful: dict[str, Stateful]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stateful = {}
        super().__init__(*args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; True resumes from the newest whole checkpoint of the output folder.

        Raises:
            ValueError: the checkpoint asked for is damaged, or none is whole.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(self._newest_checkpoint())
        elif resume_from_checkpoint and (wrong := checkpoints.damage(Path(resume_from_checkpoint))):
            raise ValueError(f"the checkpoint is damaged: {wrong}; resume from an earlier one")
        return super().train(resume_from_checkpoint or None, **kwargs)

    def _newest_checkpoint(self) -> Path:
        root = Path(self.args.output_dir or ".")
        found, damaged = checkpoints.newest_whole(root)
        for wrong in damaged:
            log.warning("damaged checkpoint: %s; trying the one before it", wrong)
        if found is None:
            raise ValueError(f"{root} has no whole checkpoint to resume from")
        return found.path

    # Writing

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        root, step = Path(self._get_output_dir(trial)), self.state.global_step
        draft, main = checkpoints.draft_path(root, step), self.args.should_save
        self.store_flos()

        def start() -> None:
            refuse_spoiled_weights(self.model, step)
            if main:
                checkpoints.start(root, step)

        def publish() -> None:
            if main:
                checkpoints.publish(draft)
                if self.args.save_total_limit:
                    checkpoints.prune(root, self.args.save_total_limit, newest=step)

        try:
            for part in (start, lambda: self._write(draft), publish):
                all_or_none(part, step)
        except (OSError, SafetensorError, ValueError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise explain_failed_write(error, root, step) from error

    def _write(self, draft: Path) -> None:
        """Every process writes what it alone has; the main one writes everything else."""
        refuse_flat_shards(self)
        weights = self._gathered_weights() if self.is_fsdp_enabled else None
        scaler = self.accelerator.scaler
        steps = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        if self.args.should_save:
            self._save(str(draft), weights)
            self.state.save_to_json(str(draft / "trainer_state.json"))
        if self.args.should_save or self.is_fsdp_enabled:
            save_state(draft, self._optimizer_name(), steps)
        mine = {"random": random_state(), "stateful": self._stateful_state(), **self._own_state()}
        save_state(draft, f"process-{self.args.process_index}", mine)

    def _gathered_weights(self) -> dict[str, Tensor]:
        """Whole weights of a sharded model; every process must ask. Tied ones are held once."""
        found = self.accelerator.get_state_dict(self.model)
        return {n: w for n, w in found.items() if n not in self.model.all_tied_weights_keys}

    def _optimizer_name(self) -> str:
        """One file for all processes, or one for each where each has a part of the state."""
        return f"optimizer-{self.args.process_index}" if self.is_fsdp_enabled else "optimizer"

    def _stateful_state(self) -> dict[str, Any]:
        return {
            name: {"tensors": part.tensors(), "values": json.dumps(part.values())}
            for name, part in self.stateful.items()
        }

    def _own_state(self) -> dict[str, Any]:
        """What a kind of trainer keeps for each process beyond the random states."""
        return {}

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Weights and tokenizer; Transformers would add its arguments as a pickle."""
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
        parts = sorted(folder.glob("model*.safetensors"))
        if not parts:
            raise ValueError(f"{folder} has no weights as safetensors; resume from another one")
        found: dict[str, Any] = {}
        for path in parts:
            found |= load_file(path)
        # Spreads whole weights where the model is sharded, and copies them where it is not.
        missing, unexpected = set_model_state_dict(model, found, options=WHOLE)
        tied = set(model.all_tied_weights_keys)  # saved once, under the other name
        if unexpected or set(missing) - tied:
            wrong = ", ".join([*unexpected, *(set(missing) - tied)][:3])
            raise ValueError(f"{folder} holds another model than this one: {wrong}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        mine = self._load_process_state(checkpoint)
        steps = self._load_optimizer(Path(checkpoint))
        self.lr_scheduler.load_state_dict(steps["scheduler"])
        if steps["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(steps["scaler"])
        for name, part in self.stateful.items():
            if name not in mine["stateful"]:
                raise ValueError(f"{checkpoint} has no state of {name}: it is of another objective")
            load_part(part, mine["stateful"][name])
        self._load_own_state(mine)

    def _load_optimizer(self, checkpoint: Path) -> dict[str, Any]:
        """Fill the optimizer; returns what lies in the checkpoint beside it."""
        steps = load_state(checkpoint, self._optimizer_name())
        spread_like_parameters(steps["optimizer"], self.optimizer)
        self.optimizer.load_state_dict(steps["optimizer"])
        return steps

    def restore_policy(self, checkpoint: Path) -> None:
        """Go back to a checkpoint's weights in the middle of training, for `watch.rollback`.

        Weights, optimizer, and those of `stateful` that hold tensors, which follow the weights (an
        anchor); the schedule, the data's order, random states and counters go on.
        """
        self._load_from_checkpoint(str(checkpoint))
        self._load_optimizer(checkpoint)
        mine = self._load_process_state(str(checkpoint))
        for name, part in self.stateful.items():
            if part.tensors() or mine["stateful"][name]["tensors"]:
                load_part(part, mine["stateful"][name])

    def _load_own_state(self, mine: dict[str, Any]) -> None:
        """Take back what `_own_state` gave."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: it came with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            restore_random_state(self._load_process_state(checkpoint)["random"])

    def _load_process_state(self, checkpoint: str) -> dict[str, Any]:
        name = f"process-{self.args.process_index}"
        found = len(list(Path(checkpoint).glob("process-*.json")))
        if found != self.args.world_size:
            raise ValueError(
                f"{checkpoint} was written by {found} processes and cannot be continued exactly by "
                f"{self.args.world_size}; start as many as before"
            )
        return load_state(Path(checkpoint), name)


class ExactResume(SafeCheckpoints):
    """Mixin for TRL's GRPO trainer: also its rollout buffer, its counters and its order of prompts.

    `class GRPOTrainer(ExactResume, trl.GRPOTrainer)`.
    """

    _epochs_read: int = 0

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(self._newest_checkpoint())
        if resume_from_checkpoint:
            path = Path(resume_from_checkpoint) / "trainer_state.json"
            self._epochs_read = int(json.loads(path.read_text())["epoch"])
        return super().train(resume_from_checkpoint, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's sampler after as many shuffles as the run has begun epochs."""
        sampler = super()._get_train_sampler(dataset)
        if self.shuffle_dataset:
            for _ in range(self._epochs_read):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _own_state(self) -> dict[str, Any]:
        every = self.args.steps_per_generation * self.num_iterations
        used_up = self._step % every == 0  # then the next step samples anew
        state: dict[str, Any] = {
            "step": self._step,
            "buffer": None if used_up else self._buffered_inputs,
            "metrics": {name: list(found) for name, found in self._metrics["train"].items()},
        }
        if self.use_adaptive_entropy:
            state["entropy"] = [self.entropy_coef, self._last_world_entropy]
        return state

    def _load_own_state(self, mine: dict[str, Any]) -> None:
        self._step = mine["step"]
        buffer = mine["buffer"]
        if buffer is not None:
            buffer = [to_device(batch, self.accelerator.device) for batch in buffer]
        self._buffered_inputs = buffer
        for name, found in mine["metrics"].items():
            self._metrics["train"][name].extend(found)
        if self.use_adaptive_entropy:
            self.entropy_coef, self._last_world_entropy = mine["entropy"]


def load_part(part: Stateful, saved: dict[str, Any]) -> None:
    """Give a part back what it gave for a checkpoint."""
    part.load_tensors(saved["tensors"])
    part.load_values(json.loads(saved["values"]))


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch with its tensors on a device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}


def load_adapter(model: Any, folder: Path) -> None:
    """Fill a LoRA model's adapter with the weights that `save_pretrained` wrote; all of them."""
    from peft import set_peft_model_state_dict

    saved = load_file(folder / "adapter_model.safetensors")
    trains = [name for name, _ in trainable(model)]
    if is_sharded(model):
        # PEFT would copy whole weights into shards. Its files leave the adapter's name out.
        names = {name.replace(f".{model.active_adapter}", ""): name for name in trains}
        wrong = [name for name in (*saved, *names) if (name in saved) != (name in names)]
        whole: dict[str, Any] = {names[n]: weight for n, weight in saved.items() if n in names}
        set_model_state_dict(model, whole, options=WHOLE)
    else:
        found = set_peft_model_state_dict(model, saved)
        # What is frozen is missing by design.
        missing = set(found.missing_keys).intersection(trains)
        wrong = [*found.unexpected_keys, *sorted(missing)]
    if wrong:
        raise ValueError(f"{folder} holds another adapter than this one: {', '.join(wrong[:3])}")


def spread_like_parameters(state: dict[str, Any], optimizer: Any) -> None:
    """Put the parts of a sharded optimizer's state together, each spread as its parameter is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, Shard):
                state["state"][number][key] = value.like(parameter)

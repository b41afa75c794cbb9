"""Exact checkpoints for Transformers trainers: killed and resumed equals uninterrupted, bit by bit.

Transformers' checkpoints are pickles and not atomic. These are safetensors and JSON, written to a
draft folder and renamed. A tree of plain values goes to NAME.json and its tensors to
NAME.safetensors; nothing that is read can run code. vLLM's random states are not saved.
"""

import copy
import gc
import json
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from mesotron.models.adapters import WHOLE, load_adapter
from mesotron.runs import checkpoints

# The mixin calls methods of the trainer that follows it in the bases.
if TYPE_CHECKING:
    Mixin = Any
else:
    Mixin = object

log = logging.getLogger(__name__)
# Markers in the JSON: a dict whose only key is one of these is not plain state.
TENSOR = "__tensor__"
TUPLE = "__tuple__"
PAIRS = "__pairs__"
SHARD = "__shard__"  # a process's part of a sharded tensor


class SafeCheckpoints(Mixin):
    """Mixin for any Transformers trainer: atomic checkpoints without pickle.

    `class MyTrainer(SafeCheckpoints, trl.SFTTrainer)`. Add whatever else must survive a kill, such
    as a prompt stream, to `stateful` before calling `train`.
    """

    stateful: dict[str, Stateful]
    resumed_from: Path | None = None
    last_step: dict[str, Any] | None = None  # the state when it ended, until a rollout is done

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stateful = {}
        super().__init__(*args, **kwargs)

    def own_state(self) -> dict[str, Any]:
        """What a kind of trainer saves per process beyond random states; override it."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restore what `own_state` returned."""

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; True resumes from the newest complete checkpoint of the output folder."""
        if resume_from_checkpoint is True:
            root = Path(self.args.output_dir or ".")
            newest, damaged = checkpoints.newest_whole(root)
            for wrong in damaged:
                log.warning("skipping a damaged checkpoint: %s", wrong)

            if newest is None:
                raise ValueError(f"{root} has no complete checkpoint to resume from")

            resume_from_checkpoint = str(newest.path)
        elif resume_from_checkpoint and (wrong := checkpoints.damage(Path(resume_from_checkpoint))):
            raise ValueError(f"the checkpoint is damaged: {wrong}; resume from an earlier one")

        if resume_from_checkpoint:
            self.resumed_from = Path(resume_from_checkpoint)

        frozen = gc.get_freeze_count() > 0  # by the caller, who would not want it undone
        if not frozen:
            # Every few steps Python would search all of the libraries' objects, for 0.3 s, in vain.
            gc.collect()
            gc.freeze()

        try:
            return super().train(resume_from_checkpoint or None, **kwargs)
        finally:
            if not frozen:
                gc.unfreeze()

    # Writing

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        root = Path(self._get_output_dir(trial))
        step = self.state.global_step
        draft = checkpoints.draft_path(root, step)
        main = self.args.should_save
        self.store_flos()

        def start() -> None:
            refuse_non_finite_weights(self.model, step)
            if main:
                checkpoints.start(root, step)

        def publish() -> None:
            if main:
                checkpoints.publish(draft)
                if self.args.save_total_limit:
                    best = self.state.best_model_checkpoint
                    checkpoints.prune(root, self.args.save_total_limit, step, best)

        try:
            for part in (start, lambda: self._write(draft), publish):
                all_or_none(part, step)
        except (OSError, SafetensorError, ValueError) as error:
            checkpoints.remove(draft)
            raise checkpoints.explain_failed_write(error, root, step) from error

    def _write(self, draft: Path) -> None:
        # Each process writes its own state; the main one writes the rest.
        if self.is_deepspeed_enabled or (self.is_fsdp_enabled and not self.accelerator.is_fsdp2):
            raise ValueError("flat shards (DeepSpeed, FSDP1) cannot be saved exactly: use FSDP2")

        weights = None
        if self.is_fsdp_enabled:  # a collective call; tied weights are held once
            tied = self.model.all_tied_weights_keys
            whole = self.accelerator.get_state_dict(self.model)
            weights = {name: w for name, w in whole.items() if name not in tied}

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
            save_state(draft, self._optimizer_file(), steps)

        own = self.last_step or self.process_state()
        save_state(draft, f"process-{self.args.process_index}", own)

    def process_state(self) -> dict[str, Any]:
        """What each process saves; averages of weights are not copied."""
        parts = {name: part.state_dict() for name, part in self.stateful.items()}
        parts |= {k: copy.deepcopy(x) for k, x in parts.items() if k not in ("anchor", "average")}
        tokens = self.state.num_input_tokens_seen

        return {
            "random": random_state(),
            "stateful": parts,
            "tokens": tokens,
            **self.own_state(),
        }

    def save_last_step(self) -> None:
        """After an error in a rollout, save as if training had stopped before it."""
        path = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        if self.last_step and self.state.global_step and not path.exists():
            self.state.num_input_tokens_seen = self.last_step["tokens"]
            with suppress(ValueError):  # such as a full disk; the first error matters
                self._save_checkpoint(self.model, None)

    def _optimizer_file(self) -> str:
        # One file, or one per process where each has a part of the state.
        return f"optimizer-{self.args.process_index}" if self.is_fsdp_enabled else "optimizer"

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
            why = "has no weights as safetensors: resume from another checkpoint"
            raise ValueError(f"{folder} {why}")

        saved: dict[str, Any] = {}
        for path in files:
            saved |= load_file(path)

        # Shards whole weights where the model is sharded, and copies them where it is not.
        missing, unexpected = set_model_state_dict(model, saved, options=WHOLE)
        tied = set(model.all_tied_weights_keys)  # saved once, under the other name
        if wrong := [*unexpected, *(set(missing) - tied)]:
            raise ValueError(f"{folder} holds a different model: {', '.join(wrong[:3])}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return

        own = self._load_process_state(checkpoint)
        steps = self._load_optimizer(Path(checkpoint))
        self.lr_scheduler.load_state_dict(steps["scheduler"])

        if steps["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(steps["scaler"])

        for name, part in self.stateful.items():
            if name not in own["stateful"]:
                raise ValueError(f"{checkpoint} has no state of {name}: it was written without")
            part.load_state_dict(own["stateful"][name])

        self.load_own_state(own)

    def _load_optimizer(self, checkpoint: Path) -> dict[str, Any]:
        steps = load_state(checkpoint, self._optimizer_file())
        shard_like_parameters(steps["optimizer"], self.optimizer)
        self.optimizer.load_state_dict(steps["optimizer"])

        return steps

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

        if averages := self.stateful.keys() & {"anchor", "average"}:
            own = self._load_process_state(str(checkpoint))["stateful"]
            for name in averages:
                self.stateful[name].load_state_dict(own[name])


def shard_like_parameters(state: dict[str, Any], optimizer: Any) -> None:
    """Turn the `Shard`s of an optimizer's state into tensors sharded like their parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, Shard):
                state["state"][number][key] = value.like(parameter)


# Failures of writing: named, and raised in every process


def all_or_none(action: Callable[[], None], step: int) -> None:
    """Run an action in every process; a failure in one is raised in all, so that none waits."""
    from accelerate.utils import gather_object

    error: Exception | None = None
    try:
        action()
    except Exception as raised:  # raised below, once the other processes know
        error = raised

    errors = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
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
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    held = [w.detach() for w in weights if w.numel() and w.is_floating_point()]
    peaks = torch._foreach_norm(held, float("inf")) if held else []  # pyright: ignore

    if not all(bool(peak.isfinite()) for peak in peaks):
        raise ValueError(
            f"weights are not finite after step {step}, so training stopped and this step was not "
            "saved: continue from an earlier checkpoint (--model) with a smaller --lr"
        )


# State without pickle


def save_state(folder: Path, name: str, tree: Any) -> None:
    tensors: dict[str, Tensor] = {}
    plain = take_tensors_out(tree, name, tensors)
    (folder / f"{name}.json").write_text(json.dumps(plain))

    if tensors:
        save_file(tensors, folder / f"{name}.safetensors")


def load_state(folder: Path, name: str) -> Any:
    path = folder / f"{name}.safetensors"
    tensors = load_file(path) if path.exists() else {}
    return put_tensors_back(json.loads((folder / f"{name}.json").read_text()), tensors)


def take_tensors_out(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors[path] = own_memory(tree.to_local() if isinstance(tree, DTensor) else tree)
        return {SHARD if isinstance(tree, DTensor) else TENSOR: path}

    if tree is None or type(tree) in (bool, int, float, str):
        return tree

    if isinstance(tree, dict):
        items = [
            (key, take_tensors_out(item, f"{path}.{key}", tensors)) for key, item in tree.items()
        ]
        named = all(isinstance(key, str) for key in tree)
        return dict(items) if named else {PAIRS: [[key, item] for key, item in items]}

    if type(tree) in (list, tuple):
        items = [take_tensors_out(item, f"{path}.{k}", tensors) for k, item in enumerate(tree)]
        return items if type(tree) is list else {TUPLE: items}

    raise ValueError(f"{path} is a {type(tree).__name__}; checkpoints hold plain values, tensors")


def put_tensors_back(plain: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(plain, list):
        return [put_tensors_back(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if plain.keys() == {TENSOR}:
        return tensors[plain[TENSOR]]
    if plain.keys() == {SHARD}:
        return Shard(tensors[plain[SHARD]])
    if plain.keys() == {TUPLE}:
        return tuple(put_tensors_back(plain[TUPLE], tensors))

    pairs = plain[PAIRS] if plain.keys() == {PAIRS} else plain.items()
    return {key: put_tensors_back(item, tensors) for key, item in pairs}


@dataclass(frozen=True)
class Shard:
    """A process's part of a sharded tensor, before its placement is known."""

    local: Tensor

    def like(self, other: DTensor) -> DTensor:
        return DTensor.from_local(
            self.local.to(other.device),
            other.device_mesh,
            other.placements,
            run_check=False,
            shape=other.shape,
            stride=other.stride(),
        )


def own_memory(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor with its own storage, which safetensors requires."""
    plain = tensor.detach().cpu().contiguous()
    shared = plain.untyped_storage().nbytes() != plain.nbytes
    return plain.clone() if shared or plain.data_ptr() == tensor.data_ptr() else plain


def random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])

    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

"""Whole training runs under FSDP2 on gloo processes, and the same ones on one process.

Completions are really sampled, by weights that are sharded or not: the draws alone are given, by a
completion's place among those of all processes, so that the same run must come out.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trl
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import mesotron
from mesotron.rlvr.checkpoint import load_state
from mesotron.rlvr.models import reshard
from mesotron.watch.engine import Engine
from mesotron.watch.events import Event
from support.rlvr_tiny import EOS, make_trainer, rows

SAMPLE = trl.GRPOTrainer._generate_single_turn
ROWS = 16  # completions of a step, over all processes


@contextmanager
def given_draws(first: int) -> Iterator[None]:
    """Let `torch.multinomial` take its draws from a table, of this row and the following ones.

    The second half of a step's rows ends after two tokens: of two processes one is done early.
    """
    own, calls = torch.multinomial, 0

    def draw(probabilities: Tensor, num_samples: int) -> Tensor:
        nonlocal calls
        assert num_samples == 1
        places = torch.arange(first, first + len(probabilities))[:, None]
        u = torch.rand(1024, generator=torch.Generator().manual_seed(calls))[places]
        calls += 1
        chosen = (probabilities.cumsum(-1) < u).sum(-1, keepdim=True)
        return chosen.masked_fill((places % ROWS >= ROWS // 2) & (calls > 1), EOS)

    torch.multinomial = draw
    try:
        yield
    finally:
        torch.multinomial = own


def sample_by_place(trainer: Any, prompt_ids: list[list[int]], *rest: Any, **named: Any) -> Any:
    """TRL's sampling with such draws."""
    with given_draws(trainer.accelerator.process_index * len(prompt_ids)):
        return SAMPLE(trainer, prompt_ids, *rest, **named)


def length(completions: list[str], **_: Any) -> list[float]:
    """A reward that depends on the text alone."""
    return [len(text) % 7 / 7 for text in completions]


def run_sharded(settings: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Train on this process's share: weights and anchor, each whole, and the log."""
    trl.GRPOTrainer._generate_single_turn = sample_by_place
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), parts={"reward_funcs": length, **parts}, **settings)
        trainer.train()
    weights = whole_weights(trainer)
    anchor: dict[str, Tensor] = {}
    if trainer.anchor is not None:
        with trainer.anchor.in_place_of(trainer.model):
            anchor = whole_weights(trainer)
    return {
        "sharded": trainer.is_fsdp_enabled,
        "weights": {name: weight.tolist() for name, weight in weights.items()},
        "anchor": {name: weight.tolist() for name, weight in anchor.items()},
        "rows": rows(trainer),
    }


def resume_sharded(settings: dict[str, Any], parts: dict[str, Any]) -> list[bool]:
    """Whether a run resumed from its second checkpoint ends as the run that went on, bit by bit.

    Returns:
        For each process: its shards of the weights, then those of the anchor if there is one.
    """
    trl.GRPOTrainer._generate_single_turn = SAMPLE
    folder = shared_folder()
    saving = {"save_strategy": "steps", "save_steps": 1, **settings}
    ends = []
    for checkpoint in (None, folder / "checkpoint-2"):
        trainer = make_trainer(folder, parts=parts, **saving)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        ends.append(own_shards(trainer))
    first, second = ends
    return [
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    ]


def own_shards(trainer: Any) -> list[dict[str, Tensor]]:
    reshard(trainer.model)
    held = trainer.model.named_parameters()
    found = [{n: p.to_local() for n, p in held if isinstance(p, DTensor)}]
    assert found[0], "nothing is sharded"
    return found + ([trainer.anchor.tensors()] if trainer.anchor is not None else [])


def whole_weights(trainer: Any) -> dict[str, Tensor]:
    """The weights put together; every process must ask."""
    reshard(trainer.model)
    held = [(name, p.detach()) for name, p in trainer.model.named_parameters()]
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in held}


def shared_folder() -> Path:
    """A new folder that all processes know."""
    PartialState()
    held = [tempfile.mkdtemp()]
    dist.broadcast_object_list(held, src=0)
    return Path(held[0])


class AfterRollback(TrainerCallback):
    """Whether, right after an act of the guard, weights and anchor are those of its checkpoint."""

    def __init__(self, trainer: Any, watch: Any) -> None:
        self.trainer, self.watch, self.found = trainer, watch, []

    def on_log(self, *_: Any, **__: Any) -> None:
        acts = self.watch.actions
        if len(acts) == 1 and not self.found:
            folder = Path(self.trainer.args.output_dir) / f"checkpoint-{acts[0].checkpoint}"
            saved, now = load_file(folder / "model.safetensors"), whole_weights(self.trainer)
            mine = load_state(folder, f"process-{dist.get_rank()}")["stateful"]["anchor"]["tensors"]
            anchor = self.trainer.anchor.tensors()
            self.found = [
                now.keys() == saved.keys(),
                all(torch.equal(now[name], saved[name]) for name in saved),
                all(torch.equal(anchor[name], mine[name]) for name in anchor),
            ]


def go_back_sharded(settings: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """What a rollback did to a sharded run, in which the first process sees a failure at step 3."""
    trl.GRPOTrainer._generate_single_turn = SAMPLE
    change = {"field": "optim.lr", "act": "multiply", "value": 0.5}
    event = Event(step=3, detector="repetition", severity="stop", diagnosis="", remedy="",
                  changes=(change,), began=2)  # fmt: skip
    folder = shared_folder()
    first = dist.get_rank() == 0
    Engine.update = lambda self, row: [event] if first and row["step"] == 3 else []
    saving = {"save_strategy": "steps", "save_steps": 1, **settings}
    trainer = make_trainer(folder, parts=parts, **saving)
    watch = mesotron.Watch(guard="rollback", trainer=trainer)
    after = AfterRollback(trainer, watch)
    trainer.add_callback(watch)
    trainer.add_callback(after)
    trainer.train()
    return {
        "acts": [act.checkpoint for act in watch.actions],
        "restored": after.found,
        "rate": trainer.optimizer.param_groups[0]["initial_lr"],
        "steps": trainer.state.global_step,
    }

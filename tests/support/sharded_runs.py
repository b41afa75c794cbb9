"""Whole training runs under FSDP2 on gloo processes, and the same ones on one process.

Completions are sampled by the model, but with uniform numbers fixed by a completion's place among
those of all processes, so the runs must be equal.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trl
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import mesotron
from mesotron.models.sharded import reshard
from mesotron.rlvr.state import load_state
from support import rlvr_processes as common
from support.rlvr_tiny import EOS, make_trainer, same

SAMPLE = trl.GRPOTrainer._generate_single_turn
ROWS = 16  # completions of a step, over all processes


@contextmanager
def fixed_draws(first: int) -> Iterator[None]:
    """Make `torch.multinomial` draw from a table, starting at row `first`.

    The second half of a step's rows ends after two tokens: one of two processes is done early.
    """
    own = torch.multinomial
    calls = 0

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
    with fixed_draws(trainer.accelerator.process_index * len(prompt_ids)):
        return SAMPLE(trainer, prompt_ids, *rest, **named)


def length(completions: list[str], **_: Any) -> list[float]:
    """A reward that depends on the text alone."""
    return [len(text) % 7 / 7 for text in completions]


def run_sharded(settings: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    trl.GRPOTrainer._generate_single_turn = sample_by_place
    return common.train_and_gather(settings, {"reward_funcs": length, **parts})


def resume_sharded(settings: dict[str, Any], parts: dict[str, Any]) -> list[bool]:
    """Whether this process's shards of the weights, then those of the anchor, are the same bits
    in a run resumed from its second checkpoint."""
    trl.GRPOTrainer._generate_single_turn = SAMPLE
    folder = common.shared_folder()

    ends = []
    for checkpoint in (None, str(folder / "checkpoint-2")):
        trainer = make_trainer(
            folder,
            parts=parts,
            **common.SAVE,
            **settings,
        )

        trainer.train(resume_from_checkpoint=checkpoint)
        ends.append(own_shards(trainer))

    return [same(a, b) for a, b in zip(*ends, strict=True)]


def own_shards(trainer: Any) -> list[dict[str, Tensor]]:
    reshard(trainer.model)
    parameters = trainer.model.named_parameters()
    shards = [{n: p.to_local() for n, p in parameters if isinstance(p, DTensor)}]

    assert shards[0], "nothing is sharded"
    return shards + ([trainer.anchor.weights] if trainer.anchor is not None else [])


class AfterRollback(TrainerCallback):
    """Whether weights and anchor are those of the checkpoint right after a rollback."""

    def __init__(self, trainer: Any, watch: Any) -> None:
        self.trainer = trainer
        self.watch = watch
        self.restored = []

    def on_log(self, *_: Any, **__: Any) -> None:
        acts = self.watch.actions
        if len(acts) == 1 and not self.restored:
            folder = Path(self.trainer.args.output_dir) / f"checkpoint-{acts[0].checkpoint}"
            state = load_state(folder, f"process-{dist.get_rank()}")["stateful"]
            self.restored = [
                same(common.whole_weights(self.trainer), load_file(folder / "model.safetensors")),
                same(self.trainer.anchor.weights, state["anchor"]["tensors"]),
            ]


def roll_back_sharded(settings: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """The effect of a rollback on a sharded run; only the first process sees a failure."""
    trl.GRPOTrainer._generate_single_turn = SAMPLE
    folder = common.shared_folder()
    common.fail_at_step_3(visible=dist.get_rank() == 0)

    trainer = make_trainer(
        folder,
        parts=parts,
        **common.SAVE,
        **settings,
    )

    watch = mesotron.Watch(guard="rollback", trainer=trainer)
    after = AfterRollback(trainer, watch)
    trainer.add_callback(watch)
    trainer.add_callback(after)
    trainer.train()

    return common.what_was_done(trainer, watch) | {"restored": after.restored}

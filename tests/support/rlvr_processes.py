"""Whole training steps on one process and on several gloo ones, with scripted rollouts.

What is sampled depends on the prompt and its place in the group, not on the process, so the run
must be the same however it is split.
"""

import multiprocessing
import os
import random
import socket
import tempfile
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trl
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

import mesotron
from mesotron.models.sharded import reshard
from mesotron.rlvr import checkpoint as resume
from mesotron.rlvr.callbacks import Spending
from mesotron.rlvr.trl_trainer import GRPOTrainer
from mesotron.watch.budget import Budget, Limits
from mesotron.watch.detectors import Event
from mesotron.watch.engine import Engine
from support.fsdp_on_cpu import shard_on_cpus, shipped_variables
from support.rlvr_tiny import TIMES, make_trainer, rows

PRELOAD = ["mesotron.rlvr.trl_trainer", "torch._dynamo", "transformers.models.llama.modeling_llama"]
GENERATE = GRPOTrainer._generate_single_turn
SAVE = {"save_strategy": "steps", "save_steps": 1}


def scripted(trainer: Any, prompt_ids: list[list[int]], *args: Any, **_: Any) -> Any:
    """In place of TRL's sampling."""
    number = args[2]
    rows = with_places(trainer, prompt_ids, number)
    return [write(ids, ids.place, number) for ids in rows], None


class Placed(list):
    """The tokens of a prompt, and which completion of it is wanted."""

    place = 0


def with_places(trainer: Any, prompt_ids: list[list[int]], number: int) -> list[Placed]:
    """Prompts with their places among `number` of each, unless they have one already."""
    start = trainer.accelerator.process_index * len(prompt_ids)
    rows = []
    for k, ids in enumerate(prompt_ids):
        row = ids
        if not isinstance(row, Placed):
            row = Placed(ids)
            row.place = (start + k) % number
        rows.append(row)

    return rows


def placing(trainer: Any, prompt_ids: list[list[int]], *args: Any, **named: Any) -> Any:
    """Our own method, told the places: the merged variant samples a group in two parts."""
    return GENERATE(trainer, with_places(trainer, prompt_ids, args[2]), *args, **named)


def write(ids: list[int], place: int, number: int) -> list[int]:
    draw = random.Random(repr((ids, place, number)))
    return [*draw.choices(range(3, 25), k=draw.randint(1, 3)), 1]


def as_lists(tensors: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: x.tolist() for name, x in tensors.items()}


def shared_folder() -> Path:
    """A new folder that all processes know."""
    PartialState()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)

    return Path(folder[0])


def fail_at_step_3(visible: bool) -> None:
    """Let the detectors report one failure, with a remedy, if it is visible to this process."""
    change = {
        "field": "optim.lr",
        "act": "multiply",
        "value": 0.5,
    }

    event = Event(
        step=3,
        detector="repetition",
        severity="stop",
        diagnosis="",
        remedy="",
        changes=(change,),
        began=2,
    )

    Engine.update = lambda self, row: [event] if visible and row["step"] == 3 else []


def run_steps(settings: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    trl.GRPOTrainer._generate_single_turn = scripted
    if parts["objective"].loss_on_momentum:
        GRPOTrainer._generate_single_turn = placing
    return train_and_gather(settings, parts)


def train_and_gather(settings: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Train on this process's share; returns gathered weights and anchor, and the log."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), parts=parts, **settings)
        trainer.train()

    found = {
        "sharded": trainer.is_fsdp_enabled,
        "rows": rows(trainer),
        "anchor": {},
    }

    found["weights"] = as_lists(whole_weights(trainer))
    if trainer.anchor is not None:
        with trainer.anchor.in_place_of(trainer.model):
            found["anchor"] = as_lists(whole_weights(trainer))

    return found


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The gathered weights; every process must call this."""
    reshard(trainer.model)
    parameters = [(name, p.detach()) for name, p in trainer.model.named_parameters()]
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in parameters}


def obey_the_first(kind: str) -> list[dict[str, Any]]:
    """Only the first process sees a failure, or the end of its budget; what each one then did."""
    trl.GRPOTrainer._generate_single_turn = scripted
    first = os.environ["RANK"] == "0"
    fail_at_step_3(visible=first and kind == "rollback")
    folder = shared_folder()
    trainer = make_trainer(folder, trl.GRPOTrainer, max_steps=4, **SAVE)
    watch = mesotron.Watch(guard="rollback", trainer=trainer)
    looks = count()  # a second per look: the first step fits, the second does not
    limit = 2.5 if first and kind == "budget" else 1e9
    budget = Budget(Limits(seconds=limit), clock=lambda: float(next(looks)))
    trainer.add_callback(Spending(budget, trainer))
    trainer.add_callback(watch)
    trainer.train()
    weights = trainer.model.lm_head.weight.detach().tolist()

    return gather_object([what_was_done(trainer, watch) | {"weights": weights}])


def what_was_done(trainer: Any, watch: Any) -> dict[str, Any]:
    return {
        "acts": [act.checkpoint for act in watch.actions],
        "steps": trainer.state.global_step,
        "rate": trainer.optimizer.param_groups[0]["initial_lr"],
    }


def fail_to_save(failing: int, number: int) -> str:
    """The error in this process when one of them cannot write its part of a checkpoint."""
    save = resume.save_state

    def fail(draft: Path, name: str, tree: Any) -> None:
        if name == f"process-{failing}":
            raise OSError(number, os.strerror(number))
        save(draft, name, tree)

    resume.save_state = fail
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.raises(ValueError, match="step 1") as caught,
    ):
        make_trainer(Path(folder), max_steps=1, **SAVE).train()

    return str(caught.value)


def assert_same_run(one: dict[str, Any], two: dict[str, Any], cosines: bool = True) -> None:
    for kind in ("weights", "anchor"):
        assert one[kind].keys() == two[kind].keys()
        for name, weight in one[kind].items():
            other = torch.tensor(two[kind][name])
            torch.testing.assert_close(other, torch.tensor(weight), rtol=0, atol=2e-5)

    for row, other in zip(one["rows"], two["rows"], strict=True):
        assert row.keys() == other.keys()
        for key in row.keys() - TIMES:
            if cosines or not key.endswith("/cosine"):
                # A step without tokens has no entropy.

                if row[key] is None:
                    same = None
                else:
                    same = pytest.approx(row[key], rel=1e-3, abs=1e-4)

                assert other[key] == same, key


def run_on(num: int, cases: list[tuple], function: str = "run_steps") -> list[dict[str, Any]]:
    """Run a function of this file with each case on `num` processes: the first one's results."""
    return run_everywhere(num, cases, function)[0]


def run_everywhere(
    num: int, cases: list[tuple], function: str, module: str = __name__, sharded: bool = False
) -> list[list[Any]]:
    """The same for a function of any module, also under FSDP2; the results of every process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    calls = [(rank, num, port, (module, function), cases, sharded) for rank in range(num)]
    with context.Pool(num) as pool:
        return pool.starmap_async(_run_cases, calls, chunksize=1).get(timeout=300)


def _run_cases(
    rank: int, num: int, port: int, function: tuple[str, str], cases: list[tuple], sharded: bool
) -> list[Any]:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }

    torch.set_num_threads(1)
    if sharded:
        shard_on_cpus()
        os.environ |= shipped_variables()

    act = getattr(import_module(function[0]), function[1])
    return [act(*case) for case in cases]

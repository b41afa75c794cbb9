"""Whole training steps on one process and on several gloo ones, with rollouts that are scripted.

What is sampled depends on the prompt and on the place in its group, never on the process: so the
same run must come out however it is divided.
"""

import multiprocessing
import os
import random
import socket
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from support.fsdp_on_cpu import shard_on_cpus, shipped_variables

PRELOAD = ["mesotron.rlvr.trainer", "torch._dynamo", "transformers.models.llama.modeling_llama"]


def scripted(trainer: Any, prompt_ids: list[list[int]], *args: Any, **_: Any) -> Any:
    """In place of TRL's sampling: short completions, drawn from what may decide about them."""
    start, number = trainer.accelerator.process_index * len(prompt_ids), args[2]
    found = [write(ids, (start + k) % number, number) for k, ids in enumerate(prompt_ids)]
    return found, None


def scripted_merged(
    sampler: Any, prompt_ids: list[list[int]], generations: int, number: int
) -> Any:
    """The same for the merged variant, whose rows are sampled by the policy and by the anchor."""
    start, ours = sampler.rank * len(prompt_ids), generations - number
    places = [(start + k) % generations for k in range(len(prompt_ids))]
    counts = [ours if place < ours else number for place in places]
    rows = zip(prompt_ids, places, counts, strict=True)
    return [write(ids, place, count) for ids, place, count in rows], None


def write(ids: list[int], place: int, number: int) -> list[int]:
    draw = random.Random(repr((ids, place, number)))
    return [*draw.choices(range(3, 25), k=draw.randint(1, 3)), 1]


def run_steps(settings: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Train on this process's share; returns weights, an anchor's weights, and the log."""
    import trl

    from mesotron.rlvr.anchor import AnchoredSampler
    from support.rlvr_tiny import make_trainer, rows

    trl.GRPOTrainer._generate_single_turn = scripted
    AnchoredSampler.merged = scripted_merged
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), parts=parts, **settings)
        trainer.train()
    weights = {n: p.detach().tolist() for n, p in trainer.model.named_parameters()}
    anchor = trainer.anchor.tensors() if trainer.anchor is not None else {}
    logs = rows(trainer) if trainer.is_world_process_zero() else []
    return {"weights": weights, "anchor": {n: w.tolist() for n, w in anchor.items()}, "rows": logs}


def obey_the_first(kind: str) -> list[dict[str, Any]]:
    """The first process alone sees a failure, or the end of its budget; what each one then did."""
    import torch.distributed as dist
    import trl

    import mesotron
    from mesotron.rlvr.spending import Spending
    from mesotron.runs import RunFolder
    from mesotron.watch.budget import Limits, Meter
    from mesotron.watch.engine import Engine
    from mesotron.watch.events import Event
    from support.rlvr_tiny import make_trainer

    trl.GRPOTrainer._generate_single_turn = scripted
    first = os.environ["RANK"] == "0"
    change = {"field": "optim.lr", "act": "multiply", "value": 0.5}
    event = Event(step=3, detector="repetition", severity="stop", diagnosis="", remedy="",
                  changes=(change,), began=2)  # fmt: skip

    def see(self: Engine, row: dict[str, float]) -> list[Event]:
        return [event] if first and kind == "rollback" and row["step"] == 3 else []

    Engine.update = see
    shared = [tempfile.mkdtemp()]
    PartialState()
    dist.broadcast_object_list(shared, src=0)
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(Path(shared[0]), trl.GRPOTrainer, **saving)
    watch = mesotron.Watch(guard="rollback", trainer=trainer)
    limit = 1e-9 if first and kind == "budget" else 1e9
    run = RunFolder.create(Path(shared[0]) / "run", {}, {}) if first else None
    trainer.add_callback(Spending(Meter(Limits(seconds=limit)), run, trainer))
    trainer.add_callback(watch)
    trainer.train()
    rate = trainer.optimizer.param_groups[0]["initial_lr"]
    mine = {"acts": [act.checkpoint for act in watch.actions], "steps": trainer.state.global_step,
            "weights": trainer.model.lm_head.weight.detach().tolist(), "rate": rate}  # fmt: skip
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def move_anchor(sharded: bool) -> dict[str, Any]:
    """An anchor's weights, in the model and after it, where the model is sharded by FSDP2."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from mesotron.rlvr.anchor import Anchor, local
    from support.rlvr_tiny import make_model

    model = make_model()
    if sharded:
        dist.init_process_group("gloo")
        fully_shard(model)
    anchor = Anchor().start(model)
    with torch.no_grad():
        for p in model.parameters():
            local(p).mul_(3.0)
    anchor.update(model, momentum=0.75)

    def whole() -> dict[str, Any]:
        found = {n: p.detach() for n, p in model.named_parameters()}
        return {n: (p.full_tensor() if sharded else p).tolist() for n, p in found.items()}

    with anchor.in_place_of(model):
        inside = whole()
    return {
        "inside": inside,
        "after": whole(),
        "shards": [w.numel() for w in anchor.weights.values()],
    }


def fail_to_save(failing: int, number: int) -> str:
    """What this process says when one of them cannot write its part of a checkpoint."""
    from mesotron.rlvr import checkpoint as resume
    from support.rlvr_tiny import make_trainer

    save = resume.save_state

    def fail(draft: Path, name: str, tree: Any) -> None:
        if name == f"process-{failing}":
            raise OSError(number, os.strerror(number))
        save(draft, name, tree)

    resume.save_state = fail
    with tempfile.TemporaryDirectory() as folder:
        settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
        trainer = make_trainer(Path(folder), **settings)
        try:
            trainer.train()
        except (OSError, ValueError) as error:
            return str(error)
        finally:
            resume.save_state = save
    return "it went on"


def run_on(num: int, cases: list[tuple], function: str = "run_steps") -> list[dict[str, Any]]:
    """Run a function of this file with each case on so many processes; the main one's results."""
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
    pipes, processes = [], []
    for rank in range(num):
        here, there = context.Pipe()
        given = (rank, num, port, (module, function), cases, there, sharded)
        process = context.Process(target=_serve, args=given, daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    try:
        answers = []
        for pipe in pipes:
            assert pipe.poll(300), "a process does not answer"
            answers.append(pipe.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = [text for ok, text in answers if not ok]
    assert not failures, failures[0]
    return [results for _, results in answers]


def _serve(
    rank: int,
    num: int,
    port: int,
    function: tuple[str, str],
    cases: list[tuple],
    pipe: Any,
    sharded: bool,
) -> None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    torch.set_num_threads(1)
    if sharded:
        shard_on_cpus()
        os.environ |= shipped_variables()
    try:
        act = getattr(import_module(function[0]), function[1])
        pipe.send((True, [act(*case) for case in cases]))
    except Exception:
        pipe.send((False, f"process {rank} of {num}\n{traceback.format_exc()}"))
    pipe.recv()  # stay for the others, until killed

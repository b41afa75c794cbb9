"""Real gloo processes that run named functions together, started once for many tests."""

import importlib
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)  # of a collective: a hang fails the test, it does not stop the run
# Slow imports; the server cannot import modules of the tests themselves.
PRELOAD = [
    "mesotron.optim.sharding.step",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "transformers.models.qwen2.modeling_qwen2",
]


class Ranks:
    """`ranks(function, *args)` runs a function of `sharded_checks` on every rank and returns their
    results. Processes are forked from a server that has imported torch once, which is cheap."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory()
        uri = Path(self._folder.name, "rendezvous").as_uri()
        self._pipes, self._processes = [], []
        for rank in range(self.num):
            pipe, remote = context.Pipe()
            args = (rank, self.num, uri, remote)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)

    def __call__(self, function: str, *args) -> list:
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(2 * TIMEOUT.total_seconds()), "a rank does not respond"
            answers.append(pipe.recv())
        failures = [text for ok, text in answers if not ok]
        if failures:
            self.stop()
            self._start()  # the ranks may be out of step with one another
            raise AssertionError(failures[0])
        return [result for _, result in answers]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, num: int, uri: str, pipe) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else FSDP2 shards over the GPUs of the machine
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=uri, rank=rank, world_size=num, timeout=TIMEOUT)
    checks = importlib.import_module("support.sharded_checks")
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, getattr(checks, function)(*args)))
        except Exception:
            pipe.send((False, f"rank {rank} of {num}\n{traceback.format_exc()}"))

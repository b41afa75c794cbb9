"""Real gloo processes that run named functions together, started once for many tests."""

import multiprocessing
import os
import tempfile
from datetime import timedelta
from importlib import import_module
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

        ranks = context.SimpleQueue()
        for rank in range(self.num):
            ranks.put(rank)

        self._pool = context.Pool(self.num, _join, (ranks, self.num, uri))

    def __call__(self, function: str, *args) -> list:
        calls = self._pool.starmap_async(_run, [(function, args)] * self.num, chunksize=1)
        try:
            return [result for _, result in sorted(calls.get(120), key=lambda x: x[0])]
        except Exception:
            self.stop()
            self._start()  # the ranks may be out of step with one another
            raise

    def stop(self) -> None:
        self._pool.terminate()
        self._folder.cleanup()


def _join(ranks, num: int, uri: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else FSDP2 shards over the GPUs of the machine
    torch.set_num_threads(1)

    join = {
        "rank": ranks.get(),
        "world_size": num,
        "timeout": TIMEOUT,
    }

    dist.init_process_group("gloo", init_method=uri, **join)


def _run(function: str, args: tuple) -> tuple:
    dist.barrier()  # so that every rank takes one of the calls
    return dist.get_rank(), getattr(import_module("support.sharded_checks"), function)(*args)

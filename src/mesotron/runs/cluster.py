"""Commands on a Ray cluster: a `CommandPool` whose processes run where CPUs and GPUs are free.

Each command is the child of a Ray actor. Every node has mesotron installed and sees the folders
under the same path. A command that dies with its node is `lost`, and its owner starts it again.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from logging import ERROR
from pathlib import Path
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from mesotron.runs.links import open_own
from mesotron.runs.workers import CommandPool, Job

MAX_LOSSES = 3  # of one command, before it counts as the cause
CONNECT_SECONDS = 10
STOP_SECONDS = 5
PR_SET_PDEATHSIG = 1  # of prctl: a signal to a child whose parent ends


class RayPool(CommandPool):
    """Runs commands on the cluster at `address` (None: RAY_ADDRESS, or this machine's).

    Args:
        num_workers: most commands at once; None fills the cluster, also as it grows.
        threads, gpus: CPUs and GPUs of each command; a fraction of a GPU shares it.
    """

    def __init__(
        self, address: str | None, num_workers: int | None, threads: int, gpus: float
    ) -> None:
        address = address or os.environ.get("RAY_ADDRESS") or "auto"
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            if port.isdecimal():  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            ray.init(address, ignore_reinit_error=True, log_to_driver=False, logging_level=ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            hint = "start one with `ray start --head`, or give --on ray:ADDRESS"
            raise ValueError(f"no Ray cluster at {address}: {hint} ({error})") from None

        self._limit = num_workers
        self._threads = threads
        self._gpus = gpus if ray.cluster_resources().get("GPU") else 0.0
        self._losses: Counter[str] = Counter()
        super().__init__(self._capacity())

    def _capacity(self) -> int:
        total = ray.cluster_resources()
        fit = total.get("CPU", 0) / self._threads
        if self._gpus:
            fit = min(fit, total.get("GPU", 0) / self._gpus)

        return self._limit or max(1, int(fit))

    @property
    def has_free_slot(self) -> bool:
        self.num_workers = self._capacity()  # nodes come and go
        return super().has_free_slot

    def start(
        self,
        key: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        keep_open: Sequence[int] = (),
    ) -> Job:
        if "PYTHONPATH" in os.environ:
            path = {"PYTHONPATH": os.environ["PYTHONPATH"]}
        else:
            path = {}

        remote: Any = ray.remote(Attendant)
        place = {
            "num_cpus": self._threads,
            "num_gpus": self._gpus,
            "scheduling_strategy": "SPREAD",
        }

        actor = remote.options(max_concurrency=2, **place).remote()
        process: Any = RemoteProcess(actor, list(command), log.absolute(), {**path, **env})
        job = Job(key, process, slot=len(self.jobs), log=log, start=monotonic())
        self.jobs.append(job)

        return job

    def take_ended(self) -> list[Job]:
        ended = super().take_ended()
        for job in ended:
            process: Any = job.process
            self._losses[job.key] += process.lost
            job.lost = process.lost and self._losses[job.key] <= MAX_LOSSES

        return ended


class RemoteProcess:
    """What `CommandPool` needs of `subprocess.Popen`."""

    def __init__(self, actor: Any, command: list[str], log: Path, env: dict[str, str]) -> None:
        self.returncode: int | None = None
        self.lost = False
        self._actor = actor
        self._log = log
        self._result = actor.run.remote(command, log, env, os.getcwd())

    def poll(self) -> int | None:
        if self.returncode is None and ray.wait([self._result], timeout=0)[0]:
            try:
                self.returncode = ray.get(self._result)
            except RayActorError:
                self.returncode = -signal.SIGKILL
                self.lost = True
            except RayError as error:  # such as a folder that the node does not see
                self.returncode = 1
                with open_own(self._log, "a") as log:
                    log.write(f"{error}\n")

            self.kill()

        return self.returncode

    def terminate(self) -> None:
        if not ray.wait([self._actor.terminate.remote()], timeout=STOP_SECONDS)[0]:
            self.kill()  # it still waits for a free node

    def kill(self) -> None:
        ray.kill(self._actor)

    def wait(self) -> None:
        """Nothing to wait for: the command dies with its actor."""


class Attendant:
    """The actor beside a command; it has a second thread, which can stop the command."""

    def run(self, command: list[str], log: Path, env: dict[str, str], folder: str) -> int:
        # Or a node that is cut off would go on writing to the run folder.
        die_too = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
        with open_own(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **env},
                cwd=folder,
                preexec_fn=die_too if sys.platform == "linux" else None,
            )

        return self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

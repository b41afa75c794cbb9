"""Worker processes with a deadline: a question is answered in time, or its worker is killed.

Workers are fresh interpreters that speak JSON lines over pipes. So they can be started from
threads, notebooks, forked and daemonic processes, need no `__main__` guard, and unpickle nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("verify_worker.py")
START_SECONDS = 120.0  # for a slow disk: sympy is large
# A worker ends itself after its timeout in processor time; on a busy machine that takes longer on
# the clock, and only after this many timeouts does the parent kill it.
PATIENCE = 4

Request = dict[str, str]
TOO_LONG: dict[str, Any] = {"value": None, "error": "TooLong"}


class Worker:
    """One process; asked one question at a time."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        # -P: the folder of the script has modules named like those of the standard library.
        command = [sys.executable, "-P", str(WORKER), str(timeout)]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the parent, which may finish its step first
        )
        self.replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        if not self._reply(START_SECONDS):
            self.stop()
            raise ValueError(
                "math-verify does not start in a process of its own: "
                f"run {WORKER.name} by hand to see why"
            )

    def send(self, request: Request) -> bool:
        """Put a question; False if the worker has died since the last one."""
        stdin = self.process.stdin
        assert stdin is not None  # it was asked for as a pipe
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except OSError:
            self.stop()
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """The reply; without one the worker is dead.

        Returns:
            `TOO_LONG` if the worker ran out of its processor time, which it would again. None if
            the clock ran out, or something else ended it: that says nothing about the question.
        """
        reply = self._reply(PATIENCE * self.timeout)
        if reply:
            return json.loads(reply)
        self.stop()
        return TOO_LONG if self.process.returncode == -signal.SIGPROF else None

    @property
    def alive(self) -> bool:
        """Whether it can be asked again."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End the process at once, whatever it is doing."""
        stop_process(self.process)

    def _listen(self) -> None:
        # A thread, since a pipe cannot be read with a deadline on every system.
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.replies.put(line)
        self.replies.put("")  # end of file: it died

    def _reply(self, timeout: float) -> str:
        try:
            return self.replies.get(timeout=timeout)
        except queue.Empty:
            return ""


def stop_process(process: subprocess.Popen[str]) -> None:
    """Kill a process and collect it."""
    process.kill()
    process.wait()
    if process.stdin is not None:
        try:
            process.stdin.close()
        except OSError:  # an unsent question: nobody is left to read it
            process.stdin = None


class WorkerPool:
    """A few workers, started when first needed and replaced when killed; used from any thread.

    Args:
        timeout: seconds of processor time that one question may take.
        num_workers: most processes at once.
    """

    def __init__(self, timeout: float, num_workers: int) -> None:
        self.timeout = timeout
        self.num_workers = num_workers
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        # One slot for each process that may run; the last one used is taken first.
        self._slots: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(self.num_workers):
            self._slots.put(None)
        self._processes: set[subprocess.Popen[str]] = set()
        self._finalizer = weakref.finalize(self, _stop_all, self._processes, self._owner)

    def ask(self, requests: Sequence[Request]) -> list[dict[str, Any] | None]:
        """Replies in the order of the requests; None where there is no verdict this time."""
        if not requests:
            return []
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                "answers that are not plain numbers are compared by math-verify: "
                'pip install "mesotron[rlvr]"'
            )
        if os.getpid() != self._owner:
            self._reset()  # forked: the workers belong to the parent
        if len(requests) == 1:
            return [self._ask(requests[0])]
        with ThreadPoolExecutor(min(self.num_workers, len(requests))) as threads:
            return list(threads.map(self._ask, requests))

    def _ask(self, request: Request) -> dict[str, Any] | None:
        slots = self._slots  # a close in between brings others
        worker = slots.get()
        try:
            while worker is None or not worker.send(request):
                worker = self._start()
            return worker.receive()
        finally:
            slots.put(worker if worker is not None and worker.alive else None)

    def _start(self) -> Worker:
        dead = [process for process in list(self._processes) if process.poll() is not None]
        self._processes.difference_update(dead)
        worker = Worker(self.timeout)
        self._processes.add(worker.process)
        return worker

    def close(self) -> None:
        """End every worker; a later question starts new ones."""
        if os.getpid() == self._owner:
            self._finalizer()
        self._reset()


def _stop_all(processes: set[subprocess.Popen[str]], owner: int) -> None:
    if os.getpid() == owner:
        for process in list(processes):
            stop_process(process)

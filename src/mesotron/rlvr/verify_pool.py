"""Worker processes with a deadline: a question is answered in time, or its worker is killed.

Workers are fresh interpreters that speak JSON lines over pipes. So they can be started from
threads, notebooks, forked and daemonic processes, need no `__main__` guard, and unpickle nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
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
WATCHDOG_FACTOR = 4  # a worker whose parent is gone ends itself after so many timeouts

Request = dict[str, str]


class Worker:
    """One process; asked one question at a time."""

    def __init__(self, timeout: float) -> None:
        watchdog = str(WATCHDOG_FACTOR * timeout + 1)
        # -P: the folder of the script has modules named like those of the standard library.
        command = [sys.executable, "-P", str(WORKER), watchdog]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        self.replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        if not self._reply(START_SECONDS):
            self.stop()
            raise ValueError(
                "math-verify does not start in a process of its own: "
                f"run {WORKER.name} by hand to see why"
            )

    def ask(self, request: Request, timeout: float) -> dict[str, Any] | None:
        """The reply, or None if there is none in time; the worker is then dead."""
        stdin = self.process.stdin
        assert stdin is not None  # it was asked for as a pipe
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except OSError:  # it died since the last question
            self.stop()
            return None
        reply = self._reply(timeout)
        if not reply:
            self.stop()
            return None
        return json.loads(reply)

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
        for line in self.process.stdout:
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
        timeout: seconds that one question may take.
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
        """Replies in the order of the requests; None where the deadline passed."""
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
        worker = self._slots.get()
        try:
            if worker is None or not worker.alive:
                worker = Worker(self.timeout)
                self._processes.add(worker.process)
            return worker.ask(request, self.timeout)
        finally:
            if worker is not None and not worker.alive:
                self._processes.discard(worker.process)
                worker = None
            self._slots.put(worker)

    def close(self) -> None:
        """End every worker; a later question starts new ones."""
        if os.getpid() == self._owner:
            self._finalizer()
        self._reset()


def _stop_all(processes: set[subprocess.Popen[str]], owner: int) -> None:
    if os.getpid() == owner:
        for process in processes:
            stop_process(process)
        processes.clear()

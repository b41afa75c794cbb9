"""Child processes: functions called in persistent workers, and commands run side by side.

`WorkerPool` calls functions, named as "module:function", in fresh interpreters: they import only
what they need and need no `__main__` guard. `CommandPool` runs commands, each with its own log and
GPU. Standard library only: this file is also the script that a worker runs.
"""

import json
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name as resolve
from time import monotonic
from typing import IO, Any, Literal, Self

START_SECONDS = 120.0
EXIT_SECONDS = 1.0  # for imports from a slow disk, and to end
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
GPUS = Path("/proc/driver/nvidia/gpus")
LOG_TAIL = 4096  # bytes


class WorkerDied(RuntimeError):
    """The worker ended during a call (`returncode` is negative for a signal), or it timed out."""

    def __init__(self, target: str, returncode: int, timed_out: bool = False) -> None:
        how = "timed out" if timed_out else describe_exit(returncode)
        super().__init__(f"worker process {how} in {target}")
        self.returncode = returncode
        self.timed_out = timed_out


class Worker:
    """One persistent child process; takes one call at a time, sent by pickle. It runs in its own
    session: Ctrl-C reaches the parent only. What its functions print goes to stderr.

    Args:
        env: environment variables; None inherits all. The parent's `sys.path` is always passed on.
        setup: (target, *args) of a call to make first; a failure is a ValueError.
        replies: "json" for workers that handle untrusted data: nothing they send is unpickled.
        stderr: a file, `subprocess.DEVNULL`, or None for the parent's.
    """

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        setup: tuple[Any, ...] | None = None,
        replies: Literal["pickle", "json"] = "pickle",
        stderr: int | IO[Any] | None = None,
    ) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._connection, its_end = multiprocessing.Pipe()
        self.process = subprocess.Popen(
            # -P: this folder has modules named like those of the standard library.
            [sys.executable, "-P", __file__, str(its_end.fileno()), replies],
            stdin=subprocess.DEVNULL,
            stdout=2 if stderr is None else stderr,
            stderr=stderr,
            env={**(os.environ if env is None else env), "PYTHONPATH": paths},
            start_new_session=True,
            pass_fds=(its_end.fileno(),),
        )

        its_end.close()
        self._loads = json.loads if replies == "json" else pickle.loads
        self._target = ""

        try:
            if setup:
                self.call(setup[0], *setup[1:], timeout=START_SECONDS)
        except (RuntimeError, ValueError) as error:
            self.kill()
            raise ValueError(f"worker process does not start: {error}") from error

    def call(self, target: str, *args: Any, timeout: float | None = None) -> Any:
        """Call "module:function" in the worker. Its ValueErrors are raised here, other errors as
        RuntimeError with the traceback; WorkerDied if it ends or takes `timeout` seconds."""
        if not self.send(target, args):
            raise WorkerDied(target, self.process.returncode)
        return self.receive(timeout)

    def send(self, target: str, args: Sequence[Any]) -> bool:
        """Start a call; False if the worker had died before."""
        self._target = target
        try:
            self._connection.send_bytes(pickle.dumps((target, tuple(args))))
        except OSError:
            self.kill()
            return False

        return True

    def receive(self, timeout: float | None = None) -> Any:
        timed_out = False
        try:
            timed_out = not self._connection.poll(timeout)
            if timed_out:
                raise EOFError
            kind, value = self._loads(self._connection.recv_bytes())
        except (OSError, EOFError):
            if not timed_out:  # it is ending by itself: learn how
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(EXIT_SECONDS)

            self.kill()
            raise WorkerDied(self._target, self.process.returncode, timed_out) from None

        if kind == "ValueError":
            raise ValueError(value)
        if kind == "error":
            raise RuntimeError(f"in a worker process:\n{value}")

        return value

    def kill(self) -> None:
        _kill(self.process)
        self._connection.close()


class WorkerPool:
    """Persistent workers, started when first needed and replaced when they die. Thread-safe.

    Args:
        num_workers: most processes at once; 0 makes every call in this process.
        options: env, setup, replies and stderr of `Worker`.
    """

    def __init__(self, num_workers: int, **options: Any) -> None:
        self.num_workers = num_workers
        self._options = options
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._workers: list[Worker | None] = [None] * self.num_workers
        self._locks = [threading.Lock() for _ in self._workers]

        # Last in, first out: no more processes start than the load needs.
        self._idle: queue.LifoQueue[int] = queue.LifoQueue()
        for index in reversed(range(self.num_workers)):
            self._idle.put(index)

        self._threads: ThreadPoolExecutor | None = None
        self.processes: set[subprocess.Popen[bytes]] = set()
        weakref.finalize(self, _kill_all, self.processes, self._owner)

    def submit(
        self, target: str, *args: Any, timeout: float | None = None, worker: int | None = None
    ) -> Future[Any]:
        """Call "module:function" in a free worker, or in worker number `worker`; see `Worker.call`.
        A worker that died is replaced at the next call; its modules and state start afresh."""
        if os.getpid() != self._owner:
            self._reset()  # forked: the processes belong to the parent

        if not self.num_workers:
            return call_here(target, args)

        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.num_workers)

        return self._threads.submit(self._call, target, args, timeout, worker)

    def _call(
        self, target: str, args: Sequence[Any], timeout: float | None, only: int | None
    ) -> Any:
        index = self._idle.get() if only is None else only
        try:
            with self._locks[index]:
                worker = self._workers[index]
                if worker is not None and worker.send(target, args):
                    return worker.receive(timeout)

                worker = self._replace(index)
                return worker.call(target, *args, timeout=timeout)
        finally:
            if only is None:
                self._idle.put(index)

    def _replace(self, index: int) -> Worker:
        ended = set()
        for process in set(self.processes):
            if process.poll() is not None:
                ended.add(process)

        self.processes -= ended

        worker = Worker(**self._options)
        self._workers[index] = worker
        self.processes.add(worker.process)

        return worker

    def map(self, target: str, jobs: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
        """Call `target` with each tuple of arguments; yields (index, result) as they finish."""
        if not self.num_workers:
            for index, args in enumerate(jobs):
                yield index, resolve(target)(*args)
            return

        futures = {self.submit(target, *args): index for index, args in enumerate(jobs)}
        for future in as_completed(futures):
            yield futures[future], future.result()

    def each(self, target: str, args: Sequence[Sequence[Any] | None]) -> list[Any]:
        """Call worker k with the k-th arguments, None for no call; results in that order."""
        futures: dict[int, Future[Any]] = {}
        for index, given in enumerate(args):
            if given is not None:
                futures[index] = self.submit(target, *given, worker=index)

        results: list[Any] = [None] * len(args)
        for index, future in futures.items():
            results[index] = future.result()

        return results

    def close(self) -> None:
        if os.getpid() != self._owner:
            return

        _kill_all(self.processes, self._owner)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def call_here(target: str, args: Sequence[Any]) -> Future[Any]:
    """A call that is made at once in this process, as the future of a worker's."""
    future: Future[Any] = Future()
    try:
        future.set_result(resolve(target)(*args))
    except Exception as error:
        future.set_exception(error)

    return future


@dataclass
class Job:
    """A running or ended command of a pool."""

    key: str
    process: subprocess.Popen[bytes]
    slot: int
    log: Path
    start: float  # monotonic clock
    lost: bool = False  # it died with its machine: start it again

    @property
    def failure(self) -> str:
        """Why an ended command failed: the last line of its log, or how it ended."""
        how = describe_exit(self.process.returncode)
        if self.process.returncode < 0:
            return how

        return last_line(self.log) or how


class CommandPool:
    """Runs commands side by side on this machine, one in each slot.

    Args:
        num_workers: most commands at once.
        gpus: names as in CUDA_VISIBLE_DEVICES; slots take them in turn.
    """

    def __init__(self, num_workers: int, gpus: Sequence[str] = ()) -> None:
        self.num_workers = num_workers
        self.gpus = tuple(gpus)
        self.jobs: list[Job] = []
        self._terminated = False

    @property
    def has_free_slot(self) -> bool:
        return len(self.jobs) < self.num_workers

    def start(
        self,
        key: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        keep_open: Sequence[int] = (),
    ) -> Job:
        taken = {job.slot for job in self.jobs}
        slot = next(k for k in range(self.num_workers) if k not in taken)

        env = {**os.environ, **env}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]

        from mesotron.runs.links import open_own  # not above: a worker would start later

        with open_own(log, "ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=keep_open,
            )

        job = Job(key, process, slot, log, start=monotonic())
        self.jobs.append(job)

        return job

    def take_ended(self) -> list[Job]:
        ended = [job for job in self.jobs if job.process.poll() is not None]
        self.jobs = [job for job in self.jobs if job not in ended]
        return ended

    def terminate(self) -> None:
        """Send SIGTERM once, so that runs save and stop; a second signal would end them unsaved."""
        if self._terminated:
            return

        self._terminated = True
        for job in self.jobs:
            job.process.terminate()

    def kill(self) -> None:
        for job in self.jobs:
            _kill(job.process)
        self.jobs = []


def num_cores() -> int:
    if sys.platform == "linux":  # a container may use fewer than there are
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def list_gpus() -> list[str]:
    """GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; loads no library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]

    number = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    return list(map(str, range(number)))


def describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"

    names = {one.value: one.name for one in signal.Signals}
    return f"was killed by {names.get(-returncode, f'signal {-returncode}')}"


def last_line(log: Path) -> str:
    if not log.is_file():
        return ""

    from mesotron.runs.links import open_own

    with open_own(log, "rb") as file:
        tail = file.read()[-LOG_TAIL:].decode(errors="replace")

    return tail.rstrip().rpartition("\n")[2].strip()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _kill_all(processes: set[subprocess.Popen[bytes]], owner: int) -> None:
    if os.getpid() == owner:
        for process in list(processes):
            _kill(process)


def _serve(descriptor: int, codec: str) -> None:
    """The loop of a worker: receive a call, send its result."""
    connection = Connection(descriptor)

    def encode(message: tuple[str, Any]) -> bytes:
        if codec == "json":
            return json.dumps(message).encode()

        return pickle.dumps(message)

    with suppress(EOFError, OSError):  # the parent is gone
        while True:
            message = connection.recv_bytes()
            try:
                target, args = pickle.loads(message)
                reply = encode(("result", resolve(target)(*args)))
            except ValueError as error:  # meant for the user
                reply = encode(("ValueError", str(error)))
            except Exception:
                reply = encode(("error", traceback.format_exc()))

            connection.send_bytes(reply)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])

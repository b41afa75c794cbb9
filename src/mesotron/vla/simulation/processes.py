"""A few processes that simulate while this one thinks: fresh interpreters, asked over pipes.

They import neither torch nor jax, share no GPU, and need no `__main__` guard in a user's script.
One worker is no process at all: the work is then done here.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from importlib import import_module
from types import TracebackType
from typing import IO, Any, Self

LENGTH = struct.Struct("<Q")
MODULE = "mesotron.vla.simulation.worker"


def count_workers(wanted: int | None) -> int:
    """`wanted`, or as many as this process may use processors if it is None."""
    if wanted is not None:
        if wanted < 1:
            raise ValueError(
                f"--workers {wanted} must be at least 1: one simulates in this process"
            )
        return wanted
    if sys.platform == "linux":  # a container may use fewer than there are
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve(target: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, function = target.split(":")
    return getattr(import_module(module), function)


def send(pipe: IO[bytes], message: object) -> None:
    """Write one message with its length before it."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """Read one message.

    Raises:
        EOFError: the other side has ended.
    """
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return pickle.loads(pipe.read(LENGTH.unpack(head)[0]))


class Worker:
    """One process, which keeps its worlds between questions; asked one at a time."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **one_thread, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self._thread = ThreadPoolExecutor(1)

    def ask(self, target: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Call `module:function` there."""
        return self._thread.submit(self._ask, target, arguments)

    def _ask(self, target: str, arguments: tuple[Any, ...]) -> Any:
        assert self.process.stdin is not None  # both were asked for as pipes
        assert self.process.stdout is not None
        try:
            send(self.process.stdin, (target, arguments))
            kind, value = receive(self.process.stdout)
        except (EOFError, BrokenPipeError):
            code = self.process.wait()
            raise RuntimeError(f"a simulating process ended with code {code} in {target}") from None
        if kind == "refused":
            raise ValueError(value)
        if kind == "raised":
            raise RuntimeError(f"in a simulating process:\n{value}")
        return value

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self._thread.shutdown()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Here:
    """The same for work that is done in this process."""

    def ask(self, target: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Call `module:function` now."""
        done: Future[Any] = Future()
        done.set_result(resolve(target)(*arguments))
        return done

    def stop(self) -> None:
        """Nothing to end."""


class Workers:
    """Several workers, ended when the block is left.

    Args:
        wanted: how many; None for as many as there are processors.

    Example:
        >>> with Workers(1) as workers:
        ...     dict(workers.map("operator:neg", [(1,), (2,)]))
        {0: -1, 1: -2}
    """

    def __init__(self, wanted: int | None) -> None:
        count = count_workers(wanted)
        self.members: list[Worker | Here] = [Here()]
        if count > 1:
            self.members = [Worker() for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self.members:
            member.stop()

    def map(self, target: str, jobs: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Do every job wherever there is room; yields (number of the job, result) when done."""
        waiting = iter(enumerate(jobs))
        running: dict[Future[Any], tuple[int, int]] = {}

        def start(member: int) -> None:
            for number, arguments in waiting:
                running[self.members[member].ask(target, arguments)] = number, member
                return

        for member in range(len(self.members)):
            start(member)
        while running:
            done = next(as_completed(running))
            number, member = running.pop(done)
            yield number, done.result()
            start(member)

    def each(self, target: str, arguments: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Ask each worker its own question, None for no question; answers in their order."""
        asked = [
            None if given is None else member.ask(target, given)
            for member, given in zip(self.members, arguments, strict=True)
        ]
        return [None if future is None else future.result() for future in asked]

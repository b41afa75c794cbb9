"""`max_staleness=1`: the next rollout is sampled and scored while a step trains.

    ready = ahead.next(rows)    the rollout of the rows before these; that of these begins

A worker thread samples with a copy of the weights as they are now, with random numbers of its own,
and calls the rewards. So every rollout but the first is exactly one rollout old, whichever of the
two takes longer: a run does not depend on the clock, and a checkpoint that holds the finished
rollout resumes it exactly. Nothing is ready for the first step, which samples its own rows; the
second step samples them again.

The loss weighs each token by the ratio of the policy of now to the copy, truncated
(`grpo.correct_sampler`).
"""

import copy
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from mesotron.models.adapters import trainable
from mesotron.models.sharded import as_loaded
from mesotron.rlvr.grpo import Rollout, Row, Scored

log = logging.getLogger("mesotron")

WAITING_FOR = "the rollout that is sampled ahead"
SAVING_WAITS = 60.0  # seconds for the rollout ahead, which the checkpoint should hold


@dataclass(frozen=True, kw_only=True)
class RolloutAhead:
    """A rollout with its rewards, and what was logged on the way."""

    rows: Sequence[Row]
    rollout: Rollout
    scored: Scored
    metrics: dict[str, list[float]]
    columns: dict[str, list[Any]]  # of TRL's table, by reward functions
    step: int  # optimizer steps before it was sampled
    micro_batches: int  # the same in micro-batches
    tokens: int  # read and written

    def to_plain(self) -> dict[str, Any]:
        """What a checkpoint holds; `scored` follows from the rewards."""
        rollout = self.rollout
        return {
            "rows": to_plain(self.rows),
            "completions": to_plain(rollout.completions),
            "prompt_tokens": to_plain(rollout.prompt_tokens),
            "completion_tokens": to_plain(rollout.completion_tokens),
            "sampler_logprobs": to_plain(rollout.sampler_logprobs),
            "rewards": self.scored.by_function,
            "metrics": to_plain(self.metrics),
            "columns": to_plain(self.columns),
            "step": self.step,
            "micro_batches": self.micro_batches,
            "tokens": self.tokens,
        }


def plain_or_none(pending: Future[RolloutAhead] | None) -> dict[str, Any] | None:
    """What a checkpoint holds of a rollout ahead; None if it failed, or hangs."""
    if pending is None:
        return None
    if not pending.done():
        log.warning("%s is not finished: the checkpoint begins it again", WAITING_FOR)
        return None

    return None if pending.exception() else pending.result().to_plain()


def rollout_of(plain: dict[str, Any]) -> Rollout:
    """The rollout that `RolloutAhead.to_plain` saved."""
    return Rollout(
        prompts=[row["prompt"] for row in plain["rows"]],
        completions=plain["completions"],
        prompt_tokens=plain["prompt_tokens"],
        completion_tokens=plain["completion_tokens"],
        sampler_logprobs=plain["sampler_logprobs"],
    )


def to_plain(value: Any) -> Any:
    """Lists, dicts and numbers in place of their relatives, as checkpoints take them."""
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(item) for item in value]

    return value


SampleAhead = Callable[[Callable[[], None]], RolloutAhead]


@dataclass(frozen=True)
class AheadJob:
    """A rollout in the worker's queue."""

    work: SampleAhead
    future: Future[RolloutAhead] = field(default_factory=Future)
    has_sampled: threading.Event = field(default_factory=threading.Event)


class Ahead:
    """One rollout in a worker thread, begun with each that is used.

    Args:
        prepare: takes over the weights of now, in the main thread, and returns the work, which
            gets a function to call when it has sampled and goes on to the rewards.
        device: where the work runs. On a GPU it samples beside the training, on a stream of its
            own. On a CPU both would take their turns at Python's lock, and the rewards would begin
            when training is over: there training waits until it has sampled.
    """

    def __init__(self, prepare: Callable[[list[Row]], SampleAhead], device: torch.device) -> None:
        self.prepare = prepare
        self.pending: Future[RolloutAhead] | None = None

        # Surrounds each wait for the worker, with a name.
        self.waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self._jobs: queue.Queue[AheadJob] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._stream: Any = None
        if device.type == "cuda":
            # The small kernels of sampling go first where they meet the large ones of training.
            self._stream = torch.cuda.Stream(device, priority=-1)

    def next(self, rows: list[Row], goes_on: bool = True) -> RolloutAhead:
        """The rollout that is ready; that of these rows begins if training goes on."""
        if self.pending is None:
            self._begin(rows)

        assert self.pending is not None
        with self.waiting(WAITING_FOR):
            ready = self.pending.result()

        self.pending = None
        if goes_on:
            self._begin(rows)

        return ready

    def settle(self, seconds: float | None = None) -> None:
        """Wait until the worker is idle: it shares the tokenizer and the rewards. After so many
        seconds go on without it; without a number of them, the run's limits end the wait."""
        if self.pending is None:
            return

        if seconds is not None:
            wait([self.pending], seconds)
            return

        with self.waiting(WAITING_FOR):
            wait([self.pending])

    def load(self, sampled: RolloutAhead | None) -> None:
        """Continue with a rollout from a checkpoint."""
        self.drop()
        if sampled is not None:
            self.pending = Future()
            self.pending.set_result(sampled)

    def drop(self) -> None:
        """Forget the pending rollout, once the worker is done with it."""
        self.settle()
        self.pending = None

    def _begin(self, rows: list[Row]) -> None:
        work = self.prepare(rows)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # for the weights

        if self._thread is None:
            # A daemon: the process must be able to end while a reward hangs.
            self._thread = threading.Thread(target=self._work, name="ahead", daemon=True)
            self._thread.start()

        job = AheadJob(work)
        self.pending = job.future
        self._jobs.put(job)
        if self._stream is None:
            job.has_sampled.wait()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                with torch.no_grad(), torch.cuda.stream(self._stream):
                    ready = job.work(job.has_sampled.set)
                    if self._stream is not None:
                        self._stream.synchronize()
            except BaseException as error:  # raised in the main thread
                job.future.set_exception(error)
            else:
                job.future.set_result(ready)
            finally:
                job.has_sampled.set()


def copy_policy(model: Any) -> Any:
    """A copy for another thread; weights that do not train are shared."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    with as_loaded(model):
        return copy.deepcopy(model, shared)


@torch.no_grad()
def take_weights(copied: nn.Module, model: nn.Module) -> None:
    old = [p for _, p in trainable(copied)]
    new = [p for _, p in trainable(model)]
    torch._foreach_copy_(old, new)  # pyright: ignore

"""Compares answers: numbers exactly, words as words, everything else by math-verify.

Answers come from a model and golds from files, so both are untrusted. What reaches math-verify is
short and screened by bounded patterns (`screen`), runs in a worker process with limited time and
memory (`expressions`), and is never evaluated as code.
"""

import importlib.util
import logging
import math
import os
import signal
import subprocess
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from mesotron.answers import expressions
from mesotron.answers.colons import compare_colons, is_clock_time
from mesotron.answers.expressions import Request
from mesotron.answers.intervals import in_one_notation, is_set_and_tuple
from mesotron.answers.latex import MAX_LENGTH
from mesotron.answers.numbers import Number, read_abbreviated, read_number, same_number
from mesotron.answers.screen import (
    expression_and_unit,
    expression_of,
    is_costly,
    is_date,
    is_hexadecimal,
    letters,
    literal,
    screened,
    unfinished,
    words,
)
from mesotron.answers.units import same_unit
from mesotron.runs.workers import ONE_THREAD, WorkerDied, WorkerPool

log = logging.getLogger("mesotron")

CACHE_SIZE = 16_384  # replies kept; a string that hangs costs its timeout once
# A worker ends itself after its timeout in CPU time. On a busy machine that takes longer on the
# clock, and only after this many timeouts does the parent kill it.
WALL_TIMEOUTS = 4
# CPU time of a batch: so many timeouts, and what an ordinary answer takes to be read and compared.
BATCH_TIMEOUTS = 6
SECONDS_PER_ANSWER = 0.2
READING = 0.5  # of that time at most for reading; the rest is for comparing
START_SECONDS = 1.0  # of CPU time to import sympy, when a worker that ran out of time is replaced
# Environment variables a worker gets: no tokens or keys.
INHERITED = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "SYSTEMROOT", "TMPDIR")
PREPARE = f"{expressions.__name__}:prepare_worker"
ANSWER = f"{expressions.__name__}:answer_request"

TOO_LONG: dict[str, Any] = {"value": None, "error": "TooLong"}


@dataclass
class CpuAllowance:
    """CPU seconds that the workers may use for one batch, and what was left out without them."""

    seconds: float
    used: float = 0.0
    skipped: set[Request] = field(default_factory=set)

    def covers(self, share: float) -> bool:
        """Whether less than this share of the allowance was used."""
        return self.used < share * self.seconds


class Comparison(NamedTuple):
    """An answer and its gold: the key of each, None if it cannot be read."""

    key: str | None
    gold_key: str | None
    same: bool


class Verifier:
    r"""Decides whether answers are the same. Can be shared between threads.

    Args:
        timeout: seconds of CPU time math-verify may take to read an answer or compare a pair.
            An answer that takes longer is unreadable; a pair that does is not the same. A whole
            batch may take `BATCH_TIMEOUTS` of them and `SECONDS_PER_ANSWER`; the rest of it is
            compared as text.
        num_workers: maximum number of worker processes. None is started for numbers and words.

    Example:
        >>> with Verifier() as verifier:
        ...     verifier.same(["1,080", r"\frac12", "71"], ["1080", "0.5", "72"])
        [True, True, False]
    """

    def __init__(self, timeout: float = 5.0, num_workers: int | None = None) -> None:
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout={timeout} must be more than 0 seconds, and finite")

        self.timeout = timeout
        self.num_workers = num_workers or min(4, os.cpu_count() or 1)

        inherited = {}
        for name in INHERITED:
            if name in os.environ:
                inherited[name] = os.environ[name]

        self._pool = WorkerPool(
            self.num_workers,
            env=inherited | ONE_THREAD,
            setup=(PREPARE,),
            replies="json",
            stderr=subprocess.DEVNULL,
        )
        self._replies: OrderedDict[Request, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._warned = False

    def __reduce__(self) -> tuple[type["Verifier"], tuple[float, int]]:
        # Another process gets its own verifier with its own workers.
        return (Verifier, (self.timeout, self.num_workers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.close()

    def same(self, answers: Sequence[str], golds: Sequence[str]) -> list[bool]:
        """Whether each answer equals its gold.

        Two plain numbers are compared exactly. A gold in words is compared as words. Arithmetic
        that was not carried out, such as 48 + 24 or 3!, does not equal its result. Identical text
        is equal. Everything else goes to math-verify. A gold that cannot be read equals nothing.
        """
        allowance = self._allowance(len(answers))
        verdicts = self._compare(_drop_long(answers), _drop_long(golds), allowance)
        self._warn_of_skipped(allowance)

        return verdicts

    def keys(self, answers: Sequence[str]) -> list[str | None]:
        """A key for each answer, the same for every way to write it; None if unreadable."""
        allowance = self._allowance(len(answers))
        keys = self._read(_drop_long(answers), allowance, share=1.0)
        self._warn_of_skipped(allowance)

        return keys

    def compare(self, answers: Sequence[str], golds: Sequence[str]) -> list[Comparison]:
        """`keys` of the answers and of the golds, and whether they are the `same`, with one
        allowance of CPU time for all."""
        answers = _drop_long(answers)
        golds = _drop_long(golds)
        allowance = self._allowance(len(answers))

        gold_keys = self._read(golds, allowance, share=READING)
        keys = self._read(answers, allowance, share=READING)
        verdicts = self._compare(answers, golds, allowance)
        self._warn_of_skipped(allowance)

        return list(map(Comparison, keys, gold_keys, verdicts))

    def _allowance(self, num_answers: int) -> CpuAllowance:
        return CpuAllowance(BATCH_TIMEOUTS * self.timeout + SECONDS_PER_ANSWER * num_answers)

    def _warn_of_skipped(self, allowance: CpuAllowance) -> None:
        """Once for each verifier."""
        if allowance.skipped and not self._warned:
            self._warned = True
            log.warning(
                "judging a batch used its %.0f s of CPU time: %d expressions were compared as text "
                "(--reward.timeout allows more)",
                allowance.seconds,
                len(allowance.skipped),
            )

    def _compare(
        self, answers: Sequence[str], golds: Sequence[str], allowance: CpuAllowance
    ) -> list[bool]:
        verdicts = [_decide(answer, gold) for answer, gold in zip(answers, golds, strict=True)]
        hard: dict[int, tuple[str, str]] = {}
        for i, verdict in enumerate(verdicts):
            if verdict is None:
                hard[i] = in_one_notation(answers[i], golds[i])

        for i, verdict in self._compare_hard(hard, allowance).items():
            verdicts[i] = verdict

        return [bool(verdict) for verdict in verdicts]

    def _compare_hard(
        self, hard: dict[int, tuple[str, str]], allowance: CpuAllowance
    ) -> dict[int, bool]:
        """Verdicts of math-verify on answers and golds."""
        verdicts: dict[int, bool] = {}

        # Read each alone first: an unreadable text then costs one timeout, not one per pair.
        gold_keys = self._read([gold for _, gold in hard.values()], allowance, share=READING)
        keys = self._read([answer for answer, _ in hard.values()], allowance, share=READING)

        pairs: dict[int, Request] = {}
        for i, answer_key, gold_key in zip(hard, keys, gold_keys):
            verdicts[i] = answer_key is not None and answer_key == gold_key
            if verdicts[i] or not answer_key or not gold_key:
                continue

            pair = _as_pair(*hard[i], answer_key, allowance.skipped)
            if pair:
                pairs[i] = pair

        replies = self._ask(list(pairs.values()), allowance, share=1.0)
        for i, pair in pairs.items():
            verdicts[i] = bool(replies.get(pair))

        return verdicts

    def _read(
        self, answers: Sequence[str], allowance: CpuAllowance, share: float
    ) -> list[str | None]:
        keys = [_plain_key(answer) for answer in answers]

        requests: dict[int, Request] = {}
        for i, answer in enumerate(answers):
            if keys[i] is not None:
                continue

            expression = expression_of(answer)
            if screened(expression):
                requests[i] = (expression,)

        replies = self._ask(list(requests.values()), allowance, share)
        for i, request in requests.items():
            was_skipped = request in allowance.skipped
            keys[i] = literal(answers[i]) if was_skipped else replies.get(request)

        return keys

    def _ask(
        self, requests: Sequence[Request], allowance: CpuAllowance, share: float
    ) -> dict[Request, Any]:
        """Values of the replies, without those that have no verdict. Each distinct request is sent
        once, while less than a share of the allowance was used."""
        with self._lock:
            known = {one: self._replies[one] for one in requests if one in self._replies}

        new = [one for one in dict.fromkeys(requests) if one not in known]
        new = [one for one in new if one not in allowance.skipped]
        new.sort(key=_is_costly)  # so that few of them do not take the time of all others

        for request, reply in zip(new, self._send(new, allowance, share)):
            if reply is not None:  # else the machine was too busy: try again next time
                known[request] = reply["value"]

        with self._lock:
            self._replies.update(known)
            while len(self._replies) > CACHE_SIZE:
                self._replies.popitem(last=False)

        return known

    def _send(
        self, requests: Sequence[Request], allowance: CpuAllowance, share: float
    ) -> list[dict[str, Any] | None]:
        """Replies of the workers; None where the worker died for another reason than CPU time, and
        for the requests that the allowance does not cover."""
        if requests and importlib.util.find_spec("math_verify") is None:
            raise ValueError("comparing answers needs math-verify: pip install 'mesotron[rlvr]'")

        wall = WALL_TIMEOUTS * self.timeout
        waiting = deque(enumerate(requests))
        running: dict[Future[Any], int] = {}
        replies: list[dict[str, Any] | None] = [None] * len(requests)

        while running or (waiting and allowance.covers(share)):
            while waiting and len(running) < self.num_workers and allowance.covers(share):
                index, request = waiting.popleft()
                future = self._pool.submit(ANSWER, request, self.timeout, timeout=wall)
                running[future] = index

            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                replies[running.pop(future)] = self._receive(future, allowance)

        allowance.skipped.update(request for _, request in waiting)
        return replies

    def _receive(self, future: Future[Any], allowance: CpuAllowance) -> dict[str, Any] | None:
        """A worker's reply, whose CPU time is taken from the allowance."""
        try:
            reply = future.result()
        except WorkerDied as death:
            allowance.used += self.timeout + START_SECONDS
            ran_out_of_time = death.returncode == -signal.SIGPROF
            return TOO_LONG if ran_out_of_time else None

        allowance.used += reply["seconds"]
        return reply


def _is_costly(request: Request) -> bool:
    return any(map(is_costly, request))


def _drop_long(answers: Sequence[str]) -> list[str]:
    return [answer if len(answer) <= MAX_LENGTH else "" for answer in answers]


def _decide(answer: str, gold: str) -> bool | None:
    """A verdict without math-verify; None if it takes that."""
    answer_number, gold_number = _read_numbers(answer, gold)
    if answer_number and gold_number:
        return same_number(answer_number, gold_number)

    gold_text = literal(gold)
    if gold_text and gold_text == literal(answer):
        return True

    by_colons = compare_colons(answer, gold)
    if by_colons is not None:
        return by_colons

    if _other_kinds(answer, gold):
        return False

    answer_words = words(answer)
    gold_words = words(gold)
    if answer_words is not None or gold_words is not None:
        return answer_words == gold_words

    if (gold_number and unfinished(answer)) or is_set_and_tuple(answer, gold):
        return False

    return None


def _read_numbers(answer: str, gold: str) -> tuple[Number | None, Number | None]:
    """Both as plain numbers; the answer may abbreviate its own if the gold is one."""
    answer_number = read_number(answer)
    gold_number = read_number(gold)
    if gold_number and not answer_number:
        answer_number = read_abbreviated(answer)

    return answer_number, gold_number


def _other_kinds(answer: str, gold: str) -> bool:
    """Whether they differ in what math-verify would overlook: a date, a base or a unit."""
    if is_hexadecimal(gold) or is_date(gold) or is_date(answer):
        return True

    return _other_units(answer, gold)


def _other_units(answer: str, gold: str) -> bool:
    """Whether both have a unit, and not the same."""
    first = _unit_of(answer)
    second = _unit_of(gold)
    return bool(first and second) and not same_unit(first, second)


def _unit_of(answer: str) -> str:
    number = read_number(answer)
    _, unit = expression_and_unit(answer)
    return number.unit if number else unit


def _as_pair(answer: str, gold: str, answer_key: str, skipped: set[Request]) -> Request | None:
    """What math-verify is asked to compare; None if nothing can come of it."""
    if read_number(gold) and letters(answer_key):
        return None

    answer_expression = _as_expression(answer)
    gold_expression = _as_expression(gold)
    if not answer_expression or not gold_expression:
        return None
    if skipped.intersection([(answer_expression,), (gold_expression,)]):
        return None

    return answer_expression, gold_expression


def _as_expression(answer: str) -> str | None:
    number = read_number(answer)
    if number:
        return number.key

    expression = expression_of(answer)
    return expression if screened(expression) else None


def _plain_key(answer: str) -> str | None:
    """The key of an answer that needs no math-verify."""
    number = read_number(answer)
    if number:
        return number.key

    if unfinished(answer) or is_clock_time(answer):
        return literal(answer)

    return words(answer)

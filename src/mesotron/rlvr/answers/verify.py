"""Whether two answers are the same: numbers exactly, words as words, mathematics by math-verify.

Answers come from a model and golds from files, so both are hostile: what reaches math-verify is
short and screened, runs in another process with a deadline, and is never evaluated as code.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Self

from mesotron.rlvr.answers.numbers import MAX_LENGTH, clean, read_number, same_number
from mesotron.rlvr.answers.screening import expression_of, letters, screened, unfinished, words
from mesotron.rlvr.answers.verify_pool import Request, WorkerPool

_REMEMBERED = 16_384  # replies that are kept; a string that hangs costs its deadline once


class Verifier:
    r"""Decides whether answers are the same; safe to share between threads.

    Args:
        timeout: seconds of processor time that math-verify may take to read an answer, or to
            compare a pair; what takes longer cannot be read, or is not the same.
        num_workers: most worker processes at once; none is started for numbers and words.

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
        self._pool = WorkerPool(timeout, self.num_workers)
        self._replies: OrderedDict[tuple[str, ...], Any] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Verifier], tuple[float, int]]:
        """Another process gets a verifier of its own, with workers of its own."""
        return (Verifier, (self.timeout, self.num_workers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes; they start again when they are needed."""
        self._pool.close()

    def same(self, answers: Sequence[str], golds: Sequence[str]) -> list[bool]:
        """Whether each answer is the same as its gold.

        Two plain numbers are compared exactly. A gold in words is compared as words. A sum that
        was left standing, such as 48 + 24, is not the number it comes to. All else goes to
        math-verify. A gold that cannot be read is the same as nothing.

        Args:
            answers: as a model wrote them, without their format.
            golds: one for each answer.
        """
        if len(answers) != len(golds):
            raise ValueError(f"{len(answers)} answers and {len(golds)} golds: give as many of each")
        answers, golds = _short(answers), _short(golds)
        verdicts = [_decide(answer, gold) for answer, gold in zip(answers, golds)]
        hard = [i for i, verdict in enumerate(verdicts) if verdict is None]
        # Read each alone first: what cannot be read costs one deadline, not one for each pair.
        keys = self.keys([answers[i] for i in hard] + [golds[i] for i in hard])
        pairs: dict[int, Request] = {}
        for i, left, right in zip(hard, keys, keys[len(hard) :]):
            verdicts[i] = left is not None and left == right
            if not left or not right or left == right or (read_number(golds[i]) and letters(left)):
                continue
            answer, gold = _shown(answers[i]), _shown(golds[i])
            if answer and gold:
                pairs[i] = {"answer": answer, "gold": gold}
        for i, reply in zip(pairs, self._ask(list(pairs.values()))):
            verdicts[i] = bool(reply)
        return [bool(verdict) for verdict in verdicts]

    def keys(self, answers: Sequence[str]) -> list[str | None]:
        """One key for every way to write each answer; None where it cannot be read."""
        answers = _short(answers)
        keys = [_plain_key(answer) for answer in answers]
        open_answers = {
            i: {"answer": expression}
            for i, answer in enumerate(answers)
            if keys[i] is None and screened(expression := expression_of(answer))
        }
        for i, key in zip(open_answers, self._ask(list(open_answers.values()))):
            keys[i] = key
        return keys

    def canonical(self, answer: str) -> str:
        """The key of one answer for votes; its cleaned text if it cannot be read."""
        return self.keys([answer])[0] or clean(answer)

    def parseable_all(self, golds: Sequence[str]) -> list[bool]:
        """Whether each gold can be read, so that an answer can be compared with it."""
        return [key is not None for key in self.keys(golds)]

    def _ask(self, requests: list[Request]) -> list[Any]:
        """Values of the replies; each distinct request is sent once and its verdict remembered.

        None where there was no verdict: a machine that was too busy may have time next time.
        """
        names = [tuple(request.values()) for request in requests]
        with self._lock:
            known = {name: self._replies[name] for name in names if name in self._replies}
        fresh = {n: r for n, r in zip(names, requests) if n not in known}
        for name, reply in zip(fresh, self._pool.ask(list(fresh.values()))):
            if reply is not None:
                known[name] = reply["value"]
        with self._lock:
            self._replies.update(known)
            while len(self._replies) > _REMEMBERED:
                self._replies.popitem(last=False)
        return [known.get(name) for name in names]


def _short(answers: Sequence[str]) -> list[str]:
    """The answers, with nothing in place of those that are too long to be one."""
    return [answer if len(answer) <= MAX_LENGTH else "" for answer in answers]


def _decide(answer: str, gold: str) -> bool | None:
    """The verdict where it needs no mathematics, None where it does."""
    left, right = read_number(answer), read_number(gold)
    if left and right:
        return same_number(left, right)
    left_words, right_words = words(answer), words(gold)
    if left_words is not None or right_words is not None:
        return left_words == right_words
    if right and unfinished(answer):
        return False
    return None


def _shown(answer: str) -> str | None:
    """What math-verify is shown of one side of a pair; None if that side is not for it."""
    if number := read_number(answer):
        return number.key
    return expression if screened(expression := expression_of(answer)) else None


def _plain_key(answer: str) -> str | None:
    number = read_number(answer)
    if number:
        return number.key
    if unfinished(answer):
        return clean(answer).replace(" ", "")
    return words(answer)

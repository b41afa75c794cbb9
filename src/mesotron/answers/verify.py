"""Compares answers: numbers exactly, words as words, everything else by math-verify.

Answers come from a model and golds from files, so both are untrusted. What reaches math-verify is
short and screened by bounded patterns, runs in a worker process with limited time and memory, and
is never evaluated as code: only math-verify's LaTeX grammar is used, since its reader of plain
expressions calls `eval`.
"""

import importlib.util
import logging
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Self

from mesotron.answers.numbers import (
    _TEXT,
    MAX_LENGTH,
    clean,
    read_number,
    same_number,
    simplify_latex,
)
from mesotron.runs.workers import ONE_THREAD, WorkerDied, WorkerPool

CACHE_SIZE = 16_384  # replies kept; a string that hangs costs its timeout once
# A worker ends itself after its timeout in CPU time. On a busy machine that takes longer on the
# clock, and only after this many timeouts does the parent kill it.
WALL_TIMEOUTS = 4
MAX_MEMORY = 2 * 2**30  # bytes of address space; sympy itself takes a tenth of it
# Environment variables a worker gets: no tokens or keys.
INHERITED = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "SYSTEMROOT", "TMPDIR")

Request = tuple[str, ...]  # an answer to read, or an answer and a gold to compare
TOO_LONG: dict[str, Any] = {"value": None, "error": "TooLong"}


class Verifier:
    r"""Decides whether answers are the same. Can be shared between threads.

    Args:
        timeout: seconds of CPU time math-verify may take to read an answer or compare a pair.
            An answer that takes longer is unreadable; a pair that does is not the same.
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
        self._pool = WorkerPool(
            self.num_workers,
            env={name: os.environ[name] for name in INHERITED if name in os.environ} | ONE_THREAD,
            setup=(f"{__name__}:prepare_worker",),
            replies="json",
            stderr=subprocess.DEVNULL,
        )

        self._replies: OrderedDict[Request, Any] = OrderedDict()
        self._lock = threading.Lock()

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
        answers = _drop_long(answers)
        golds = _drop_long(golds)
        verdicts = [_decide(answer, gold) for answer, gold in zip(answers, golds, strict=True)]
        hard = [i for i, verdict in enumerate(verdicts) if verdict is None]

        # Read each alone first: an unreadable text then costs one timeout, not one per pair.
        keys = self.keys([answers[i] for i in hard] + [golds[i] for i in hard])
        pairs: dict[int, Request] = {}
        for i, left, right in zip(hard, keys, keys[len(hard) :]):
            verdicts[i] = left is not None and left == right
            if not left or not right or left == right or (read_number(golds[i]) and letters(left)):
                continue

            answer = _as_expression(answers[i])
            gold = _as_expression(golds[i])
            if answer and gold:
                pairs[i] = (answer, gold)

        for i, reply in zip(pairs, self._ask(list(pairs.values()))):
            verdicts[i] = bool(reply)

        return [bool(verdict) for verdict in verdicts]

    def keys(self, answers: Sequence[str]) -> list[str | None]:
        """A key for each answer, the same for every way to write it; None if unreadable."""
        answers = _drop_long(answers)
        keys = [_plain_key(answer) for answer in answers]

        requests = {
            i: (expression,)
            for i, answer in enumerate(answers)
            if keys[i] is None and screened(expression := expression_of(answer))
        }
        for i, key in zip(requests, self._ask(list(requests.values()))):
            keys[i] = key

        return keys

    def _ask(self, requests: list[Request]) -> list[Any]:
        """Values of the replies, None for no verdict. Each distinct request is sent once."""
        with self._lock:
            known = {one: self._replies[one] for one in requests if one in self._replies}

        new = [one for one in dict.fromkeys(requests) if one not in known]
        for request, reply in zip(new, self._send(new)):
            if reply is not None:  # else the machine was too busy: try again next time
                known[request] = reply["value"]

        with self._lock:
            self._replies.update(known)
            while len(self._replies) > CACHE_SIZE:
                self._replies.popitem(last=False)

        return [known.get(one) for one in requests]

    def _send(self, requests: Sequence[Request]) -> list[dict[str, Any] | None]:
        """Replies of the workers; None where the worker died for another reason than CPU time."""
        if requests and importlib.util.find_spec("math_verify") is None:
            raise ValueError("comparing answers needs math-verify: pip install 'mesotron[rlvr]'")

        target = f"{__name__}:answer_request"
        wall = WALL_TIMEOUTS * self.timeout
        futures = [
            self._pool.submit(target, request, self.timeout, timeout=wall) for request in requests
        ]

        replies: list[dict[str, Any] | None] = []
        for future in futures:
            try:
                replies.append(future.result())
            except WorkerDied as death:
                replies.append(TOO_LONG if death.returncode == -signal.SIGPROF else None)

        return replies


def _drop_long(answers: Sequence[str]) -> list[str]:
    return [answer if len(answer) <= MAX_LENGTH else "" for answer in answers]


def _decide(answer: str, gold: str) -> bool | None:
    left = read_number(answer)
    right = read_number(gold)
    if left and right:
        return same_number(left, right)
    if (text := literal(gold)) and text == literal(answer):
        return True
    # Math-verify would divide 6:01, and overlook the base of A5_{12}.
    if any(pattern.fullmatch(_tidy(gold)) for pattern in (_TIME, _HEXADECIMAL)):
        return False

    left_words = words(answer)
    right_words = words(gold)
    if left_words is not None or right_words is not None:
        return left_words == right_words
    if right and unfinished(answer):
        return False

    return None


def _as_expression(answer: str) -> str | None:
    if number := read_number(answer):
        return number.key
    return expression if screened(expression := expression_of(answer)) else None


def _plain_key(answer: str) -> str | None:
    if number := read_number(answer):
        return number.key
    if unfinished(answer) or _TIME.fullmatch(_tidy(answer)):
        return literal(answer)

    return words(answer)


# Screening: bounded patterns over a short text that say whether an answer is words, unfinished
# arithmetic, mathematics for math-verify, or none of them.

MAX_EXPRESSION = 256  # characters given to math-verify
MAX_DEPTH = 10  # of brackets; its parser takes exponentially long in them
MAX_DIGIT_RUN = 64

_WORDS = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_]+(?:[ ',.-]{1,2}[^\W\d_]+)*\.?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})", re.ASCII)
_ARITHMETIC = re.compile(r"(?:[\d\s.+*/(){}$%!-]|\\times|\\cdot|\\div|\\frac)+", re.ASCII)
_OPERATOR = re.compile(r"[+*/!]|\\times|\\cdot|\\div|(?<=[\d)}]) ?- ?(?=[\d({\\])", re.ASCII)
_TIME = re.compile(r"\d{1,2}(?: ?: ?\d\d){1,2}(?: ?[ap]\.?m\.?)?", re.ASCII | re.IGNORECASE)
_HEXADECIMAL = re.compile(r"(?=\w*[A-F])[\dA-F]{1,30}_\{?\d{1,2}\}?", re.ASCII)
# More digits than fit in memory, and no real answer: 9^9^9, 9^{9^{9}}, 99999!, 1e9999. And a
# product that would be read as a sum: 72 73.
_ABSURD = re.compile(
    r"\^\s*[{(]?\s*\d+\s*\^\s*[{(]?\s*\d|\d{4}\s*!|\d[eE][-+]?\d|(?<![_^\d])\d+\s+\d", re.ASCII
)
# Prose, which a grammar of mathematics takes for products of letters.
_PROSE = re.compile(
    r"(?<![\w\\])(?!(?:sin|cos|tan|log|exp|max|min|gcd|lcm|mod|and)\b)[A-Za-z]{3}|[?\"#@`]",
    re.ASCII,
)
# Units after mathematics: 25\pi square inches.
_UNITS = re.compile(r"(?<=[\w})\]])(?: [a-z]{2,24}){1,4}(?:\^\{?[23]\}?)?$", re.ASCII)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]{1,12}\*?\}")
_MATHEMATICS = re.compile(r"[^\d\s.+*/(){}$%=-]", re.ASCII)
# A whole number and powers of letters, as sympy writes them; E and I are numbers.
_LETTERS = re.compile(r"-?(?:\d+\*)?[a-z](?:\*\*\d+)?(?:\*[a-z](?:\*\*\d+)?)*", re.ASCII)
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


@lru_cache(maxsize=16_384)
def _tidy(answer: str) -> str:
    return simplify_latex(clean(answer))


def expression_of(answer: str) -> str:
    r"""An answer in the one LaTeX spelling that is screened and then given to math-verify."""
    text = _tidy(answer).replace("$", "").replace("**", "^")
    bare = _UNITS.sub("", text)
    return bare if "\\" in bare else text


def screened(expression: str) -> bool:
    r"""Whether an expression is short, complete, shallow and more than digits or prose."""
    if not 0 < len(expression) <= MAX_EXPRESSION or r"\boxed" in expression:
        return False
    if re.search(rf"\d{{{MAX_DIGIT_RUN}}}", expression) or _ABSURD.search(expression):
        return False

    bare = _ENVIRONMENT.sub("", re.sub(r"\\[{}]", "", expression))
    if _PROSE.search(bare) or not _MATHEMATICS.search(bare):
        return False

    # Round and square brackets may stay open, as in the interval (0, 1]; braces may not.
    braces = list(accumulate(_BRACKETS[c] for c in bare if c in "{}"))
    depths = accumulate(_BRACKETS.get(c, 0) for c in bare)

    return min(braces, default=0) >= 0 == sum(braces[-1:]) and max(depths) <= MAX_DEPTH


def words(answer: str) -> str | None:
    """Words in lower case without a final period; None if the answer is something else. Math-verify
    would read a word as a product of letters, and take an anagram of the gold for correct."""
    text = _tidy(answer)
    return text.removesuffix(".").casefold() if _WORDS.fullmatch(text) else None


def literal(answer: str) -> str | None:
    r"""The text itself, to compare as it stands; None if it is broken or has no letter or digit.

    >>> literal(r"12\!:\!00 \text{ P.M.}")
    '12:00P.M'
    """
    # 1 000 is 1000, but 7 2 is not 72.
    text = re.sub(r"(?<!\d) | (?!\d)| (?=\d{3}(?!\d))", "", _tidy(answer)).removesuffix(".")
    braces = list(accumulate(_BRACKETS[c] for c in re.sub(r"\\[{}]", "", text) if c in "{}"))
    is_closed = min(braces, default=0) >= 0 == sum(braces[-1:])

    return text if is_closed and any(map(str.isalnum, text)) else None


def has_prose(text: str) -> bool:
    return bool(_PROSE.search(_ENVIRONMENT.sub("", _TEXT.sub("", text))))


def unfinished(answer: str) -> bool:
    """Whether an answer is arithmetic on plain numbers that was not carried out."""
    text = _THOUSANDS.sub("", _tidy(answer))
    return bool(_ARITHMETIC.fullmatch(text) and _OPERATOR.search(text))


def letters(key: str) -> bool:
    """Whether a key is a product of letters, as math-verify reads a word: equal to no number."""
    return bool(_LETTERS.fullmatch(key))


# In the worker process.


def prepare_worker() -> None:
    """Import math-verify, then limit memory and forbid files and core dumps where possible."""
    logging.disable()
    compare_expressions("x + 1", "x + 2")  # pays for the imports before the first timeout
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    if sys.platform == "linux":  # elsewhere the address space cannot be limited
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def answer_request(request: Request, timeout: float) -> dict[str, Any]:
    """The key of an expression, or whether two are equal; ends the process after `timeout`."""
    # In CPU time, so that a verdict does not depend on how busy the machine is; by the signal's
    # default action, which no loop in C can delay.
    try:
        signal.setitimer(signal.ITIMER_PROF, timeout)
        read = canonical_expression if len(request) == 1 else compare_expressions
        return {"value": read(*request)}
    except Exception as error:
        # Anything that untrusted text makes sympy raise, MemoryError and RecursionError too.
        return {"value": None, "error": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _parse(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    boxed = rf"\boxed{{{answer}}}"
    grammar = [LatexExtractionConfig(boxed_match_priority=0)]

    return parse(
        boxed,
        grammar,
        "no_fallback",
        "first_match",
        parsing_timeout=0,
    )


def canonical_expression(answer: str) -> str | None:
    from sympy import Expr, nan, zoo

    expressions = _parse(answer)
    if not expressions:
        return None

    expression = expressions[0]

    # A relation stays as it is: 71 = 72 would become False, as would every other such answer.
    value = expression.doit() if isinstance(expression, Expr) else expression
    return None if value in (nan, zoo) else str(value)


def compare_expressions(answer: str, gold: str) -> bool:
    from math_verify import verify

    right = _parse(gold)
    left = _parse(answer)
    if not right or not left or not verify(right, left, timeout_seconds=None):
        return False

    # It rounds to six decimals, where 5^{-98} and 2^{-98} are both 0.
    values = [one[0].evalf(30) for one in (left, right) if getattr(one[0], "is_number", False)]
    return len(values) < 2 or bool(abs(values[0] - values[1]) <= 1e-6 * abs(values[1]))

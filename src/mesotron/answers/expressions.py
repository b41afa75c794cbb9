"""Expressions in a worker process of their own: math-verify and sympy read untrusted text here.

Memory, files and CPU time are limited, and only math-verify's LaTeX grammar is used, since its
reader of plain expressions calls `eval`.
"""

import logging
import resource
import signal
import sys
import time
from typing import Any

MAX_MEMORY = 2 * 2**30  # bytes of address space; sympy itself takes a tenth of it

Request = tuple[str, ...]  # an answer to read, or an answer and a gold to compare


def prepare_worker() -> None:
    """Import math-verify, then limit memory and forbid files and core dumps where possible."""
    logging.disable()
    compare_expressions("x + 1", "x + 2")  # pays for the imports before the first timeout
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    if sys.platform == "linux":  # elsewhere the address space cannot be limited
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def answer_request(request: Request, timeout: float) -> dict[str, Any]:
    """The key of an expression, or whether two are equal, and the CPU time that it took; ends the
    process after `timeout`."""
    began = time.process_time()
    reply = _answer(request, timeout)
    return reply | {"seconds": time.process_time() - began}


def _answer(request: Request, timeout: float) -> dict[str, Any]:
    # In CPU time, so that a verdict does not depend on how busy the machine is; by the signal's
    # default action, which no loop in C can delay.
    try:
        signal.setitimer(signal.ITIMER_PROF, timeout)
        if len(request) == 1:
            return {"value": canonical_expression(*request)}

        return {"value": compare_expressions(*request)}
    except Exception as error:
        # Anything that untrusted text makes sympy raise, MemoryError and RecursionError too.
        return {"value": None, "error": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _parse(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    boxed = rf"\boxed{{{answer}}}"
    grammar = [LatexExtractionConfig(boxed_match_priority=0)]

    return parse(boxed, grammar, "no_fallback", "first_match", parsing_timeout=0)


def canonical_expression(answer: str) -> str | None:
    """A key that every spelling of an expression shares; None if it cannot be read."""
    from sympy import Expr, nan, zoo

    expressions = _parse(answer)
    if not expressions:
        return None

    # A relation stays as it is: 71 = 72 would become False, as would every other such answer.
    value = expressions[0]
    if isinstance(value, Expr):
        value = value.doit()

    return None if value in (nan, zoo) else str(value)


def compare_expressions(answer: str, gold: str) -> bool:
    from math_verify import verify

    right = _parse(gold)
    left = _parse(answer)
    if not right or not left or not verify(right, left, timeout_seconds=None):
        return False

    # It rounds to six decimals, where 5^{-98} and 2^{-98} are both 0.
    both_numbers = all(getattr(one[0], "is_number", False) for one in (left, right))
    if not both_numbers:
        return True

    answer_value = left[0].evalf(30)
    gold_value = right[0].evalf(30)
    return bool(abs(answer_value - gold_value) <= 1e-6 * abs(gold_value))

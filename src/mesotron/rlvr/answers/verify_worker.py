"""The process in which math-verify reads and compares expressions; run as a script, not imported.

It answers one JSON line for each JSON line on its standard input and ends when that closes. It
uses math-verify's LaTeX grammar alone: the plain-expression reader calls Python's `eval`. Memory
is limited, files cannot be written, and a request that computes for too long ends the process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any, TextIO

MAX_MEMORY = 2 * 2**30  # bytes of address space; sympy itself takes a tenth of it


def read(answer: str) -> list[Any]:
    """The expression as math-verify reads it, in a list; empty if it cannot."""
    from math_verify import LatexExtractionConfig, parse

    boxed = rf"\boxed{{{answer}}}"
    grammar = [LatexExtractionConfig(boxed_match_priority=0)]
    return parse(boxed, grammar, "no_fallback", "first_match", parsing_timeout=0)


def canonical(answer: str) -> str | None:
    """One text for many ways to write an expression; None if it cannot be read."""
    from sympy import Expr, nan, zoo

    expressions = read(answer)
    if not expressions:
        return None
    expression = expressions[0]
    # A relation stays as it is: 71 = 72 would come to False, as would every other such answer.
    value = expression.doit() if isinstance(expression, Expr) else expression
    return None if value in (nan, zoo) else str(value)


def same(answer: str, gold: str) -> bool:
    """Whether two expressions are equal, as math-verify judges."""
    from math_verify import verify

    right, left = read(gold), read(answer)
    return bool(right and left) and verify(right, left, timeout_seconds=None)


def limit_resources() -> None:
    """Cap memory, and forbid files and core dumps, where the system can."""
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform == "linux":  # elsewhere the address space cannot be limited
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def answer_request(request: dict[str, str]) -> dict[str, Any]:
    """The reply to one request; an expression that breaks the reader is one it cannot read."""
    try:
        if "gold" in request:
            return {"value": same(request["answer"], request["gold"])}
        return {"value": canonical(request["answer"])}
    except Exception as error:
        # Whatever a stranger's text brings sympy to raise, MemoryError and RecursionError too.
        return {"value": None, "error": type(error).__name__}


def start_clock(seconds: float) -> None:
    """End this process after so many seconds of its own computing; 0 stops the clock.

    Processor time, so that a verdict does not depend on how busy the machine is; the signal's
    default action, so that no loop in C can put it off.
    """
    if sys.platform != "win32":  # there the parent's deadline is the only one
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main(timeout: float) -> None:
    """Answer requests until standard input closes.

    Args:
        timeout: seconds of processor time that one request may take.
    """
    replies = _private_stdout()
    logging.disable()
    same("x + 1", "x + 2")  # pays for the imports before the first deadline runs
    limit_resources()
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        start_clock(timeout)
        reply = json.dumps(answer_request(json.loads(line)))
        start_clock(0)
        print(reply, file=replies, flush=True)


def _private_stdout() -> TextIO:
    """Standard output for replies alone: what a library prints goes nowhere."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return replies


if __name__ == "__main__":
    main(float(sys.argv[1]))

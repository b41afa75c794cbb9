"""The other side of `processes`: read a call from stdin, answer on stdout, until stdin ends."""

import os
import sys
import traceback

from mesotron.vla.simulation.processes import receive, resolve, send


def main() -> None:
    """Answer calls; what a library prints goes to stderr, so that answers stay readable."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions = sys.stdin.buffer
    while True:
        try:
            target, arguments = receive(questions)
        except EOFError:
            return
        try:
            answer = "done", resolve(target)(*arguments)
        except ValueError as error:  # a sentence for the user
            answer = "refused", str(error)
        except Exception:
            answer = "raised", traceback.format_exc()
        send(answers, answer)


if __name__ == "__main__":
    main()

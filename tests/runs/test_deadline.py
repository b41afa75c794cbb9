"""What a limit ends: calls that wait, that swallow the interrupt, and that hold Python's lock."""

import json
import signal
import subprocess
import sys

import pytest

from mesotron.runs import deadline

BEGIN = """
import re, sys, time
from pathlib import Path
from mesotron.runs import deadline
from mesotron.runs.deadline import Deadline, LimitReached

deadline.GRACE = deadline.SECOND = deadline.KILL = 0.3

def swallow(seconds):
    try:
        time.sleep(seconds)
    except BaseException:
        pass

def save():
    print("saved", flush=True)
    return 7
"""


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BEGIN + code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "hangs",
    [
        "time.sleep(600)",
        "swallow(600)",  # and returns: the limit counts all the same
        "re.match('(a+)+$', 'a' * 60 + 'b')",  # holds Python's lock, and looks for signals
    ],
)
def test_a_call_that_hangs_is_interrupted(hangs):
    done = run(f"""
with Deadline(0.2, record=(Path("none.json"), {{}})) as limit:
    try:
        with limit.own_code():
            {hangs}
    except LimitReached:
        limit.obey()
        time.sleep(1.5)  # saving takes as long as it takes
        print("stopped")
""")
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


def test_what_ignores_the_interrupt_is_left_behind_after_the_save():
    done = run("""
with Deadline(0.2, account=lambda: print("counted", flush=True)) as limit:
    with limit.during(lambda: True, save), limit.own_code():
        while True:
            swallow(600)
""")
    assert (done.returncode, done.stdout) == (7, "saved\ncounted\n"), done.stderr


@pytest.mark.parametrize(
    "hangs",
    [
        "signal.signal(deadline.SIGNAL, signal.SIG_IGN); time.sleep(600)",
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",  # in C, without Python's lock
    ],
)
def test_what_does_not_notice_the_signal_is_left_behind_too(hangs):
    done = run(f"""
import hashlib, signal
with Deadline(0.2) as limit:
    with limit.during(lambda: True, save), limit.own_code():
        {hangs}
""")
    assert (done.returncode, done.stdout) == (7, "saved\n"), done.stderr


def test_a_step_that_has_begun_is_finished():
    done = run("""
changes_weights = True
with Deadline(0.2) as limit:
    try:
        with limit.during(lambda: not changes_weights, save):
            time.sleep(1.5)
            print("finished", flush=True)
            changes_weights = False
            limit.check()
    except LimitReached:
        limit.obey()
""")
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr


def test_what_nothing_can_interrupt_is_killed_and_counted(tmp_path):
    spent = tmp_path / "spent.json"
    spent.write_text(json.dumps({"seconds": 1.0, "step": 2.0}))
    code = """
with Deadline(0.2, record=(Path(sys.argv[1]), {"seconds": 9.0})):
    sum(range(10**15))  # holds Python's lock
"""
    done = run(code, str(spent))

    assert done.returncode == -signal.SIGKILL
    assert json.loads(spent.read_text()) == {"seconds": 9.0, "step": 2.0}
    assert "--resume" in done.stderr


def test_nothing_is_left_of_a_limit_that_was_not_reached():
    before = signal.getsignal(signal.SIGVTALRM)
    done = run("""
with Deadline(600) as limit:
    second = limit._second
print(second.poll() is not None)
""")
    assert done.stdout == "True\n"
    assert signal.getsignal(signal.SIGVTALRM) is before


def test_the_second_process_writes_through_no_link(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    link = tmp_path / "spent.json"
    link.symlink_to(secret)
    with pytest.raises(OSError, match=r"spent\.json"):
        deadline.add_values(link, {"stopped": True})

    own = tmp_path / "own.json"
    own.write_text('{"seconds": 3}')
    (tmp_path / ".own.json.limit").symlink_to(secret)
    deadline.add_values(own, {"stopped": True})

    assert json.loads(own.read_text()) == {"seconds": 3, "stopped": True}
    assert secret.read_text() == "{}"

"""What the user's code may not change for the rest of the process, and what its errors say."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from mesotron.runs import RunFolder
from mesotron.runs.own_code import SHOWN, calling, describe


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_the_text_of_any_error_is_shown_in_part():
    assert describe(KeyError("a")) == "KeyError ('a')"

    long = describe(ValueError("x" * 10**7))
    assert len(long) < 2 * SHOWN
    assert "10,000,000" in long

    assert "RuntimeError" in describe(Silent())


def test_what_was_changed_is_set_back(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    streams = sys.stdout, sys.stderr
    threads = torch.get_num_threads()
    (tmp_path / "elsewhere").mkdir()

    with calling("the reward f"):
        sys.stdout.close()
        sys.stderr = None
        os.chdir("elsewhere")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(threads + 1)
        torch.set_default_device("meta")

    assert (sys.stdout, sys.stderr) == streams
    assert not sys.stdout.closed
    assert os.getcwd() == str(tmp_path)
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu"
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    assert "the reward f changed torch's default dtype" in caplog.text


def test_a_removed_hook_of_errors_is_set_back_and_another_stays(monkeypatch, caplog):
    hook = threading.excepthook
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", hook)

    with calling("the reward h"):
        sys.excepthook = print
        del threading.excepthook

    assert sys.excepthook is print
    assert threading.excepthook is hook

    with calling("the reward h"):
        sys.excepthook = None

    assert sys.excepthook is print
    threading.Thread(target=int).start()
    assert "the reward h removed sys.excepthook" in caplog.text


def test_an_autocast_that_was_left_open_is_closed(caplog):
    x = torch.ones(2, 2)
    weights = torch.ones(2, 2, requires_grad=True)

    with calling("the reward g"):
        torch.autocast("cpu", torch.float16).__enter__()
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False).__enter__()
        torch.mm(x, weights)

    assert torch.mm(x, x).dtype == torch.float32
    assert torch.is_autocast_cache_enabled()
    assert "the reward g changed torch's autocast" in caplog.text

    # A count that stayed too high would keep the casts of weights after they have changed.
    sums = []
    for _ in range(2):
        with torch.autocast("cpu"):
            product = torch.mm(x, weights)
            assert product.dtype == torch.bfloat16
            sums.append(product.sum().item())

        with torch.no_grad():
            weights.mul_(3)

    assert sums == [8.0, 24.0]


def test_an_autocast_around_the_call_stays_open():
    with torch.autocast("cpu", torch.bfloat16):
        with calling("the reward g"):
            torch.set_autocast_enabled("cpu", False)
            torch.autocast("cpu", torch.float16).__enter__()

        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16

    assert not torch.is_autocast_enabled("cpu")


def test_it_is_set_back_after_an_error_too():
    @calling("the reward f")
    def fail() -> None:
        torch.set_default_dtype(torch.float64)
        raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert torch.get_default_dtype() == torch.float32


def test_closed_descriptors_are_opened_again(capfd):
    with calling("the reward f"):
        os.close(1)

    os.write(1, b"still here")
    assert capfd.readouterr().out == "still here"


FORK = """
import os
from mesotron.runs.own_code import calling

with calling("the reward f"):
    child = os.fork()

print("once", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_copy_ends_where_it_would_go_on():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert done.stdout == "once 0\n"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
def test_a_forked_copy_writes_nothing_into_a_run(tmp_path):
    with RunFolder.create(tmp_path / "run", {"steps": 1}, {}) as run:
        run.append("metrics", {"step": 1})
        child = os.fork()
        if not child:
            run.append("metrics", {"step": 2})
            os._exit(3)

        _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert run.rows("metrics") == [{"step": 1}]

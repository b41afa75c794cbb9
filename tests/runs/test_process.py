"""Ranks as launchers set them, and stop signals."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest
import torch

from mesotron import cli
from mesotron.config import ObjectiveConfig
from mesotron.optim.device import choose_device
from mesotron.runs.process import (
    StopRequest,
    asks_for_sharding,
    cpu_allowance,
    explain_interrupt,
    go_offline_without_network,
    is_main,
    num_processes,
    process_index,
)
from support.rlvr_tiny import make_trainer

SMALL = "--steps 1 --device cpu --task.num-eval 1 --batch 2 --max-tokens 2"


def test_a_failure_is_left_for_the_launcher(tmp_path, monkeypatch, capsys):
    """In the form in which torchrun reads it; it ends with the reason then."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert cli.main(["train", "--stepz", "3"]) == 2

    sentence = capsys.readouterr().err.strip()
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))
    assert "--stepz" in sentence
    assert f"traceback : {sentence}" in str(ChildFailedError("mesotron", {0: failure}))


def test_ranks(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)

    assert (num_processes(), process_index(), is_main(), asks_for_sharding()) == (1, 0, True, False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")

    assert (num_processes(), process_index(), is_main(), asks_for_sharding()) == (8, 5, False, True)
    for text in ("", "two", "-1"):
        monkeypatch.setenv("WORLD_SIZE", text)
        with pytest.raises(ValueError, match="WORLD_SIZE"):
            num_processes()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("auto") == torch.device("cuda", 3)
    assert choose_device("cpu") == torch.device("cpu")


def test_sharding_that_cannot_work_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert cli.main(["train", *SMALL.split(), "--out", str(tmp_path / "run")]) == 2
    assert "ddp.yaml" in capsys.readouterr().err

    monkeypatch.delenv("FSDP_VERSION")
    with pytest.raises(ValueError, match="beta"):
        make_trainer(tmp_path, parts={"objective": ObjectiveConfig(name="grpo", beta=0.1)})


PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@pytest.fixture
def online(monkeypatch):
    """No variable decides about the network; what is decided is forgotten after the test."""
    for name in ("HF_ENDPOINT", *PROXIES):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.delenv("HF_HUB_OFFLINE")


@pytest.mark.usefixtures("online")
def test_a_hub_that_answers_is_used_and_another_not_tried_again(monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    go_offline_without_network()
    assert "HF_HUB_OFFLINE" not in os.environ

    listener.close()
    monkeypatch.setenv("https_proxy", "http://proxy")  # it may know the way
    go_offline_without_network()
    assert "HF_HUB_OFFLINE" not in os.environ

    monkeypatch.delenv("https_proxy")
    go_offline_without_network()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        (None, ("huggingface.co", 443)),
        ("https://mirror.example", ("mirror.example", 443)),
        ("http://mirror.example/hub", ("mirror.example", 80)),
        ("https://mirror.example:8443", ("mirror.example", 8443)),
    ],
)
def test_the_port_of_the_hub(monkeypatch, endpoint, address):
    tried = []

    def connect(address: tuple[str, int], timeout: float) -> Mock:
        tried.append(address)
        return Mock()

    monkeypatch.setattr(socket, "create_connection", connect)
    if endpoint is not None:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)

    go_offline_without_network()
    assert tried == [address]


def test_the_first_signal_asks_and_the_second_ctrl_c_stops():
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)

    with StopRequest(said.append, "continue it") as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        assert not said  # a handler that prints would interrupt the loop's own printing

        stop.announce()
        os.kill(os.getpid(), signal.SIGTERM)  # another kind of signal changes nothing
        stop.announce()

        with pytest.raises(KeyboardInterrupt, match="continue it"):
            os.kill(os.getpid(), signal.SIGINT)

    assert len(said) == 1
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("early", [True, False])
def test_a_hanging_call_is_named_and_stops_at_the_first_ctrl_c(early):
    said: list[str] = []

    def hang() -> None:
        with stop.waiting_for("the reward own:f", 0.05):
            if early:
                os.kill(os.getpid(), signal.SIGINT)  # waits for the step, in vain

            while not said:
                time.sleep(0.01)

            os.kill(os.getpid(), signal.SIGINT)

    with StopRequest(said.append, "continue it") as stop:
        with stop.waiting_for("a fast one", 60.0):
            pass
        with pytest.raises(KeyboardInterrupt, match="continue it"):
            hang()

    assert early or "own:f" in said[0]


def test_sigterm_outside_the_loop_says_how_to_continue():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="continue it"), explain_interrupt("continue it"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_age_of_a_process_counts_its_imports():
    code = "import time; time.sleep(0.3); from mesotron.runs.process import *; print(process_age())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )

    assert 0.3 < float(done.stdout) < 60


def compute_for_ever() -> None:
    while True:
        pass


def test_a_block_that_uses_up_its_cpu_time_is_stopped():
    before = signal.getsignal(signal.SIGVTALRM)

    with pytest.raises(TimeoutError), cpu_allowance(0.01):
        compute_for_ever()

    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_a_block_that_stays_below_it_is_left_alone():
    with cpu_allowance(1000.0):
        total = sum(range(1000))

    assert total == 499_500
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_other_threads_have_no_allowance():
    finished = []

    def work() -> None:
        with cpu_allowance(0.0):
            finished.append(sum(range(10**6)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert len(finished) == 1

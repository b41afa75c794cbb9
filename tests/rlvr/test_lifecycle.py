"""What a run says when it loses another process."""

from types import SimpleNamespace

import pytest
import torch

from mesotron.config import SftConfig, TrainConfig
from mesotron.rlvr.lifecycle import explain_failure

CLOSED = (
    "[/__w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[10.77.0.1]:38272. This is typically caused by a remote worker crashing."
)
TIMED_OUT = "[/__w/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv"


def fail(config, path, error):
    plan = SimpleNamespace(path=path, whole=None, config=config)
    with explain_failure(plan):
        raise error


@pytest.mark.parametrize("config", [TrainConfig(), SftConfig()], ids=["train", "sft"])
@pytest.mark.parametrize("variable", ["", "ACCELERATE_MIXED_PRECISION"])
@pytest.mark.parametrize("machines", ["1", "2"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(CLOSED), "(Connection closed by peer [10.77.0.1]:38272)"),
        (RuntimeError(TIMED_OUT), "(Timed out waiting 1800000ms for recv)"),
        (torch.distributed.DistNetworkError("no\nroute"), "(DistNetworkError (no)"),
    ],
)
def test_a_lost_process_is_one_sentence_with_the_command_that_continues(
    config, variable, machines, error, reason, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if variable:
        monkeypatch.setenv(variable, "no")

    with pytest.raises(ValueError, match="--resume") as caught:
        fail(config, tmp_path, error)

    sentence = str(caught.value)
    command = "sft" if isinstance(config, SftConfig) else "train"
    assert reason in sentence
    assert f"-m mesotron {command} --resume {tmp_path}" in sentence
    assert ("accelerate launch" in sentence) == bool(variable)
    assert ("every machine" in sentence) == (machines == "2")


def test_one_process_alone_has_lost_no_other(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="RuntimeError") as caught:
        fail(TrainConfig(), tmp_path, RuntimeError(CLOSED))

    assert "lost" not in str(caught.value)

"""Which process this is, as launchers say it, and what is refused when it cannot be done."""

import pytest
import torch

from mesotron import cli
from mesotron.config import ObjectiveConfig
from mesotron.optim.device import choose_device
from mesotron.runs.processes import asks_for_sharding, is_main, num_processes, process_index
from support.rlvr_tiny import make_trainer

SMALL = "--steps 1 --device cpu --task.num-eval 1 --rollout.prompts 2 --rollout.max-tokens 2"


def test_without_a_launcher_there_is_the_main_process(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    assert (num_processes(), process_index(), is_main(), asks_for_sharding()) == (1, 0, True, False)


def test_a_launchers_variables_are_read(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert (num_processes(), process_index(), is_main(), asks_for_sharding()) == (8, 5, False, True)


@pytest.mark.parametrize("said", ["", "two", "-1"])
def test_a_variable_that_is_no_number_is_a_sentence(monkeypatch, said):
    monkeypatch.setenv("WORLD_SIZE", said)
    with pytest.raises(ValueError, match=f"WORLD_SIZE='{said}' should be a number"):
        num_processes()


def test_each_process_of_a_machine_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("auto") == torch.device("cuda", 3)
    assert choose_device("cpu") == torch.device("cpu")


def test_sharding_that_accelerate_would_not_take_up_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert cli.main(["train", *SMALL.split(), "--out", str(tmp_path / "run")]) == 2
    assert "does not take up on cpu: use examples/scaling/ddp.yaml" in capsys.readouterr().err


def test_a_sharded_reference_that_lies_nowhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="this one was made in memory: save it"):
        make_trainer(tmp_path, parts={"objective": ObjectiveConfig(name="grpo", beta=0.1)})

"""Under FSDP2 two processes make the runs of one, with real sampling; killed runs come back."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from mesotron.config import ObjectiveConfig, OptimConfig
from mesotron.runs import RunFolder
from support.fsdp_on_cpu import SHIPPED
from support.rlvr_processes import run_everywhere
from support.rlvr_tiny import make_model

TIMES = {"step_time", "time/step", "time/rollout", "time/optimizer"}
OBJECTIVES = {
    "grpo": ObjectiveConfig(name="grpo", beta=0.0),
    "mgrpo": ObjectiveConfig(name="mgrpo", beta=0.0, momentum=0.5),
    "merged": ObjectiveConfig(name="mgrpo", beta=0.0, momentum=0.5, loss_on_momentum=True),
    "kl": ObjectiveConfig(name="mgrpo", beta=0.1),
    "lora": ObjectiveConfig(name="mgrpo", beta=0.1, momentum=0.5),
}
QUICK = [("grpo", "muon"), ("mgrpo", "pion")]
SLOW = [
    ("grpo", "pion"), ("grpo", "adamw"), ("mgrpo", "muon"), ("mgrpo", "adamw"), ("merged", "muon"),
    ("kl", "muon"), ("lora", "muon"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model as a folder: a KL term under FSDP refers to where its model came from."""
    path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(path)
    return str(path)


def case(name, folder, num, steps=3):
    objective, optim = name
    settings = {"per_device_train_batch_size": 16 // num, "max_steps": steps,
                "max_completion_length": 6, "num_iterations": 2}  # fmt: skip
    parts = {"objective": OBJECTIVES[objective], "optim": OptimConfig(name=optim, lr=0.01)}
    if objective == "kl":
        parts["model"] = folder
    if objective == "lora":
        parts["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
    return settings, parts


def run_both(names, folder):
    """Each case on one process, and sharded on two: the main one's results."""
    found = [
        run_everywhere(num, [case(name, folder, num) for name in names], "run_sharded",
                       "support.sharded_runs", sharded=num > 1)[0]
        for num in (1, 2)
    ]  # fmt: skip
    return dict(zip(names, zip(*found, strict=True), strict=True))


@pytest.fixture(scope="module")
def quick(folder):
    return run_both(QUICK, folder)


@pytest.fixture(scope="module")
def slow(folder):
    return run_both(SLOW, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK, ids="-".join)
def test_a_sharded_run_is_the_run_of_one_process(quick, name):
    compare(name[0], *quick[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW, ids="-".join)
def test_a_sharded_run_is_the_run_of_one_process_in_every_variant(slow, name):
    compare(name[0], *slow[name])


def compare(objective, one, two):
    assert two["sharded"]
    assert not one["sharded"]
    assert bool(one["anchor"]) == (objective != "grpo")
    for kind in ("weights", "anchor"):
        assert one[kind].keys() == two[kind].keys()
        for name, weight in one[kind].items():
            torch.testing.assert_close(
                torch.tensor(two[kind][name]), torch.tensor(weight), rtol=0, atol=2e-5
            )
    assert any(abs(row["loss"]) > 1e-4 for row in one["rows"])
    for mine, theirs in zip(one["rows"], two["rows"], strict=True):
        assert mine.keys() == theirs.keys()
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
        # Cosines are of a sample of elements, which is another one in a shard.
        for key in {k for k in mine if not k.endswith("/cosine")} - TIMES:
            if mine[key] is None:
                assert theirs[key] is None, key
            else:
                assert theirs[key] == pytest.approx(mine[key], rel=1e-3, abs=1e-4), key


@pytest.mark.slow
def test_a_sharded_run_resumes_to_the_same_bits(folder):
    """From inside a rollout buffer, with the momentum policy, for each kind of optimizer state."""
    names = [("grpo", "adamw"), ("mgrpo", "muon"), ("kl", "pion"), ("lora", "muon")]
    cases = [case(name, folder, 2, steps=4) for name in names]
    for process in run_everywhere(2, cases, "resume_sharded", "support.sharded_runs", sharded=True):
        assert process == [[True], [True, True], [True, True], [True, True]]


@pytest.mark.slow
def test_a_sharded_run_goes_back(folder):
    cases = [case(("mgrpo", "muon"), folder, 2, steps=4)]
    for (process,) in run_everywhere(
        2, cases, "go_back_sharded", "support.sharded_runs", sharded=True
    ):
        assert process == {"acts": [1], "restored": [True, True, True], "rate": 0.005, "steps": 4}


@pytest.mark.slow
def test_the_command_is_killed_and_resumed_under_fsdp2(tmp_path):
    """`accelerate launch` with the shipped file: kill -9 after two steps, then --resume."""
    words = ("--steps 4 --save-every 1 --keep 9 --eval-every 2 --task.num-eval 4 --device cpu "
             "--rollout.prompts 4 --rollout.generations 4 --rollout.max-tokens 16 "
             "--objective.name mgrpo --optim.name muon --guard rollback")  # fmt: skip
    assert launch(["arith", *words.split(), "--out", "whole"], tmp_path).wait() == 0
    killed = launch(["arith", *words.split(), "--out", "killed"], tmp_path)
    checkpoint = tmp_path / "killed" / "checkpoints" / "checkpoint-2"
    while not checkpoint.exists():
        assert killed.poll() is None
        time.sleep(0.05)
    for process in psutil.Process(killed.pid).children(recursive=True):
        process.kill()  # SIGKILL
    assert killed.wait() != 0
    assert launch(["--resume", "killed"], tmp_path).wait() == 0
    ends = [load_file(tmp_path / name / "checkpoints" / "checkpoint-4" / "model.safetensors")
            for name in ("whole", "killed")]  # fmt: skip
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    rows = [RunFolder(tmp_path / name).rows("metrics") for name in ("whole", "killed")]
    kept = [[{k: row[k] for k in ("step", "loss", "reward", "grad_norm")} for row in run]
            for run in rows]  # fmt: skip
    assert kept[0] == kept[1]
    assert [row["step"] for row in rows[0] if "eval/greedy" in row] == [1, 2, 4]


def launch(words, folder):
    """The command as two sharded processes."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(SHIPPED),
                "--num_processes", "2", "--main_process_port", "0"]  # fmt: skip
    command = [*launcher, "-m", "support.fsdp_on_cpu", "train", *words]
    variables = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1]),
                 "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}  # fmt: skip
    variables = os.environ | variables
    return subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_log_probabilities_stay_float32_where_bfloat16_is_sharded(folder):
    """Rounded to bfloat16 an entropy of 3.2 would be off by up to 0.008."""
    found = []
    for num in (1, 2):
        settings, parts = case(("grpo", "muon"), folder, num, steps=1)
        cases = [(settings | {"bf16": True}, parts)]
        here = run_everywhere(num, cases, "run_sharded", "support.sharded_runs", sharded=num > 1)
        found.append(here[0][0]["rows"][0])
    for name in ("entropy", "entropy/trajectory_q1", "entropy/trajectory_q3"):
        assert found[1][name] == pytest.approx(found[0][name], abs=5e-4)

"""Under FSDP2 two processes make the runs of one, with real sampling; killed runs resume."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from peft import LoraConfig
from safetensors.torch import load_file

from mesotron.config import ObjectiveConfig, OptimConfig
from mesotron.runs import RunFolder
from support.fsdp_on_cpu import SHIPPED
from support.rlvr_processes import assert_same_run, run_everywhere
from support.rlvr_tiny import make_model, same

OBJECTIVES = {
    "grpo": ObjectiveConfig(name="grpo", beta=0.0),
    "mgrpo": ObjectiveConfig(name="mgrpo", beta=0.0, momentum=0.5),
    "merged": ObjectiveConfig(name="mgrpo", beta=0.0, momentum=0.5, loss_on_momentum=True),
    "kl": ObjectiveConfig(name="mgrpo", beta=0.1),
    "lora": ObjectiveConfig(name="mgrpo", beta=0.1, momentum=0.5),
}
CASES = [
    ("grpo", "muon"), ("mgrpo", "pion"), ("grpo", "pion"), ("grpo", "adamw"), ("mgrpo", "muon"),
    ("mgrpo", "adamw"), ("merged", "muon"), ("kl", "muon"), ("lora", "muon"),
]  # fmt: skip
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model as a folder: under FSDP a KL term loads its reference from there."""
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


def run(function, num, cases):
    """The results of every process."""
    return run_everywhere(num, cases, function, "support.sharded_runs", sharded=num > 1)


@pytest.fixture(scope="module")
def results(folder):
    """Each case on one process and sharded on two: the first one's results."""
    both = [run("run_sharded", num, [case(x, folder, num) for x in CASES])[0] for num in (1, 2)]
    return dict(zip(CASES, zip(*both, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES, ids="-".join)
def test_a_sharded_run_is_the_run_of_one_process(results, name):
    one, two = results[name]
    assert (one["sharded"], two["sharded"]) == (False, True)
    assert bool(one["anchor"]) == (name[0] != "grpo")
    assert any(abs(row["loss"]) > 1e-4 for row in one["rows"])
    # Cosines are over a sample of elements, which differs in a shard.
    assert_same_run(one, two, cosines=False)
    losses = [[row["loss"] for row in each["rows"]] for each in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_a_sharded_run_resumes_to_the_same_bits(folder):
    """From inside a rollout buffer, with the momentum policy, for each kind of optimizer state."""
    names = [("grpo", "adamw"), ("mgrpo", "muon"), ("kl", "pion"), ("lora", "muon")]
    for process in run("resume_sharded", 2, [case(name, folder, 2, steps=4) for name in names]):
        assert process == [[True], [True, True], [True, True], [True, True]]


def test_a_sharded_run_rolls_back(folder):
    for (process,) in run("roll_back_sharded", 2, [case(("mgrpo", "muon"), folder, 2, steps=4)]):
        assert process == {"acts": [1], "restored": [True, True], "rate": 0.005, "steps": 4}


def test_the_command_is_killed_and_resumed_under_fsdp2(tmp_path):
    """`accelerate launch` with the shipped file: kill -9 after two steps, then --resume."""
    flags = ("--steps 4 --save-every 1 --keep 9 --eval-every 2 --task.num-eval 4 --device cpu "
             "--rollout.prompts 4 --rollout.generations 4 --rollout.max-tokens 16 "
             "--objective.name mgrpo --optim.name muon --guard rollback")  # fmt: skip
    assert launch(["arith", *flags.split(), "--out", "whole"], tmp_path).wait() == 0
    killed = launch(["arith", *flags.split(), "--out", "killed"], tmp_path)
    checkpoint = tmp_path / "killed" / "checkpoints" / "checkpoint-2"
    while not checkpoint.exists():
        assert killed.poll() is None
        time.sleep(0.05)
    for process in psutil.Process(killed.pid).children(recursive=True):
        process.kill()  # SIGKILL
    assert killed.wait() != 0
    assert launch(["--resume", "killed"], tmp_path).wait() == 0
    last = "checkpoints/checkpoint-4/model.safetensors"
    assert same(*(load_file(tmp_path / name / last) for name in ("whole", "killed")))
    rows = [RunFolder(tmp_path / name).rows("metrics") for name in ("whole", "killed")]
    kept = [[{k: row[k] for k in ("step", "loss", "reward", "grad_norm")} for row in run]
            for run in rows]  # fmt: skip
    assert kept[0] == kept[1]
    assert [row["step"] for row in rows[0] if "eval/greedy" in row] == [1, 2, 4]


def launch(arguments, folder):
    """The command as two sharded processes."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(SHIPPED),
                "--num_processes", "2", "--main_process_port", "0"]  # fmt: skip
    command = [*launcher, "-m", "support.fsdp_on_cpu", "train", *arguments]
    variables = os.environ | {
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1]),
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL)


def test_log_probabilities_stay_float32_where_bfloat16_is_sharded(folder):
    """Rounded to bfloat16 an entropy of 3.2 would be off by up to 0.008."""
    entropies = []
    for num in (1, 2):
        settings, parts = case(("grpo", "muon"), folder, num, steps=1)
        ((result,), *_) = run("run_sharded", num, [(settings | {"bf16": True}, parts)])
        names = ("entropy", "entropy/trajectory_q1", "entropy/trajectory_q3")
        entropies.append([result["rows"][0][name] for name in names])
    assert entropies[1] == pytest.approx(entropies[0], abs=5e-4)

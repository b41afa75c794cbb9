"""Two processes make the steps of one, also under FSDP2; killed and rolled back runs go on."""

import errno
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
from support.rlvr_processes import assert_same_run, run_everywhere, run_on
from support.rlvr_tiny import make_model, same

# Eight completions of each process; a group of 16 spans both.
SHAPES = {"whole": {"num_generations": 4}, "spanning": {"num_generations": 16}}
slow = pytest.mark.slow
RESAMPLE = {
    "name": "grpo",
    "beta": 0.0,
    "dynamic_sampling": "resample",
}
CASES = {
    "grpo": ObjectiveConfig(name="grpo", beta=0.05),
    "mgrpo": ObjectiveConfig(name="mgrpo", momentum=0.5),
    "merged": ObjectiveConfig(
        name="mgrpo",
        momentum=0.5,
        loss_on_momentum=True,
    ),
    "resample": ObjectiveConfig(**RESAMPLE),
    "oversample": ObjectiveConfig(
        **RESAMPLE,
        dynamic_max_rounds=1,
        dynamic_oversample=3,
    ),
    "drop": ObjectiveConfig(name="dapo", dynamic_sampling="drop"),
    "skip": ObjectiveConfig(
        name="grpo",
        beta=0.05,
        dynamic_sampling="skip",
    ),
}
MUON = OptimConfig(name="muon", lr=0.01)
QUICK = ("mgrpo", "spanning")
# Processes do not exchange groups, so they draw other prompts than one process would.
OWN_PROMPTS = [("resample", "whole"), ("oversample", "whole")]
REFUSED = ("oversample", "spanning")
SLOW = [(n, s) for n in CASES for s in SHAPES if (n, s) not in (QUICK, REFUSED)]


def length(completions, prompts, **_):
    """Depends on the text alone; prompts that start with 0 have no signal."""
    pairs = zip(prompts, completions, strict=True)
    return [0.0 if prompt.startswith("0") else len(text) % 5 / 5 for prompt, text in pairs]


def case(objective, shape, num):
    settings = {
        "per_device_train_batch_size": 16 // num,
        "max_steps": 2,
        **SHAPES[shape],
    }
    return settings, {
        "objective": CASES[objective],
        "optim": MUON,
        "reward_funcs": length,
    }


@pytest.fixture(scope="module")
def results():
    """Each case on one process and on two."""
    both = [run_on(num, [case(*name, num) for name in SLOW]) for num in (1, 2)]
    return dict(zip(SLOW, zip(*both, strict=True), strict=True))


def check(objective, one, two):
    assert_same_run(one, two)
    assert bool(one["anchor"]) == (objective in ("mgrpo", "merged"))
    assert any(row["grad_norm"] > 1e-3 for row in one["rows"])


def test_two_processes_make_the_steps_of_one():
    one, two = (run_on(num, [case(*QUICK, num)])[0] for num in (1, 2))
    check(QUICK[0], one, two)


@slow
@pytest.mark.parametrize("name", [n for n in SLOW if n not in OWN_PROMPTS], ids="-".join)
def test_two_processes_make_the_steps_of_one_in_every_variant(results, name):
    check(name[0], *results[name])


@slow
@pytest.mark.parametrize("name", OWN_PROMPTS, ids="-".join)
def test_two_processes_fill_their_own_batches(results, name):
    for result in results[name]:
        assert [row["dynamic/filled"] for row in result["rows"]] == [1, 1]
        several = max(row["dynamic/rounds"] for row in result["rows"]) > 1
        assert several == (name[0] == "resample")


@slow
def test_a_checkpoint_that_fails_in_one_process_fails_in_all():
    """Otherwise the main process would wait for the other one forever."""
    (first,), (second,) = run_everywhere(2, [(1, errno.EIO)], "fail_to_save")
    assert "process 1" in first
    assert "Input/output error" in second


SHARDED = [
    ("grpo", "adamw"),
    ("grpo", "muon"),
    ("merged", "muon"),
    ("mgrpo", "muon"),
    ("mgrpo", "pion"),
    ("lora", "muon"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model as a folder: under FSDP a KL term loads its reference from there."""
    path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(path)
    return str(path)


def sharded_case(name, model, num, steps=3, **more):
    objective, optim = name
    settings = {
        "per_device_train_batch_size": 16 // num,
        "max_steps": steps,
        "max_completion_length": 6,
        "num_iterations": 2,
        **more,
    }

    parts = {"model": model, "optim": OptimConfig(name=optim, lr=0.01)}
    if objective == "lora":
        parts["peft_config"] = LoraConfig(r=4, target_modules="all-linear")

    return settings, parts | {"objective": CASES["mgrpo" if objective == "lora" else objective]}


def run(function, num, cases):
    """The results of every process."""
    return run_everywhere(
        num,
        cases,
        function,
        "support.sharded_runs",
        sharded=num > 1,
    )


@pytest.fixture(scope="module")
def sharded(model):
    """Each case on one process and sharded on two: the first one's results."""
    pairs = []
    for num in (1, 2):
        cases = [sharded_case(name, model, num) for name in SHARDED]
        pairs.append(run("run_sharded", num, cases)[0])

    return dict(zip(SHARDED, zip(*pairs, strict=True), strict=True))


@slow
@pytest.mark.parametrize("name", SHARDED, ids="-".join)
def test_a_sharded_run_is_the_run_of_one_process(sharded, name):
    one, two = sharded[name]
    assert (one["sharded"], two["sharded"]) == (False, True)
    assert bool(one["anchor"]) == (name[0] != "grpo")

    # Cosines are over a sample of elements, which differs in a shard.
    assert_same_run(one, two, cosines=False)
    losses = [[row["loss"] for row in each["rows"]] for each in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert max(map(abs, losses[0])) > 1e-4


@slow
def test_a_sharded_run_resumes_to_the_same_bits_and_rolls_back(model):
    """From inside a rollout buffer, with the momentum policy, for each kind of optimizer state."""
    names = [("grpo", "adamw"), ("mgrpo", "muon"), ("mgrpo", "pion"), ("lora", "muon")]
    cases = [sharded_case(name, model, 2, steps=4) for name in names]
    for process in run("resume_sharded", 2, cases):
        assert process == [[True], [True, True], [True, True], [True, True]]

    for (process,) in run("roll_back_sharded", 2, cases[1:2]):
        assert process == {
            "acts": [1],
            "restored": [True, True],
            "rate": 0.005,
            "steps": 4,
        }


@slow
def test_the_command_is_killed_and_resumed_under_fsdp2(tmp_path):
    """`accelerate launch` with the shipped file: kill -9 after two steps, then --resume."""
    flags = (
        "--steps 4 --save-every 1 --keep 9 --eval-every 2 --task.num-eval 4 --device cpu "
        "--batch 4 --group 4 --max-tokens 16 "
        "--objective.name mgrpo --optim muon --guard rollback"
    )

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
    kept = [
        [{k: row[k] for k in ("step", "loss", "reward", "grad_norm")} for row in run]
        for run in rows
    ]

    assert kept[0] == kept[1]
    assert [row["step"] for row in rows[0] if "eval/greedy" in row] == [1, 2, 4]


def launch(arguments, folder):
    """The command as two sharded processes."""
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(SHIPPED),
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
    ]

    command = [*launcher, "-m", "support.fsdp_on_cpu", "train", *arguments]
    variables = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }

    return subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.DEVNULL,
    )


@slow
def test_a_reward_that_raises_in_one_process_is_told_by_all(tmp_path):
    """In the first evaluation, before there is a trainer; started as by torchrun."""
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def score(completions, **_):\n"
        "    return [1 / (1 - int(os.environ['RANK'])) for _ in completions]\n"
    )
    flags = "--batch 2 --group 2 --max-tokens 4 --task.num-eval 2 --task.num-train 8 --steps 1"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["-m", "mesotron", "train", "arith", "--device", "cpu", *flags.split()]
    command += ["--reward", "mine.py:score", "--out", "run"]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    ours = [line for line in done.stderr.splitlines() if line.startswith("mesotron: ")]
    assert len(ours) == 1
    assert "process 1" in ours[0]
    assert "ZeroDivisionError" in ours[0]
    assert "exitcode  : 2 " in done.stderr


@slow
def test_log_probabilities_stay_float32_where_bfloat16_is_sharded(model):
    """Rounded to bfloat16 an entropy of 3.2 would be off by up to 0.008."""
    entropies = []
    for num in (1, 2):
        rounded = sharded_case(
            ("grpo", "muon"),
            model,
            num,
            steps=1,
            bf16=True,
        )

        ((result,), *_) = run("run_sharded", num, [rounded])
        names = ("entropy", "entropy/trajectory_q1", "entropy/trajectory_q3")
        entropies.append([result["rows"][0][name] for name in names])

    assert entropies[1] == pytest.approx(entropies[0], abs=5e-4)

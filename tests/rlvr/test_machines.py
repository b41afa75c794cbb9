"""Training on two machines: started by each launcher, one machine killed, the run resumed."""

import os
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from safetensors.torch import load_file

from mesotron.runs import RunFolder
from support.fsdp_on_cpu import SHIPPED
from support.machines import two_machines
from support.rlvr_tiny import same

FLAGS = (
    "arith --steps 4 --save-every 1 --keep 9 --eval-every 0 --task.num-eval 4 --device cpu "
    "--batch 4 --group 4 --max-tokens 16"
)


def torchrun(rank, address):
    where = f"--nnodes 2 --nproc_per_node 1 --node_rank {rank} --master_addr {address}"
    return ["torch.distributed.run", *where.split(), "--master_port", "29500", "-m", "mesotron"]


def accelerate(rank, address, config="ddp", module="mesotron"):
    where = f"--num_machines 2 --num_processes 2 --machine_rank {rank} --main_process_ip {address}"
    command = [
        "accelerate.commands.launch",
        "--config_file",
        str(SHIPPED.parent / f"{config}.yaml"),
    ]
    return [*command, *where.split(), "--main_process_port", "29500", "-m", module]


def accelerate_fsdp2(rank, address):
    return accelerate(rank, address, "fsdp2", "support.fsdp_on_cpu")


def start(machines, launcher, arguments, folder):
    started = []
    for rank, machine in enumerate(machines):
        command = [sys.executable, "-m", *launcher(rank, machines[0].address), "train", *arguments]
        started.append(machine.start(command, folder, ACCELERATE_USE_CPU="true"))

    return started


def finish(processes):
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "killed", "named"),
    [
        (torchrun, 1, "torchrun"),
        (accelerate, 0, "accelerate launch"),
        (accelerate_fsdp2, 1, "accelerate launch"),
    ],
)
def test_a_killed_machine_is_told_in_a_sentence_and_the_run_resumes(
    launcher, killed, named, tmp_path
):
    with two_machines() as machines:
        finish(start(machines, launcher, [*FLAGS.split(), "--out", "whole"], tmp_path))

        processes = start(machines, launcher, [*FLAGS.split(), "--out", "lost"], tmp_path)
        while not (tmp_path / "lost/checkpoints/checkpoint-2").exists():
            assert [process.poll() for process in processes] == [None, None]
            time.sleep(0.05)

        machines[killed].kill()
        survivor = processes[1 - killed]
        _, errors = survivor.communicate(timeout=120)

        assert survivor.returncode != 0
        (sentence,) = [line for line in errors.splitlines() if line.startswith("mesotron: ")]
        assert machines[killed].address in sentence
        assert "mesotron train --resume lost on every machine" in sentence
        assert f"{named} <the same flags> -m " in sentence
        assert f"traceback : {sentence}" in errors  # the launcher's last words

        finish(start(machines, launcher, ["--resume", "lost"], tmp_path))

    last = "checkpoints/checkpoint-4/model.safetensors"
    assert same(*(load_file(tmp_path / name / last) for name in ("whole", "lost")))

    whole, lost = (RunFolder(tmp_path / name).rows("metrics") for name in ("whole", "lost"))
    for key in ("step", "loss", "reward", "grad_norm"):
        assert [row[key] for row in whole] == [row[key] for row in lost]


SCRIPT = SHIPPED.with_name("slurm.sbatch")
SLURM = {
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_NODELIST": "node[07-08]",
}
# What a node of the job would start, for Slurm's own commands.
STUBS = {
    "scontrol": "printf 'node07\\nnode08\\n'",
    "srun": 'shift; exec "$@"',
    "accelerate": 'printf "%s\\n" "$@"',
}


@pytest.mark.parametrize("exists", [False, True])
def test_the_job_for_slurm_starts_a_run_and_continues_one(exists, tmp_path):
    for name, line in STUBS.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/bash\n{line}\n")
        stub.chmod(0o755)

    run = tmp_path / "my run"
    if exists:
        run.mkdir()
        (run / "config.json").touch()

    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(SCRIPT), "arith", "--steps", "4", "--out", str(run)]
    done = subprocess.run(
        command, env=os.environ | SLURM | {"PATH": path}, capture_output=True, text=True, check=True
    )

    launcher, _, given = done.stdout.partition("-m\nmesotron\ntrain\n")
    where = dict(pairwise(launcher.splitlines()))
    assert where["--main_process_ip"] == "node07"
    assert where["--machine_rank"] == "1"
    assert where["--num_processes"] == "16"
    assert given.splitlines() == (["--resume", str(run)] if exists else command[2:])

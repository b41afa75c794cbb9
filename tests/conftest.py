"""Shared by all tests: no network, few threads, and a way to run the real command."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

# Before any test imports transformers: it reads the variable once, at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Before any test imports Triton, for the same reason: without a GPU its interpreter runs kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def mesotron() -> Run:
    """Run the command in a process of its own: `mesotron("spectrum", "muon")`."""

    def run(*words: str, **options) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "mesotron", *words]
        environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=environment, **options
        )

    return run


@pytest.fixture
def sentence(mesotron: Run) -> Callable[..., str]:
    """Run the command with bad input: one line on stderr, exit code 2, nothing on stdout."""

    def run(*words: str) -> str:
        done = mesotron(*words)
        assert done.returncode == 2, done
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("mesotron: ")
        return done.stderr

    return run

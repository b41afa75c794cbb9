"""Shared by all tests: no network, and quick compilers where there is no GPU."""

import gc
import os
import tempfile

import pytest
import torch

# Before any test imports transformers: it reads the variable once, at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # the same; warnings are errors here

# Before any test imports Triton, for the same reason: without a GPU its interpreter runs kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Before any test imports JAX, too: XLA's newer emitters take twice as long to compile for a CPU. (A
# version without the flag stops and names it.)
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

# Runs with code of the user's own are noted in the state folder, which must not be the tester's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="mesotron-state-")

pytest_plugins = ["support.fixtures"]


@pytest.fixture(autouse=True, scope="session")
def frozen_imports():
    """Accelerate collects garbage after each training run: not among all that was imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()

"""Shared by all tests: no network, and Triton's interpreter where there is no GPU."""

import os

import torch

# Before any test imports transformers: it reads the variable once, at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # the same; warnings are errors here

# Before any test imports Triton, for the same reason: without a GPU its interpreter runs kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

"""Shared by the studies' tests; set before anything imports transformers."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

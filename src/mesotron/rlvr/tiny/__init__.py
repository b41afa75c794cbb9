"""The shipped model: a Llama of about a million parameters with a tokenizer of its own.

`tokenizer` and `network` say what it is, `weights/` is what `mesotron sft` made of it, and
docs/tiny.md has the command that makes it again.
"""

from mesotron.rlvr.tiny.network import build_network, tiny_config
from mesotron.rlvr.tiny.tokenizer import build_tokenizer

__all__ = ["build_network", "build_tokenizer", "tiny_config"]

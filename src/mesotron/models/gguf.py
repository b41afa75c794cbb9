"""GGUF files, converted once to a model folder in the user's cache.

Reading one takes a minute or more, so the folder is kept, in float32. Its name carries a digest of
the file's content; it appears complete or not at all.
"""

import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from mesotron.models.gguf_header import ADD_BOS, read_setting
from mesotron.models.messages import first_sentence, is_panic, no_progress_bars
from mesotron.runs.extras import require

# Increment when `_write_folder` changes, so that cached folders of the old layout are not used.
GGUF_LAYOUT = 3
# llama.cpp's files may hold a tied matrix twice, rounded to different numbers of bits. Cosine of
# the two: above 0.95 at two bits, near 0 for a head of its own.
SAME_MATRIX = 0.9
COMPARED = 16  # every so many rows of them
# With these marks Transformers refuses to save a model, though its weights are float32 now.
QUANTIZATION_MARKS = ("hf_quantizer", "quantization_method", "is_quantized")


def convert_gguf(file: Path, cache: Path | None = None) -> Path:
    """Convert a GGUF file to a model folder, or return the cached folder of an earlier call."""
    if cache is None:
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        cache = Path(root).expanduser() / "mesotron" / "models"

    folder = cache / f"{file.stem}-{_digest(file)[:12]}"
    if (folder / "config.json").is_file():
        return folder

    print(f"converting {file.name} once, a minute or two; cached in {folder}", file=sys.stderr)
    cache.mkdir(parents=True, exist_ok=True)

    draft = Path(tempfile.mkdtemp(prefix=f".{file.stem}-", dir=cache))
    try:
        with no_progress_bars(), bar_on_terminal_only():
            _write_folder(file, draft)

        # Renaming makes it complete or absent; a concurrent conversion has the same content.
        if not folder.exists():
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)

    return folder


@contextmanager
def bar_on_terminal_only() -> Iterator[None]:
    """Drop the bar that Transformers draws over the tensors; a log would get a line for each."""
    if sys.stderr.isatty():
        yield
        return

    with redirect_stderr(io.StringIO()):
        yield


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")

    digest.update(f"layout {GGUF_LAYOUT}".encode())
    return digest.hexdigest()


def _write_folder(file: Path, folder: Path) -> None:
    require("rlvr", ["gguf"], f"reading {file.name}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Beside other files of a tokenizer, Transformers loses the special tokens.
    link = folder / file.name
    link.symlink_to(file.resolve())
    place: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **place)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, trust_remote_code=False, **place
        )
    # An untrusted file can break its readers anywhere; some architectures are not converted.
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise

        why = first_sentence(error)
        raise ValueError(f"{file}: cannot read this GGUF file: {why}") from error

    link.unlink()
    # Transformers overlooks it; without its begin token Gemma loses a nat per token.
    if read_setting(file, ADD_BOS) and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True

    tie_if_same(model)
    for name in QUANTIZATION_MARKS:
        vars(model).pop(name, None)

    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tie_if_same(model: Any) -> None:
    """Tie the head to the embedding if both are roundings of one matrix, as in small Qwen models,
    whose files hold it twice. The head's is kept: llama.cpp rounds it to more bits."""
    import torch

    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return

    if head.weight.shape != embedding.weight.shape or getattr(head, "bias", None) is not None:
        return

    a = head.weight.detach()[::COMPARED].flatten()
    b = embedding.weight.detach()[::COMPARED].flatten()
    if not torch.cosine_similarity(a, b, dim=0) >= SAME_MATRIX:  # NaN says nothing
        return

    embedding.weight = head.weight
    model.config.tie_word_embeddings = True
    model.tie_weights()

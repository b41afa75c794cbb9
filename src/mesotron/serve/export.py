"""`mesotron export`: a run's model as a folder for `from_pretrained`, a GGUF file or a hub
repository, with a model card that carries the run's evidence."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesotron.config import ExportConfig, TaskConfig, TrainConfig
from mesotron.config.base import to_plain
from mesotron.evaluate.subject import Subject, find_subject
from mesotron.models.messages import first_sentence, no_progress_bars
from mesotron.models.names import SHIPPED, locate
from mesotron.models.variables import set_library_variables
from mesotron.runs import RunFolder
from mesotron.runs.best import Chosen
from mesotron.runs.extras import require
from mesotron.runs.files import printable, write_whole
from mesotron.runs.folder import check_free
from mesotron.runs.links import open_own
from mesotron.runs.markdown import fill_template, make_table
from mesotron.runs.process import go_offline_without_network
from mesotron.runs.resume import run_of

CONVERTER = "convert_hf_to_gguf.py"
# All that is copied of a checkpoint with an adapter; what else lies there may be anything.
ADAPTER_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def run(config: ExportConfig) -> int:
    run = run_of(config.model)
    subject = find_subject(config.model)
    if run is None:
        raise ValueError(f"{config.model} is not a run: name a folder that mesotron train wrote")

    # Refuse what cannot work before anything is written.
    out = config.out or run.path / "export"
    check_free(out, started=())  # all of it may be pushed
    whole = config.merge_lora or not subject.adapter
    if config.gguf and not whole:
        raise ValueError("--gguf needs whole weights, and this run trained adapters: --merge-lora")

    set_library_variables(TaskConfig(), subject.model.name)
    go_offline_without_network()
    converter = find_converter(out) if config.gguf else None
    if config.push is not None:
        check_push(config.push, out)

    # Write.
    subject.say_which()
    if subject.adapter and not whole:
        copy_adapter(subject.adapter, out)
    else:
        write_weights(subject, config.dtype, out)

    title = config.push or local_name(config, run)
    write_whole(out / "README.md", model_card(run, title, whole, subject.chosen))
    print(f"model: {out}; load with {load_line(str(out), whole)}")

    if converter is not None:
        write_gguf(converter, out)
    if config.push is not None:
        push(config.push, out)

    return 0


def local_name(config: ExportConfig, run: RunFolder) -> str:
    folder = config.out or run.path
    return folder.resolve().name


def write_weights(subject: Subject, dtype: str, out: Path) -> None:
    """Merge in float32 into the whole weights, then round once."""
    import torch

    wide = replace(subject, model=replace(subject.model, dtype="float32", load="full"))
    model, tokenizer = wide.load(torch.device("cpu"))

    name = own_dtype(subject) if dtype == "auto" else DTYPES.get(dtype, dtype)
    with no_progress_bars():
        model.to(getattr(torch, name)).save_pretrained(out)

    tokenizer.save_pretrained(out)


def own_dtype(subject: Subject) -> str:
    """The dtype that the model's own config names."""
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(locate(subject.model.name))
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def copy_adapter(adapter: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in ADAPTER_FILES:
        if not (adapter / name).exists():
            continue

        with open_own(adapter / name, "rb") as source, open_own(out / name, "xb") as copy:
            shutil.copyfileobj(source, copy)


def write_gguf(converter: Path, out: Path) -> None:
    file = out / "model.gguf"
    command = [sys.executable, converter, out, "--outfile", file]
    done = subprocess.run(command, capture_output=True, text=True)

    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        why = printable(lines[-1])
        raise ValueError(f"{out} is complete, but {converter} failed: {why}")

    print(f"gguf: {file}")


def load_line(place: str, whole: bool) -> str:
    loader = "AutoModelForCausalLM" if whole else "AutoPeftModelForCausalLM"
    return f'{loader}.from_pretrained("{place}")'


def find_converter(out: Path) -> Path:
    """llama.cpp's script, from the variable LLAMA_CPP or the path."""
    folder = os.environ.get("LLAMA_CPP")

    if folder:
        script = Path(folder).expanduser() / CONVERTER
    else:
        script = shutil.which(CONVERTER)

    if script is None or not Path(script).is_file():
        raise ValueError(
            "--gguf needs llama.cpp's converter: set LLAMA_CPP to a clone of it, or export without "
            f"--gguf and run python llama.cpp/{CONVERTER} {out} --outfile model.gguf"
        )

    return Path(script)


def check_push(name: str, out: Path) -> None:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII):
        raise ValueError(f"--push {name!r} is not a repository: write USER/NAME")

    require("rlvr", ["huggingface_hub"], "--push")
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        later = f"export without --push and run hf upload {name} {out} later"
        raise ValueError(f"--push {name}: the hub cannot be reached from here; {later}")
    from huggingface_hub import get_token

    if get_token() is None:
        raise ValueError(f"--push {name} needs a login: hf auth login, or set HF_TOKEN")


def push(name: str, out: Path) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=out)
    except (HfHubHTTPError, OSError) as error:
        why = first_sentence(error)
        raise ValueError(f"--push {name} failed, the model is in {out}: {why}") from error

    print(f"pushed: https://huggingface.co/{name}")


def model_card(run: RunFolder, name: str, whole: bool, chosen: Chosen | None = None) -> str:
    from mesotron.rlvr.run_report import best_lines, headline, score_table, watch_lines

    settings = run.config
    result = run.result or {}
    env = run.environment
    rows = run.rows("metrics")
    start = settings["model"]["name"]
    packages = env.get("packages", {})
    best = chosen.record if chosen is not None else None

    return fill_template(
        Path(__file__).with_name("card.md.j2"),
        name=name,
        whole=whole,
        start=start,
        on_hub=start not in SHIPPED and not Path(start).expanduser().exists(),
        public=public,
        supervised=settings.get("sft", {}).get("steps", 0),
        num_steps=best["step"] if best else len(rows),
        result=result,
        headline=headline(result),
        scores=score_table(result),
        best=best_lines(best, result, settings["steps"]) if best else [],
        data=data_of(settings["task"]),
        rewards=spell_rewards(settings.get("reward") or {}),
        watch=watch_lines(rows, run.rows("events")),
        settings=make_table(["setting", "value"], changed_settings(settings)),
        env=env,
        versions=", ".join(f"{key} {value}" for key, value in packages.items()),
        load_line=load_line(name, whole),
    )


def data_of(task: dict[str, Any]) -> list[str]:
    if task.get("data"):
        return task["data"]

    names = [task["name"]]
    if task.get("path"):  # of an older run
        names.append(task["path"])

    return names


def spell_rewards(reward: dict[str, Any]) -> list[str]:
    parts = reward.get("parts") or ["none"]
    weights = reward.get("weights") or [1.0] * len(parts)
    return [f"{public(part)} x {weight:g}" for part, weight in zip(parts, weights)]


def changed_settings(settings: dict[str, Any]) -> list[list[str]]:
    """Names and values of the settings that differ from the defaults, and a few that matter."""
    rows = []
    for section, defaults in to_plain(TrainConfig()).items():
        own = settings.get(section)
        if not isinstance(defaults, dict):
            if section in ("steps", "seed") or own not in (defaults, None):
                rows.append([section, public(own)])
            continue

        for key, default in defaults.items():
            value = (own or {}).get(key)
            if key == "name" or value not in (default, None):
                rows.append([f"{section}.{key}", public(value)])

    return rows


def public(value: Any) -> str:
    """A setting as the card shows it: of a local path only its last part."""
    if isinstance(value, list):
        return ", ".join(public(item) for item in value)

    text = " ".join(str(value).split())
    is_local = text.startswith(("/", "~", ".")) or os.path.exists(text.partition(":")[0])
    if is_local:
        return Path(text).name

    return text.replace("|", "\\|")

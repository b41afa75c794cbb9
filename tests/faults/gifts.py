"""What a stranger's folder did before it was refused, each case by name.

A case changes a fresh gift and runs a command on it. It holds if the home beside it, whose files
the links name, is as before, nothing ran, and the command ended in one sentence.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.kills import Tally, run_command, say
from faults.readers import copy_model, listing, write
from mesotron.config import TrainConfig
from mesotron.config.base import to_plain
from mesotron.runs import RunFolder
from mesotron.runs.checkpoints import writing

Change = Callable[[Path, Path], None]  # of the gift, by its folder and the home


@dataclass(frozen=True)
class Case:
    name: str
    change: Change
    command: str
    code: int = 2


def link(entry: str, target: str = "secret") -> Change:
    """Replace an entry of the gift by a link to one of the home, which may not exist."""

    def change(gift: Path, home: Path) -> None:
        path = gift / entry
        if path.is_dir():
            shutil.rmtree(path)

        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(home / target)

    return change


def hard_link(entry: str, target: str = "documents/letter") -> Change:
    """Give a file of the home a second name in the gift."""

    def change(gift: Path, home: Path) -> None:
        (gift / entry).unlink(missing_ok=True)
        os.link(home / target, gift / entry)

    return change


def option_of_trl(option: str) -> Change:
    def change(gift: Path, home: Path) -> None:
        write(gift / "config.json", to_plain(TrainConfig(trl=(option,))))

    return change


def gguf(body: bytes) -> Change:
    def change(gift: Path, home: Path) -> None:
        write(gift / "model.gguf", b"GGUF" + struct.pack("<I", 3) + body)

    return change


def backtracking_tokenizer(gift: Path, home: Path) -> None:
    place = copy_model(gift / "model")
    content = json.loads((place / "tokenizer.json").read_text())
    pattern = {"Regex": "(a+)+$"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    write(place / "tokenizer.json", content | {"pre_tokenizer": split})


def template(text: str) -> Change:
    def change(gift: Path, home: Path) -> None:
        write(copy_model(gift / "model") / "chat_template.jinja", text)

    return change


def linked_template(gift: Path, home: Path) -> None:
    place = copy_model(gift / "model") / "chat_template.jinja"
    place.unlink()
    place.symlink_to(home / "secret")


def tournament(gift: Path, home: Path) -> None:
    """One whose cell, which is removed and made again, is somebody's folder."""
    link("cells", "documents")(gift, home)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CHAT = "chat gift/model --max-tokens 1 --device cpu --prompt"
RESUME = "train --resume gift"
SWEEP = "compare sweep arith --space optim.lr=1e-5..1e-3 --out gift"
NEW = "train --out gift/empty --steps 1 --device cpu --task.num-eval 1 --batch 2 --max-tokens 2"
CASES = (
    Case("rows through a dangling link", link("samples.jsonl", "new.sh"), "train --resume gift"),
    Case("rows through a link", link("metrics.jsonl", ".profile"), "train --resume gift"),
    Case("a lock that truncates", link("lock"), "train --resume gift"),
    Case("a lock of a warm start", link("lock"), "sft --resume gift"),
    Case("a draft of spent.json", link(".spent.json.writing", "new.sh"), "train --resume gift"),
    Case("checkpoints elsewhere", link("checkpoints", "documents"), "train --resume gift"),
    Case("a checkpoint elsewhere", link("checkpoints/checkpoint-2", "documents"), "eval gift"),
    Case("an export elsewhere", link("export", "documents"), "export gift"),
    Case("a token in a checkpoint", link("checkpoints/checkpoint-1/.token"), "export gift"),
    Case("adapter_x in a checkpoint", link("checkpoints/checkpoint-1/adapter_x"), "export gift"),
    Case("an evaluation elsewhere", link("eval", "documents"), "vla eval gift"),
    Case("a report elsewhere", link("report.html", ".profile"), "report gift"),
    Case("events of a watched run", link("events.jsonl"), "watch gift"),
    Case("boards of PPO", link("tensorboard", "documents"), "ppo snake --resume gift"),
    Case("weights of PPO", link("lock"), "ppo snake --pretrained-model gift"),
    Case("a new run in a gift", link("empty/checkpoints", "empty"), NEW),
    Case("a chat with a run", link("lock"), "chat gift --prompt hello"),
    Case("cells elsewhere", tournament, "compare arith --out gift"),
    Case("trials elsewhere", link("trials", "documents"), SWEEP),
    Case("a journal elsewhere", link("study.log"), SWEEP),
    Case("a journal's second name", hard_link("study.log"), SWEEP),
    Case("a lock's second name", hard_link("lock"), "train --resume gift"),
    Case("a server in TRL's options", option_of_trl("vllm_server_host=192.0.2.1"), RESUME),
    Case("a Space in TRL's options", option_of_trl("trackio_space_id=a/b"), RESUME),
    Case("GGUF, 2^60 keys", gguf(struct.pack("<QQ", 0, 2**60)), "eval gift/model.gguf"),
    Case("GGUF, 2^60 tensors", gguf(struct.pack("<QQ", 2**60, 0)), "eval gift/model.gguf"),
    Case("GGUF, a key of 2^60", gguf(struct.pack("<QQQ", 0, 1, 2**60)), "eval gift/model.gguf"),
    Case("GGUF, a key of 2^64", gguf(struct.pack("<QQQ", 0, 1, 2**64 - 1)), "eval gift/model.gguf"),
    Case("a pattern that backtracks", backtracking_tokenizer, f"{CHAT} {'a' * 40}b"),
    Case("nested loops in a template", template(LOOPS), f"{CHAT} hello"),
    Case("a template elsewhere", linked_template, f"{CHAT} hello"),
)


def make(place: Path) -> tuple[Path, Path]:
    """A gift, which is a stopped run, and a home with a few files."""
    shutil.rmtree(place, ignore_errors=True)
    home = place / "home"
    write(home / "secret", "secret")
    write(home / ".profile", "# shell\n")
    write(home / "documents/letter", "dear")
    (home / "empty").mkdir()

    run = RunFolder.create(place / "gift", to_plain(TrainConfig()), {})
    run.append("metrics", {"step": 1, "reward": 0.5, "loss": 0.1})
    with writing(run.checkpoints, 1) as draft:
        write(draft / "adapter_config.json", {})
        write(draft / "adapter_model.safetensors", b"")

    return run.path, home


def holds(case: Case, place: Path, log: Path) -> str | None:
    """What went wrong, or None."""
    gift, home = make(place)
    case.change(gift, home)
    before = listing(home)

    ended = run_command(case.command.split(), log, place, own_folder=False)
    sentences = [line for line in ended.text.splitlines() if line.startswith("mesotron: ")]
    if listing(home) != before:
        return "the home has changed"
    if ended.code != case.code or "Traceback" in ended.text or len(sentences) != 1:
        return f"{ended.code} {ended.text[-800:]}"

    return None


def attack(args: Any, root: Path, model: Path) -> dict[str, Any]:
    tally = Tally()
    names = {}
    for case in CASES:
        wrong = holds(case, root / "gifts", root / "gift.log")
        tally.add(wrong is None, f"{case.name}: {wrong}")
        names[case.name] = "held" if wrong is None else "failed"
        say(f"{case.name}: {names[case.name]}")

    return tally.record() | {"cases": names}

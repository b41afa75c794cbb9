"""Files of a stranger that try to run code, in every place where something is read.

Each attempt is a command on a folder that somebody sent; the code, wherever it is, would make a
file called `ran`.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mesotron
from faults.kills import SMALL, Tally, run_command, say

EVIL = "gift.evil:f"
SHELL = "touch ran"
CODE = "open('ran', 'w').close()\nf = W = dict\n"
TEMPLATE = "{{ cycler.__init__.__globals__.os.system('touch ran') }}{{ messages[0].content }}"
PICKLES = ("log.parquet", "log.wandb", "log.db", "log.json", "events.out.tfevents.1", "model.gguf")
REMOTE = {
    "AutoConfig": "evil.C",
    "AutoModelForCausalLM": "evil.M",
    "AutoTokenizer": ["evil.T", ""],
}


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, (SHELL,)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb()))


def write(path: Path, value: Any) -> None:
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def change(path: Path, **values: Any) -> None:
    write(path, json.loads(path.read_text()) | values)


def make_gift(root: Path, model: Path) -> None:
    """Folders that are a package, a run, demonstrations, models and logs at once."""
    from mesotron.config import RewardConfig, RunWatchConfig, TrainConfig, WorldConfig
    from mesotron.config.base import to_plain
    from mesotron.runs import RunFolder
    from mesotron.vla.demos import write_manifest

    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    watch = RunWatchConfig(alerts=(f"command:{SHELL}",))

    configs = {
        "gift": TrainConfig(reward=RewardConfig(parts=(EVIL,)), trust=True),
        "alert": TrainConfig(watch=watch, trust=True),
        "file": TrainConfig(reward=RewardConfig(parts=("gift/evil.py:f",)), trust=True),
        "cells/a": TrainConfig(reward=RewardConfig(parts=(EVIL,)), trust=True),
    }
    for name, config in configs.items():
        folder = root / name
        RunFolder.create(folder, to_plain(config) | {"resume": name}, {})
        rows = [
            json.dumps(
                {
                    "step": k,
                    "reward": 0.5,
                    "loss": 0.1,
                }
            )
            + "\n"
            for k in range(1, 9)
        ]

        write(folder / "metrics.jsonl", "".join(rows))
        (folder / "checkpoints" / "checkpoint-1").mkdir()

    gift = root / "gift"
    facts = {"num_shards": 1, "cameras": []}
    write_manifest(gift, WorldConfig(name=EVIL), False, facts)
    write(gift / "evil.py", CODE)
    pickled(gift / "shard-00000.npz")

    for name in ("trl", "numpy", "datasets", "rich", "sitecustomize", "usercustomize"):
        write(root / f"{name}.py", CODE)  # in the working folder

    for name in ("remote", "pickle", "template", "adapter"):
        shutil.copytree(model, root / name)
        write(root / name / "evil.py", CODE)

    change(root / "remote" / "config.json", auto_map=REMOTE, model_type="evil")
    change(root / "remote" / "tokenizer_config.json", auto_map=REMOTE, tokenizer_class="T")

    for path in (root / "pickle").glob("*.safetensors"):
        path.unlink()

    pickled(root / "pickle" / "pytorch_model.bin")
    change(root / "template" / "tokenizer_config.json", chat_template=TEMPLATE)
    write(root / "template" / "chat_template.jinja", TEMPLATE)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "remote"}
    adapter |= {"auto_mapping": {"base_model_class": "M", "parent_library": "evil"}}
    write(root / "adapter" / "adapter_config.json", adapter)
    write(root / "sweep.yaml", f"command: !!python/object/apply:os.system ['{SHELL}']\n")

    write(
        root / "detectors.toml",
        f'[[detector]]\nname = "a"\ndiagnosis = "$({SHELL})"\n'
        "cases = [[{metric = '__import__(\"os\")', moved = 'above', level = 0}]]\n",
    )
    for name in PICKLES:
        pickled(root / name)

    record = {
        "recipe": "arith",
        "kind": "rlvr",
        "measure": "",
        "rule": [],
        "contenders": [],
        "plan": {},
        "cells": [],
    }

    write(root / "tournament.json", record)


def states_of(model: Path, root: Path) -> None:
    """A run stopped by its owner, into whose checkpoint pickles were put, listed with hashes."""
    from mesotron.runs.checkpoints import publish

    words = f"{SMALL} --model {model} --out {root / 'own'} --steps 2"
    args = words.replace("earned:even", "format").split()  # no code of their own
    ended = run_command(["train", *args], root / "log", root)

    assert ended.code == 0, ended
    (root / "own" / "result.json").unlink()

    for checkpoint in (root / "own" / "checkpoints").iterdir():
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
            pickled(checkpoint / name)

        (checkpoint / "manifest.json").unlink()
        draft = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.writing"))
        publish(draft)


ATTEMPTS = """
train --resume gift
train --resume gift --trust
train --resume gift --reward sparse
train --resume gift --watch.alerts wandb
train --resume gift --time-limit 1m --trust
train --resume alert
train --resume alert --reward sparse
train --resume cells/a
train --resume file
train --resume own
train --model remote --steps 1
train --model pickle --steps 1
train --model adapter --steps 1
train --model template --steps 1 --task.num-eval 1 --max-tokens 2
train --task file --data gift/evil.py --steps 1
train --task file --data gift --steps 1
train --config gift/evil.py
sft --resume gift
sft --model remote --steps 1
eval gift
eval gift/checkpoints/checkpoint-1
eval file
eval remote
export file --out exported
export remote --out exported
chat gift
chat remote
eval pickle
eval template --task.num-eval 1 --max-tokens 2
eval model.gguf
vla train gift --steps 1
vla train gift --steps 1 --trust
vla eval gift
vla demos --render gift --out images
compare vla --set demos=gift --out games
compare arith --out .
sweep sweep.yaml
plan --resume gift
plan --model remote
route remote
watch gift
watch gift --detectors detectors.toml
watch log.parquet
watch log.wandb
watch log.db
watch log.json
watch .
report gift
report gift alert
ppo snake --resume gift
"""


def attack(options: Any, root: Path, model: Path) -> dict[str, Any]:
    """Every attempt in a fresh folder."""
    tally = Tally()
    place = root / "strangers"

    commands = [line.split() for line in ATTEMPTS.split("\n") if line]
    for number, args in enumerate(commands):
        if number == 0 or (place / "ran").exists():
            make_gift(place, model)
            states_of(model, place)

        ended = run_command(args, root / "stranger.log", place, own_folder=False)
        judge(place, args, ended.code, ended.text, tally)
        say(f"{' '.join(args)}: {ended.code}")

    # The working folder has modules with the names of ours' packages; no child of this process.
    program = Path(sys.executable).with_name("mesotron")
    source = Path(mesotron.__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run(
        [program, "report", "gift"], cwd=place, env=env, capture_output=True, text=True
    )

    judge(
        place,
        ["mesotron report gift"],
        done.returncode,
        done.stderr,
        tally,
    )
    return tally.record() | {"executed": tally.kills}


def judge(place: Path, args: list[str], code: int, text: str, tally: Tally) -> None:
    ran = (place / "ran").exists()
    tally.kills += ran
    good = not ran and code in (0, 1, 2) and "Traceback" not in text
    tally.add(good, f"{args}: {'ran code' if ran else code} {text[-1500:]}")

"""Make the shipped tiny model again: `python -m mesotron.rlvr.tiny FOLDER`.

A tokenizer learned from arith's problems, a random network, then `mesotron sft` with the settings
below. Half of the demonstrations give the answer outside the format, and the training ends early:
the model knows more than it is paid for, which is what reinforcement learning starts from.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoTokenizer

from mesotron.config import ModelConfig, OptimConfig, SftConfig, TaskConfig
from mesotron.rlvr import sft
from mesotron.rlvr.models import load_model
from mesotron.rlvr.prompts import loose_text, solved_text
from mesotron.rlvr.tasks.load import load_task
from mesotron.rlvr.tiny import build_network, build_tokenizer
from mesotron.runs import newest_whole

TASK = TaskConfig(name="arith")


def settings(start: Path, out: Path) -> SftConfig:
    """The warm start that makes the tiny model out of a random one."""
    return SftConfig(
        model=ModelConfig(name=str(start)),
        task=TASK,
        optim=OptimConfig(name="muon", lr=4e-3),
        steps=600,
        batch=32,
        loose=0.5,
        max_tokens=128,
        save_every=100,
        out=out,
        device="cpu",
        threads=1,
    )


def write_start(folder: Path) -> None:
    """A tokenizer that has read some problems, and a network that has not."""
    task = load_task(TaskConfig(name="arith", levels=(1, 2, 3, 4, 5), num_train=4000, num_eval=1))
    texts = [(p.question, solved_text(p, task.format), loose_text(p)) for p in task.train]
    tokenizer = build_tokenizer([text for three in texts for text in three])
    build_network(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: Path) -> int:
    """Make the model in `folder / "weights"`; the run that made it stays beside it."""
    write_start(folder / "start")
    code = sft.run(settings(folder / "start", folder / "run"))
    found, _ = newest_whole(folder / "run" / "checkpoints")
    assert found is not None
    write_model(found.path, folder / "weights")
    return code


def write_model(checkpoint: Path, folder: Path) -> None:
    """A checkpoint as a model folder: without the trainer's state, ready to generate."""
    model, _ = load_model(ModelConfig(name=str(checkpoint)))
    model.config.use_cache = True  # training has switched it off
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.init_kwargs.pop("local_files_only", None)  # how it was read, and not what it is
    tokenizer.save_pretrained(folder)
    print(f"the tiny model is in {folder}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Make the shipped tiny model: `python -m benchmarks.tiny_model FOLDER`.

Trains a tokenizer on arith's problems, then a random network with `mesotron sft`. Half of the
demonstrations give the answer outside the format, and training ends early: the model can do more
than it is rewarded for, which is where reinforcement learning starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.tiny_model import build_network, build_tokenizer
from mesotron.config import ModelConfig, OptimConfig, SftConfig, TaskConfig
from mesotron.rlvr import train
from mesotron.rlvr.models import load_model
from mesotron.rlvr.prompts import loose_text, solved_text
from mesotron.rlvr.tasks.load import load_task
from mesotron.runs import newest_whole


def main(folder: Path) -> int:
    task = load_task(TaskConfig(name="arith", levels=(1, 2, 3, 4, 5), num_train=4000, num_eval=1))
    texts = [(p.question, solved_text(p, task.format), loose_text(p)) for p in task.train]
    tokenizer = build_tokenizer([text for three in texts for text in three])
    build_network(tokenizer).save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    settings = SftConfig(
        model=ModelConfig(name=str(folder / "start")),
        task=TaskConfig(name="arith"),
        optim=OptimConfig(name="muon", lr=4e-3),
        steps=600,
        batch=32,
        loose=0.5,
        max_tokens=128,
        save_every=100,
        out=folder / "run",
        device="cpu",
        threads=1,
    )
    code = train.run(settings)
    newest, _ = newest_whole(folder / "run" / "checkpoints")
    assert newest is not None
    model, _ = load_model(ModelConfig(name=str(newest.path)))
    model.config.use_cache = True  # training switched it off
    model.save_pretrained(folder / "weights")
    tokenizer = AutoTokenizer.from_pretrained(newest.path)
    tokenizer.init_kwargs.pop("local_files_only", None)  # how it was loaded
    tokenizer.save_pretrained(folder / "weights")
    print(f"the tiny model is in {folder / 'weights'}")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

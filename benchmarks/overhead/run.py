"""What our trainer adds to a step of TRL's: facts, metrics, statistics, the watch, the run folder.

    python -m benchmarks.overhead.run --out benchmarks/overhead/result.json

Both train the shipped tiny model with AdamW on the same prompts, with a learning rate of 0, so that
both sample the very same completions and do the same work. Rounds alternate. A step is measured in
processor time, the optimizer's own work apart.
"""

import argparse
import logging
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import trl
from transformers import TrainerCallback

import mesotron
from benchmarks._lib.plain_trl import plain_reward
from benchmarks._lib.results import write_json
from mesotron.answers.facts import Judge
from mesotron.answers.verify import Verifier
from mesotron.config import OptimConfig
from mesotron.models.load import load_model
from mesotron.recipes import make_recipe
from mesotron.rewards.call import as_reward_function, make_reward
from mesotron.rlvr.callbacks import RunLog
from mesotron.rlvr.trl_arguments import trl_arguments
from mesotron.runs import RunFolder, describe_environment
from mesotron.runs.console import LiveView
from mesotron.tasks.load import load_task
from mesotron.tasks.rows import make_rows


class ProcessorClock(TrainerCallback):
    """Processor seconds of each step, without the optimizer's."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_begin(self, *_, **__) -> None:
        self.began = time.process_time()

    def on_pre_optimizer_step(self, *_, **__) -> None:
        self.paused = time.process_time()

    def on_optimizer_step(self, *_, **__) -> None:
        self.optimizer = time.process_time() - self.paused

    def on_log(self, args, state, control, logs=None, **__) -> None:
        if "loss" in (logs or {}):
            self.steps.append(time.process_time() - self.began - self.optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)

    times: dict[str, list[float]] = {"trl": [], "mesotron": []}
    with Verifier() as verifier:
        for _ in range(given.rounds):
            for name in times:
                times[name] += train(name, given.steps, verifier)[1:]  # the first one warms up

    pairs = zip(times["mesotron"], times["trl"], strict=True)
    ratios = {
        "ratio_of_medians": median(times["mesotron"]) / median(times["trl"]),
        "median_of_ratios": median(ours / stock for ours, stock in pairs),
    }
    print(ratios)
    if given.out:
        write_json(ratios | {"seconds": times}, given.out, indent=1)


def train(name: str, steps: int, verifier: Verifier) -> list[float]:
    config = make_recipe("arith")
    task = load_task(config.task)
    judge = Judge(task.format, verifier)
    reward = make_reward(config.reward, judge, config.rollout.max_tokens)
    model, tokenizer = load_model(config.model, torch.device("cpu"))
    optim = OptimConfig(name="adamw", lr=0.0)

    clock = ProcessorClock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl_arguments(config.objective, config.rollout, optim, 1) | {
            "output_dir": folder,
            "max_steps": steps,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "dataloader_pin_memory": False,
        }

        parts = {
            "model": model,
            "args": trl.GRPOConfig(**arguments),
            "train_dataset": make_rows(task, config.task, tokenizer),
            "processing_class": tokenizer,
            "callbacks": [clock],
        }

        if name == "trl":
            trainer = trl.GRPOTrainer(reward_funcs=plain_reward(reward, tokenizer), **parts)
        else:
            own = {"optim": optim, "objective": config.objective, "judge": judge}
            ours = as_reward_function(reward)
            trainer = mesotron.GRPOTrainer(reward_funcs=ours, **own, **parts)
            run = RunFolder.create(Path(folder) / "run", config, describe_environment("cpu", 0))
            trainer.add_callback(RunLog(run, LiveView(steps, {}), trainer))
            trainer.add_callback(mesotron.Watch(guard="warn", run=run.path))

        trainer.train()

    return clock.steps


if __name__ == "__main__":
    main()

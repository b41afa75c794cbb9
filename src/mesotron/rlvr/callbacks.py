"""What a training run does besides training: rows to its folder, the live view, stopping politely.

Plain Transformers callbacks; only the main process writes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mesotron.runs import RunFolder
from mesotron.runs.console import LiveView
from mesotron.runs.signals import StopRequest

WATCHED = {
    "reward": "reward",
    "facts/correct": "correct",
    "facts/formatted": "format",
    "entropy": "entropy",
}
SAMPLES_A_STEP = 2


class RunLog(TrainerCallback):
    """Writes one row a step to metrics.jsonl, a few completions to samples.jsonl, and shows both.

    Args:
        run: its folder.
        view: what the terminal shows.
        trainer: whose latest completions are sampled; TRL keeps them in `_logs`.
        refuse: end the run at a loss that is not a number; a guard may be able to go back instead.
    """

    def __init__(
        self, run: RunFolder, view: LiveView, trainer: Any, *, refuse: bool = True
    ) -> None:
        self.run = run
        self.view = view
        self.trainer = trainer
        self.refuse = refuse

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A row of metrics; the summary that Transformers logs at the end is not one."""
        if logs is None or "loss" not in logs:
            return
        if state.is_world_process_zero:
            self._write(state.global_step, logs)
        if self.refuse:
            refuse_non_finite(state.global_step, logs, self.run)

    def _write(self, step: int, logs: dict[str, Any]) -> None:
        row = {key: value for key, value in logs.items() if value is not None}
        self.run.append("metrics", {"step": step, **row})
        if "reward" in logs:  # this step has sampled, rather than used a rollout again
            self._keep_samples(step)
        self.view.update(step, logs)

    def _keep_samples(self, step: int) -> None:
        logs = self.trainer._logs
        # In the order of the reward functions; self-labelled runs log some at the weight 0.
        rewards = [list(values) for values in logs["rewards"].values()]
        weights = self.trainer.reward_weights.tolist()
        for k in range(min(SAMPLES_A_STEP, len(logs["completion"]))):
            earned = [(w, values[k]) for w, values in zip(weights, rewards, strict=True)]
            sample = {
                "step": step,
                "prompt": text_of(logs["prompt"][k]),
                "completion": text_of(logs["completion"][k]),
                "reward": sum(w * x for w, x in earned if x is not None and not math.isnan(x)),
                "advantage": logs["advantages"][k],
            }
            self.run.append("samples", sample)
            if k == 0:
                asked = sample["prompt"][-200:]
                self.view.show_transcript(f"{asked}\n{sample['completion']}")


class PoliteStop(TrainerCallback):
    """Ends training after the step in which somebody asked for it, with a checkpoint."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Ask for a checkpoint and the end, in every process if one was told."""
        requested = self.stop.requested
        if dist.is_initialized():
            told = torch.tensor([float(requested)], device=args.device)
            dist.all_reduce(told, dist.ReduceOp.MAX)
            requested = bool(told.item())
        if requested:
            control.should_save = True
            control.should_training_stop = True


class EvalEvery(TrainerCallback):
    """Puts the greedy accuracy into the row of every n-th step, as eval/greedy.

    The first row has the accuracy before training, so that whoever reads the rows knows what
    there was to lose.

    Args:
        every: how many steps apart.
        trainer: whose rows; TRL collects a row's metrics in `_metrics`.
        accuracy: measures the model as it is.
        start: the accuracy before training.
        problems: how many it is measured on.
    """

    def __init__(
        self,
        every: int,
        trainer: Any,
        accuracy: Callable[[], float],
        *,
        start: float,
        problems: int,
    ) -> None:
        self.every = every
        self.trainer = trainer
        self.accuracy = accuracy
        self.start = start
        self.problems = problems

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Evaluate; greedy decoding draws no random number, so training is not moved."""
        if state.global_step % self.every == 0:
            self._log(self.accuracy())
        elif state.global_step == 1:
            self._log(self.start)

    def _log(self, accuracy: float) -> None:
        metrics = self.trainer._metrics["train"]
        metrics["eval/greedy"].append(accuracy)
        metrics["eval/problems"].append(float(self.problems))


def refuse_non_finite(step: int, logs: dict[str, Any], run: RunFolder) -> None:
    """Stop at a loss that is not a number: the weights may be spoiled, and are not saved."""
    if not math.isfinite(logs["loss"]):
        raise ValueError(
            f"the loss is {logs['loss']} at step {step}, so training has stopped and this step was "
            f"not saved; {run.path} keeps what was before: try a smaller --optim.lr"
        )


def text_of(said: str | list[dict[str, Any]]) -> str:
    """A prompt or completion of either kind as text: of messages, the last one's."""
    return said if isinstance(said, str) else str(said[-1]["content"])

"""Callbacks of a training run: rows, live view, stopping, evaluation, forgetting, gradient SNR.

Plain Transformers callbacks; only the main process writes. Row metrics go to the trainer's `note`.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback
from trl.trainer.utils import split_tensor_dict

from mesotron.probes.forgetting import text_nll
from mesotron.probes.gradients import snr_from_norms, squared_norm
from mesotron.rlvr.ahead import Ahead
from mesotron.rlvr.optimizer import unwrap_optimizer
from mesotron.rlvr.state import random_state, restore_random_state
from mesotron.rlvr.together import together
from mesotron.runs import RunFolder
from mesotron.runs.best import NAME as BEST
from mesotron.runs.best import HeldOut
from mesotron.runs.console import LiveView
from mesotron.runs.deadline import Deadline, LimitReached
from mesotron.runs.own_code import FAILURES
from mesotron.runs.process import StopRequest
from mesotron.tasks.rows import Rows
from mesotron.watch.budget import Budget
from mesotron.watch.callback import Watch, broadcast
from mesotron.watch.forecast import forecast

log = logging.getLogger("mesotron.watch")

WATCHED = {
    "reward": "reward",
    "facts/correct": "correct",
    "facts/formatted": "format",
    "entropy": "entropy",
}
SAMPLES_PER_STEP = 2
# Parts of a step that is a single forward pass; a step of several has one part for each.
SNR_PARTS = 4

Note = Callable[[dict[str, float]], None]
"""Logs metrics in the row of the step."""


class RunLog(TrainerCallback):
    """Writes metrics.jsonl (a row per step) and samples.jsonl (completions), and shows both."""

    def __init__(self, run: RunFolder, view: LiveView, trainer: Any, refuse: bool = True) -> None:
        self.run = run
        self.view = view
        self.trainer = trainer
        self.refuse = refuse

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:  # Transformers' summary at the end
            return

        step = state.global_step
        if state.is_world_process_zero:
            row = {}
            for key, value in logs.items():
                if value is not None:
                    row[key] = value

            self.run.append("metrics", {"step": step, **row})

            if "reward" in logs:  # this step sampled, rather than reused a rollout
                self._keep_samples(step)

            self.view.update(step, logs)

        if self.refuse and not math.isfinite(logs["loss"]):
            # The weights may be broken, so they are not saved.
            raise ValueError(
                f"the loss is {logs['loss']} at step {step}, so training stopped and this step was "
                f"not saved; {self.run.path} keeps what came before: try a smaller --lr"
            )

    def _keep_samples(self, step: int) -> None:
        for k, sampled in enumerate(self.trainer.samples(SAMPLES_PER_STEP)):
            prompt = sampled.prompt
            turns = sampled.completion
            if not isinstance(turns, str):
                turns = "\n".join(str(x.get("content") or x.get("tool_calls") or "") for x in turns)

            sample = {
                "step": step,
                "prompt": prompt if isinstance(prompt, str) else str(prompt[-1]["content"]),
                "completion": turns,
                "reward": sampled.reward,
                "advantage": sampled.advantage,
            }

            self.run.append("samples", sample)
            if k == 0:
                self.view.show_transcript(f"{sample['prompt'][-200:]}\n{sample['completion']}")


class StepTimer(TrainerCallback):
    """Logs time/step and time/optimizer of each step."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self.step_start = 0.0
        self.optimizer_start = 0.0
        self.optimizer_time = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.step_start = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.optimizer_start = time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.optimizer_time = time.perf_counter() - self.optimizer_start

    def on_step_end(self, *_: Any, **__: Any) -> None:
        spent = time.perf_counter() - self.step_start
        self.note({"time/step": spent, "time/optimizer": self.optimizer_time})


class EndAhead(TrainerCallback):
    """Forgets the rollout that is sampled ahead when training ends."""

    def __init__(self, ahead: Ahead) -> None:
        self.ahead = ahead

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.ahead.drop()


class KeepLastStep(TrainerCallback):
    """Keeps the state of the last whole step while the next one can still be given up, so that an
    error loses no finished step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.trainer.last_step is None:
            self.on_epoch_begin()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        # Before the data loader draws from the random state.
        self.trainer.last_step = self.trainer.process_state()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer.last_step = None  # from here on the weights change


class GiveUpAtLimit(TrainerCallback):
    """Gives a step up at the limit, before it changes the weights: something in it may have
    swallowed the interrupt. Must come before `KeepLastStep`."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.deadline.check()


class SkipSilentBatch(TrainerCallback):
    """Makes no step where no group of an update has a signal.

    Else rounding or momentum moves the weights, with Muon at full size.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.is_silent = False
        self.update_start = 0  # number of its first micro-batch; epochs may end inside an update

    def observe(self, is_silent: bool) -> None:
        """Called with each rollout; an update may use several, or one with others."""
        starts_update = self.trainer.micro_batches_done == self.update_start
        self.is_silent = is_silent and (starts_update or self.is_silent)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.update_start = self.trainer.micro_batches_done

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.is_silent and self._may_skip():
            self.trainer.policy.zero_grad()

    def _may_skip(self) -> bool:
        trainer = self.trainer
        if trainer.objective.dynamic_sampling != "off":
            return True

        # These terms of the loss need no signal.
        has_more = trainer.beta or trainer.bonus is not None or trainer.aux_loss_enabled
        return not has_more and unwrap_optimizer(trainer.optimizer) is not None


class TokenizeAhead(TrainerCallback):
    """Tokenizes the next prompts while the GPU still runs the backward pass."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        data = trainer.train_dataset
        if trainer.fast.sampler is None or not isinstance(data, Rows) or not data.latest:
            return
        if trainer.ahead is not None:  # whose thread uses the tokenizer
            return

        rows = list(data.latest)
        if trainer.resampler is not None:
            rows += trainer.resampler.ahead()
        if trainer.curriculum is not None:
            rows = trainer.curriculum.place(rows)

        trainer.tokenize_ahead([row["prompt"] for row in rows])
        data.latest = ()


class LogAuxiliaryNorm(TrainerCallback):
    """Logs the norm of the gradients that AdamW steps, when reading it does not wait."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self.norm: Tensor | None = None

    def observe(self, norm: Tensor | None) -> None:
        self.norm = norm

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.norm is not None:
            self.note({"grad_norm/auxiliary": self.norm.item()})
            self.norm = None


class MoveAverages(TrainerCallback):
    """Moves the anchor and the average of the weights after each optimizer step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        if trainer.anchor is not None and trainer.objective.momentum_update == "optimizer_step":
            trainer.update_anchor()

        if trainer.average is not None:
            trainer.average.add(trainer.policy, trainer.average_decay)
            trainer.end_with_average()


class GracefulStop(TrainerCallback):
    """Ends training after the step in which a stop was requested, with a checkpoint."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.stop.announce()

    on_substep_end = on_pre_optimizer_step = on_step_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop.announce()
        if any(gather_object([self.stop.requested])):  # a signal may have reached one process only
            control.should_save = control.should_training_stop = True


class NotContinued(BaseException):
    """Ends a training before its first step: a limit does not allow it."""


class Spending(TrainerCallback):
    """Logs time and cost in each row and stops training before a limit is crossed."""

    def __init__(
        self, budget: Budget, trainer: Any, eval_every: int = 0, evaluations_at_end: int = 0
    ) -> None:
        self.budget = budget
        self.trainer = trainer
        self.eval_every = eval_every
        self.evaluations_at_end = evaluations_at_end
        self.stopped_by: str | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # After other steps of this session: heats of a search.
        continues = self.budget.is_training and self.trainer.resumed_from is not None
        self.budget.start()

        reason = broadcast(self._refusal(state))
        if reason is None:
            return
        if not continues:
            raise ValueError(f"{reason}: raise it and resume")

        self.stopped_by = reason
        raise NotContinued

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        budget = self.budget
        left = state.max_steps - state.global_step
        budget.step()

        for name, seconds in {"spent": budget.spent, "projected": budget.projected(left)}.items():
            dollars = None if seconds is None else budget.dollars(seconds)
            for key, value in ((f"time/{name}", seconds), (f"cost/{name}", dollars)):
                if value is not None:
                    self.trainer.note({key: value})

        reason = broadcast(self._refusal(state)) if left else None
        if reason is not None:
            self.stopped_by = reason
            control.should_save = control.should_training_stop = True

    def on_save(self, *_: Any, **__: Any) -> None:
        self.budget.saved()

    def _refusal(self, state: Any) -> str | None:
        step = state.global_step + 1
        evaluations = int(self.eval_every > 0 and step % self.eval_every == 0)
        if step == state.max_steps:
            evaluations += self.evaluations_at_end

        return self.budget.refusal(evaluations)


class SayVerdict(TrainerCallback):
    """Says once, after N steps, how the run will end, and stops it there if it is hopeless and that
    is asked for. Must come after the watch, whose rows it reads."""

    def __init__(
        self, after: int, stops: bool, watch: Watch, run: RunFolder, price: float | None
    ) -> None:
        self.after = after
        self.stops = stops
        self.watch = watch
        self.run = run
        self.price = price
        self.is_said = False
        self.stopped_by: str | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """A resumed run is not asked again."""
        said = [row for row in self.run.rows("events") if row.get("kind") == "forecast"]
        self.is_said = broadcast(bool(said))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        is_due = self.after <= state.global_step < state.max_steps and "loss" in (logs or {})
        if self.is_said or not is_due:
            return

        self.is_said = True
        given = None
        if state.is_world_process_zero:
            given = forecast(self.watch.monitor.rows, state.max_steps, self.price)
            event = {"kind": "forecast"} | given.to_record() | {"step": state.global_step}
            self.run.append("events", event)
            logging.getLogger("mesotron").warning(given.text())

        if self.stops and broadcast(given is not None and given.is_hopeless):
            self.stopped_by = "the verdict is hopeless"
            control.should_save = control.should_training_stop = True


class EvalEvery(TrainerCallback):
    """Puts the greedy accuracy into the row of every n-th step, as eval/greedy; for rewards of the
    user's own their mean, as eval/reward. If the trainer chooses its best checkpoint, a step that
    is better than the kept one is saved.

    An evaluation that fails stops the run once its step is saved. A resumed run makes it first.
    """

    def __init__(
        self,
        every: int,
        trainer: Any,
        score: Callable[[], HeldOut],
        start: float,
        problems: int,
        name: str = "eval/greedy",
        run: RunFolder | None = None,
    ) -> None:
        self.every = every
        self.trainer = trainer
        self.score = score
        self.start = start
        self.problems = problems
        self.name = name
        self.run = run
        self.failure: BaseException | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        row = state.log_history[-1] if state.log_history else {}
        due = state.global_step > 0 and state.global_step % self.every == 0
        if due and row.get("step") == state.global_step and self.name not in row:
            self._make_up(row, state)

        if state.global_step > 0:
            self._record_best(state)

    def _make_up(self, row: dict[str, Any], state: Any) -> None:
        """The evaluation of a step that is saved already."""
        evaluated = together(self.score)
        if self._is_best(evaluated):
            self.trainer.best.written(state.global_step)

        scores = self._scores(evaluated.score)
        row |= scores
        if self.run is not None and state.is_world_process_zero:
            self.run.amend("metrics", state.global_step, scores)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = state.global_step % self.every == 0
        if not due and state.global_step != 1:
            return

        scores = self._scores(self.start)
        if due:
            try:
                evaluated = self._score_whole_step()
            except (*FAILURES, LimitReached) as failure:
                self.failure = failure
                control.should_save = control.should_training_stop = True
                return

            scores = self._scores(evaluated.score)
            if self._is_best(evaluated):
                control.should_save = True

        self.trainer.note(scores)

    def _is_best(self, evaluated: HeldOut) -> bool:
        """Whether its checkpoint is to be kept: in all processes what the first one says."""
        best = self.trainer.best
        return best is not None and best.observe(broadcast(evaluated))

    def _record_best(self, state: Any) -> None:
        best = self.trainer.best
        if best is not None and self.run is not None and state.is_world_process_zero:
            self.run.save(BEST, best.record())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        # With a limit of one checkpoint Transformers now removes all but the one named here.
        if self.trainer.best is not None and "train_runtime" in (logs or {}):
            state.best_model_checkpoint = None

    def _score_whole_step(self) -> HeldOut:
        """The score; while it is computed, what was just trained counts as a whole step."""
        state = self.trainer.process_state()
        self.trainer.last_step = state | {"metrics": {}}  # those of this step's row
        try:
            if self.trainer.ahead is not None:
                self.trainer.ahead.settle()

            return together(self.score)
        finally:
            self.trainer.last_step = None

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.failure is not None:
            raise self.failure

        self._record_best(state)

    def _scores(self, value: float) -> dict[str, float]:
        return {self.name: value, "eval/problems": float(self.problems)}


class ForgettingProbe(TrainerCallback):
    """Puts forgetting/nll into the first row (that of the start) and the row of every n-th step."""

    def __init__(self, every: int, trainer: Any, blocks: Tensor) -> None:
        self.every = every
        self.trainer = trainer
        self.blocks = blocks
        self.start: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.start = self._measure()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = state.global_step % self.every == 0
        if due or self.start is not None:
            nll = self._measure() if due or self.start is None else self.start
            self.start = None
            self.trainer.note({"forgetting/nll": nll})

    def _measure(self) -> float:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with self.trainer.compute_loss_context_manager(), self.trainer.averaged():
            return text_nll(model, self.blocks)


class SnrProbe(TrainerCallback):
    """Puts gradient/snr, gradient/signal and gradient/noise into the row of every n-th step. The
    step's batch is split into parts, whose gradients are taken separately at the same weights
    (`probes.snr_from_norms`). It costs about one more forward and backward pass (time/snr) and does
    not change training by a bit. Each process measures its own rows; the main one's are logged."""

    def __init__(self, every: int, trainer: Any) -> None:
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise ValueError(f"--watch.snr-every {every} needs whole gradients, not sharded ones")

        self.every = every
        self.trainer = trainer
        self._cost_logged = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (state.global_step + 1) % self.every == 0:
            start = time.perf_counter()
            metrics = measure_snr(self.trainer)
            metrics["time/snr"] = time.perf_counter() - start
            self.trainer.note(metrics)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._cost_logged or not {"time/snr", "time/step"} <= (logs or {}).keys():
            return

        self._cost_logged = True
        if state.is_world_process_zero:
            probe = logs["time/snr"]
            share = probe / self.every / max(logs["time/step"] - probe, 1e-9)
            message = "measuring the gradient SNR took %.2g s, %.1f%% of the run's time"
            log.warning(message, probe, 100 * share)


def measure_snr(trainer: Any) -> dict[str, float]:
    """The gradient SNR of a step, between backward pass and optimizer; empty for a single row."""
    parts = list(step_parts(trainer))
    if len(parts) < 2:
        return {}

    params = [p for p in trainer.model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    squares: list[float] = []
    generators = random_state()

    for part in parts:
        gradients = gradients_of(trainer, part, params)
        squares.append(squared_norm(gradients))
        for sum_of, gradient in zip(total, gradients, strict=True):
            sum_of += gradient

    restore_random_state(generators)
    return snr_from_norms(squares, squared_norm(total))


def gradients_of(trainer: Any, part: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
    with trainer.compute_loss_context_manager():
        loss = trainer.loss_of(trainer.model, part).loss

    gradients = torch.autograd.grad(loss, params, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(params, gradients, strict=True)]


def step_parts(trainer: Any) -> Iterator[dict[str, Any]]:
    number = trainer.current_gradient_accumulation_steps
    used = trainer.last_micro_batches(number)
    if number > 1:
        yield from used
        return

    rows = len(used[0]["completion_ids"])
    count = next((k for k in range(min(SNR_PARTS, rows), 1, -1) if rows % k == 0), 1)
    yield from split_tensor_dict(used[0], count)

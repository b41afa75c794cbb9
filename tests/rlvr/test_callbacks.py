"""The callbacks of a run, one by one, beside trainers that are only what they read."""

import logging
import math
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mesotron.optim import Muon
from mesotron.probes.gradients import snr_from_norms
from mesotron.rlvr import callbacks
from mesotron.rlvr.callbacks import (
    EvalEvery,
    ForgettingProbe,
    GracefulStop,
    KeepLastStep,
    LogAuxiliaryNorm,
    MoveAverages,
    NotContinued,
    RunLog,
    SayVerdict,
    SkipSilentBatch,
    SnrProbe,
    Spending,
    StepTimer,
    measure_snr,
    step_parts,
)
from mesotron.runs import RunFolder
from mesotron.runs.best import HeldOut
from mesotron.runs.deadline import LimitReached
from support.fake_trainer import FakeTrainer


def at(step: int, most: int = 10, **more: Any) -> Any:
    return SimpleNamespace(
        global_step=step,
        max_steps=most,
        is_world_process_zero=True,
        log_history=[],
        **more,
    )


def control() -> Any:
    return SimpleNamespace(should_save=False, should_training_stop=False)


def metrics() -> Any:
    return {"train": defaultdict(list)}


class View:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, Any]] = []
        self.shown: list[str] = []

    def update(self, step: int, row: Any) -> None:
        self.updates.append((step, row))

    def show_transcript(self, text: str) -> None:
        self.shown.append(text)


# Rows and samples


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", {}, {}) as folder:
        yield folder


def logging_trainer() -> Any:
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    turns = [{"content": None, "tool_calls": ["add"]}, {"content": "7"}]
    return FakeTrainer(
        _logs={
            "prompt": [chat, "2 + 2 =", "unseen"],
            "completion": [turns, "5", "unseen"],
            "advantages": [0.5, -0.5, 0.0],
            "rewards": {"right": [1.0, 0.0, 9.0], "short": [math.nan, 0.5, 9.0]},
        },
        reward_weights=torch.tensor([1.0, 2.0]),
    )


def test_a_row_and_two_samples_of_each_rollout_are_kept(run):
    view = View()
    log = RunLog(run, view, logging_trainer())
    log.on_log(None, at(3), None, {"loss": 0.1, "reward": 0.5, "entropy": None})
    log.on_log(None, at(4), None, {"loss": 0.2})  # the same rollout again
    log.on_log(None, at(4), None, {"train_runtime": 3.0})

    assert run.rows("metrics") == [
        {"step": 3, "loss": 0.1, "reward": 0.5},
        {"step": 4, "loss": 0.2},
    ]
    first, second = run.rows("samples")
    assert first == {
        "step": 3,
        "prompt": "What is 3 + 4?",
        "completion": "['add']\n7",
        "reward": 1.0,
        "advantage": 0.5,
    }
    assert (second["prompt"], second["completion"], second["reward"]) == ("2 + 2 =", "5", 1.0)
    assert [step for step, _ in view.updates] == [3, 4]
    assert view.shown == ["What is 3 + 4?\n['add']\n7"]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_unless_the_step_will_be_undone(run, loss):
    with pytest.raises(ValueError, match="--lr"):
        RunLog(run, View(), logging_trainer()).on_log(None, at(2), None, {"loss": loss})

    RunLog(run, View(), logging_trainer(), refuse=False).on_log(None, at(3), None, {"loss": loss})
    assert [row["step"] for row in run.rows("metrics")] == [2, 3]


def test_another_process_writes_nothing(run):
    state = at(1)
    state.is_world_process_zero = False
    view = View()
    RunLog(run, view, logging_trainer()).on_log(None, state, None, {"loss": 0.1, "reward": 1.0})
    assert run.rows("metrics") == run.rows("samples") == view.updates == []


def test_times_of_a_step_and_its_optimizer(monkeypatch):
    clock = iter([10.0, 12.0, 12.5, 13.0])
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: next(clock))
    noted: dict[str, float] = {}
    timer = StepTimer(noted.update)
    timer.on_step_begin()
    timer.on_pre_optimizer_step()
    timer.on_optimizer_step()
    timer.on_step_end()
    assert noted == {"time/step": 3.0, "time/optimizer": 0.5}


def test_a_norm_is_logged_once():
    noted: list[dict[str, float]] = []
    norms = LogAuxiliaryNorm(noted.append)
    norms.on_step_end()
    norms.observe(torch.tensor(2.0))
    norms.on_step_end()
    norms.on_step_end()
    assert noted == [{"grad_norm/auxiliary": 2.0}]


# The last whole step


def test_the_state_of_a_whole_step_is_kept_until_the_weights_change():
    states = iter(["first", "second", "third"])
    trainer = FakeTrainer(last_step=None, process_state=lambda: next(states))
    keep = KeepLastStep(trainer)

    keep.on_epoch_begin()
    keep.on_step_begin()  # as it was before the data were drawn
    assert trainer.last_step == "first"

    keep.on_pre_optimizer_step()
    assert trainer.last_step is None

    keep.on_step_begin()
    assert trainer.last_step == "second"


# Batches without a signal


def silent_trainer(sampling: str = "off", **more: Any) -> Any:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    parts = {"beta": 0.0, "bonus": None, "aux_loss_enabled": False} | more
    return FakeTrainer(
        _step=0,
        policy=model,
        objective=SimpleNamespace(dynamic_sampling=sampling),
        optimizer=parts.pop("optimizer", Muon([model.weight])),
        **parts,
    )


def skips(trainer: Any, *rollouts: bool) -> bool:
    """Whether a step is skipped whose rollouts are silent or not."""
    skip = SkipSilentBatch(trainer)
    skip.on_step_begin()
    for is_silent in rollouts:
        skip.observe(is_silent)
        trainer._step += 1

    skip.on_pre_optimizer_step()
    return trainer.policy.weight.grad is None


def test_a_step_is_skipped_if_all_of_its_rollouts_are_silent():
    assert skips(silent_trainer(), True)
    assert skips(silent_trainer(), True, True)
    assert not skips(silent_trainer(), False)
    assert not skips(silent_trainer(), False, True)
    assert not skips(silent_trainer(), True, False)


def test_the_next_step_is_judged_by_its_own_rollout():
    trainer = silent_trainer()
    skip = SkipSilentBatch(trainer)
    skip.observe(False)
    trainer._step = 2
    skip.on_step_begin()
    skip.observe(True)
    skip.on_pre_optimizer_step()
    assert trainer.policy.weight.grad is None


@pytest.mark.parametrize(
    "more", [{"beta": 0.1}, {"bonus": object()}, {"aux_loss_enabled": True}, {"optimizer": None}]
)
def test_terms_that_need_no_signal_are_not_skipped(more):
    if "optimizer" in more:
        more = {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)}

    assert not skips(silent_trainer(**more), True)
    assert skips(silent_trainer("drop", **more), True)  # no completion is left


# Averages


@pytest.mark.parametrize("update", ["optimizer_step", "rollout"])
def test_averages_move_after_each_step(update):
    done: list[Any] = []
    trainer = FakeTrainer(
        anchor=object(),
        objective=SimpleNamespace(momentum_update=update),
        update_anchor=lambda: done.append("anchor"),
        average=SimpleNamespace(add=lambda *what: done.append(what)),
        average_decay=0.5,
        policy="policy",
        end_with_average=lambda: done.append("end"),
    )
    MoveAverages(trainer).on_step_end()
    assert done == ["anchor"] * (update == "optimizer_step") + [("policy", 0.5), "end"]

    trainer.anchor = trainer.average = None
    done.clear()
    MoveAverages(trainer).on_step_end()
    assert done == []


# Stopping


def test_a_requested_stop_saves_and_ends_after_the_step():
    said: list[str] = []
    stop = SimpleNamespace(requested=False, announce=lambda: said.append("announced"))
    graceful = GracefulStop(stop)
    wish = control()
    graceful.on_step_begin()
    graceful.on_step_end(None, at(1), wish)
    assert not wish.should_training_stop

    stop.requested = True
    graceful.on_step_end(None, at(1), wish)
    assert wish.should_training_stop
    assert wish.should_save
    assert len(said) == 3


class Meter:
    """A budget that refuses when told so."""

    def __init__(self) -> None:
        self.refused: str | None = None
        self.is_training = False
        self.calls: list[Any] = []
        self.spent = 4.0

    def start(self) -> None:
        self.calls.append("start")

    def step(self) -> None:
        self.calls.append("step")

    def saved(self) -> None:
        self.calls.append("saved")

    def projected(self, left: int) -> float | None:
        return None if left > 5 else 10.0 * left

    def dollars(self, seconds: float) -> float | None:
        return seconds / 2

    def refusal(self, evaluations: int) -> str | None:
        self.calls.append(evaluations)
        return self.refused


def spending(**options: Any) -> tuple[Spending, Meter, Any]:
    budget = Meter()
    trainer = FakeTrainer(_metrics=metrics(), resumed_from=None)
    return Spending(budget, trainer, **options), budget, trainer


def test_time_and_cost_are_logged_in_each_row():
    spends, budget, trainer = spending()
    spends.on_step_end(None, at(4), control())
    assert trainer._metrics["train"] == {"time/spent": [4.0], "cost/spent": [2.0]}

    spends.on_step_end(None, at(7), control())
    assert trainer._metrics["train"]["time/projected"] == [30.0]
    assert trainer._metrics["train"]["cost/projected"] == [15.0]
    assert budget.calls.count("step") == 2

    spends.on_save()
    assert budget.calls[-1] == "saved"


def test_a_limit_stops_before_the_next_step_and_not_after_the_last():
    spends, budget, _ = spending()
    budget.refused = "no money is left"
    wish = control()
    spends.on_step_end(None, at(10), wish)
    assert spends.stopped_by is None
    assert not wish.should_training_stop

    spends.on_step_end(None, at(9), wish)
    assert spends.stopped_by == "no money is left"
    assert wish.should_training_stop
    assert wish.should_save


def test_evaluations_of_the_next_step_count():
    spends, budget, _ = spending(eval_every=3, evaluations_at_end=2)
    for step in (1, 2, 3, 9):
        spends.on_step_end(None, at(step), control())

    assert [call for call in budget.calls if call != "step"] == [0, 1, 0, 2]

    never, budget, _ = spending(evaluations_at_end=1)
    never.on_step_end(None, at(8), control())
    never.on_step_end(None, at(9), control())
    assert [call for call in budget.calls if call != "step"] == [0, 1]


def test_a_limit_that_is_reached_at_the_start_is_an_error_or_ends_a_later_stretch():
    spends, budget, trainer = spending()
    spends.on_train_begin(None, at(0), control())  # nothing is refused
    assert budget.calls[0] == "start"

    budget.refused = "no time is left"
    with pytest.raises(ValueError, match="no time is left"):
        spends.on_train_begin(None, at(0), control())

    trainer.resumed_from = "checkpoint-4"
    with pytest.raises(ValueError, match="resume"):
        spends.on_train_begin(None, at(4), control())

    budget.is_training = True
    with pytest.raises(NotContinued):
        spends.on_train_begin(None, at(4), control())
    assert spends.stopped_by == "no time is left"


# The verdict


class Given:
    is_hopeless = True

    def to_record(self) -> dict[str, Any]:
        return {"outcome": "plateau"}

    def text(self) -> str:
        return "it will not learn"


def verdict(run: RunFolder, stops: bool) -> SayVerdict:
    watch: Any = SimpleNamespace(monitor=SimpleNamespace(rows=[]))
    return SayVerdict(3, stops, watch, run, 2.0)


@pytest.mark.parametrize("stops", [False, True])
def test_the_verdict_is_said_once_and_stops_if_that_is_asked_for(run, monkeypatch, caplog, stops):
    asked = []
    monkeypatch.setattr(callbacks, "forecast", lambda *what: asked.append(what) or Given())
    says = verdict(run, stops)
    wish = control()
    says.on_train_begin(None, at(0), wish)
    for step in (2, 3, 4):
        says.on_log(None, at(step), wish, {"reward": 1.0})
        says.on_log(None, at(step), wish, {"loss": 0.1})

    assert asked == [([], 10, 2.0)]
    assert run.rows("events") == [{"kind": "forecast", "outcome": "plateau", "step": 3}]
    assert "it will not learn" in caplog.text
    assert wish.should_training_stop is wish.should_save is stops
    assert (says.stopped_by is not None) is stops

    again = verdict(run, stops)
    again.on_train_begin(None, at(3), wish)
    again.on_log(None, at(5), wish, {"loss": 0.1})
    assert len(asked) == 1


def test_a_finished_run_has_no_verdict(run, monkeypatch):
    monkeypatch.setattr(callbacks, "forecast", pytest.fail)
    says = verdict(run, True)
    says.on_train_begin(None, at(0), control())
    says.on_log(None, at(10), control(), {"loss": 0.1})


def test_a_hopeful_verdict_stops_nothing(run, monkeypatch):
    monkeypatch.setattr(Given, "is_hopeless", False)
    monkeypatch.setattr(callbacks, "forecast", lambda *_: Given())
    says = verdict(run, True)
    wish = control()
    says.on_train_begin(None, at(0), wish)
    says.on_log(None, at(3), wish, {"loss": 0.1})
    assert not wish.should_training_stop


# Evaluations


class Best:
    """Keeps what it is shown; everything above 0.5 is better."""

    name = "checkpoint-4"

    def __init__(self) -> None:
        self.seen: list[HeldOut] = []
        self.saved: list[int] = []

    def observe(self, evaluated: HeldOut) -> bool:
        self.seen.append(evaluated)
        return evaluated.score > 0.5

    def written(self, step: int) -> None:
        self.saved.append(step)

    def record(self) -> dict[str, Any]:
        return {"saved": self.saved}


def evaluations(run: RunFolder | None = None, best: Best | None = None, value: Any = 0.75) -> Any:
    def score() -> HeldOut:
        during.append(trainer.last_step)
        if isinstance(value, BaseException):
            raise value
        return HeldOut(4, value, (), "accuracy")

    during: list[Any] = []
    trainer = FakeTrainer(
        _metrics=metrics(),
        best=best,
        last_step=None,
        process_state=lambda: {"rng": 1, "metrics": {"loss": [0.1]}},
    )
    each = EvalEvery(4, trainer, score, 0.25, 30, run=run)
    return each, trainer, during


def test_rows_of_evaluated_steps_and_the_first_have_the_score():
    each, trainer, during = evaluations()
    for step, expected in ((1, [0.25]), (2, [0.25]), (4, [0.25, 0.75])):
        wish = control()
        each.on_step_end(None, at(step), wish)
        assert trainer._metrics["train"]["eval/greedy"] == expected
        assert not wish.should_save

    assert trainer._metrics["train"]["eval/problems"] == [30.0, 30.0]
    assert during == [{"rng": 1, "metrics": {}}]  # a whole step, while it is evaluated
    assert trainer.last_step is None


@pytest.mark.parametrize(("value", "is_better"), [(0.75, True), (0.25, False)])
def test_a_better_step_is_saved(run, value, is_better):
    best = Best()
    each, _, _ = evaluations(run, best, value)
    wish = control()
    each.on_step_end(None, at(4), wish)
    assert [one.score for one in best.seen] == [value]
    assert wish.should_save is is_better

    each.on_save(None, at(4), wish)
    assert run.load("best") == {"saved": []}


@pytest.mark.parametrize("failure", [KeyError("oops"), LimitReached()])
def test_an_evaluation_that_fails_ends_the_run_once_its_step_is_saved(failure):
    each, trainer, _ = evaluations(value=failure)
    wish = control()
    each.on_step_end(None, at(4), wish)
    assert wish.should_save
    assert wish.should_training_stop
    assert "eval/greedy" not in trainer._metrics["train"]
    with pytest.raises(type(failure)):
        each.on_save(None, at(4), wish)


def test_a_resumed_run_makes_up_for_the_evaluation_that_failed(run):
    run.append("metrics", {"step": 4, "loss": 0.1})
    best = Best()
    each, _, during = evaluations(run, best)
    state = at(4)
    state.log_history = [{"step": 4, "loss": 0.1}]
    each.on_train_begin(None, state, control())

    assert len(during) == 1
    assert state.log_history == [
        {"step": 4, "loss": 0.1, "eval/greedy": 0.75, "eval/problems": 30.0}
    ]
    assert run.rows("metrics") == state.log_history
    assert best.saved == [4]
    assert run.load("best") == {"saved": [4]}

    each.on_train_begin(None, state, control())  # it has it now
    assert len(during) == 1


@pytest.mark.parametrize("step", [0, 3])
def test_no_other_step_is_made_up_for(run, step):
    each, _, during = evaluations(run)
    state = at(step)
    state.log_history = [{"step": step, "loss": 0.1}]
    each.on_train_begin(None, state, control())
    assert during == []


def test_a_step_that_was_not_logged_yet_is_not_made_up_for():
    each, _, during = evaluations()
    state = at(4)
    state.log_history = [{"step": 3, "loss": 0.1}]
    each.on_train_begin(None, state, control())
    assert during == []


def test_the_best_checkpoint_is_not_taken_for_transformers_own():
    state = at(10, best_model_checkpoint="checkpoint-4")
    evaluations()[0].on_log(None, state, None, {"train_runtime": 1.0})
    assert state.best_model_checkpoint == "checkpoint-4"

    each, _, _ = evaluations(best=Best())
    each.on_log(None, state, None, {"loss": 1.0})
    assert state.best_model_checkpoint == "checkpoint-4"
    each.on_log(None, state, None, {"train_runtime": 1.0})
    assert state.best_model_checkpoint is None


# Forgetting and the signal of gradients


def test_forgetting_is_measured_at_the_start_and_every_few_steps(monkeypatch):
    values = iter([5.0, 6.0, 7.0])
    monkeypatch.setattr(ForgettingProbe, "_measure", lambda self: next(values))
    trainer = FakeTrainer(_metrics=metrics())
    probe = ForgettingProbe(3, trainer, torch.zeros(1, 1))
    probe.on_train_begin(None, at(0), None)
    counts = []
    for step in range(1, 7):
        probe.on_step_end(None, at(step), None)
        counts.append(len(trainer._metrics["train"]["forgetting/nll"]))

    assert trainer._metrics["train"]["forgetting/nll"] == [5.0, 6.0, 7.0]
    assert counts == [1, 1, 2, 2, 2, 3]


def test_a_resumed_run_measures_no_start_of_its_own(monkeypatch):
    monkeypatch.setattr(ForgettingProbe, "_measure", pytest.fail)
    trainer = FakeTrainer(_metrics=metrics())
    probe = ForgettingProbe(3, trainer, torch.zeros(1, 1))
    probe.on_train_begin(None, at(4), None)
    probe.on_step_end(None, at(5), None)


def test_the_probe_of_gradients_measures_every_few_steps_and_says_its_share_once(
    monkeypatch, caplog
):
    monkeypatch.setattr(callbacks, "measure_snr", lambda trainer: {"gradient/snr": 2.0})
    noted: list[dict[str, float]] = []
    trainer = FakeTrainer(is_deepspeed_enabled=False, is_fsdp_enabled=False, note=noted.append)
    probe = SnrProbe(5, trainer)
    for step in range(10):
        probe.on_pre_optimizer_step(None, at(step), None)
    assert [one["gradient/snr"] for one in noted] == [2.0, 2.0]

    with caplog.at_level(logging.WARNING):
        probe.on_log(None, at(1), None, {"time/step": 2.0})
        probe.on_log(None, at(5), None, {"time/snr": 1.0, "time/step": 2.0})
        probe.on_log(None, at(10), None, {"time/snr": 1.0, "time/step": 2.0})
    assert [record.getMessage() for record in caplog.records] == [
        "measuring the gradient SNR took 1 s, 20.0% of the run's time"
    ]

    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="snr-every 5"):
        SnrProbe(5, trainer)


@pytest.mark.parametrize(
    ("rows", "sizes"), [(8, [2] * 4), (6, [2] * 3), (4, [1] * 4), (5, [5]), (1, [1])]
)
def test_a_step_of_one_pass_is_split_into_equal_parts(rows, sizes):
    batch = {"completion_ids": torch.arange(rows)[:, None]}
    trainer = FakeTrainer(current_gradient_accumulation_steps=1, _buffered_inputs=[batch], _step=1)
    assert [len(part["completion_ids"]) for part in step_parts(trainer)] == sizes


def test_a_step_of_several_passes_has_one_part_for_each():
    buffer = [{"completion_ids": torch.full((2, 1), number)} for number in range(4)]
    trainer = FakeTrainer(current_gradient_accumulation_steps=2, _buffered_inputs=buffer, _step=4)
    assert [part["completion_ids"][0].item() for part in step_parts(trainer)] == [2, 3]


def test_the_probe_of_gradients_draws_no_number_of_the_training():
    """As dropout does in each pass."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def loss_of(model: Any, part: Any) -> Any:
        x = part["completion_ids"].float().mean() + torch.rand(()) * 0
        return SimpleNamespace(loss=(model.weight * x).sum())

    trainer = FakeTrainer(
        current_gradient_accumulation_steps=2,
        _buffered_inputs=[{"completion_ids": torch.full((2, 1), k)} for k in (1, 3)],
        _step=2,
        model=nn.ParameterDict({"weight": weight}),
        compute_loss_context_manager=nullcontext,
        loss_of=loss_of,
    )
    before = torch.get_rng_state()
    measured = measure_snr(trainer)
    assert torch.equal(torch.get_rng_state(), before)

    # Gradients (1, 1) and (3, 3): their mean is (2, 2), their squared distance from it 2 each.
    assert measured["gradient/snr"] == pytest.approx(
        snr_from_norms([2.0, 18.0], 32.0)["gradient/snr"]
    )
    assert weight.grad is None

    trainer._buffered_inputs = [{"completion_ids": torch.ones(1, 1)}]
    trainer.current_gradient_accumulation_steps = 1
    assert measure_snr(trainer) == {}

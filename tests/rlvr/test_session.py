"""What a session says and decides around its training, without a model."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mesotron.config import TrainConfig
from mesotron.rlvr import session as module
from mesotron.rlvr.callbacks import (
    EvalEvery,
    ForgettingProbe,
    GracefulStop,
    RunLog,
    SnrProbe,
)
from mesotron.rlvr.optimizer import OptimizerLog
from mesotron.rlvr.session import (
    Session,
    add_callbacks,
    evaluate_before,
    evaluate_best,
    evaluate_fresh,
    explain_zeros,
    held_out,
    least_step_time,
    make_watch,
    report,
    say_start,
    say_stopped_by_watch,
)
from mesotron.runs import RunFolder
from mesotron.runs.best import BestCheckpoint, HeldOut


def evaluation(value: Any = 0.25, measure: str = "accuracy", **more: Any) -> dict[str, Any]:
    score = None if value is None else {"value": value, "low": 0.1, "high": 0.4}
    greedy = {"strict": score, "lenient": score, "reward": score}
    made = {"greedy": greedy, "problems": 4, "measure": measure, "findings": [], "transcripts": []}
    return made | more


class Trainer(SimpleNamespace):
    """Keeps its callbacks in their order."""

    def __init__(self, **more: Any) -> None:
        own: dict[str, Any] = {
            "callback_handler": SimpleNamespace(callbacks=["its own"]),
            "is_deepspeed_enabled": False,
            "is_fsdp_enabled": False,
            "best": None,
            "model": "the model",
            "state": SimpleNamespace(global_step=8),
            "averaged": nullcontext,
            "loaded": [],
        }
        super().__init__(**own | more)

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.callbacks.append(callback)

    def take_weights(self, path: Any) -> None:
        self.loaded.append(str(path))

    _load_from_checkpoint = take_weights

    def is_world_process_zero(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {}, {})


@pytest.fixture
def console():
    return Console(record=True, width=300)


def a_session(run: RunFolder, trainer: Any = None, **config: Any) -> Session:
    settings = TrainConfig(**{"steps": 8, "guard": "off", "eval_every": 4} | config)
    parts = SimpleNamespace(config=settings, task=SimpleNamespace(eval=[1, 2, 3]), tokenizer=None)
    names = ("watch", "spending", "verdict")
    reasons: dict[str, Any] = {name: SimpleNamespace(stopped_by=None) for name in names}
    budget: Any = SimpleNamespace(evaluation=nullcontext, slowest_evaluation=6.0)
    stop: Any = SimpleNamespace(requested=False)
    trainer = trainer or Trainer()
    return Session(run, parts, trainer, budget=budget, stop=stop, **reasons)  # pyright: ignore


# Before training


def test_the_first_evaluation_is_made_once(run, console, monkeypatch):
    made = []
    monkeypatch.setattr(module, "evaluate_part", lambda *what: made.append(what) or evaluation())
    session = a_session(run)
    parts: Any = SimpleNamespace(**vars(session.parts), model="as loaded")
    for _ in range(2):
        before = evaluate_before(run, parts, session.budget, console)
        assert before == evaluation()

    assert [what[1:] for what in made] == [("as loaded", "before")]
    assert run.load("before") == evaluation()


def test_a_step_takes_at_least_as_long_as_its_samples():
    config = TrainConfig(rollout=replace(TrainConfig().rollout, prompts=2, generations=4))
    budget: Any = SimpleNamespace(slowest_evaluation=6.0)
    few = least_step_time({"problems": 4}, budget, config)
    many = least_step_time({"problems": 32}, budget, config)
    assert few > many > 0


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (evaluation(), "greedy accuracy before: 0.250 strict, 0.250 lenient; training for 8 steps"),
        (evaluation(measure="reward"), "mean reward before: 0.250; training for 8 steps"),
        (evaluation(None), ""),
    ],
)
def test_the_start_is_said_in_its_measure(console, before, said):
    say_start(before, TrainConfig(steps=8), console)
    assert console.export_text().strip() == said


@pytest.mark.parametrize(
    ("rewards", "measure", "is_said"),
    [((0.0, 0.0), "reward", True), ((0.0, 0.5), "reward", False), ((0.0,), "accuracy", False)],
)
def test_rewards_that_are_all_0_are_explained(run, console, monkeypatch, rewards, measure, is_said):
    monkeypatch.setattr(module, "explain_constant", lambda score, problem: f"of {problem}")
    transcripts = [{"reward": reward} for reward in rewards]
    before = evaluation(measure=measure, transcripts=transcripts)
    parts: Any = SimpleNamespace(**vars(a_session(run).parts), reward=None)
    explain_zeros(before, parts, console)
    said = console.export_text()
    assert (f"all {len(rewards)} held-out rewards are 0: of 1" in said) is is_said


def test_a_reward_that_cannot_explain_itself_stops_nothing(run, console, monkeypatch):
    def fail(*_: Any) -> None:
        raise ValueError("oops")

    monkeypatch.setattr(module, "explain_constant", fail)
    parts: Any = SimpleNamespace(**vars(a_session(run).parts), reward=None)
    before = evaluation(measure="reward", transcripts=[{"reward": 0.0}])
    explain_zeros(before, parts, console)
    monkeypatch.setattr(module, "explain_constant", lambda *_: None)
    explain_zeros(before, parts, console)
    assert console.export_text() == ""


# During training


def callbacks_of(session: Session, before: Any) -> list[Any]:
    view: Any = SimpleNamespace(notes={})
    add_callbacks(session, before, view)
    own: Any = session.trainer.callback_handler.callbacks
    return own


def test_the_watch_sees_a_loss_before_it_is_refused_unless_it_undoes_steps(run):
    session = a_session(run)
    kinds = [type(one) for one in callbacks_of(session, evaluation(None))]
    own = [str, type(session.watch)]
    assert kinds == [*own, RunLog, OptimizerLog, GracefulStop, SimpleNamespace]

    undoes = a_session(run, guard="rollback")
    added = callbacks_of(undoes, evaluation(None))
    assert added[-2:] == [undoes.spending, undoes.watch]
    assert [one.refuse for one in added if isinstance(one, RunLog)] == [False]

    fork = replace(a_session(run), is_fork=True)
    assert callbacks_of(fork, evaluation(None))[-1] is fork.watch


def test_a_run_without_a_score_is_not_evaluated(run):
    def evaluations(value: float | None, every: int) -> int:
        added = callbacks_of(a_session(run, eval_every=every), evaluation(value))
        return sum(isinstance(one, EvalEvery) for one in added)

    assert (evaluations(0.5, 4), evaluations(None, 4), evaluations(0.5, 0)) == (1, 0, 0)


@pytest.mark.parametrize(("final", "chooses"), [("best", True), ("last", False)])
def test_evaluations_choose_a_checkpoint_if_that_is_asked_for(run, final, chooses):
    trainer = Trainer()
    session = a_session(run, trainer, final=final)
    each = callbacks_of(session, evaluation(0.5, "reward"))[-2]
    assert isinstance(each, EvalEvery)
    assert (each.every, each.start, each.problems, each.name) == (4, 0.5, 4, "eval/reward")
    assert (trainer.best is not None) is chooses

    kept = trainer.best
    callbacks_of(session, evaluation(0.5))  # the next stretch of the run goes on choosing
    assert trainer.best is kept


def test_probes_are_added_where_they_are_asked_for(run, monkeypatch):
    monkeypatch.setattr(module, "read_text", lambda file: "text")
    monkeypatch.setattr(module, "text_blocks", lambda tokenizer, text: text)
    watch = replace(TrainConfig().watch, snr_every=3, forgetting_every=2)
    added = callbacks_of(a_session(run, watch=watch), evaluation(None))
    assert isinstance(added[0], SnrProbe)
    assert [one.every for one in added if isinstance(one, ForgettingProbe)] == [2]


def test_a_verdict_and_an_own_end_come_after_the_watch_and_not_in_forks(run):
    session = replace(a_session(run, verdict_after=5), own_end="its own end")  # pyright: ignore
    added = callbacks_of(session, evaluation(None))
    assert added[-2:] == [session.verdict, "its own end"]

    fork = replace(a_session(run, verdict_after=5), is_fork=True)
    assert not any(one is fork.verdict for one in callbacks_of(fork, evaluation(None)))


def test_a_fork_is_only_watched(run, monkeypatch):
    monkeypatch.setattr(module, "live_settings", lambda *_: {})
    parts = a_session(run, guard="stop").parts
    trainer: Any = Trainer()
    assert make_watch(trainer, parts, run, is_fork=True).guard == "off"
    assert make_watch(trainer, parts, run).guard == "stop"


def test_the_latest_score_is_shown_beside_the_first(run, monkeypatch):
    monkeypatch.setattr(module, "evaluate_part", lambda parts, model, name: evaluation(0.5))
    session = a_session(run)
    view: Any = SimpleNamespace(notes={"greedy accuracy": "0.250 before"})
    scorer = module.HeldOutScorer(session, view)
    for step in (4, 8):
        session.trainer.state.global_step = step
        assert scorer.score() == HeldOut(step, 0.5, (), "accuracy")
        assert view.notes["greedy accuracy"] == f"0.250 before, 0.500 at step {step}"


# After training


def chosen(*scores: tuple[int, float], **more: Any) -> tuple[Trainer, BestCheckpoint]:
    best = BestCheckpoint()
    for step, score in scores:
        if best.observe(HeldOut(step, score, (score,) * 9)):
            best.written(step)

    return Trainer(best=best, **more), best


def outcomes(right: int, of: int = 9) -> dict[str, Any]:
    transcripts = [{"correct": k < right} for k in range(of)]
    return evaluation(right / of, transcripts=transcripts)


def test_without_a_choice_there_is_no_best(run):
    assert evaluate_best(a_session(run), outcomes(9)) is None
    trainer, _ = chosen()
    assert evaluate_best(a_session(run, trainer), evaluation(None)) is None
    assert run.load("best") is None


def test_the_last_step_takes_part_once(run, monkeypatch):
    monkeypatch.setattr(module, "evaluate_fresh", lambda session, step: {"value": 0.5, "of": step})
    trainer, best = chosen((4, 0.0))
    record = evaluate_best(a_session(run, trainer, eval_every=5), outcomes(9))
    assert record is not None
    assert (record["step"], record["evaluations"], record["fresh"]["of"]) == (8, 2, 8)
    assert run.load("best") == record

    trainer, best = chosen((4, 1.0), (8, 0.0))  # the last was evaluated on its way
    record = evaluate_best(a_session(run, trainer), outcomes(9))
    assert record is not None
    assert (record["step"], best.evaluations) == (4, 2)


def test_a_single_evaluation_needs_no_others(run, monkeypatch):
    monkeypatch.setattr(module, "evaluate_fresh", pytest.fail)
    trainer, _ = chosen((8, 0.5))
    record = evaluate_best(a_session(run, trainer), outcomes(5))
    assert record is not None
    assert "fresh" not in record


@pytest.mark.parametrize(("step", "loads"), [(4, 1), (8, 0)])
def test_the_chosen_weights_are_scored_on_problems_that_did_not_choose(
    run, monkeypatch, step, loads
):
    problems: list[Any] = []
    seen = []

    def score(parts: Any, model: Any, name: str) -> Any:
        seen.append((list(parts.task.eval), name))
        return evaluation(0.5)

    monkeypatch.setattr(module, "load_fresh", lambda config, task: problems)
    monkeypatch.setattr(module, "evaluate_part", score)
    monkeypatch.setattr(module, "replace", lambda what, **new: SimpleNamespace(**vars(what) | new))
    session = a_session(run)
    assert evaluate_fresh(session, step) is None

    problems += ["new", "newer"]
    found = evaluate_fresh(session, step)
    assert found == {"value": 0.5, "low": 0.1, "high": 0.4, "problems": 2}
    assert seen == [(["new", "newer"], f"step {step}")]
    assert len(session.trainer.loaded) == loads


@pytest.mark.parametrize("guard", ["stop", "rollback"])
def test_a_stop_by_the_watch_names_its_reason_and_what_is_left(console, guard):
    def said(text: str) -> Any:
        return SimpleNamespace(sentence=lambda: text)

    watch: Any = SimpleNamespace(
        stopped_by=said("the loss is no number"),
        actions=[],
        last_healthy_checkpoint=None,
        guard=guard,
    )
    say_stopped_by_watch(watch, BestCheckpoint(), 6, console)  # none was kept yet
    watch.actions = [said("went back"), said("gave up")]
    watch.last_healthy_checkpoint = 4
    _, best = chosen((2, 1.0))
    say_stopped_by_watch(watch, best, 6, console)

    first, second = console.export_text().splitlines()
    assert "step 6: the loss is no number" in first
    assert "checkpoint" not in first
    assert "step 6: gave up" in second
    assert "checkpoint-4" in second
    assert "checkpoint-2" in second
    assert ("--guard rollback" in first) is (guard == "stop")


def test_the_report_names_the_model_and_a_reward_that_is_not_known(run, console, monkeypatch):
    shown: list[Any] = []
    monkeypatch.setattr(module, "write_report", lambda *_: "the report")
    monkeypatch.setattr(module, "show", lambda *what: shown.append(what))
    before, after = evaluation(), evaluation(0.5)
    reward = replace(TrainConfig().reward, parts=("mine.py:f",))
    session = a_session(run, reward=reward)
    best = {"step": 4, "score": 0.5, "problems": 4, "evaluations": 2}

    report(session, before, after, best, console)
    assert run.load("after") == after
    assert run.result is not None
    assert (run.result["steps"], run.result["best"]) == (8, best)
    assert (run.path / "report.md").read_text().strip() == "the report"
    assert len(shown) == 1

    said = console.export_text()
    assert "checkpoint-4" in said
    assert "--reward mine.py:f" in said


def test_an_evaluation_without_a_score_counts_for_nothing():
    unknown = held_out(3, evaluation(None))
    assert unknown.step == 3
    assert unknown.score != unknown.score
    assert held_out(3, evaluation(0.5, "reward")).measure == "reward"

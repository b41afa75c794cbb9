"""The best checkpoint in whole runs: kept, resumed, averaged, reported, and in a user's script."""

import math
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from mesotron import cli
from mesotron.evaluate.subject import find_subject
from mesotron.rlvr import session
from mesotron.runs import RunFolder
from mesotron.runs.best import BestCheckpoint, HeldOut
from support.planted_evaluations import (
    Killed,
    checkpoints,
    model_of,
    plant,
    small_model,  # noqa: F401  # fixtures
    small_run,  # noqa: F401
)
from support.rlvr_tiny import make_data, make_trainer, same, weights

LORA = LoraConfig(r=2, target_modules="all-linear")
# Right answers of four problems by step: the second is the best, though not in the last place.
LATE_COLLAPSE = {1: 1, 2: 3, 3: 3, 4: 0, 5: 0}


@pytest.mark.parametrize("words", ["", "--lora 2", "--guard off"])
def test_the_best_step_survives_pruning_and_is_the_runs_model(run, monkeypatch, capsys, words):
    seen = plant(monkeypatch, LATE_COLLAPSE)
    assert run(f"--out a {words}") == 0
    assert checkpoints("a") == {2, 5}
    assert "checkpoint-2" in capsys.readouterr().out.splitlines()[-1]  # how to load it

    record = RunFolder(Path("a")).load("best")
    fresh = record.pop("fresh")
    assert record == {
        "step": 2,
        "score": 0.75,
        "measure": "accuracy",
        "problems": 4,
        "evaluations": 5,
    }
    assert fresh["problems"] == 4
    assert same(seen["fresh"], seen["step 2"])
    assert not same(seen["step 5"], seen["step 2"])

    result = RunFolder(Path("a")).result
    assert result["best"]["step"] == 2
    assert result["after"]["value"] == 0.0  # of the last step, as ever
    assert (
        "| step 2, the best of 5 | 4, which chose it | 0.750 |" in Path("a/report.md").read_text()
    )

    assert find_subject("a").chosen.checkpoint.name == "checkpoint-2"
    assert cli.main(["export", "a", "--out", "exported"]) == 0
    assert "checkpoint-2" in capsys.readouterr().err
    assert same(model_of(Path("exported")), model_of(Path("a/checkpoints/checkpoint-2")))
    assert "after 2 steps" in Path("exported/README.md").read_text()


def test_the_last_step_on_request_and_without_evaluations(run, monkeypatch):
    plant(monkeypatch, LATE_COLLAPSE)
    for words in ("--final last", "--eval-every 0"):
        name = words.split()[-1]
        assert run(f"--out {name} {words}") == 0
        assert checkpoints(name) == {5}
        assert RunFolder(Path(name)).load("best") is None
        assert "best" not in RunFolder(Path(name)).result
        assert find_subject(name).chosen.note is None


def test_the_last_step_counts_even_between_evaluations(run, monkeypatch):
    plant(monkeypatch, {2: 1, 4: 1, 5: 4})
    assert run("--out a --eval-every 2") == 0
    assert RunFolder(Path("a")).load("best")["step"] == 5


@pytest.mark.parametrize("killed_at", [1, 2, 3, 5])
def test_killed_and_resumed_chooses_the_same(run, monkeypatch, killed_at):
    plant(monkeypatch, LATE_COLLAPSE)
    assert run("--out whole --save-every 1 --keep 2") == 0

    append = RunFolder.append

    def kill(self: RunFolder, stream: Any, row: dict[str, Any]) -> None:
        append(self, stream, row)
        if stream == "metrics" and row["step"] == killed_at:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", kill)
        with pytest.raises(Killed):
            run("--out killed --save-every 1 --keep 2")

    assert run("--resume killed") == 0
    assert checkpoints("killed") == checkpoints("whole") == {2, 4, 5}
    assert RunFolder(Path("killed")).load("best") == RunFolder(Path("whole")).load("best")
    for step in (2, 5):
        name = f"checkpoints/checkpoint-{step}"
        assert same(model_of(Path("whole", name)), model_of(Path("killed", name)))


def test_killed_before_the_record_was_written(run, monkeypatch):
    plant(monkeypatch, LATE_COLLAPSE)
    save = RunFolder.save

    def kill(self: RunFolder, name: str, value: dict[str, Any]) -> None:
        if name == "best" and value["step"] == 2:
            raise Killed
        save(self, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", kill)
        with pytest.raises(Killed):
            run("--out killed")

    assert RunFolder(Path("killed")).load("best")["step"] == 1
    assert run("--resume killed") == 0
    assert RunFolder(Path("killed")).load("best")["step"] == 2


def test_of_an_averaged_run_the_evaluated_average_is_kept(run, monkeypatch):
    seen = plant(monkeypatch, LATE_COLLAPSE)
    assert run("--out a --average 0.5") == 0

    chosen = find_subject("a").chosen
    averaged = model_of(chosen.weights)
    raw = model_of(chosen.checkpoint)
    assert chosen.weights.parent.name == "checkpoint-2"
    assert same({n: seen["step 2"][n] for n in averaged}, averaged)
    assert same({n: seen["fresh"][n] for n in averaged}, averaged)
    assert not same(raw, averaged)


def test_an_evaluation_that_failed_is_made_up_and_counts(run, monkeypatch):
    plant(monkeypatch, LATE_COLLAPSE)
    planted = session.evaluate_part

    def fail(parts: Any, model: Any, name: str) -> dict[str, Any]:
        if name == "step 2":
            raise ValueError("oops")
        return planted(parts, model, name)

    with monkeypatch.context() as patch:
        patch.setattr(session, "evaluate_part", fail)
        assert run("--out a") == 2

    assert run("--resume a") == 0
    assert RunFolder(Path("a")).load("best")["step"] == 2
    assert checkpoints("a") == {2, 5}


def test_a_rollback_undoes_what_was_about_to_be_chosen(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.best = BestCheckpoint()
    trainer.train()

    assert trainer.best.observe(HeldOut(2, 0.5, (1.0, 0.0)))
    trainer.restore_policy(tmp_path / "checkpoint-1")
    trainer._save_checkpoint(trainer.model, None)
    assert trainer.best.kept is None


def test_held_out_rewards_choose_where_there_is_no_accuracy():
    transcripts = [{"correct": False, "reward": 0.25}, {"correct": False, "reward": None}]
    result = {
        "measure": "reward",
        "transcripts": transcripts,
        "greedy": {"reward": {"value": 0.25}, "strict": None},
    }
    evaluated = session.held_out(3, result)
    assert (evaluated.score, evaluated.measure) == (0.25, "reward")
    assert evaluated.outcomes[0] == 0.25
    assert math.isnan(session.held_out(3, {**result, "greedy": {"reward": None}}).score)


@pytest.mark.parametrize("peft", [None, LORA])
def test_load_best_model_at_end_in_a_users_script(tmp_path, peft):
    """Transformers names the best step by a metric; ours keeps and loads it."""
    trainer = make_trainer(
        tmp_path,
        parts={"eval_dataset": make_data(4), "peft_config": peft},
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_planted",
        greater_is_better=True,
    )
    scores = {1: 0.1, 2: 0.9, 3: 0.3, 4: 0.2}
    evaluate = trainer.evaluate
    kept = {}

    def planted(*args: Any, **kwargs: Any) -> dict[str, float]:
        step = trainer.state.global_step
        kept[step] = weights(trainer)
        return {**evaluate(*args, **kwargs), "eval_planted": scores[step]}

    trainer.evaluate = planted
    trainer.train()

    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert not same(kept[2], kept[4])
    assert same(weights(trainer), kept[2])
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]

"""`mesotron train` as a user runs it: whole runs, interruptions, resumes, and failures."""

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from mesotron import cli
from mesotron.config import (
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from mesotron.models.precision import choose_precision
from mesotron.models.speed import choose_speed
from mesotron.rlvr import session, train
from mesotron.rlvr.live_settings import live_settings
from mesotron.runs import RunFolder
from mesotron.watch import budget as budget_of_run
from mesotron.watch.detectors import COOLER, KL_TO_START, SMALLER_STEP, TWO_PART, Event
from mesotron.watch.engine import Engine
from mesotron.watch.forecast import Forecast
from mesotron.watch.settings import obstacle
from support.rlvr_tiny import SlowBudget, same, save_arith_model

slow = pytest.mark.slow
TIMES = ("time", "step_time", "cost")
REWARD = """
import pathlib

def even(completion_ids, **_):
    return [sum(int(token) % 2 == 0 for token in ids) / 4 for ids in completion_ids]

def broken(completions, **_):
    raise KeyError("oops")

def moody(completion_ids, **_):
    if pathlib.Path(f"moody-{len(completion_ids)}").exists():
        raise GeneratorExit("oops")
    return even(completion_ids)
"""
# A random model has no right answer: this reward has a spread, so that the weights move.
SMALL = (
    "--steps 4 --save-every 1 --keep 9 --reward earned:even --lr 1e-2 --device cpu "
    "--batch 4 --group 4 --max-tokens 4 --task.num-eval 3 "
    "--task.num-train 14"
)


class Killed(BaseException):
    """Stands for kill -9: nothing in the package catches it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_arith_model(folder)
    return folder


@pytest.fixture
def run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    (tmp_path / "earned.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def main(words: str) -> int:
        sys.modules.pop("earned", None)

        if "--resume" in words:
            small = "--trust "
        else:
            small = f"{SMALL} --model {model} "

        return cli.main(["train", *(small + words).split()])

    return main


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "earned.py").write_text(REWARD)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        words = f"{SMALL} --model {model} --out {folder / 'run'}"
        assert cli.main(["train", *words.split()]) == 0

    sys.modules.pop("earned")
    first, last = (
        load_file(folder / f"run/checkpoints/checkpoint-{step}/model.safetensors")
        for step in (1, 4)
    )

    assert not same(first, last)  # or nothing below would mean anything
    return folder / "run"


def stream(path: str | Path, name: Any = "metrics", without: tuple[str, ...] = TIMES) -> list[Any]:
    rows = RunFolder(Path(path)).rows(name)
    return [{k: row[k] for k in row if not k.startswith(without)} for row in rows]


def assert_same_end(one: str | Path, other: str, step: int = 4, new: tuple = ()) -> None:
    """Same weights to the last bit, same metrics (but `new` ones), same samples and events, and in
    each checkpoint the same one to go back to."""
    states = [sorted(Path(path).glob("checkpoints/*/trainer_state.json")) for path in (one, other)]
    healthy = [
        [Path(json.loads(file.read_text())["best_model_checkpoint"] or "").name for file in files]
        for files in states
    ]

    assert healthy[0] == healthy[1]
    pattern = f"checkpoints/checkpoint-{step}/*model.safetensors"  # the model's or the adapter's
    assert same(*(load_file(*Path(path).glob(pattern)) for path in (one, other)))

    for name in ("metrics", "samples", "events"):
        assert stream(one, name) == stream(other, name, (*TIMES, *new))


def at_row(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Do something when the row of a step has been written: before that step's checkpoint."""
    append = RunFolder.append

    def spy(self: RunFolder, stream: Any, row: dict[str, Any]) -> None:
        append(self, stream, row)
        if stream == "metrics" and row["step"] == step:
            act()

    monkeypatch.setattr(RunFolder, "append", spy)


def interrupt(run: Callable[..., int], words: str, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_row(patch, step, Mock(side_effect=Killed))
        with pytest.raises(Killed):
            run(f"{words} --out killed")


def refusal(run: Callable[..., int], words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(words) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1, errors

    return errors


# Every row of a run with Muon has these, beside TRL's.
OWN_METRICS = [
    "answers/distinct_in_group",
    "answers/top_share",
    "completions/repetition",
    "entropy/trajectory_q1",
    "entropy/trajectory_q2",
    "entropy/trajectory_q3",
    "facts/correct",
    "facts/correct_unformatted",
    "facts/formatted",
    "facts/gold_unparseable",
    "facts/parsed",
    "facts/truncated",
    "grad_norm/auxiliary",
    "groups/all_right",
    "groups/all_wrong",
    "groups/mixed",
    "groups/spread",
    "groups/unscored",
    "groups/zero_signal",
    "optim/adamw/cosine",
    "optim/adamw/skipped",
    "optim/adamw/update_rms",
    "optim/adamw_vectors/cosine",
    "optim/adamw_vectors/skipped",
    "optim/adamw_vectors/update_rms",
    "optim/muon/blocks",
    "optim/muon/concentration",
    "optim/muon/cosine",
    "optim/muon/dead_blocks",
    "optim/muon/passed_rank",
    "optim/muon/skipped",
    "optim/muon/update_rms",
    "optim/skipped",
    "ratio/log_max",
    "ratio/log_min",
    "time/optimizer",
    "time/projected",
    "time/rollout",
    "time/spent",
    "time/step",
]
OF_TRL = ("completions/", "clip_ratio/", "rewards/")


def own_metrics(row: dict[str, Any]) -> set[str]:
    names = set()
    for name in row:
        is_own = "/" in name and not name.startswith(OF_TRL)
        if is_own or name == "completions/repetition":
            names.add(name)

    return names


def test_a_run_leaves_a_complete_folder(run, whole, capsys):
    assert run("--eval-every 2 --watch.snr-every 2 --watch.forgetting-every 3") == 0
    made = RunFolder(Path("runs/last"))
    measured = ("eval/", "gradient/", "forgetting/")
    assert_same_end(whole, "runs/last", new=measured)  # measuring moves nothing
    rows = made.rows("metrics")

    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/greedy" in row] == [1, 2, 4]
    assert [row["step"] for row in rows if "gradient/snr" in row] == [2, 4]
    assert [row["step"] for row in rows if "forgetting/nll" in row] == [1, 3]
    assert own_metrics(rows[0]) == {*OWN_METRICS, "eval/greedy", "eval/problems", "forgetting/nll"}
    assert own_metrics(stream(whole, without=())[2]) == {*OWN_METRICS}
    assert (made.config["recipe"], made.environment["device"]) == ("arith", "cpu")
    assert made.result["problems"] == 3
    assert made.rows("samples")[0].keys() >= {"step", "prompt", "completion", "reward"}
    assert "| before | after | gain |" in (made.path / "report.md").read_text()
    assert (made.path / "report.html").is_file()
    assert "step 4/4" in capsys.readouterr().out

    # The folder is used, and the run is over.
    path = str(made.path)
    for words, named in [(f"--out {path}", "--out"), (f"--resume {path}", f"mesotron eval {path}")]:
        assert named in refusal(run, words, capsys)

    (made.path / "result.json").unlink()
    with made:
        assert "in use" in refusal(run, f"--resume {path}", capsys)

    assert "config.json" in refusal(run, "--resume absent", capsys)


def test_an_averaged_run_evaluates_and_ends_with_its_average(run, whole, monkeypatch):
    seen = {}
    evaluate = session.evaluate_part

    def spy(parts, model, name):
        seen[name] = {n: p.detach().clone() for n, p in model.named_parameters()}
        return evaluate(parts, model, name)

    monkeypatch.setattr(session, "evaluate_part", spy)
    assert run("--average 0.5 --eval-every 3 --out averaged") == 0

    for step, name in ((3, "step 3"), (4, "after")):
        folder = Path(f"averaged/checkpoints/checkpoint-{step}")
        state = load_file(folder / "process-0.safetensors")
        prefix = "process-0.stateful.average"
        average = {n: state[f"{prefix}.tensors.{n}"] for n in seen[name]}

        assert same(seen[name], average)
        own = load_file(folder / "model.safetensors")
        assert same({n: average[n] for n in own}, own) == (step == 4)

    raw = (
        load_file(path / "checkpoints/checkpoint-3/model.safetensors")
        for path in (whole, Path("averaged"))
    )

    assert same(*raw)  # averaging moves nothing


@pytest.mark.parametrize(
    ("words", "step", "damaged", "shown", "checkpoints"),
    [
        ("", 4, "checkpoint-3/process-0.json", "from step 2", {1, 2, 3, 4}),
        pytest.param(
            "",
            1,
            "",
            "no intact checkpoint",
            {1, 2, 3, 4},
            marks=slow,
        ),
        pytest.param(
            "--guard rollback --save-every 3", 2, "", "from step 0", {0, 3, 4}, marks=slow
        ),  # a guarded run keeps its start
    ],
)
def test_the_newest_intact_checkpoint_is_resumed(  # noqa: PLR0913  # a table of cases
    run, whole, capsys, words, step, damaged, shown, checkpoints
):
    interrupt(run, words, step)
    if damaged:
        Path("killed/checkpoints", damaged).write_text("{}")

    assert run("--resume killed") == 0
    output = capsys.readouterr().out
    assert shown in output
    assert damaged in output

    if words:  # which checkpoint is the healthy one depends on how many there are
        assert run(f"{words} --out alone") == 0

    assert_same_end("alone" if words else whole, "killed")
    kept = {int(path.name.split("-")[1]) for path in Path("killed/checkpoints").iterdir()}
    assert kept == checkpoints


def test_killed_between_saving_and_pruning(run, monkeypatch):
    def kill(root: Path, keep: int, newest: int, *protected: str | None) -> None:
        if newest == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("mesotron.runs.checkpoints.prune", kill)
        with pytest.raises(Killed):
            run("--steps 2 --keep 1 --guard off --out killed")

    assert run("--resume killed") == 0
    assert [path.name for path in Path("killed/checkpoints").iterdir()] == ["checkpoint-2"]


def test_a_signal_finishes_the_step_and_saves(run, whole, monkeypatch, capsys, caplog):
    """And a report that cannot be written costs nothing."""

    def stop() -> None:
        for name in ("report.md", "report.html"):
            Path("stopped", name).mkdir()
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        at_row(patch, 2, stop)
        assert run("--out stopped") == 0

    # The signal came after the end of step 2, so step 3 is the one that was finished.
    assert "mesotron train --resume stopped" in capsys.readouterr().out
    assert len(stream("stopped")) == 3
    assert run("--resume stopped") == 0

    assert_same_end(whole, "stopped")
    assert RunFolder(Path("stopped")).result == RunFolder(whole).result

    warned = []
    for line in caplog.messages:
        if "not written" in line:
            warned.append(line.split()[0])

    assert {*warned} == {"report.md", "report.html"}


def raise_alarm(monkeypatch: pytest.MonkeyPatch, **event: Any) -> Event:
    alarm = Event(
        detector="entropy_collapse",
        severity="stop",
        diagnosis="gone",
        **event,
    )

    def see(self: Engine, row: dict[str, float]) -> list[Event]:
        if row["step"] == alarm.step and "loss" in row:
            return [alarm]

        return []

    monkeypatch.setattr(Engine, "update", see)
    return alarm


def test_the_watch_can_stop_a_run_and_says_why(run, monkeypatch, capsys):
    event = raise_alarm(monkeypatch, step=2, remedy="restart")
    assert run("--guard stop --out stopped") == 0
    assert event.sentence() in capsys.readouterr().out

    events = stream("stopped", "events")
    assert [(row["step"], row["detector"]) for row in events] == [(2, "entropy_collapse")]
    assert run("--guard rollback --out given_up") == 0

    last = next(line for line in capsys.readouterr().out.splitlines() if "stopped at" in line)
    assert "no automatic remedy" in last
    assert "start again" not in last


def test_a_hopeless_verdict_stops_a_run_with_a_checkpoint(run, whole, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(Forecast, "is_hopeless", True)
        assert run("--verdict-after 2 --stop-if hopeless --out hopeless") == 0

    (event,) = stream("hopeless", "events")
    assert (event["kind"], event["step"], event["steps"]) == ("forecast", 2, 4)
    printed = capsys.readouterr().out.splitlines()
    (last,) = [line for line in printed if "stopped and saved at step 2" in line]
    assert "hopeless" in last

    assert len(stream("hopeless")) == 2
    assert run("--resume hopeless") == 0
    assert len(stream("hopeless", "events")) == 1  # it was asked once
    Path("hopeless/events.jsonl").unlink()
    assert_same_end(whole, "hopeless")


def test_an_unknown_verdict_stops_nothing(run, whole):
    assert run("--verdict-after 2 --stop-if hopeless --out unknown") == 0

    (event,) = stream("unknown", "events")
    assert event["outcome"] == "unknown"
    assert event["text"] in Path("unknown/report.md").read_text()
    assert event["text"].split(",")[0] in Path("unknown/report.html").read_text()
    Path("unknown/events.jsonl").unlink()
    assert_same_end(whole, "unknown")


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("", set()),
        pytest.param(
            "--lora 2 --objective.beta 0.02 --rollout.updates 2",
            {"objective.beta"},
            marks=slow,
        ),
        pytest.param("--objective.name mgrpo --objective.beta 0", {"reward.parts"}, marks=slow),
    ],
)
def test_killed_after_a_rollback_and_resumed_equals_left_alone(run, monkeypatch, words, refused):
    remedy = (SMALLER_STEP, KL_TO_START, TWO_PART, COOLER)  # every change a trainer accepts
    changes = tuple(asdict(change) for change in remedy)
    raise_alarm(
        monkeypatch,
        step=3,
        began=2,
        remedy="back",
        changes=changes,
    )

    words += " --guard rollback --steps 5"
    assert run(f"{words} --out whole") == 0

    interrupt(run, words, step=5)
    assert run("--resume killed") == 0

    assert_same_end("whole", "killed", step=5)
    act = stream("whole", "events")[1]
    assert (act["kind"], act["checkpoint"]) == ("guard", 1)
    assert {one["field"] for one in act["refused"]} == refused
    assert {one["field"] for one in act["changes"]} == {one.field for one in remedy} - refused


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (("two_part", "near", "overlong"), "two_part"),
        (("correct", "format"), "format"),
        (("sparse", "near"), ""),
    ],
)
def test_a_reward_that_pays_for_the_format_is_not_exchanged(judge, parts, reason):
    config = TrainConfig(reward=RewardConfig(parts=parts), rollout=RolloutConfig(max_tokens=64))
    parts_of_run = Mock(
        config=config,
        judge=judge,
        device=torch.device("cpu"),
    )

    settings = live_settings(Mock(self_labeled=False), parts_of_run)
    obstacle_found = obstacle(TWO_PART, settings["reward.parts"])
    assert bool(obstacle_found) == bool(reason)
    assert reason in (obstacle_found or "")


def test_a_budget_counts_over_all_sessions(run, whole, monkeypatch, capsys):
    monkeypatch.setattr(budget_of_run, "Budget", SlowBudget)
    assert run("--budget 0.25 --price 3 --out bought") == 0  # 300 seconds
    assert "$0.08 of $0.33" in capsys.readouterr().out  # spent, and projected

    bought = RunFolder(Path("bought"))
    rows = bought.rows("metrics")
    spent = bought.load("spent")

    assert rows[0]["cost/projected"] == pytest.approx(400 / 3600 * 3)
    assert spent is not None
    assert (len(rows), spent["seconds"], spent["dollars"]) == (3, 300, 0.25)
    assert "budget" in refusal(run, "--resume bought --budget 0.33", capsys)

    # A run beside it knows how long a step takes, and does not begin.
    assert "time limit" in refusal(run, "--time-limit 99s --out beside", capsys)
    assert not Path("beside").exists()
    assert run("--resume bought --budget 9 --gpu h100") == 0

    assert_same_end(whole, "bought")
    first = bought.rows("metrics")[len(rows)]  # earlier hours keep the earlier price
    seconds = first["time/spent"] - spent["seconds"]

    assert first["cost/spent"] == pytest.approx(spent["dollars"] + seconds / 3600 * 3.95)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--task file --data empty.jsonl", "--data"),
        ("--model.dtype bfloat16", "bfloat16"),
        ("--watch.forgetting-every 2 --watch.forgetting-file absent.txt", "absent.txt"),
        ("--watch.forgetting-file empty.jsonl", "--watch.forgetting-every"),
        ("--optim adamw --optim.leash 0.1", "--optim.leash"),
        ("--optim normuon --optim.lora product", "--optim.lora"),
        ("--model no/such-model", "no/such-model"),
        ("--rollout.updates 3", "3 updates"),
        ("--objective.dynamic-sampling resample --objective.dynamic-oversample 4", "oversample 4"),
        ("--time-limit 0.001s", "time limit"),
        ("--seed 4294967296", "--seed"),
    ],
)
def test_a_refused_run_leaves_no_folder(run, capsys, words, named):
    Path("empty.jsonl").write_text("")
    assert named in refusal(run, f"{words} --out made", capsys)
    assert not Path("made").exists()


def test_a_reward_that_raises_is_named_and_nothing_is_lost(run, monkeypatch, capsys):
    def spoil() -> None:
        sys.modules["earned"].even.__code__ = sys.modules["earned"].broken.__code__

    at_row(monkeypatch, 2, spoil)
    error = refusal(run, "--out spoiled --save-every 100", capsys)
    assert "earned:even" in error
    assert "--resume spoiled" in error
    assert len(stream("spoiled")) == 2
    assert Path("spoiled/checkpoints/checkpoint-2/manifest.json").exists()


MOODY = "--reward earned:moody --save-every 100 --keep 1 --eval-every 2 --guard off"


@pytest.mark.parametrize(
    ("row", "batch", "flags", "step"),
    [
        (1, 3, "", 2),  # in the evaluation of step 2
        (3, 16, "--objective.name gmpo", 3),  # in the rollout of step 4
        (2, 16, "--average 0.5", 2),
        (4, 3, "", 4),  # in the last evaluation
    ],
)
def test_a_failing_reward_loses_no_step_and_no_row(
    run, monkeypatch, capsys, row, batch, flags, step
):
    assert run(f"{MOODY} {flags} --out left-alone") == 0
    capsys.readouterr()

    fails = Path(f"moody-{batch}")
    with monkeypatch.context() as patch:
        at_row(patch, row, fails.touch)
        error = refusal(run, f"{MOODY} {flags} --out spoiled", capsys)

    assert "GeneratorExit (oops)" in error
    assert "mesotron train --resume spoiled" in error
    assert f"from step {step}" in error
    assert len(stream("spoiled")) == step

    fails.unlink()
    assert run("--resume spoiled") == 0
    assert_same_end("left-alone", "spoiled")
    assert stream("spoiled") == stream("left-alone")


def test_a_reward_that_fails_at_once_says_how_to_continue(run, capsys):
    """In the evaluation before training, when there is nothing to save."""
    Path("moody-3").touch()
    error = refusal(run, f"{MOODY} --out spoiled", capsys)
    assert "mesotron train --resume spoiled" in error

    Path("moody-3").unlink()
    assert run("--resume spoiled") == 0


def test_a_loss_that_is_not_a_number_stops_before_it_is_saved(run, monkeypatch, capsys):
    """Unless the guard may roll back: then one NaN is one row."""
    compute = session.GRPOTrainer._compute_loss

    def spoil(self: Any, model: Any, inputs: Any) -> torch.Tensor:
        return compute(self, model, inputs) + (math.nan if self.state.global_step == 1 else 0.0)

    monkeypatch.setattr(session.GRPOTrainer, "_compute_loss", spoil)
    assert "step 2" in refusal(run, "--out spoiled", capsys)
    assert [path.name for path in Path("spoiled/checkpoints").iterdir()] == ["checkpoint-1"]
    assert math.isnan(stream("spoiled")[1]["loss"])

    events = stream("spoiled", "events")
    assert [(row["step"], row["detector"]) for row in events] == [(2, "nonfinite")]
    assert run("--guard rollback --out whole") == 0
    assert [math.isnan(row["loss"]) for row in stream("whole")] == [False, True, False, False]
    assert not [row for row in stream("whole", "events") if row["kind"] == "guard"]


@pytest.mark.parametrize(
    ("task", "models", "hub"),
    [
        ({}, ["tiny", "smollm2"], False),
        ({}, ["tiny", "Qwen/Qwen3-1.7B"], True),
        ({"name": "gsm8k", "data": ("openai/gsm8k",)}, ["tiny"], True),
        ({"name": "gsm8k"}, ["tiny"], True),
        ({"name": "file", "data": (__file__,)}, ["tiny"], False),
    ],
)
def test_the_network_is_off_unless_a_name_needs_the_hub(monkeypatch, task, models, hub):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    train.set_library_variables(TaskConfig(**task), *models)
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert (os.environ.get("HF_HUB_OFFLINE") == "1") is not hub


def test_samples_log_the_reward_that_trained(run):
    # The given reward is at most 0.3 and never 0 here; voting trains on 0 or 1.
    assert run("--steps 1 --objective.name vote --reward.weights 0.3 --out voted") == 0
    assert {sample["reward"] for sample in stream("voted", "samples")} <= {0.0, 1.0}


def test_precision_where_it_is_unset():
    for model, has_bfloat16, dtype in (
        (ModelConfig(), True, "mixed"),
        (ModelConfig(lora=8), True, "bfloat16"),
        (ModelConfig(), False, "auto"),
        (ModelConfig(dtype="float32"), True, "float32"),
    ):
        assert choose_precision(TrainConfig(model=model), has_bfloat16).model.dtype == dtype


SMALL_MODEL = 10**8
LARGE_MODEL = 10**10
AUTO = {"rollout": RolloutConfig(vllm="auto")}
GIVEN = {"rollout": RolloutConfig(fast=True), "optim": OptimConfig(fused=True)}


@pytest.mark.parametrize(
    ("machine", "weights", "settings", "chosen"),
    [
        ("gpu", SMALL_MODEL, {}, (True, False, "off")),
        ("gpu", SMALL_MODEL, {"steps": 500}, (True, True, "off")),
        ("cpu", SMALL_MODEL, {"steps": 500}, (False, True, "off")),
        ("gpu", LARGE_MODEL, {}, (False, False, "off")),
        ("two gpus", SMALL_MODEL, {}, (False, False, "off")),
        (
            "gpu",
            SMALL_MODEL,
            {"rollout": RolloutConfig(vllm="colocate")},
            (False, False, "colocate"),
        ),
        ("cpu", LARGE_MODEL, GIVEN, (True, True, "off")),
        ("gpu", 1_700_000_000, AUTO, (True, False, "off")),
        ("gpu, not fusing", 1_700_000_000, AUTO, (False, False, "colocate")),
        ("gpu", 2_000_000_000, AUTO, (False, False, "colocate")),
        ("gpu without vllm", 2_000_000_000, AUTO, (False, False, "off")),
        ("cpu", 2_000_000_000, AUTO, (False, False, "off")),
    ],
)
def test_speed_where_it_is_unset(monkeypatch, machine, weights, settings, chosen):
    monkeypatch.setattr("mesotron.models.speed.is_installed", lambda name: "without" not in machine)
    if "two" in machine:
        monkeypatch.setenv("WORLD_SIZE", "2")

    given = TrainConfig(**{"steps": 40, **settings})
    config = choose_speed(given, machine != "cpu", weights, "not fusing" not in machine)
    assert (config.rollout.fast, config.optim.fused, config.rollout.vllm) == chosen


def test_several_processes_need_a_name_for_the_folder(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--out"):
        train.new_run(TrainConfig(), 0.0)


@slow
def test_only_the_main_process_writes_the_first_evaluation(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run("--steps 1 --out other") == 0
    assert not Path("other/before.json").exists()
    assert not Path("other/report.html").exists()

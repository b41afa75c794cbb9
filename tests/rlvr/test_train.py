"""`mesotron train` as a user runs it: whole runs, interruptions, resumes, and failures."""

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from mesotron import cli
from mesotron.config import ModelConfig, RewardConfig, RolloutConfig, TaskConfig, TrainConfig
from mesotron.rlvr import session, spending, train
from mesotron.rlvr.answers.facts import Judge
from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.answers.verify import Verifier
from mesotron.rlvr.prompts import solved_text
from mesotron.rlvr.session import live_settings
from mesotron.rlvr.tasks import arith
from mesotron.rlvr.tiny import build_tokenizer
from mesotron.runs import RunFolder
from mesotron.watch.budget import Limits, Meter
from mesotron.watch.detectors import COOLER, KL_TO_START, SMALLER_STEP, TWO_PART
from mesotron.watch.engine import Engine
from mesotron.watch.events import Event
from mesotron.watch.settings import obstacle

TIMES = ("time", "step_time", "cost")
REWARD = """
def distinct(completion_ids, **_):
    return [len(set(ids)) / 4 for ids in completion_ids]

def broken(completions, **_):
    raise KeyError("oops")
"""
# A random model has no right answer: this reward has a spread, so that the weights move.
SMALL = (
    "--steps 4 --save-every 1 --keep 9 --reward.parts earned:distinct --optim.lr 1e-2 --device cpu "
    "--rollout.prompts 4 --rollout.generations 4 --rollout.max-tokens 4 --task.num-eval 3 "
    "--task.num-train 14"
)


class Killed(BaseException):
    """In the place of kill -9: nothing in the package catches it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    problems = arith.generate("train", 200, (), 0)
    texts = [f"{p.question} {solved_text(p, FORMATS['boxed'])}" for p in problems]
    tokenizer = build_tokenizer(texts)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command in this process, in an empty folder, with the small settings."""
    (tmp_path / "earned.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def main(words: str) -> int:
        sys.modules.pop("earned", None)
        small = "" if "--resume" in words else f"{SMALL} --model.name {model} "
        return cli.main(["train", *(small + words).split()])

    return main


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with the small settings, left alone."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "earned.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        words = f"{SMALL} --model.name {model} --out {folder / 'run'}"
        assert cli.main(["train", *words.split()]) == 0
    sys.modules.pop("earned")
    return folder / "run"


def rows_of(path: str | Path) -> list[dict[str, Any]]:
    """The metrics of a run, without times."""
    rows = RunFolder(Path(path)).rows("metrics")
    return [{k: row[k] for k in row if not k.startswith(TIMES)} for row in rows]


def assert_same_end(one: str | Path, other: str, step: int = 4) -> None:
    """Same weights to the last bit, same metrics, same samples."""
    pattern = f"checkpoints/checkpoint-{step}/*model.safetensors"  # the model's or the adapter's
    first, second = (load_file(*Path(path).glob(pattern)) for path in (one, other))
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
    assert rows_of(one) == rows_of(other)
    first, second = (RunFolder(Path(path)).rows("samples") for path in (one, other))
    assert first == second


def at_row(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Do something when the row of a step has been written: before that step's checkpoint."""
    append = RunFolder.append

    def spy(self: RunFolder, stream: Any, row: dict[str, Any]) -> None:
        append(self, stream, row)
        if stream == "metrics" and row["step"] == step:
            act()

    monkeypatch.setattr(RunFolder, "append", spy)


def kill() -> None:
    raise Killed


def test_a_run_leaves_a_complete_folder(run, tmp_path, capsys):
    assert run("--eval-every 2") == 0
    made = RunFolder(Path("runs/last"))
    rows = made.rows("metrics")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/greedy" in row] == [1, 2, 4]
    assert {"reward", "entropy", "facts/formatted", "groups/mixed", "optim/skipped"} <= rows[
        0
    ].keys()
    assert made.config["recipe"] == "arith"
    assert made.environment["device"] == "cpu"
    assert made.result is not None
    assert made.result["problems"] == 3
    assert made.rows("samples")[0].keys() >= {"step", "prompt", "completion", "reward"}
    report = (made.path / "report.md").read_text()
    assert "| before | after | gain |" in report
    assert report.count("\n## ") >= 1
    assert "step 4/4" in capsys.readouterr().out


CASES = {
    "several updates": "--rollout.updates 2",
    "an anchor": "--objective.name mgrpo --rollout.updates 3 --rollout.prompts 3",
    "resampling": "--objective.dynamic-sampling resample",
    "lora": "--model.lora 2 --optim.name pion --optim.cutoff noise",
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case != "an anchor")) for case in CASES]
)
def test_killed_and_resumed_equals_left_alone(run, monkeypatch, case):
    words = CASES[case]
    assert run(f"{words} --out whole") == 0
    with monkeypatch.context() as patch:
        at_row(patch, 2, kill)
        with pytest.raises(Killed):
            run(f"{words} --out killed")
    assert len(rows_of("killed")) == 2  # one more than the checkpoint it goes back to
    assert run("--resume killed") == 0
    assert_same_end("whole", "killed")


@pytest.mark.slow
def test_killed_before_the_first_checkpoint(run, whole, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        at_row(patch, 1, kill)
        with pytest.raises(Killed):
            run("--out killed")
    assert run("--resume killed") == 0
    assert "no intact checkpoint" in capsys.readouterr().out
    assert_same_end(whole, "killed")


@pytest.mark.slow
def test_a_guarded_run_keeps_its_start(run, whole, monkeypatch, capsys):
    words = "--guard rollback --save-every 3"
    with monkeypatch.context() as patch:
        at_row(patch, 2, kill)
        with pytest.raises(Killed):
            run(f"{words} --out killed")
    assert run("--resume killed") == 0
    assert "from step 0" in capsys.readouterr().out
    assert_same_end(whole, "killed")
    kept = {path.name for path in Path("killed/checkpoints").iterdir()}
    assert kept == {"checkpoint-0", "checkpoint-3", "checkpoint-4"}


@pytest.mark.slow
def test_killed_after_the_last_step_only_reports(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(session, "compare", lambda *_: kill())
        with pytest.raises(Killed):
            run("--out killed")
    rows = rows_of("killed")
    assert run("--resume killed") == 0
    assert rows_of("killed") == rows
    assert (Path("killed") / "report.md").exists()


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(run, whole, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        at_row(patch, 4, kill)
        with pytest.raises(Killed):
            run("--out killed")
    (Path("killed") / "checkpoints" / "checkpoint-3" / "process-0.json").write_text("{}")
    assert run("--resume killed") == 0
    shown = capsys.readouterr().out
    assert "checkpoint-3/process-0.json" in shown
    assert "from step 2" in shown
    assert_same_end(whole, "killed")


def test_a_signal_finishes_the_step_and_saves(run, whole, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        at_row(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run("--out stopped") == 0
    # The signal came after the end of step 2, so step 3 is the one that was finished.
    shown = capsys.readouterr().out
    assert "mesotron train --resume stopped" in shown
    assert len(rows_of("stopped")) == 3
    assert run("--resume stopped") == 0
    assert_same_end(whole, "stopped")


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(run, monkeypatch, capsys):
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_row(monkeypatch, 2, twice)
    assert run("--out stopped") == 130
    assert "--resume stopped" in capsys.readouterr().err
    assert len(rows_of("stopped")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_in_an_evaluation_says_how_to_resume(run, whole, monkeypatch, capsys, when):
    evaluate = session.evaluate_part

    def interrupt(parts: Any, model: Any, name: str) -> Any:
        if name == when:
            raise KeyboardInterrupt
        return evaluate(parts, model, name)

    with monkeypatch.context() as patch:
        patch.setattr(session, "evaluate_part", interrupt)
        assert run("--out cut") == 130
    assert "--resume cut" in capsys.readouterr().err
    assert run("--resume cut") == 0
    assert_same_end(whole, "cut", step=4)


def test_the_watch_can_stop_a_run_and_says_why(run, whole, monkeypatch, capsys):
    words = {"diagnosis": "entropy is gone", "remedy": "start again"}
    event = Event(step=2, detector="entropy_collapse", severity="stop", **words)

    def see(self: Engine, row: dict[str, float]) -> list[Event]:
        return [event] if row["step"] == 2 and "loss" in row else []

    monkeypatch.setattr(Engine, "update", see)
    assert run("--guard stop --out stopped") == 0
    assert event.sentence() in capsys.readouterr().out
    events = RunFolder(Path("stopped")).rows("events")
    assert [(row["step"], row["detector"]) for row in events] == [(2, "entropy_collapse")]


GONE_BACK = {
    "lora": "--model.lora 2 --objective.beta 0.02 --rollout.updates 2",
    "an anchor": "--objective.name mgrpo --objective.beta 0",
    "another reward": "",
}


@pytest.mark.parametrize(
    "case",
    [
        "another reward",
        pytest.param("lora", marks=pytest.mark.slow),
        pytest.param("an anchor", marks=pytest.mark.slow),
    ],
)
def test_killed_after_a_rollback_and_resumed_equals_left_alone(run, monkeypatch, case):
    """With every remedy that a running trainer accepts."""
    remedy = (SMALLER_STEP, KL_TO_START, TWO_PART, COOLER)
    event = Event(
        step=3, detector="entropy_collapse", severity="stop", diagnosis="it is gone", remedy="back",
        changes=tuple(asdict(change) for change in remedy), began=2,
    )  # fmt: skip

    def see(self: Engine, row: dict[str, float]) -> list[Event]:
        return [event] if row["step"] == 3 and "loss" in row else []

    monkeypatch.setattr(Engine, "update", see)
    words = f"{GONE_BACK[case]} --guard rollback --steps 6"
    assert run(f"{words} --out whole") == 0
    with monkeypatch.context() as patch:
        at_row(patch, 5, kill)
        with pytest.raises(Killed):
            run(f"{words} --out killed")
    assert run("--resume killed") == 0
    assert_same_end("whole", "killed", step=6)
    told = [RunFolder(Path(name)).rows("events") for name in ("whole", "killed")]
    assert told[0] == told[1]
    act = told[0][1]
    assert (act["kind"], act["checkpoint"]) == ("guard", 1)
    changed = {change["field"] for change in act["changes"]}
    left = {one["field"] for one in act["refused"]}
    assert changed | left == {change.field for change in remedy}
    assert left == {"lora": {"objective.beta"}, "an anchor": {"reward.parts"}}.get(case, set())


@pytest.mark.parametrize(
    ("parts", "left"),
    [
        (("two_part", "near", "overlong"), "two_part"),
        (("correct", "format"), "format"),
        (("sparse", "near"), None),
    ],
)
def test_a_reward_that_pays_for_the_format_is_not_exchanged(parts, left):
    """The remedy is there for the format: near and overlong would be lost for nothing."""
    trainer: Any = SimpleNamespace(self_labelled=False)
    config = TrainConfig(reward=RewardConfig(parts=parts), rollout=RolloutConfig(max_tokens=64))
    judge = Judge(FORMATS["boxed"], Verifier())
    parts_of_run: Any = SimpleNamespace(config=config, judge=judge, device=torch.device("cpu"))
    settings = live_settings(trainer, parts_of_run)
    reason = obstacle(TWO_PART, settings["reward.parts"])
    assert reason is None if left is None else left in reason


def test_measuring_the_signal_moves_nothing(run, whole):
    assert run("--watch.snr-every 2 --out measured") == 0
    rows = RunFolder(Path("measured")).rows("metrics")
    assert [row["step"] for row in rows if "gradient/snr" in row] == [2, 4]
    assert rows[1]["time/snr"] > 0
    for row in rows:
        for name in ("gradient/snr", "gradient/signal", "gradient/noise"):
            row.pop(name, None)
    left = [{k: row[k] for k in row if not k.startswith(TIMES)} for row in rows]
    assert left == rows_of(whole)
    last = "checkpoints/checkpoint-4/model.safetensors"
    one, other = load_file(whole / last), load_file(Path("measured") / last)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def slow_clock(monkeypatch):
    """A clock for the meter that moves 100 seconds at each look."""
    looks = itertools.count(0, 100)

    def make(limits: Limits, *, began: float | None, **earlier: Any) -> Meter:
        return Meter(limits, **earlier, began=None, clock=lambda: float(next(looks)))

    monkeypatch.setattr(spending, "Meter", make)


@pytest.mark.slow
def test_a_run_stops_before_its_time_limit_and_can_be_resumed(run, whole, slow_clock, capsys):
    # Step 2 ends at 400; a step takes up to 200 and saving 100.
    assert run("--time-limit 650s --out stopped") == 0
    assert "step 2: the time limit of 650 s" in capsys.readouterr().out
    rows = RunFolder(Path("stopped")).rows("metrics")
    assert [row["time/spent"] for row in rows] == [200.0, 400.0]
    assert "cost/spent" not in rows[0]
    assert run("--resume stopped") == 0  # another session has its own limit
    assert_same_end(whole, "stopped")


def test_a_budget_counts_over_all_sessions(run, whole, slow_clock, capsys):
    assert run("--budget 0.5 --price 3 --out bought") == 0  # 600 seconds
    shown = capsys.readouterr().out
    assert "budget of 0.5 dollars" in shown
    assert "$0.17 of $0.42" in shown  # spent, and projected
    rows = RunFolder(Path("bought")).rows("metrics")
    assert rows[0]["cost/projected"] == pytest.approx(500 / 3600 * 3)
    spent = RunFolder(Path("bought")).load("spent")
    assert spent is not None
    assert spent["dollars"] == pytest.approx(spent["seconds"] / 3600 * 3)
    assert run("--resume bought --budget 0.2") == 2
    assert "--budget" in error_line(capsys)
    assert run("--resume bought --budget 9 --gpu h100") == 0
    assert_same_end(whole, "bought")
    after = RunFolder(Path("bought")).rows("metrics")
    first = after[len(rows)]  # the old hours at the old price, the new ones at the new
    session = first["time/spent"] - spent["seconds"]
    assert first["cost/spent"] == pytest.approx(spent["dollars"] + session / 3600 * 3.95)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1, errors
    return errors


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--task.name file --task.path empty.jsonl", "--task.path"),
        ("--model.dtype bfloat16", "bfloat16"),
        ("--model.name no/such-model", "no/such-model"),
        ("--reward.parts earned:absent", "'absent'"),
        ("--rollout.updates 3", "3 updates"),
        ("--budget 5", "--budget 5"),
    ],
)
def test_a_refused_run_leaves_no_folder(run, capsys, words, named):
    Path("empty.jsonl").write_text("")
    assert run(f"{words} --out made") == 2
    assert named in error_line(capsys)
    assert not Path("made").exists()


def test_a_reward_that_raises_is_named_and_nothing_is_lost(run, monkeypatch, capsys):
    def spoil() -> None:
        sys.modules["earned"].distinct.__code__ = sys.modules["earned"].broken.__code__

    at_row(monkeypatch, 2, spoil)
    assert run("--out spoiled") == 2
    assert "earned:distinct" in error_line(capsys)
    assert len(rows_of("spoiled")) == 2
    assert (Path("spoiled") / "checkpoints" / "checkpoint-2" / "manifest.json").exists()


def test_a_loss_that_is_not_a_number_stops_before_it_is_saved(run, monkeypatch, capsys):
    compute = session.GRPOTrainer._compute_loss

    def spoil(self: Any, model: Any, inputs: Any) -> torch.Tensor:
        loss = compute(self, model, inputs)
        return loss * math.nan if self.state.global_step == 1 else loss

    monkeypatch.setattr(session.GRPOTrainer, "_compute_loss", spoil)
    assert run("--out spoiled") == 2
    assert "step 2" in error_line(capsys)
    assert [path.name for path in (Path("spoiled") / "checkpoints").iterdir()] == ["checkpoint-1"]
    assert math.isnan(RunFolder(Path("spoiled")).rows("metrics")[1]["loss"])
    events = RunFolder(Path("spoiled")).rows("events")
    assert [(row["step"], row["detector"]) for row in events] == [(2, "nonfinite")]


def test_a_used_folder_is_refused(run, capsys):
    assert run("--steps 1 --out made") == 0
    assert run("--out made") == 2
    assert "--out" in error_line(capsys)
    assert run("--resume made") == 2
    assert "mesotron eval made" in error_line(capsys)
    (Path("made") / "result.json").unlink()
    assert run("--resume made --steps 9") == 2
    assert "--steps 1" in error_line(capsys)
    capsys.readouterr()
    with RunFolder(Path("made")):
        assert run("--resume made") == 2
    said = capsys.readouterr()
    assert said.out == "", "a run that is in use is not continued"
    assert "in use" in said.err
    assert run("--resume absent") == 2
    assert "config.json" in error_line(capsys)


@pytest.mark.slow
def test_a_model_without_a_pad_token_trains(run, model, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model.iterdir():
        (bare / file.name).write_bytes(file.read_bytes())
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    assert run(f"--steps 1 --model.name {bare}") == 0


@pytest.mark.parametrize(
    ("config", "hub"),
    [
        (TrainConfig(), False),
        (TrainConfig(model=ModelConfig(name="smollm2")), False),
        (TrainConfig(model=ModelConfig(name="Qwen/Qwen3-1.7B")), True),
        (TrainConfig(task=TaskConfig(name="gsm8k", path="openai/gsm8k")), True),
        (TrainConfig(task=TaskConfig(name="gsm8k")), True),
        (TrainConfig(task=TaskConfig(name="file", path=__file__)), False),
    ],
)
def test_the_network_is_off_unless_a_name_needs_the_hub(monkeypatch, config, hub):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    train.set_library_variables(config)
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert (os.environ.get("HF_HUB_OFFLINE") == "1") is not hub


def test_samples_log_the_reward_that_trained(run):
    """Voting logs the given reward, at most 0.3 and never 0 here, and trains on 0 or 1."""
    assert run("--steps 1 --objective.name vote --reward.weights 0.3 --out voted") == 0
    samples = RunFolder(Path("voted")).rows("samples")
    assert {sample["reward"] for sample in samples} <= {0.0, 1.0}


@pytest.mark.slow
def test_only_the_main_process_writes_the_first_evaluation(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run("--steps 1 --out other") == 0
    assert not (Path("other") / "before.json").exists()


def test_several_processes_need_a_name_for_the_folder(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--out"):
        train.new_run(TrainConfig())


@pytest.mark.slow
def test_a_real_kill_and_a_real_resume(run, model, tmp_path):
    """kill -9 of the real command, wherever it happens to be after some steps."""
    steps = 12
    assert run(f"--out whole --steps {steps} --rollout.updates 2") == 0
    words = f"{SMALL} --model.name {model} --out killed --steps {steps} --rollout.updates 2"
    command = [sys.executable, "-m", "mesotron", "train", *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = subprocess.run(
        [sys.executable, "-m", "mesotron", "train", "--resume", "killed"], env=environment
    )
    assert done.returncode == 0
    assert_same_end("whole", "killed", step=steps)


@pytest.mark.slow
def test_two_processes_resume_to_the_same_bits(run, model, tmp_path):
    """Whole, then again from its first checkpoint with everything after it taken away."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = f"{SMALL} --model.name {model} --out whole --objective.name mgrpo --rollout.updates 2"

    def two(*words: str) -> None:
        command = [*launch, "mesotron", "train", *words]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

    two(*words.split())
    shutil.copytree("whole", "cut")
    for name in ("result.json", "after.json", "report.md"):
        (Path("cut") / name).unlink()
    for step in (2, 3, 4):
        shutil.rmtree(Path("cut") / "checkpoints" / f"checkpoint-{step}")
    two("--resume", "cut")
    assert_same_end("whole", "cut")

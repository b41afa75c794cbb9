"""Sweeps: files for W&B and Optuna alike, and a study that prunes, stops and continues."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mesotron.cli import COMMANDS, main, parse, split_name
from mesotron.compare import sweep
from mesotron.compare.space import read_space
from mesotron.compare.sweep import read_score, start_arguments
from mesotron.config import VlaTrainConfig
from mesotron.config.flags import find_setting, value_at
from mesotron.runs import RunFolder

pytest.importorskip("optuna")
yaml = pytest.importorskip("yaml")

FILES = sorted((Path(__file__).parents[2] / "sweeps").glob("*.yaml"))
TRIAL = Path(__file__).parents[1] / "support" / "sweep_trial.py"
NARROW = ["--space", "optim.lr=1e-4..1e-3"]  # where no trial is pruned


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Trials here train nothing."""
    words = [sys.executable, str(TRIAL)]
    monkeypatch.setattr(sweep, "process_command", lambda rest: [*words, *rest])
    return tmp_path / "s"


def trials(folder):
    return json.loads((folder / "sweep.json").read_text())["trials"]


def run_sweep(folder, count, *words):
    common = ["--trials", str(count), "--out", str(folder)]
    return main(["compare", "sweep", "arith", *common, *words])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_files_fit_their_commands(path, tmp_path):
    values = yaml.safe_load(path.read_text())
    assert values["command"][0] == values["program"] == "mesotron"
    assert values["metric"]["goal"] == "maximize"
    assert "snake" not in path.stem or values["metric"]["name"] == "eval/greedy_fruit"

    space = read_space(str(path), [])
    drawn = {one.name: one.choices[-1] if one.choices else one.high for one in space.dimensions}
    args = [f"--{name}={value}" for name, value in drawn.items()]

    # As `wandb agent` writes it (--name=value, Python's True), and as our own sweep does.
    by_agent = [word for word in values["command"][1:] if word != "${args}"] + args
    for words in (by_agent, start_arguments(space.arguments(drawn), tmp_path / "t", threads=1)):
        name, rest = split_name(words)
        command = COMMANDS[name]

        config = parse(command.config_type, rest, f"mesotron {name}", command.presets)
        for flag, value in drawn.items():
            setting = find_setting(command.config_type, flag)
            assert value_at(config, setting.path) == value

    assert not any("wandb" in word for word in space.arguments(drawn))
    (tmp_path / f"{path.stem}.json").write_text(json.dumps(values))
    assert read_space(str(tmp_path / f"{path.stem}.json"), []) == space


def test_a_sweep_finds_the_best_rate_and_prunes_dead_trials(folder, capsys):
    assert (
        run_sweep(
            folder,
            8,
            "--space",
            "optim.lr=1e-5..1e-1",
            "--workers",
            "2",
        )
        == 0
    )

    rows = trials(folder)
    assert len(rows) == len({row["values"]["optim.lr"] for row in rows}) == 8

    scored = [row for row in rows if row["score"] is not None]
    pruned = [row for row in rows if row["score"] is None]
    assert pruned
    assert all(row["values"]["optim.lr"] <= 1e-2 for row in scored)
    assert all(row["values"]["optim.lr"] > 1e-2 for row in pruned)
    assert all("reward collapse" in row["why"] for row in pruned)
    assert rows[0]["score"] == max(row["score"] for row in scored)
    assert "mesotron train arith --optim.lr=" in capsys.readouterr().out


def test_a_finished_study_can_grow_and_keeps_its_goal_and_metric(folder, capsys):
    words = [*NARROW, "--metric", "train/reward"]
    assert run_sweep(folder, 2, *words) == 0

    first = trials(folder)
    assert json.loads((folder / "sweep.json").read_text())["metric"] == "train/reward"
    assert "train/reward" in capsys.readouterr().out
    assert run_sweep(folder, 2, *words) == 0
    assert "trial 0" not in capsys.readouterr().out
    assert run_sweep(folder, 3, *words) == 0
    assert len(trials(folder)) == 3
    assert {row["number"] for row in first} < {row["number"] for row in trials(folder)}

    capsys.readouterr()
    assert run_sweep(folder, 4, *NARROW) == 2
    assert "train/reward, not score" in " ".join(capsys.readouterr().err.split())

    assert (
        run_sweep(
            folder,
            4,
            *words,
            "--goal",
            "minimize",
        )
        == 2
    )

    assert "maximize, not minimize" in " ".join(capsys.readouterr().err.split())
    assert (
        run_sweep(
            folder,
            4,
            *words,
            "--space",
            "optim.lr=1e-4..1e-3",
            "steps=5..9",
        )
        == 2
    )

    assert "--steps=" in capsys.readouterr().err
    assert (
        run_sweep(
            folder,
            4,
            *words,
            "--study",
            "other",
        )
        == 2
    )  # its trial 0 would be this one's

    assert "--out" in capsys.readouterr().err
    assert len(list((folder / "trials").glob("*.lock"))) == 3


def test_a_stopped_sweep_resumes_its_trials(folder, monkeypatch, capsys):
    space = [*NARROW, "--workers", "2"]

    def look(seconds, sleep=sweep.time.sleep):
        if sum(path.stat().st_size > 100 for path in folder.glob("trials/*/metrics.jsonl")) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            monkeypatch.setattr(sweep.time, "sleep", sleep)
        sleep(seconds)

    monkeypatch.setenv("SECONDS_A_STEP", "0.1")
    monkeypatch.setattr(sweep.time, "sleep", look)
    assert run_sweep(folder, 2, *space) == 130
    assert str(folder) in "".join(capsys.readouterr().err.split())

    monkeypatch.setenv("SECONDS_A_STEP", "0")
    assert run_sweep(folder, 2, *space) == 0
    assert {row["number"] for row in trials(folder)} == {0, 1}

    resumed = [RunFolder(path).result["resumed_at"] for path in folder.glob("trials/trial-000?")]
    assert len(resumed) == 2
    assert min(resumed) > 0


@pytest.mark.slow
def test_two_processes_share_a_study_without_sharing_a_trial(folder):
    code = (
        "import sys; from mesotron.compare import sweep; from mesotron.cli import main;"
        "words = [sys.executable, sys.argv[1]];"
        "sweep.process_command = lambda rest: [*words, *rest]; sys.exit(main(sys.argv[2:]))"
    )

    words = ["compare", "sweep", "arith", *NARROW]
    words += ["--trials", "4", "--workers", "1", "--out", str(folder)]
    started = [subprocess.Popen([sys.executable, "-c", code, str(TRIAL), *words]) for _ in range(2)]

    assert [process.wait(timeout=120) for process in started] == [0, 0]
    assert run_sweep(folder, 1, *NARROW) == 0  # reads what both have left

    rows = trials(folder)
    assert 4 <= len(rows) <= 5
    assert len({row["values"]["optim.lr"] for row in rows}) == len(rows)


def test_a_sweep_stops_after_several_crashes(folder, monkeypatch, capsys):
    monkeypatch.setenv("CRASH", "1")
    assert run_sweep(folder, 20, *NARROW, "--workers", "1") == 2
    assert "RuntimeError: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("storage", "nosql://x"), ("space", "a=1..inf")])
def test_invalid_storage_and_ranges_are_refused(flag, value, folder, capsys):
    assert (
        run_sweep(
            folder,
            1,
            *NARROW,
            f"--{flag}",
            value,
        )
        == 2
    )

    assert {"storage": "nosql", "space": "inf"}[flag] in capsys.readouterr().err


def test_a_mistyped_metric_ends_a_sweep_after_one_trial(folder, capsys):
    assert (
        run_sweep(
            folder,
            20,
            *NARROW,
            "--workers",
            "1",
            "--metric",
            "train/rewrd",
        )
        == 2
    )

    assert "reward" in capsys.readouterr().err
    assert len(list(folder.glob("trials/trial-????"))) == 1
    assert (
        run_sweep(
            folder,
            1,
            *NARROW,
            "--metric",
            "train/reward",
        )
        == 0
    )


TRAIN = "command: [mesotron, train, '${args}']\nparameters: {a: "


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("parameters: {}", "command"),
        ("command: [mesotron, train, arith, '${args}']", "--space"),
        (TRAIN.replace("train", "bench, ppo") + "{values: [1, 2]}}", "bench ppo"),
        (TRAIN + "{min: 1e-5, max: 1}}", "1e-5"),
        (TRAIN + "{min: 2, max: 1}}", "range"),
        (TRAIN + "{min: 1, max: .inf}}", "inf"),
        (TRAIN + "{min: [1], max: 2}}", "[1]"),
        (TRAIN + "{values: []}}", "[]"),
        (TRAIN + "{values: 5}}", "5"),
        (TRAIN + "{values: [1, 2]}}\nmetric: {name: 5}", "metric.name"),
        (TRAIN + "{distribution: beta}}", "beta"),
        ("command: [mesotron, train, '${args}'", "bad.yaml"),
        ("metric: reward", "metric"),
        (TRAIN.replace(" {a:", " {optim.lrr:") + "{values: [1, 2]}}", "--lr?"),
    ],
)
def test_invalid_files_are_refused(text, match, tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["compare", "sweep", str(path), "--out", str(tmp_path / "s")]) == 2
    assert match in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_score_from_rows_or_result(tmp_path):
    run = RunFolder.create(tmp_path / "r", {}, {})
    for step in range(1, 21):
        run.append(
            "metrics",
            {
                "step": step,
                "reward": step / 20,
                "loss": math.nan,
            },
        )

    assert read_score(run.path, "train/reward", ["train"]) is None  # it has not ended
    run.finish({"after": {"value": 0.4}, "greedy_fruit": 7.5}, lambda: "")
    assert read_score(run.path, "train/reward", ["train"]) == pytest.approx((0.95 + 1.0) / 2)
    assert read_score(run.path, "eval/greedy_fruit", ["ppo", "snake"]) == 7.5
    assert read_score(run.path, None, ["train"]) == 0.4
    assert read_score(run.path, None, ["ppo", "snake"]) == 7.5

    with pytest.raises(LookupError, match="reward"):
        read_score(run.path, "rewrd", ["train"])

    assert read_score(run.path, "train/loss", ["train"]) is None  # Optuna would not count it


def test_a_metric_without_a_goal_is_minimized_as_by_wandb(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(TRAIN + "{values: [1, 2]}}\nmetric: {name: loss}")
    assert read_space(str(path), []).goal == "minimize"
    path.write_text(TRAIN + "{values: [1, 2]}}")

    assert read_space(str(path), []).goal == "maximize"  # the command's own score


@pytest.mark.parametrize(("own", "workers"), [([], 1), (["--workers", "3"], 3)])
def test_robot_trials_use_one_worker_by_default(own, workers, tmp_path):
    words = start_arguments(["vla", "train", "demos", *own], tmp_path / "t", threads=1)
    assert parse(VlaTrainConfig, words[2:], "vla train").workers == workers

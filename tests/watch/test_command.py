"""`mesotron watch` as a user types it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mesotron import cli
from mesotron.config import WatchConfig
from mesotron.watch.command import SCHEMA, WatchResult, run, watch_each
from mesotron.watch.find import find_runs
from mesotron.watch.log import read_log
from mesotron.watch.metrics import NAMES_FILE
from support.watch_streams import FAILURES, TURN, Row, healthy


def write(path, rows: list[Row]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_diagnosis_of_a_log(tmp_path, capsys):
    log = write(tmp_path / "metrics.jsonl", FAILURES["parser_drift"](3))
    out = tmp_path / "diagnosis.json"
    assert cli.main(["watch", str(log), "--out", str(out), "--check"]) == 1

    record = json.loads(out.read_text())
    assert (record["condition"], record["cause"]) == ("dead", "parser_drift")
    assert {"kind", "step", "detector", "severity", "evidence"} <= set(record["events"][0])

    printed = capsys.readouterr().out
    for text in (record["text"], record["diagnosis"], record["remedy"]):
        assert text in printed

    assert "not checked" not in printed
    log = write(tmp_path / "a.jsonl", healthy(0, steps=30))
    assert run(WatchConfig(path=log, check=True)) == 0
    assert "healthy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "rename", "match"),
    [
        ("a.jsonl", '{"step": 1, "my/rwrd": 1}\n', "", "reward=my/rwrd"),
        ("a.jsonl", '{"step": 1, "my/rwrd": 1}\n', "reward=my/rwd", "my/rwrd"),
        ("a.jsonl", '{"step": 1, "my/rwrd": 1}\n', "prize=my/rwrd", "prize"),
        ("a.csv", "step,reward\n1,high\n2,low\n", "", "number"),
    ],
)
def test_input_that_cannot_be_used(tmp_path, capsys, name, text, rename, match):
    (tmp_path / name).write_text(text)
    words = ["--rename", rename] if rename else []
    assert cli.main(["watch", str(tmp_path / name), *words]) == 2

    error = capsys.readouterr().err
    assert match in error
    assert error.count("\n") == 1


def test_a_reward_that_is_no_longer_logged_is_named(tmp_path, capsys):
    rows = [row | ({"reward": None} if row["step"] >= 30 else {}) for row in healthy(0, steps=60)]
    assert cli.main(["watch", str(write(tmp_path / "a.jsonl", rows)), "--json"]) == 0

    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "29" in note

    rows = [{"loss": 1.0} | ({} if k % 10 else {"reward": 0.5 + k / 1e4}) for k in range(200)]
    assert cli.main(["watch", str(write(tmp_path / "b.jsonl", rows)), "--json"]) == 0
    assert not any("reward" in note for note in json.loads(capsys.readouterr().out)["notes"])


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([{"step": k, "reward": 0.3 + k / 100} for k in range(60)], 0),
        ([{"step": k, "reward": 0.3 + k / 100} for k in range(12)], 4),
        ([{"step": k, "reward": 0.0} for k in range(60)], 4),
        ([{"step": k, "loss": 1 / (k + 1)} for k in range(60)], 4),
        ([{"step": k % 40, "reward": 0.3 + k % 40 / 100} for k in range(80)], 4),
        ([{"step": k, "reward": 0.7 if k < 60 else 0.05} for k in range(100)], 1),
    ],
    ids=["healthy", "short", "constant", "no reward", "begun again", "dead"],
)
def test_check_tells_unknown_from_healthy(tmp_path, capsys, rows, code):
    log = write(tmp_path / "a.jsonl", rows)
    assert cli.main(["watch", str(log), "--check"]) == code

    cli.main(["watch", str(log), "--json"])
    record = json.loads(capsys.readouterr().out.partition("{\n")[2].join(["{", ""]))
    if code == 4:
        assert (record["verdict"], record["exit_code"]) == ("unknown", 4)
        assert record["diagnosis"]
        assert record["remedy"]


@pytest.mark.parametrize(
    ("words", "steps", "is_guess"), [([], 60, True), (["--steps", "200"], 200, False)]
)
def test_a_forecast_of_anybodys_log(tmp_path, capsys, words, steps, is_guess):
    rows = [{"iteration": k, "train/reward": 0.2 + k / 100} for k in range(1, 31)]
    log = write(tmp_path / "a.jsonl", rows)
    assert cli.main(["watch", str(log), "--forecast", *words]) == 0
    printed = capsys.readouterr().out

    assert cli.main(["watch", str(log), "--forecast", "--json", *words]) == 0
    forecast = json.loads(capsys.readouterr().out)["forecast"]
    assert (forecast["step"], forecast["steps"], forecast["is_guess"]) == (30, steps, is_guess)
    assert forecast["outcome"] == "learn"
    assert forecast["text"] in printed

    assert cli.main(["watch", str(log), "--json"]) == 0
    assert "forecast" not in json.loads(capsys.readouterr().out)


def test_forecasts_of_several_logs(tmp_path, capsys):
    rows = [{"step": k, "reward": 0.2 + k / 100} for k in range(1, 31)]
    for name, count in (("a", 30), ("b", 3)):
        write(tmp_path / f"{name}.jsonl", rows[:count])

    assert cli.main(["watch", str(tmp_path), "--forecast"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("a.jsonl: ") and "learn" in line for line in lines)
    assert any(line.startswith("b.jsonl: ") and "unknown" in line for line in lines)


@pytest.mark.parametrize("is_run", [True, False])
def test_the_planned_end_is_that_of_the_log(tmp_path, capsys, is_run):
    rows = [{"step": k, "reward": 0.2 + k / 100} for k in range(1, 31)]
    if is_run:
        write(tmp_path / "metrics.jsonl", rows)
        (tmp_path / "config.json").write_text(json.dumps({"steps": 90}))
        (tmp_path / "env.json").write_text("{}")
    else:
        state = {"max_steps": 90, "log_history": rows}
        (tmp_path / "trainer_state.json").write_text(json.dumps(state))

    assert cli.main(["watch", str(tmp_path), "--forecast", "--json"]) == 0
    forecast = json.loads(capsys.readouterr().out)["forecast"]
    assert (forecast["steps"], forecast["is_guess"]) == (90, False)


@pytest.mark.parametrize("steps", ["many", None, True, -1, 2.5, 10**30, {}])
def test_a_planned_end_that_is_no_count(tmp_path, capsys, steps):
    rows = [{"step": k, "reward": 0.2 + k / 100} for k in range(1, 31)]
    state = {"max_steps": steps, "log_history": rows}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))

    assert cli.main(["watch", str(tmp_path), "--forecast", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forecast"]["is_guess"]


def test_a_planned_end_needs_a_forecast(tmp_path, capsys):
    log = write(tmp_path / "a.jsonl", healthy(0, steps=30))
    assert cli.main(["watch", str(log), "--steps", "90"]) == 2
    assert "--forecast" in capsys.readouterr().err


def test_a_hacked_reward_is_shown_by_samples(tmp_path, capsys):
    rows = []
    for k in range(120):
        row = {"step": k, "reward": 0.3 + 0.6 * min(k / 80, 1) + 0.01 * (k % 3), "loss": 0.0}
        if k % 10 == 0:
            row |= {"eval/greedy": 0.6 if k < 50 else 0.2, "eval/problems": 200.0}
        rows.append(row)
    write(tmp_path / "metrics.jsonl", rows)

    samples = []
    for k in range(120):
        cheat = {"completion": "7 7 7", "reward": 1.0}
        honest = {"completion": "the sum is 12", "reward": 0.3}
        samples.append({"step": k, "prompt": "5 + 7"} | (cheat if k >= 60 else honest))
    write(tmp_path / "samples.jsonl", samples)

    cli.main(["watch", str(tmp_path), "--kind", "run", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["cause"] == "self_reward_hacking"
    assert record["onset"] <= 60
    assert [sample["completion"] for sample in record["samples"]] == ["7 7 7"] * 3


def test_renamed_metrics_are_remembered_beside_the_log(tmp_path, capsys):
    rows = [{"step": k, "prize": 0.7 if k < 60 else 0.1} for k in range(100)]
    log = write(tmp_path / "a.jsonl", rows)
    assert cli.main(["watch", str(log), "--rename", "reward=prize"]) == 0

    out = capsys.readouterr().out
    assert "cause: reward collapse" in out
    assert "heldout (" in out  # a missing metric
    assert json.loads((tmp_path / NAMES_FILE).read_text()) == {"reward": "prize"}
    assert cli.main(["watch", str(log), "--json"]) == 3  # without the flag

    (tmp_path / NAMES_FILE).write_text("[1]")
    assert cli.main(["watch", str(log)]) == 2
    assert NAMES_FILE in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "code", "verdict"),
    [
        (healthy(0), 0, "healthy"),
        (FAILURES["zero_gradient"](0), 1, "warning"),
        (FAILURES["reward_collapse"](0), 3, "dead"),
        (healthy(0, steps=4), 4, "unknown"),
    ],
)
def test_the_interface_for_programs(tmp_path, capsys, rows, code, verdict):
    log = write(tmp_path / "a.jsonl", rows)
    assert cli.main(["watch", str(log), "--json"]) == code

    record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (record["schema"], record["verdict"], record["exit_code"]) == (SCHEMA, verdict, code)
    assert record["metrics"]["reward"] == ["reward"]
    assert record["rows"] == len(rows)

    page = (Path(__file__).parents[2] / "docs" / "AGENTS.md").read_text()
    assert [name for name in record if f"`{name}`" not in page] == []


def test_a_folder_of_runs_is_a_table_with_the_worst_first(tmp_path, capsys):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "metrics.jsonl", healthy(0, steps=30))

    (tmp_path / "c").mkdir()
    write(tmp_path / "c" / "metrics.jsonl", FAILURES["reward_collapse"](0))
    (tmp_path / "last").symlink_to(tmp_path / "a")
    (tmp_path / "d.jsonl").write_text("{}\n")

    assert run(WatchConfig(path=tmp_path, check=True)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["verdict", "run"],
        ["dead", "c"],
        ["healthy", "a"],
        ["healthy", "b"],
        ["unread", "d.jsonl:"],
    ]

    assert cli.main(["watch", str(tmp_path), "--json"]) == 3
    record = json.loads(capsys.readouterr().out)
    assert [each["verdict"] for each in record["runs"]] == ["dead", "healthy", "healthy"]
    assert list(record["unread"]) == [str(tmp_path / "d.jsonl")]
    assert cli.main(["watch", str(tmp_path), "--alerts", "command:true"]) == 2
    assert "--alerts" in capsys.readouterr().err


def test_the_table_of_runs_has_what_happened_and_when(tmp_path, capsys):
    write(tmp_path / "a.jsonl", healthy(0, steps=30))
    write(tmp_path / "b.jsonl", FAILURES["reward_collapse"](0))
    run(WatchConfig(path=tmp_path))

    header, dead, alive = capsys.readouterr().out.splitlines()
    starts = [header.index(name) for name in ("steps", "reward", "cause", "onset")]
    steps, reward, cause, onset = (
        dead[start:end].strip() for start, end in zip(starts, [*starts[1:], None])
    )
    assert steps == "0-129"
    before, now = map(float, reward.split(" -> "))
    assert before > now
    assert cause == "reward collapse"
    assert 0 < int(onset) < 129
    assert alive[starts[0] :].split() == ["0-29", *alive[starts[1] :].split()]


def test_many_runs_share_the_cores_and_give_the_same(tmp_path, monkeypatch):
    for k in range(3):
        write(tmp_path / f"{k}.jsonl", healthy(k, steps=30))
    (tmp_path / "broken.jsonl").write_text("{}\n")

    runs = sorted(tmp_path.iterdir())
    config = WatchConfig(path=tmp_path)
    alone = watch_each(config, runs)
    monkeypatch.setattr("mesotron.watch.command.MANY_RUNS", 2)
    shared = watch_each(config, runs)

    for one, other in zip(alone, shared):
        if isinstance(one, WatchResult):
            assert one.record() == other.record()
        else:
            assert one == other

    assert isinstance(shared[-1], str)


def test_logs_of_other_kinds_are_named_and_samples_are_no_run(tmp_path, capsys):
    write(tmp_path / "a.jsonl", healthy(0, steps=30))
    write(tmp_path / "samples.jsonl", [{"step": 1, "reward": 1.0}])
    (tmp_path / "b.csv").write_text("step,reward\n1,0.5\n")

    assert cli.main(["watch", str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["rows"] == 30
    assert "--kind csv" in record["notes"][-1]

    write(tmp_path / "c.jsonl", healthy(1, steps=30))
    assert run(WatchConfig(path=tmp_path)) == 0

    out = capsys.readouterr().out
    assert "--kind csv" in out
    assert "samples" not in out


@pytest.mark.parametrize(
    ("second", "num_runs"),
    [(80, 1), (0, 2)],  # continued from a checkpoint, and another seed
)
def test_a_resumed_log_in_several_files_is_one_run(tmp_path, second, num_runs):
    rows = healthy(0, steps=120)
    write(tmp_path / "metrics-9.jsonl", rows[:100])
    write(tmp_path / "metrics-10.jsonl", rows[second:])
    write(tmp_path / "samples.jsonl", [{"step": 1, "completion": "x"}])

    runs = find_runs(tmp_path)
    assert len(runs) == num_runs
    if num_runs == 1:
        steps = [row["step"] for row in read_log(runs[0]).rows]
        assert steps == [row["step"] for row in rows]


def test_following_prints_events_until_interrupted(tmp_path):
    rows = FAILURES["reward_collapse"](0)
    log = write(tmp_path / "metrics.jsonl", rows[:TURN])
    words = ["watch", str(log), "--follow", "--every", "0.05"]

    # In a background shell interrupts are ignored, and children inherit that.
    code = (
        "import signal\n"
        "from mesotron.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"raise SystemExit(main({words!r}))\n"
    )

    command = [sys.executable, "-c", code]
    live = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with log.open("a") as file:
        for row in rows[TURN:]:
            file.write(json.dumps(row) + "\n")

    while " stop, " not in (line := live.stdout.readline()):
        assert line, "the command ended without an event"

    live.send_signal(signal.SIGINT)
    rest, _ = live.communicate(timeout=60)
    assert live.returncode == 0
    assert "cause: reward collapse" in rest


def test_following_survives_a_broken_line_and_a_removed_file(tmp_path, capsys, monkeypatch):
    lines = [json.dumps(row) + "\n" for row in FAILURES["reward_collapse"](0)]
    log = tmp_path / "a.jsonl"
    now = [0.0]
    log.write_text("".join(lines[:TURN]))

    # Resumed from a checkpoint and killed inside a line, removed, restored with what followed.
    broken = "".join([*lines[:TURN], *lines[TURN - 9 : TURN], '{"step": 3, "rew\n'])
    texts = [broken, None, None, broken + "".join(lines[TURN:])]

    def sleep(seconds):
        now[0] += seconds
        text = texts.pop(0) if texts else None
        log.unlink(missing_ok=True) if text is None else log.write_text(text)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    assert (
        run(
            WatchConfig(
                path=log,
                follow=True,
                every=1.0,
                idle=9.0,
            )
        )
        == 0
    )

    assert now[0] == 4 + 9  # it ends when nothing more comes
    out = capsys.readouterr().out
    assert out.count("still following") == 2  # each problem once
    assert "cause: reward collapse" in out

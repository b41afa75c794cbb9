"""Readers of logs: every format gives the same rows, and a bad file gives one clear error."""

import gzip
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from mesotron.watch import find, reader
from mesotron.watch import log as log_module
from mesotron.watch.find import find_runs
from mesotron.watch.formats.console import Console
from mesotron.watch.log import Stream, read_log
from mesotron.watch.metrics import canonical

ROWS = [
    {
        "step": float(k),
        "reward": 0.5 + k / 10,
        "entropy": 1.0 - k / 10,
    }
    for k in range(5)
]


def write_events(path: Path, rows: list[dict[str, float]], tensor: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=1.7e9, file_version="brain.Event:2").SerializeToString())

        for row in rows:
            for name, x in row.items():
                if name != "step":
                    if tensor:
                        scalar = {"tensor": make_tensor_proto(x)}
                    else:
                        scalar = {"simple_value": x}

                    value = Summary.Value(tag=f"train/{name}", **scalar)
                    event = Event(step=int(row["step"]), summary=Summary(value=[value]))
                    writer.write(event.SerializeToString())

        writer.flush()

    return path


def as_jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_csv(rows) -> str:
    return "Step,train/reward,entropy,note\n" + "".join(
        f'{row["step"]:.0f},{row["reward"]},{row["entropy"]},"a, ""b""\nc"\n' for row in rows
    )


def as_verl(rows) -> str:
    return "INFO starting\n" + "".join(
        f"\x1b[36m(TaskRunner pid=7, ip=10.0.0.1)\x1b[0m step:{row['step']:.0f} - "
        f"reward:{row['reward']} - entropy:np.float64({row['entropy']}) - what:ever\n"
        "Training Progress:  1%|  | 1/140 [00:49<1:53:43]\n"
        for row in rows
    )


def as_wrapped_verl(rows) -> str:
    line = "(T pid=7) step:{step:.0f}\n - reward:{reward}\n - entropy:{entropy}\n"
    return "".join(line.format(**row) for row in rows)


def as_state(rows) -> str:
    history = [*rows, {"step": 4, "train_runtime": 9.5}]
    return json.dumps(
        {
            "global_step": 4,
            "log_history": history,
            "best_metric": None,
        },
        indent=2,
    )


NESTED = [{"step": r["step"], "data": {k: v for k, v in r.items() if k != "step"}} for r in ROWS]
TEXTS = {
    "metrics.jsonl": as_jsonl(ROWS),
    "verl.jsonl": as_jsonl(NESTED),
    "trainer_state.json": as_state(ROWS),
    "rows.json": json.dumps(ROWS),
    "nested.json": json.dumps({"betas": [0.9, 0.99], "run": {"log": ROWS}}),
    "by_step.json": json.dumps({str(int(row["step"])): row for row in ROWS}),
    "export.csv": as_csv(ROWS),
    "export.tsv": as_csv(ROWS).replace(",", "\t"),
    "console.log": as_verl(ROWS),
    "wrapped.txt": as_wrapped_verl(ROWS),
}


@pytest.fixture
def write(tmp_path):
    def put(name: str, data: bytes | str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)

        return path

    return put


def training_rows(rows) -> list[dict[str, float]]:
    plain = [{key.removeprefix("train/"): value for key, value in row.items()} for row in rows]
    return [row for row in plain if "reward" in row]


# Complete logs


@pytest.mark.parametrize("name", [*TEXTS, "events.out.tfevents.1.host", "no_suffix"])
def test_every_format_gives_the_same_rows_also_while_it_grows(name, write):
    whole = write(f"whole/{name}", TEXTS.get(name, ""))
    if name not in TEXTS:
        write_events(whole, ROWS, tensor=name == "no_suffix")

    log = read_log(whole)
    for row, expected in zip(training_rows(log.rows), ROWS, strict=True):
        assert row == pytest.approx(expected)

    if not name.endswith(".json"):
        data = whole.read_bytes()
        path = write(name, b"")

        stream = Stream(path, log.kind)
        for start in range(0, len(data), 7):
            with path.open("ab") as file:
                file.write(data[start : start + 7])
            stream.poll()

        stream.finish()
        assert stream.log == replace(log, path=path)


@pytest.mark.parametrize("mark", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark(mark, write):
    for name in ("metrics.jsonl", "export.csv", "rows.json", "console.log"):
        log = read_log(write(name, TEXTS[name].encode(mark)))
        assert training_rows(log.rows) == [pytest.approx(row) for row in ROWS]


EPOCHS = [
    {
        "epoch": e,
        "step": k,
        "reward": 0.5,
    }
    for e in range(2)
    for k in range(2)
]
RESUMED = [
    {
        "epoch": k / 4,
        "step": k,
        "reward": k,
    }
    for k in (0, 1, 2, 3, 2)
]
PRINTED = """{'loss': 0.1, 'reward': 0.5, 'epoch': 0.1}\nnoise\n{'eval_reward': 0.4, 'epoch': 0.1}
{'loss': 'inf', 'reward': '0.6', 'epoch': 0.2}\n"""
SPLIT = [{"seed": 1}, {"step": 0, "reward": 1}, {"eval_reward": 3}, {"step": 5, "reward": 0}]
NUMBERS = '{"step": 1, "reward": 1' + "0" * 400 + ', "loss": NaN, "kl": -1e999, "up": true}\n'


@pytest.mark.parametrize(
    ("name", "text", "rows", "note"),
    [
        (
            "a.csv",
            "run;step;reward;clipped;kl\na,1;1;0,5;50%;-1,5e-3\na,1;2;0.5;2,5 %;n/a\n",
            [
                {
                    "step": 1,
                    "reward": 0.5,
                    "clipped": 0.5,
                    "kl": -0.0015,
                },
                {"step": 2, "reward": 0.5, "clipped": 0.025},
            ],
            "",
        ),
        # A decimal comma, or thousands?
        ("a.csv", 'step,reward,size\n1,50%,"1,234"\n', [{"step": 1, "reward": 0.5}], ""),
        ("a.csv", "step,run,kl\n1,,3\n2,x,4\n", [{"step": 1, "kl": 3}, {"step": 2, "kl": 4}], ""),
        (
            "run-a-tag-loss.csv",
            "Wall time,Step,Value\n9,1,0.25\n",
            [{"step": 1, "loss": 0.25, "Wall time": 9}],
            "",
        ),
        (
            "a.log",
            PRINTED,
            [
                {
                    "step": 1,
                    "loss": 0.1,
                    "reward": 0.5,
                    "epoch": 0.1,
                },
                {"step": 1, "eval_reward": 0.4, "epoch": 0.1},
                {
                    "step": 2,
                    "loss": math.inf,
                    "reward": 0.6,
                    "epoch": 0.2,
                },
            ],
            "no step",
        ),
        (
            "a.jsonl",
            NUMBERS,
            [
                {
                    "step": 1,
                    "reward": math.inf,
                    "loss": math.nan,
                    "kl": -math.inf,
                }
            ],
            "",
        ),
        (
            "a.jsonl",
            as_jsonl(SPLIT),
            [
                {
                    "step": 0,
                    "seed": 1,
                    "reward": 1,
                    "eval_reward": 3,
                },
                {"step": 5, "reward": 0},
            ],
            "",
        ),
        ("a.jsonl", as_jsonl(EPOCHS), [row | {"step": k} for k, row in enumerate(EPOCHS)], "epoch"),
        ("a.jsonl", as_jsonl(RESUMED), [*RESUMED[:2], RESUMED[4]], "resumed"),
        ("a.jsonl", '{"step": 1}\n\n{"step": 2, "kl": 1}', [{"step": 1}, {"step": 2, "kl": 1}], ""),
    ],
)
def test_rows_of_unusual_logs(name, text, rows, note, write):
    log = read_log(write(name, text))
    assert log.rows == [pytest.approx(row, nan_ok=True) for row in rows]
    assert note in "".join(log.notes)


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["metrics.jsonl", "events.jsonl", "trainer_state.json"], "run"),
        (["trainer_state.json", "other.txt"], "trainer_state"),
        (["checkpoint-9/trainer_state.json", "checkpoint-10/trainer_state.json"], "trainer_state"),
        (["runs/host/events.out.tfevents.1.host"], "tensorboard"),
        (["export.csv", "readme.txt"], "csv"),
        (["verl.jsonl", "10.jsonl", "20.jsonl"], "jsonl"),
    ],
)
def test_a_folder_is_searched_for_its_best_log(files, kind, write, tmp_path):
    for name in files:
        dump = '{"input": "2 + 3?", "output": "5", "score": 1.0, "step": 10}\n'
        write(name, TEXTS.get(Path(name).name, dump))

        if "tfevents" in name:
            write_events(tmp_path / name, ROWS)

        if name.startswith("checkpoint-9/"):
            write(name, as_state(ROWS[:2]))

    log = read_log(tmp_path)
    assert log.kind == kind
    assert len(training_rows(log.rows)) == len(ROWS)


def test_late_rows_of_a_second_process_join_their_steps(write):
    late = {
        "step": 1,
        "time": 3.0,
        "time/step": 1.0,
        "eval/accuracy": 0.5,
    }

    rows = [
        {
            "step": k,
            "time": k,
            "time/step": 1.0,
            "loss": 0.1,
        }
        for k in range(4)
    ]

    path = write("own/metrics.jsonl", as_jsonl([*rows, late]))
    for log in (read_log(path), read_log(path.parent)):
        assert (len(log.rows), log.rows[1]["eval/accuracy"], log.notes) == (4, 0.5, [])


@pytest.mark.parametrize("names", [("outputs/a/", "outputs/b/"), ("s3://x", "./y/")])
def test_names_of_runs_that_a_path_would_change(write, names):
    rows = []
    for name in names:
        for row in ROWS:
            rows.append({"run_name": name, **row})

    path = write("runs.jsonl", as_jsonl([{"config": 3.0}, *rows]))  # a row that names no run
    runs = find_runs(path)

    assert len(runs) == 2
    assert all(len(training_rows(read_log(run).rows)) >= len(ROWS) for run in runs)


def test_a_run_that_begins_again_is_not_called_resumed(write):
    log = read_log(write("a.jsonl", as_jsonl([*ROWS, *ROWS])))
    assert [row["step"] for row in log.rows] == [row["step"] for row in ROWS]
    (note,) = log.notes

    assert "begun again" in note
    assert "resumed" not in note


def test_runs_that_are_left_out_are_named(write, tmp_path, monkeypatch):
    for name in "abc":
        write(f"{name}.jsonl", TEXTS["metrics.jsonl"])

    notes: list[str] = []
    monkeypatch.setattr(find, "MAX_RUNS", 2)
    assert len(find_runs(tmp_path, notes=notes)) == 2
    assert str(tmp_path) in "".join(notes)


def test_a_console_is_not_searched_for_names_of_runs(write, monkeypatch):
    path = write("console.log", "noise\n")
    monkeypatch.setattr(Console, "parse", None)
    assert find_runs(path) == [path]


# Malformed logs


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("a.jsonl", '{"step": 1}\n{"step": \n{"step": 3}\n', "line 2"),
        ("a.jsonl", "[" * 100_000 + "\n", "line 1"),
        ("a.jsonl", "x" * (reader.MAX_LINE + 9), "line 1"),
        ("a.jsonl", '{"step": 1}\n\x00\xff\xfe\n', "line 2"),
        ("a.jsonl", '{"step": 1}\n' * 1500 + "{oops\n" + '{"step": 1}\n' * 499, "line 1501"),
        ("a.jsonl", "", "no row"),
        ("a.json", "{", "not JSON"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", '{"log_history": 3}', "log_history"),
        ("a.csv", "step,reward\n1,2,3\n", "line 2"),
        ("a.csv", 'step,reward\n1,"2\n3,4\n5,6\n', "quote"),
        ("a.csv", "step,reward\n1," + "9" * 200_000 + "\n", "line 2"),
        ("a.csv", 'step,reward\n"' + "\n" * 900_000, "quote"),
        ("a.dat", "hello\nworld\n", "--kind"),
        ("a.tfevents", b"\x00" * 64, "no row"),
    ],
)
def test_a_malformed_file_is_one_sentence(name, data, match, write):
    with pytest.raises(ValueError, match=match) as error:
        read_log(write(name, data))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_paths_that_cannot_be_read(tmp_path, write, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=str(path)):
            read_log(path)

    monkeypatch.setattr(log_module, "MAX_FILE", 20)
    with pytest.raises(ValueError, match="more than 20"):
        read_log(write("a.jsonl", TEXTS["metrics.jsonl"]))


@pytest.mark.parametrize("end", [(-9, b""), (-3, b"bad")])
def test_a_log_is_read_up_to_the_damage(end, write, tmp_path):
    for name in ("metrics.jsonl", "verl.jsonl"):
        assert len(read_log(write(name, TEXTS[name][:-9])).rows) == len(ROWS) - 1

    packed = gzip.compress(as_jsonl([{"step": k, "reward": k % 97} for k in range(999)]).encode())
    assert len(read_log(write("a.jsonl.gz", packed[: len(packed) // 2])).rows) > 100

    path = write_events(tmp_path / "events.out.tfevents.1", ROWS)
    path.write_bytes(path.read_bytes()[: end[0]] + end[1])
    log = read_log(path)

    assert log.rows[-1] == pytest.approx({"step": 4, "train/reward": 0.9})
    assert len(log.notes) == 1


def test_no_input_makes_a_pattern_run_for_long(write):
    # Made for backtracking expressions: the test would not end if one were slow.
    lines = [
        "(" + "a" * 50_000,
        "{'" + "a" * 50_000,
        "step:" + "1" * 50_000,
        "step:1 " + "- a:" * 20_000,
        "{'a': " * 20_000,
    ]

    log = read_log(write("a.log", "\n".join(lines) + "\nstep:2 - reward:0.5\n"), "console")
    assert log.rows[-1]["reward"] == 0.5

    name = "rewards/" + "accuracy" * 130_000
    assert canonical({name: 1.0, "rewards/my_accuracy/mean": 0.5}) == {"correct": 0.5}


# Growing logs


def test_polling_a_growing_log(write):
    path = write("metrics.jsonl", b"")
    stream = Stream(path)
    assert stream.poll() == 0

    lines = TEXTS["metrics.jsonl"].splitlines(keepends=True)
    for text, num_new in [("".join(lines[:2]) + lines[2][:7], 2), ("".join(lines[:4]), 2)]:
        path.write_text(text)
        assert stream.poll() == num_new
        assert not stream.resumed

    path.write_text(lines[0])  # begun again
    assert stream.poll() == 1
    assert stream.resumed

    path = write("trainer_state.json", as_state(ROWS[:2]))  # rewritten as a whole
    stream = Stream(path)
    first = stream.poll()
    path.write_text(as_state(ROWS)[:50])  # being written

    assert stream.poll() == 0
    path.write_text(as_state(ROWS))
    assert stream.poll() == first + 3
    assert stream.resumed
    assert stream.log.notes == []


def test_rows_of_two_processes_are_joined_while_they_are_written(write):
    a = [
        {
            "step": k,
            "reward": k / 10,
            "time": 1,
        }
        for k in range(1, 9)
    ]

    b = [
        {
            "step": k,
            "entropy": 1.0,
            "loss": 0.5,
            "time": 2,
        }
        for k in range(1, 9)
    ]

    order = [a[0], a[1], b[0], a[2], b[1], b[2], a[3], a[4], b[3], *a[5:], *b[4:]]
    path = write("metrics.jsonl", b"")
    taken = []

    growing = Stream(path, "jsonl")
    for k in range(1, len(order) + 2):
        path.write_text(as_jsonl(order[:k]))
        count = growing.poll() if k <= len(order) else growing.finish()
        new = growing.log.rows[growing.num_ready - count : growing.num_ready]

        if growing.resumed:
            taken = [dict(row) for row in new]
        else:
            taken = [*taken, *map(dict, new)]

    assert taken == read_log(write("whole.jsonl", as_jsonl(order))).rows
    assert [row["step"] for row in taken] == list(range(1, 9))
    assert all(len(row) == 5 and row["time"] == 1 for row in taken)


def test_several_event_files_are_one_log(tmp_path):
    write_events(tmp_path / "events.out.tfevents.100.host", ROWS[:3])
    stream = Stream(tmp_path)
    assert stream.poll() == 2  # the last step may still get scalars

    write_events(tmp_path / "events.out.tfevents.200.host", ROWS[3:])
    stream.poll()
    stream.finish()

    assert [row["step"] for row in stream.log.rows] == [0, 1, 2, 3, 4]


def test_event_files_of_several_runs(tmp_path):
    for name in (
        "logs/a",
        "logs/b",
        "outputs/runs/host-1",
        "outputs/runs/host-2",
        "verl/project/a",
        "verl/project/b",
        "one/run",
        "one/run/loss_train",
    ):
        write_events(tmp_path / name / "events.out.tfevents.1.host", ROWS)

    assert [run.name for run in find_runs(tmp_path / "logs")] == ["a", "b"]
    assert [run.name for run in find_runs(tmp_path / "verl")] == ["a", "b"]
    assert find_runs(tmp_path / "outputs") == [tmp_path / "outputs"]  # one that was started twice
    assert len(read_log(tmp_path / "one").rows) == len(ROWS)
    assert not read_log(tmp_path / "one").notes  # add_scalars wrote the inner file

    with pytest.raises(ValueError, match="2 runs"):
        read_log(tmp_path / "logs")


def test_a_tensor_is_not_repeated_to_the_shape_that_a_file_names(tmp_path):
    path = write_events(tmp_path / "events.out.tfevents.1", ROWS)
    tensor = make_tensor_proto([1.0])
    tensor.tensor_shape.dim[0].size = 10**13

    value = Summary.Value(tag="huge", tensor=tensor)
    with path.open("ab") as file:
        RecordWriter(file).write(Event(step=9, summary=Summary(value=[value])).SerializeToString())

    log = read_log(path)
    assert "huge" not in log.rows[-1]
    assert len(log.rows) == len(ROWS)


def test_tensorboard_is_an_extra(tmp_path, monkeypatch):
    path = write_events(tmp_path / "events.out.tfevents.1", ROWS)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)

    with pytest.raises(ValueError, match=r"mesotron\[tensorboard\]"):
        read_log(path)

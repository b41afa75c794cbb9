"""Logs of every kind, whole and hostile: the right rows, or one sentence that names the line."""

import csv
import json
import math
import os
import struct
from pathlib import Path

import pytest

from mesotron.watch.metrics import canonical
from mesotron.watch.readers import Stream, parser, read_log, tables, tensorboard
from mesotron.watch.readers.tensorboard import EventFile, masked_crc

ROWS = [{"step": float(k), "reward": 0.5 + k / 10, "entropy": 1.0 - k / 10} for k in range(5)]


# writers, from the formats' definitions ----------------------------------------------------------


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def message(*fields: tuple[int, int, bytes]) -> bytes:
    return b"".join(varint(number << 3 | kind) + data for number, kind, data in fields)


def chunk(data: bytes) -> bytes:
    return varint(len(data)) + data


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    sums = struct.pack("<I", masked_crc(length)), struct.pack("<I", masked_crc(data))
    return length + sums[0] + data + sums[1]


def scalar(step: int, tag: str, value: float, tensor: bool = False) -> bytes:
    if tensor:
        content = message((1, 0, varint(1)), (4, 2, chunk(struct.pack("<f", value))))
        number = (8, 2, chunk(content))
    else:
        number = (2, 5, struct.pack("<f", value))
    summary = message((1, 2, chunk(message((1, 2, chunk(tag.encode())), number))))
    wall = struct.pack("<d", 1.7e9)
    return record(message((1, 1, wall), (2, 0, varint(step)), (5, 2, chunk(summary))))


VERSION = record(message((1, 1, struct.pack("<d", 1.7e9)), (3, 2, chunk(b"brain.Event:2"))))


def events(rows: list[dict[str, float]], tensor: bool = False) -> bytes:
    each = [scalar(int(row["step"]), f"train/{tag}", value, tensor)
            for row in rows for tag, value in row.items() if tag != "step"]  # fmt: skip
    return VERSION + b"".join(each)


def as_csv(rows: list[dict[str, float]]) -> str:
    return "Step,train/reward,entropy,note\n" + "".join(
        f'{row["step"]:.0f},{row["reward"]},{row["entropy"]},"a, ""b""\nc"\n' for row in rows
    )


def as_verl(rows: list[dict[str, float]]) -> str:
    return "INFO starting\n" + "".join(
        f"\x1b[36m(TaskRunner pid=7, ip=10.0.0.1)\x1b[0m step:{row['step']:.0f} - "
        f"reward:{row['reward']} - entropy:np.float64({row['entropy']}) - what:ever\n"
        "Training Progress:  1%|  | 1/140 [00:49<1:53:43]\n"
        for row in rows
    )


def as_wrapped_verl(rows: list[dict[str, float]]) -> str:
    return "".join(f"(T pid=7) step:{r['step']:.0f}\n - reward:{r['reward']}\n - entropy:"
                   f"{r['entropy']}\n" for r in rows)  # fmt: skip


def state(rows: list[dict[str, float]]) -> str:
    history = [*rows, {"step": 4, "train_runtime": 9.5}]
    return json.dumps({"global_step": 4, "log_history": history, "best_metric": None}, indent=2)


LOGS = {
    "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "verl.jsonl": "".join(
        json.dumps({"step": row["step"], "data": {k: v for k, v in row.items() if k != "step"}})
        + "\n" for row in ROWS
    ).encode(),
    "trainer_state.json": state(ROWS).encode(),
    "rows.json": json.dumps(ROWS).encode(),
    "export.csv": as_csv(ROWS).encode(),
    "export.tsv": as_csv(ROWS).replace(",", "\t").encode(),
    "console.log": as_verl(ROWS).encode(),
    "wrapped.txt": as_wrapped_verl(ROWS).encode(),
    "events.out.tfevents.1.host": events(ROWS),
    "events.out.tfevents.2.host": events(ROWS, tensor=True),
    "no_suffix": events(ROWS),
}  # fmt: skip


def plain(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    kept = [{key.removeprefix("train/"): value for key, value in row.items()} for row in rows]
    return [row for row in kept if "reward" in row]


@pytest.fixture
def write(tmp_path):
    def put(name: str, data: bytes | str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    return put


# whole logs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOGS)
def test_every_kind_gives_the_same_rows(name, write):
    found = plain(read_log(write(name, LOGS[name])).rows)
    for row, expected in zip(found, ROWS, strict=True):
        assert row == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name in LOGS if not name.endswith(".json")])
def test_byte_by_byte_is_the_same_as_at_once(name, write):
    path = write(name, b"")
    stream = Stream(path, read_log(write(f"whole/{name}", LOGS[name])).kind)
    for byte in LOGS[name]:
        with path.open("ab") as file:
            file.write(bytes([byte]))
        stream.poll()
    stream.finish()
    assert stream.log.rows == read_log(path.parent / "whole" / name).rows


def test_what_trainer_prints_is_read(write):
    text = "{'loss': 0.1, 'reward': 0.5, 'epoch': 0.1}\nnoise\n{'loss': 'nan', 'reward': '0.6'}\n"
    log = read_log(write("out.log", text))
    assert [row["reward"] for row in log.rows] == [0.5, 0.6]
    assert [row["step"] for row in log.rows] == [1, 2]
    assert math.isnan(log.rows[1]["loss"])
    assert log.notes == ["rows carry no step: they are counted"]


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["metrics.jsonl", "events.jsonl", "trainer_state.json"], "run"),
        (["trainer_state.json", "other.txt"], "trainer_state"),
        (["checkpoint-9/trainer_state.json", "checkpoint-10/trainer_state.json"], "trainer_state"),
        (["runs/host/events.out.tfevents.1.host"], "tensorboard"),
        (["export.csv", "readme.txt"], "csv"),
    ],
)
def test_a_folder_is_searched_for_its_best_log(files, kind, write, tmp_path):
    for name in files:
        write(name, LOGS.get(Path(name).name, b"x"))
    assert read_log(tmp_path).kind == kind


def test_the_newest_checkpoint_is_the_one_with_the_largest_number(write, tmp_path):
    write("checkpoint-9/trainer_state.json", state(ROWS[:2]))
    write("checkpoint-10/trainer_state.json", state(ROWS))
    assert len(plain(read_log(tmp_path).rows)) == len(ROWS)


def test_a_resumed_run_forgets_what_it_wrote_after_its_checkpoint(write):
    rows = [*ROWS, {"step": 2, "reward": 9.0}, {"step": 3, "reward": 9.5}]
    log = read_log(write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert [row["step"] for row in log.rows] == [0, 1, 2, 3]
    assert log.rows[2]["reward"] == 9.0
    assert log.notes == ["resumed at step 2: the rows after it were written again"]


def test_two_event_files_of_one_run_are_one_log(write, tmp_path):
    write("events.out.tfevents.100.host", events(ROWS[:3]))
    write("events.out.tfevents.200.host", events(ROWS[3:]))
    assert len(read_log(tmp_path).rows) == len(ROWS)


# hostile logs ------------------------------------------------------------------------------------


def refuse(path: Path, kind: str = "auto") -> str:
    with pytest.raises(ValueError) as found:  # noqa: PT011, the text is asserted by the caller
        read_log(path, kind)  # type: ignore[arg-type]
    text = str(found.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", '{"step": 1}\n{"step": \n{"step": 3}\n', "a.jsonl line 2 is not JSON"),
        ("a.jsonl", '{"step": 1}\n[1, 2]\n', "line 2 is not a JSON object but list"),
        ("a.jsonl", "[" * 100_000 + "\n", "line 1 is not JSON"),
        ("a.jsonl", '{"a": ' * 50_000 + "1" + "}" * 50_000 + "\n", "line 1 is not JSON"),
        ("a.jsonl", '{"step": 1}\n"' + "x" * (parser.MAX_LINE + 9) + '"\n', "line 2 is longer"),
        ("a.jsonl", "x" * (parser.MAX_LINE + 9), "line 1 is longer"),
        ("a.jsonl", '{"step": 1}\n\x00\xff\xfe\n', "line 2 is not JSON"),
        ("a.jsonl", "", "no row of numbers"),
        ("a.jsonl", '{"text": "hello"}\n', "no row of numbers"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "[" * 100_000, "is not JSON"),
        ("a.json", '{"log_history": 3}', "no log_history"),
        ("a.json", '[1, "two"]', "no log_history"),
        ("a.csv", "step,reward\n1,2,3\n", "line 2 has 3 cells, the header 2"),
        ("a.csv", 'step,reward\n1,"2\n3,4\n5,6\n', "ends inside a quoted cell"),
        ("a.csv", "step,reward\n1," + "9" * 200_000 + "\n", "line 2 is not CSV"),
        ("a.csv", "step,reward\n", "no row of numbers"),
        ("a.dat", "hello\nworld\n", "not a log that can be told apart"),
        ("a.tfevents", b"\x00" * 64, "the record at byte 0 is damaged"),
    ],
)
def test_a_malformed_file_is_a_sentence(name, data, said, write):
    assert said in refuse(write(name, data))


def test_places_that_are_no_logs(tmp_path):
    assert "does not exist" in refuse(tmp_path / "nothing")
    assert "does not hold a log" in refuse(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "no plain file" in refuse(tmp_path / "pipe")


def test_a_file_over_the_limit_is_not_read(write, monkeypatch):
    monkeypatch.setattr("mesotron.watch.readers.stream.MAX_FILE", 20)
    assert "more than 20" in refuse(write("a.jsonl", LOGS["metrics.jsonl"]))
    monkeypatch.setattr("mesotron.watch.readers.stream.MAX_FILE", 2**30)
    monkeypatch.setattr(tables, "MAX_DOCUMENT", 20)
    assert "longer than 20" in refuse(write("a.json", LOGS["rows.json"]))


def test_a_torn_last_line_is_left_out(write):
    for name in ("metrics.jsonl", "verl.jsonl"):
        assert len(read_log(write(name, LOGS[name][:-9])).rows) == len(ROWS) - 1
    torn = LOGS["events.out.tfevents.1.host"][:-9]
    assert plain(read_log(write("events.out.tfevents.1", torn)).rows)[-1]["step"] == 4


@pytest.mark.parametrize("place", [3, 9, 20, 60, -3])
def test_a_flipped_bit_in_an_event_file_is_found(place, write):
    data = bytearray(LOGS["no_suffix"])
    data[place] ^= 4
    assert "is damaged" in refuse(write("events.out.tfevents.1", bytes(data)))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 30,
        b"\x2a\xff\xff\xff\xff\x0f",
        varint(5 << 3 | 2) + chunk(b"\x0a\x7f\x01"),
        b"\x03",
    ],
)
def test_a_record_that_is_no_event_is_a_sentence(content, write):
    assert "no Event message" in refuse(write("events.out.tfevents.1", VERSION + record(content)))


def test_large_records_are_passed_over_unread(write):
    picture = record(b"\x00" * (tensorboard.MAX_SCALAR + 5))
    log = read_log(write("a.tfevents", VERSION + picture + events(ROWS)[len(VERSION) :]))
    assert len(log.rows) == len(ROWS)
    reader = EventFile(Path("a"))
    for start in range(0, len(picture), 1000):
        reader.feed(picture[start : start + 1000])
        assert len(reader._rest) < 2000


def test_numbers_of_any_size_are_numbers(write):
    text = '{"step": 1, "reward": 1' + "0" * 400 + ', "loss": NaN, "kl": -1e999, "up": true}\n'
    (row,) = read_log(write("a.jsonl", text)).rows
    assert row["reward"] == math.inf
    assert row["kl"] == -math.inf
    assert math.isnan(row["loss"])
    assert "up" not in row


def test_a_row_of_a_million_names_is_bounded(write):
    text = json.dumps({f"k{k}": k for k in range(20_000)}) + "\n"
    (row,) = read_log(write("a.jsonl", text)).rows
    assert len(row) <= parser.MAX_KEYS + 1


def test_a_console_log_cannot_make_a_pattern_run_for_long(write):
    """Lines made to hurt a backtracking expression; the test would not end if one did."""
    lines = ["(" + "a" * 50_000, "{'" + "a" * 50_000, "step:" + "1" * 50_000,
             "step:1 " + "- a:" * 20_000, "{'a': " * 20_000]  # fmt: skip
    log = read_log(write("a.log", "\n".join(lines) + "\nstep:2 - reward:0.5\n"), "console")
    assert log.rows[-1]["reward"] == 0.5


def test_a_name_cannot_make_a_pattern_run_for_long():
    """As above, for the names of metrics: a million letters would take a quarter of an hour."""
    name = "rewards/" + "accuracy" * 130_000
    assert canonical({name: 1.0, "rewards/my_accuracy/mean": 0.5}) == {"correct": 0.5}


# live logs ---------------------------------------------------------------------------------------


def test_a_growing_log_gives_its_new_rows(write):
    path = write("metrics.jsonl", b"")
    stream = Stream(path)
    assert stream.poll() == 0
    lines = LOGS["metrics.jsonl"].splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:7])
    assert stream.poll() == 2
    path.write_bytes(b"".join(lines[:4]))
    assert stream.poll() == 2
    assert not stream.resumed
    path.write_bytes(lines[0])  # begun anew
    assert stream.poll() == 1
    assert stream.resumed


def test_a_document_that_is_written_anew_is_read_anew(write):
    path = write("trainer_state.json", state(ROWS[:2]))
    stream = Stream(path)
    stream.poll()
    first = len(stream.log.rows)
    path.write_text(state(ROWS)[:50])  # being written
    assert stream.poll() == 0
    path.write_text(state(ROWS))
    assert stream.poll() == first + 3
    assert stream.resumed
    assert stream.log.notes == []


def test_new_event_files_are_found(write, tmp_path):
    write("events.out.tfevents.100.host", events(ROWS[:3]))
    stream = Stream(tmp_path)
    assert stream.poll() == 2  # the last step may still get scalars
    write("events.out.tfevents.200.host", events(ROWS[3:]))
    stream.poll()
    stream.finish()
    assert {row["step"] for row in stream.log.rows} == {0, 1, 2, 3, 4}


def test_the_reader_of_csv_agrees_with_the_library(write):
    path = write("a.csv", as_csv(ROWS))
    with path.open(newline="") as file:
        expected = [float(row["train/reward"]) for row in csv.DictReader(file)]
    assert [row["train/reward"] for row in read_log(path).rows] == expected

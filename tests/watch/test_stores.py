"""Files of experiment trackers, written here in their formats."""

import itertools
import json
import math
import random
import sqlite3
import struct
import zlib
from contextlib import closing

import pytest

from mesotron.watch import log as log_module
from mesotron.watch.find import find_runs
from mesotron.watch.formats import wandb
from mesotron.watch.log import Log, Stream, Timeline, read_log

ROWS = [
    {
        "step": float(k),
        "reward": 0.1 * k,
        "entropy": 1.0 - 0.1 * k,
    }
    for k in range(1, 6)
]


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out = out + bytes([value & 127 | 128])
        value = value >> 7

    return out + bytes([value])


def wandb_file(records: list[bytes]) -> bytes:
    """Records in LevelDB's log format: chunks never cross a block of 32 KiB."""
    out = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    for record in records:
        first = True
        while first or record:
            left = wandb.BLOCK - len(out) % wandb.BLOCK
            if left < 7:
                out += b"\0" * left
                continue

            piece = record[: left - 7]
            record = record[left - 7 :]

            if first:
                kind = 1 if not record else 2
            elif not record:
                kind = 4
            else:
                kind = 3

            crc = zlib.crc32(bytes([kind]) + piece)
            out = out + struct.pack("<IHB", crc, len(piece), kind) + piece
            first = False

    return out


def history(values: dict) -> bytes:
    items = (
        field(1, field(2 if "." in key else 1, key.encode()) + field(16, json.dumps(x).encode()))
        for key, x in values.items()
    )
    return field(2, b"".join(items))


WANDB = [
    field(17, b"\x0a\x03run"),
    history(
        {
            "_step": 0,
            "train/reward": 0.5,
            "train/global_step": 10,
            "note": "x" * 70_000,
        }
    ),
    history(
        {
            "_step": 1,
            "entropy": math.nan,
            "_timestamp": 1e9,
        }
    ),
    history(
        {
            "_step": 2,
            "train/reward": 0.6,
            "train/global_step": 20,
        }
    ),
]


def test_a_wandb_folder_is_read_while_it_grows(tmp_path):
    data = wandb_file(WANDB)
    folder = tmp_path / "wandb" / "offline-run-20260101_000000-abc"
    folder.mkdir(parents=True)
    path = folder / "run-abc.wandb"
    path.write_bytes(data[:7])

    growing = Stream(tmp_path / "wandb")
    for end in range(7, len(data) + 5000, 5000):
        path.write_bytes(data[:end])
        growing.poll()

    growing.finish()
    first, second = growing.log.rows
    assert first.pop("entropy") != 0.0  # NaN
    assert first == {"step": 10, "train/reward": 0.5}
    assert second == {"step": 20, "train/reward": 0.6}
    assert growing.log.notes == []

    path.write_bytes(data[:-3])
    log = read_log(path)
    assert (len(log.rows), len(log.notes)) == (1, 1)


@pytest.mark.parametrize("seed", range(3))
def test_damage_inside_a_wandb_file(seed, tmp_path):
    draw = random.Random(seed)
    path = tmp_path / "run-a.wandb"

    data = bytearray(wandb_file([*WANDB[:1], *WANDB[2:]] * 40))
    for _ in range(20):
        data[draw.randrange(7, len(data))] = draw.randrange(256)

    path.write_bytes(data + struct.pack("<IHB", 0, 0, 3) * 20_000)  # chunks without an end
    log = read_log(path)
    assert len(log.rows) <= 80
    assert any("damaged" in note for note in log.notes)


RUNS = [(run, row) for row in ROWS for run in ("first", "second")]
LONG = [(run, *row.values()) for run, row in RUNS]
TIDY = [(run, row["step"], name, row[name]) for run, row in RUNS for name in ("reward", "entropy")]
WIDE = [(step, reward, 9, entropy, 9) for step, reward, entropy in map(dict.values, ROWS)]
TRACKIO = [
    (k, run, int(row["step"]), json.dumps(row | {"loss": "NaN"}))
    for k, (run, row) in enumerate(RUNS)
]
MLFLOW = [(name, x, 0, run, int(step), 0) for run, step, name, x in TIDY]
MLFLOW += [("loss", 0.0, 0, run, int(row["step"]), 1) for run, row in RUNS]


def table(columns, rows):
    lines = [columns, *(",".join(map(str, row)) for row in rows)]
    return lambda path: path.write_text("\n".join(lines) + "\n")


def database(columns, rows):
    def write(path):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"CREATE TABLE metrics ({columns})")
            marks = ", ".join("?" for _ in rows[0])
            connection.executemany(f"INSERT INTO metrics VALUES ({marks})", rows)

    return write


def parquet_file(rows):
    def write(path):
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)

    return write


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("long.csv", table("experiment,step,reward,entropy", LONG)),
        ("tidy.csv", table("Run,Step,Metric,Value", TIDY)),
        (
            "wandb.csv",
            table(
                '"Step","first - reward","second - reward","first - entropy","second - entropy"',
                WIDE,
            ),
        ),
        ("rows.jsonl", table("{}", [[json.dumps({"run_name": run} | row)] for run, row in RUNS])),
        ("seeds.csv", table("Seed,step,reward,entropy", LONG)),
        ("seeds.jsonl", table('{"seed": 9}', [[json.dumps({"seed": run} | r)] for run, r in RUNS])),
        ("seeds.parquet", parquet_file([{"seed": run} | row for run, row in RUNS])),
        ("trackio.db", database("id, run_name, step, metrics", TRACKIO)),
        (
            "bytes.db",
            database(
                "id, run_name, step, metrics", [(*cells, text.encode()) for *cells, text in TRACKIO]
            ),
        ),
        ("mlflow.db", database("key, value, timestamp, run_uuid, step, is_nan", MLFLOW)),
        ("demo.parquet", parquet_file([{"run_name": r, "loss": math.nan} | x for r, x in RUNS])),
        (
            "tidy.parquet",
            parquet_file([dict(zip(("run", "step", "metric", "value"), cells)) for cells in TIDY]),
        ),
    ],
)
def test_a_file_with_several_runs(name, write, tmp_path):
    path = tmp_path / name
    write(path)
    first, second = find_runs(path)

    assert (first.name, second.name) == (f"{name}#first", f"{name}#second")
    for row, expected in zip(read_log(first).rows, ROWS, strict=True):
        assert math.isnan(row.pop("loss", math.nan))
        assert {key.removeprefix("first - "): x for key, x in row.items()} == expected

    for bad in (path, tmp_path / f"{name}#third"):
        with pytest.raises(ValueError, match="first"):
            read_log(bad)


def test_a_run_is_named_by_its_name_and_its_seed(tmp_path):
    path = tmp_path / "runs.csv"
    rows = []
    for run, seed, row in itertools.product("ab", (0, 1), ROWS):
        rows.append((run, seed, *row.values()))

    table("run,seed,step,reward,entropy", rows)(path)
    names = [str(run).partition("#")[2] for run in find_runs(path)]
    assert names == ["a/0", "a/1", "b/0", "b/1"]
    assert read_log(tmp_path / "runs.csv#b/1").rows == ROWS


def test_a_run_with_a_seed_for_each_step(tmp_path):
    path = tmp_path / "runs.csv"
    rows = [(k, *row.values()) for k, row in enumerate(ROWS)]
    table("seed,step,reward,entropy", rows)(path)

    assert find_runs(path) == [path]
    assert read_log(path).rows == ROWS


@pytest.mark.parametrize("size", [2, 3])
def test_a_run_that_was_resumed_with_other_seeds(size, tmp_path):
    rows = [{"seed": k // size} | row for k, row in enumerate(ROWS)]
    writers = {
        "a.csv": table("seed,step,reward,entropy", [row.values() for row in rows]),
        "a.jsonl": table("{}", [[json.dumps(row)] for row in rows]),
        "a.parquet": parquet_file(rows),
    }
    for name, write in writers.items():
        write(tmp_path / name)
        assert find_runs(tmp_path / name) == [tmp_path / name]


def test_a_parquet_file_whose_runs_have_no_name(tmp_path):
    path = tmp_path / "a.parquet"
    parquet_file([{"run_id": None} | row for row in ROWS])(path)
    assert read_log(path).rows == ROWS


def test_a_run_of_mlflows_file_store(tmp_path):
    for name in ("a", "b"):
        run = tmp_path / "mlruns" / "0" / name
        for metric in ("train/reward", "entropy"):
            file = run / "metrics" / metric
            file.parent.mkdir(parents=True, exist_ok=True)
            key = metric.rpartition("/")[2]
            lines = [f"170000000 {row[key]} {int(row['step'])}\n" for row in ROWS]
            file.write_text("".join(lines) + "damaged\n")

        (run / "meta.yaml").write_text("x: !!python/object:os.system {}\n")  # never parsed

    runs = find_runs(tmp_path)
    assert [run.name for run in runs] == ["a", "b"]

    rows = read_log(runs[0]).rows
    assert rows == [
        {
            "step": r["step"],
            "train/reward": r["reward"],
            "entropy": r["entropy"],
        }
        for r in ROWS
    ]


def test_trackio_counts_calls_but_transformers_logs_its_own_step(tmp_path):
    path = tmp_path / "a.db"
    rows = [{"train/global_step": k, "train/reward": k} for k in (10, 20, 30, 20)]  # resumed at 10
    rows.insert(1, {"train/global_step": 10, "eval/accuracy": 0.5})
    calls = [(k, "run", k, json.dumps(row)) for k, row in enumerate(rows)]
    database("id, run_name, step, metrics", calls)(path)
    log = read_log(path)

    assert [row["step"] for row in log.rows] == [10, 20]
    assert log.rows[0] == {
        "step": 10,
        "train/reward": 10,
        "eval/accuracy": 0.5,
    }

    assert "resumed" in "".join(log.notes)
    calls = [(k, "run", 5 * (k % 3), json.dumps({"reward": k})) for k in range(6)]
    database("id, run_name, step, metrics", calls)(tmp_path / "b.db")  # two runs of one name
    log = read_log(tmp_path / "b.db")

    assert log.rows == [{"step": 5 * k, "reward": k + 3} for k in range(3)]
    assert "begun again" in "".join(log.notes)


def hostile_view(path):
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE VIEW metrics AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL "
            "SELECT x + 1 FROM c) SELECT x AS step FROM c"
        )


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.db", b"SQLite format 3\0 and nothing"),
        ("a.db", hostile_view),
        ("a.parquet", b"PAR1 and nothing"),
        ("a.wandb", b"nothing"),
        (
            "a.wandb",
            wandb_file([field(2, b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")]),
        ),
        ("a.jsonl.gz", b"\x1f\x8b nothing"),
        ("a.ipynb", b'{"cells": [1, {"outputs": [2, {"data": 3}]}]}'),
    ],
)
def test_a_damaged_store_is_one_sentence(name, data, tmp_path):
    path = tmp_path / name
    data(path) if callable(data) else path.write_bytes(data)

    with pytest.raises(ValueError, match=name) as error:
        read_log(path)

    assert "\n" not in str(error.value)


# Long logs


def test_names_and_numbers_of_a_log_are_bounded(monkeypatch):
    monkeypatch.setattr(log_module, "MAX_KEYS", 50)
    table = Timeline(Log(None, "jsonl", []))
    table.add({"step": float(k), f"name{k}": 1.0} for k in range(100))

    assert len({key for row in table.rows for key in row}) == 50
    assert len(table.log.notes) == 1

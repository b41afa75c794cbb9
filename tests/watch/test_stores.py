"""Files of experiment trackers: written here in their formats, and by the trackers if installed."""

import json
import math
import random
import sqlite3
import struct
import zlib

import pytest

from mesotron.watch.readers import Stream, find_runs, parsers, read_log, stores, stream
from mesotron.watch.readers.stream import Log, Table

ROWS = [{"step": float(k), "reward": 0.1 * k, "entropy": 1.0 - 0.1 * k} for k in range(1, 6)]


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def wandb_file(records: list[bytes]) -> bytes:
    """Records in LevelDB's log format: chunks never cross a block of 32 KiB."""
    out = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    for record in records:
        first = True
        while first or record:
            left = stores.BLOCK - len(out) % stores.BLOCK
            if left < 7:
                out += b"\0" * left
                continue
            piece, record = record[: left - 7], record[left - 7 :]
            kind = (1 if not record else 2) if first else (4 if not record else 3)
            crc = zlib.crc32(bytes([kind]) + piece)
            out, first = out + struct.pack("<IHB", crc, len(piece), kind) + piece, False
    return out


def history(values: dict) -> bytes:
    items = (
        field(1, field(2 if "." in key else 1, key.encode()) + field(16, json.dumps(x).encode()))
        for key, x in values.items()
    )
    return field(2, b"".join(items))


WANDB = [
    field(17, b"\x0a\x03run"),
    history({"_step": 0, "train/reward": 0.5, "train/global_step": 10, "note": "x" * 70_000}),
    history({"_step": 1, "entropy": math.nan, "_timestamp": 1e9}),
    history({"_step": 2, "train/reward": 0.6, "train/global_step": 20}),
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
    draw, path = random.Random(seed), tmp_path / "run-a.wandb"
    data = bytearray(wandb_file([*WANDB[:1], *WANDB[2:]] * 40))
    for _ in range(20):
        data[draw.randrange(7, len(data))] = draw.randrange(256)
    path.write_bytes(data + struct.pack("<IHB", 0, 0, 3) * 20_000)  # chunks without an end
    log = read_log(path)
    assert len(log.rows) <= 80
    assert any("damaged" in note for note in log.notes)


def trackio_database(path, text=json.dumps):
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp TEXT, "
                         "run_name TEXT, step INTEGER, metrics TEXT)")  # fmt: skip
        for run in ("first", "second"):
            for row in ROWS:
                values = text({"reward": row["reward"], "entropy": row["entropy"], "loss": "NaN"})
                insert = "INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)"
                database.execute(insert, (run, int(row["step"]), values))


def mlflow_database(path):
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE metrics (key TEXT, value REAL, timestamp INTEGER, "
                         "run_uuid TEXT, step INTEGER, is_nan BOOLEAN)")  # fmt: skip
        for run in ("first", "second"):
            for row in ROWS:
                cells = [("reward", row["reward"], 0), ("entropy", row["entropy"], 0),
                         ("loss", 0.0, 1)]  # fmt: skip
                for key, value, is_nan in cells:
                    database.execute("INSERT INTO metrics VALUES (?, ?, 0, ?, ?, ?)",
                                     (key, value, run, int(row["step"]), is_nan))  # fmt: skip


def parquet_file(path):
    table = pytest.importorskip("pyarrow")
    rows = [{"run_name": run, "loss": math.nan} | row for run in ("first", "second")
            for row in ROWS]  # fmt: skip
    pytest.importorskip("pyarrow.parquet").write_table(table.Table.from_pylist(rows), path)


def wandb_chart(path):
    lines = ['"Step","first - reward","second - reward","first - entropy","second - entropy"']
    lines += [f"{r['step']},{r['reward']},9,{r['entropy']},9" for r in ROWS]
    path.write_text("\n".join(lines) + "\n")


def long_table(path):
    lines = ["experiment,step,reward,entropy"]
    lines += [f"{run},{r['step']},{r['reward']},{r['entropy']}" for r in ROWS
              for run in ("first", "second")]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")


def tidy_table(path):
    lines = ["Run,Step,Metric,Value"]
    lines += [f"{run},{r['step']},{name},{r[name]}" for run in ("first", "second") for r in ROWS
              for name in ("reward", "entropy")]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("long.csv", long_table),
        ("tidy.csv", tidy_table),
        ("demo.db", trackio_database),
        ("bytes.db", lambda path: trackio_database(path, lambda row: json.dumps(row).encode())),
        ("mlflow.db", mlflow_database),
        ("demo.parquet", parquet_file),
        ("chart.csv", wandb_chart),
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


def test_tensorboards_export(tmp_path):
    path = tmp_path / "run-a-tag-train_reward.csv"
    path.write_text("Wall time,Step,Value\n1.5e9,1,0.25\n1.6e9,2,0.5\n")
    assert [row["train_reward"] for row in read_log(path).rows] == [0.25, 0.5]


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
    assert rows == [{"step": r["step"], "train/reward": r["reward"], "entropy": r["entropy"]}
                    for r in ROWS]  # fmt: skip


def hostile_view(path):
    with sqlite3.connect(path) as database:
        database.execute("CREATE VIEW metrics AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL "
                         "SELECT x + 1 FROM c) SELECT x AS step FROM c")  # fmt: skip


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


def test_files_of_the_trackers_themselves(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when it is imported
    trackio = pytest.importorskip("trackio")
    wandb = pytest.importorskip("wandb")
    settings = wandb.Settings(mode="offline", silent=True, root_dir=str(tmp_path))
    with wandb.init(project="demo", settings=settings) as run:
        for row in ROWS:
            run.log({"train/reward": row["reward"], "train/global_step": row["step"]})
    trackio.init(project="demo", name="first", embed=False)
    for row in ROWS:
        trackio.log({"reward": row["reward"]}, step=int(row["step"]))
    trackio.finish()
    for source, name in (("wandb", "train/reward"), ("demo.db", "reward")):
        rows = read_log(tmp_path / source).rows
        assert [(row["step"], row[name]) for row in rows] == [
            (row["step"], pytest.approx(row["reward"])) for row in ROWS
        ]


# Long logs


def test_a_long_log_is_averaged(monkeypatch, tmp_path):
    monkeypatch.setattr(stream, "MAX_ROWS", 100)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"step": k, "reward": k % 2, "loss": math.nan if k % 50 == 7
                            else 1.0}) + "\n" for k in range(1600)))  # fmt: skip
    log = read_log(path)
    assert len(log.rows) == 100
    assert all(row == {"step": 16 * k + 15, "reward": 0.5, "loss": 1.0}
               for k, row in enumerate(log.rows))  # fmt: skip
    assert len(log.notes) == 1
    growing = Stream(path)
    assert growing.poll() == 100
    with path.open("a") as file:
        file.write(
            "".join(json.dumps({"step": k, "reward": 0.0}) + "\n" for k in range(1600, 1700))
        )
    assert growing.poll() > 0  # the rows were averaged once more
    assert growing.resumed
    assert growing.log.rows[-1]["step"] >= 1663


def test_names_and_numbers_of_a_log_are_bounded(monkeypatch):
    monkeypatch.setattr(stream, "MAX_KEYS", 50)
    table = Table(Log(None, "jsonl", []))
    table.add({"step": float(k), f"name{k}": 1.0} for k in range(100))
    assert len({key for row in table.rows for key in row}) == 50
    assert len(table.log.notes) == 1


@pytest.mark.parametrize("mark", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json", "a.log"])
def test_a_byte_order_mark(name, mark, tmp_path):
    texts = {
        "a.jsonl": '{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.6}\n',
        "a.csv": "step,reward\n1,0.5\n2,0.6\n",
        "a.json": '[{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.6}]',
        "a.log": "{'step': 1, 'reward': 0.5}\n{'step': 2, 'reward': 0.6}\n",
    }
    path = tmp_path / name
    path.write_bytes(texts[name].encode(mark))
    assert read_log(path).rows == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.6}]


def test_a_line_within_a_block_is_named(tmp_path):
    lines = [json.dumps({"step": k, "reward": 0.5}) for k in range(1, 2000)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*lines[:1500], "{oops", *lines[1500:]]) + "\n")
    with pytest.raises(ValueError, match="line 1501"):
        read_log(path)
    path.write_text("\n".join([*lines[:1500], "", *lines[1500:]]) + "\n")
    assert len(read_log(path).rows) == 1999
    assert parsers.BLOCK > 2000

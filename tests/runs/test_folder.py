"""Run folders: what is written can be read after any interruption, and nothing intact is lost."""

import importlib.metadata
import math
import os
import platform
from pathlib import Path

import pytest

from mesotron.runs import RunFolder, list_checkpoints, newest_whole
from mesotron.runs.checkpoints import damage, prune, writing
from mesotron.runs.files import append_row
from mesotron.runs.folder import describe_environment, new_run_path


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "a", config={"steps": 3}, environment={"seed": 0})


def test_the_last_run_that_made_a_step_has_a_link_and_new_paths_are_free(run, tmp_path):
    last = tmp_path / "runs" / "last"
    assert not last.exists()

    run.append("metrics", {"step": 1})
    assert RunFolder(last).config == run.config == {"steps": 3}
    assert run.environment == {"seed": 0}

    failed = RunFolder.create(tmp_path / "runs" / "b", config={"steps": 9}, environment={})
    failed.append("events", {"step": 0})
    assert RunFolder(last).config == {"steps": 3}

    other = RunFolder.create(tmp_path / "elsewhere" / "c", config={}, environment={})
    other.append("metrics", {"step": 1})
    assert not (tmp_path / "elsewhere" / "last").exists()

    first = new_run_path("arith", tmp_path)
    first.mkdir()
    assert new_run_path("arith", tmp_path) != first


def test_a_start_killed_before_its_config_can_be_repeated(run):
    (run.path / "config.json").rename(run.path / ".config.json.writing")
    again = RunFolder.create(run.path, config={"steps": 4}, environment={})
    assert again.config == {"steps": 4}

    (run.path / "config.json").unlink()
    (run.path / "checkpoints" / "checkpoint-1").mkdir()

    with pytest.raises(ValueError, match="not empty"):
        RunFolder.create(run.path, config={}, environment={})


def test_folders_that_cannot_be_used(run, tmp_path):
    with pytest.raises(ValueError, match="--resume"):
        RunFolder.create(run.path, config={}, environment={})

    assert run.config == {"steps": 3}
    with pytest.raises(ValueError, match="--out") as error:  # not empty, and no run
        RunFolder.create(tmp_path, config={}, environment={})

    assert "--resume" not in str(error.value)
    with pytest.raises(ValueError, match="not a run"):
        RunFolder(tmp_path)

    (run.path / "config.json").write_text('{"steps": ')
    with pytest.raises(ValueError, match="damaged"):
        run.config  # noqa: B018

    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file"):
        RunFolder.create(tmp_path / "file" / "run", config={}, environment={})


def test_rows_come_back_exactly(run):
    rows = [
        {"step": 1, "loss": 0.1 + 0.2},
        {
            "step": 2,
            "loss": math.inf,
            "text": "sigma σ\n",
        },
    ]

    without_step = [{"loss": 1.0}, {"step": "2"}, {"step": None}]
    for row in (*rows, *without_step, {"step": 3, "loss": math.nan}):
        run.append("metrics", row)

    *first, last = run.rows("metrics")
    assert first == rows
    assert math.isnan(last["loss"])

    run.cut_after(2)
    assert run.rows("metrics") == rows
    assert run.rows("events") == []


def test_a_torn_last_line_and_rows_after_the_resumed_step_are_cut(run):
    streams = ("metrics", "events", "samples")
    for stream in streams:
        for step in (1, 2):
            run.append(stream, {"step": step})

    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')

    assert run.rows("metrics") == [{"step": 1}, {"step": 2}]
    run.cut_after(2)
    run.append("metrics", {"step": 3})

    assert run.rows("metrics") == [{"step": 1}, {"step": 2}, {"step": 3}]
    run.cut_after(1)
    assert [run.rows(stream) for stream in streams] == [[{"step": 1}]] * 3

    (run.path / "metrics.jsonl").write_text('{"step": 1}\noops\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        run.rows("metrics")


def test_a_run_in_use_is_refused(run):
    """A killed process gives it back: see test_faults.py."""
    with run, pytest.raises(ValueError, match="in use"), RunFolder(run.path):
        pass
    with run:
        run.append("metrics", {"step": 1})


def write_checkpoint(root: Path, step: int, text: str = "weights") -> Path:
    with writing(root, step) as draft:
        (draft / "model.safetensors").write_text(text)
        (draft / "inner").mkdir()
        (draft / "inner" / "state.json").write_text("{}")

    return root / f"checkpoint-{step}"


def test_checkpoints_are_listed_in_order_and_pruned(tmp_path):
    for step in (5, 100, 20):
        write_checkpoint(tmp_path, step)

    elsewhere = (tmp_path / "checkpoint-5").rename(tmp_path / "archive")  # as a user frees a disk
    (tmp_path / "checkpoint-5").symlink_to(elsewhere)
    assert [found.step for found in list_checkpoints(tmp_path)] == [5, 20, 100]

    prune(tmp_path, keep=2, newest=100)
    assert [found.step for found in list_checkpoints(tmp_path)] == [20, 100]

    # Step 100 is damaged, so the run went on from 20 and has just written 30.
    (tmp_path / "checkpoint-100" / "manifest.json").write_text("{")
    write_checkpoint(tmp_path, 30)
    prune(tmp_path, keep=1, newest=30)

    assert newest_whole(tmp_path)[0] == (30, tmp_path / "checkpoint-30")
    assert (elsewhere / "manifest.json").exists()


def test_a_checkpoint_is_whole_or_not_there(tmp_path):
    def fill_the_disk() -> None:
        with writing(tmp_path, 2) as draft:
            (draft / "model.safetensors").write_text("half")
            raise OSError(28, "No space left on device")

    write_checkpoint(tmp_path, 1, "old")
    with pytest.raises(ValueError, match=str(tmp_path)):
        fill_the_disk()

    assert os.listdir(tmp_path) == ["checkpoint-1"]
    (tmp_path / ".checkpoint-7.writing").mkdir()  # left by a killed run
    (tmp_path / ".checkpoint-8.writing").symlink_to(tmp_path / "checkpoint-1")
    path = write_checkpoint(tmp_path, 1, "new")

    assert os.listdir(tmp_path) == ["checkpoint-1"]
    assert (path / "model.safetensors").read_text() == "new"
    assert damage(path) is None


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("model.safetensors", "wei", "3 bytes"),
        ("model.safetensors", "WEIGHTS", "changed"),
        ("inner/state.json", None, "state.json"),
        ("model-2.safetensors", "", "model-2.safetensors"),
        ("manifest.json", None, "manifest.json"),
        ("manifest.json", "[1]", "manifest.json"),
        ("manifest.json", '{"files": {"a": 1}}', "a is missing"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, file, text, named):
    write_checkpoint(tmp_path, 1)
    path = write_checkpoint(tmp_path, 2) / file
    path.unlink() if text is None else path.write_text(text)
    checkpoint, wrong = newest_whole(tmp_path)

    assert checkpoint.step == 1
    assert len(wrong) == 1
    assert named in wrong[0]


def test_a_full_disk_is_named_with_its_file():
    with pytest.raises(OSError, match="/dev/full"):
        append_row(Path("/dev/full"), {"step": 1})


def test_the_versions_of_what_a_run_used_are_noted():
    noted = describe_environment("cpu", 3, threads=2)
    assert noted["packages"]["torch"] == importlib.metadata.version("torch")
    assert (noted["device"], noted["seed"], noted["threads"]) == ("cpu", 3, 2)
    assert noted["python"] == platform.python_version()

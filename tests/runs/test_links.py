"""Links in a run folder of somebody else: nothing is written or read through them."""

import os

import pytest

from mesotron import cli
from mesotron.config import TrainConfig
from mesotron.config.base import to_plain
from mesotron.runs import RunFolder
from mesotron.runs.checkpoints import damage, writing
from mesotron.runs.files import append_row, read_json, read_rows, write_json, write_whole
from mesotron.runs.folder import try_lock
from mesotron.runs.links import make_own_folder, open_own, refuse_links

# Files and folders of a run that one could replace by a link, or that a command would make.
ENTRIES = (
    "samples.jsonl",
    "metrics.jsonl",
    "events.jsonl",
    "spectra.jsonl",
    "lock",
    "env.json",
    "spent.json",
    "result.json",
    "report.md",
    "report.html",
    "routing.json",
    ".spent.json.writing",
    ".result.json.writing",
    "export",
    "eval",
    "checkpoints",
    "checkpoints/checkpoint-1",
    "checkpoints/checkpoint-1/manifest.json",
    "checkpoints/checkpoint-1/.token",
    "checkpoints/checkpoint-1/model.safetensors",
    "checkpoints/.checkpoint-2.writing",
)
COMMANDS = (
    "train --resume RUN",
    "sft --resume RUN",
    "eval RUN",
    "export RUN",
    "chat RUN",
    "watch RUN",
    "report RUN",
    "plan --resume RUN",
    "vla eval RUN",
    "ppo snake --resume RUN",
)


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path / "gift", to_plain(TrainConfig()), {})
    folder.append("metrics", {"step": 1, "reward": 0.5})
    with writing(folder.checkpoints, 1) as draft:
        (draft / "model.safetensors").write_bytes(b"")

    return folder


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "home" / "secret"
    path.parent.mkdir()
    path.write_text("secret")

    return path


def replace_by_link(path, target):
    if path.is_dir() and not path.is_symlink():
        path.rename(target.parent / "moved")
        target = target.parent / "moved"

    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_run_with_a_link_in_it_is_refused(run, secret, entry):
    replace_by_link(run.path / entry, secret)

    with pytest.raises(ValueError, match=f"{entry} is a symbolic link"):
        RunFolder(run.path)

    assert secret.read_text() == "secret"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("entry", ["samples.jsonl", "lock"])
def test_every_command_refuses_it_in_one_sentence(run, secret, entry, command, capsys):
    replace_by_link(run.path / entry, secret)
    words = [str(run.path) if word == "RUN" else word for word in command.split()]

    assert cli.main(words) == 2
    assert f"{entry} is a symbolic link" in capsys.readouterr().err
    assert secret.read_text() == "secret"


def test_a_dangling_link_is_refused_and_its_target_not_made(run, tmp_path):
    target = tmp_path / "home.sh"
    (run.path / "samples.jsonl").symlink_to(target)

    with pytest.raises(ValueError, match="link"):
        run.append("samples", {"step": 1, "completion": "touch ran"})

    assert not target.exists()


def test_a_new_run_is_not_begun_through_links(secret):
    new = secret.parent / "new"
    elsewhere = secret.parent / "elsewhere"
    new.mkdir()
    elsewhere.mkdir()
    (new / "checkpoints").symlink_to(elsewhere)  # an empty one is left by a killed start

    with pytest.raises(ValueError, match="checkpoints is a symbolic link"):
        RunFolder.create(new, {}, {})


def test_a_run_and_the_folder_above_it_may_be_reached_through_links(run, tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path)
    (tmp_path / "last").symlink_to("gift")

    for path in (tmp_path / "runs" / "gift", tmp_path / "last"):
        with RunFolder(path) as same:
            same.append("metrics", {"step": 2})

    assert [row["step"] for row in run.rows("metrics")] == [1, 2, 2]


def test_links_that_wandb_keeps_are_left_alone(run):
    (run.path / "wandb" / "run-1").mkdir(parents=True)
    (run.path / "wandb" / "latest-run").symlink_to("run-1")
    RunFolder(run.path)

    (run.path / "wandb").rename(run.path / "other")
    with pytest.raises(ValueError, match="latest-run"):
        RunFolder(run.path)


def test_pipes_are_refused_before_they_are_opened(run):
    os.mkfifo(run.path / "samples.jsonl")

    with pytest.raises(ValueError, match=r"samples\.jsonl"):
        RunFolder(run.path)


def test_a_lock_does_not_change_its_file(tmp_path, secret):
    lock = try_lock(secret)
    assert lock is not None
    lock.close()
    assert secret.read_text() == "secret"

    (tmp_path / "lock").symlink_to(secret)
    with pytest.raises(ValueError, match="link"):
        try_lock(tmp_path / "lock")

    assert secret.read_text() == "secret"


def test_files_are_opened_without_following(tmp_path, secret):
    link = tmp_path / "link.json"
    link.symlink_to(secret)

    for open_it in (
        lambda: open_own(link),
        lambda: open_own(link, "w"),
        lambda: read_json(link),
        lambda: read_rows(link),
        lambda: append_row(link, {}),
        lambda: make_own_folder(link),
    ):
        with pytest.raises(ValueError, match="link"):
            open_it()

    assert secret.read_text() == "secret"


@pytest.mark.parametrize("mode", ["a", "w", "r+", "wb", "ab"])
def test_nothing_is_written_to_a_file_with_another_name(tmp_path, secret, mode):
    os.link(secret, tmp_path / "samples.jsonl")

    with pytest.raises(ValueError, match="hard link"):
        open_own(tmp_path / "samples.jsonl", mode)

    assert secret.read_text() == "secret"
    with open_own(tmp_path / "samples.jsonl") as file:  # it holds no more than a copy would
        assert file.read() == "secret"


def test_a_resumed_run_writes_to_no_hard_link(run, secret):
    secret.write_text('{"step": 1, "completion": "theirs"}\n')
    os.link(secret, run.path / "samples.jsonl")

    with pytest.raises(ValueError, match="hard link"):
        run.append("samples", {"step": 2})

    run.cut_after(1)  # as resuming does: the kept rows are a new file
    run.append("samples", {"step": 2})

    assert [row["step"] for row in run.rows("samples")] == [1, 2]
    assert secret.read_text() == '{"step": 1, "completion": "theirs"}\n'


def test_a_file_opened_to_write_is_emptied(tmp_path):
    (tmp_path / "a").write_text("longer than before")
    with open_own(tmp_path / "a", "w") as file:
        file.write("new")

    assert (tmp_path / "a").read_text() == "new"


def test_a_link_named_like_a_draft_is_removed(tmp_path, secret):
    (tmp_path / ".spent.json.writing").symlink_to(secret)
    write_whole(tmp_path / "spent.json", "new")

    assert (tmp_path / "spent.json").read_text() == "new"
    assert secret.read_text() == "secret"
    refuse_links(tmp_path / "home")


def test_a_file_that_is_written_anew_replaces_a_link(tmp_path, secret):
    (tmp_path / "a.json").symlink_to(secret)
    write_json(tmp_path / "a.json", {"new": 1})

    assert read_json(tmp_path / "a.json") == {"new": 1}
    assert secret.read_text() == "secret"


def test_a_link_in_a_checkpoint_is_damage(run, secret):
    checkpoint = run.checkpoints / "checkpoint-1"
    replace_by_link(checkpoint / "model.safetensors", secret)

    assert "link" in damage(checkpoint)

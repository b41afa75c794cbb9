"""Runs that the user started need not name their code again; those of others do."""

import pytest

from mesotron.runs import RunFolder, own_runs
from mesotron.runs.resume import own_reward


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def test_a_noted_run_is_own_with_the_same_code_only(tmp_path):
    run = tmp_path / "runs" / "mine"
    own_runs.remember(run, ["my.py:score", "command:notify-send"])

    assert own_runs.is_own(run, ["my.py:score"])
    assert not own_runs.is_own(run, ["my.py:other"])
    assert not own_runs.is_own(tmp_path / "runs" / "gift", ["my.py:score"])


def test_the_same_name_in_another_folder_is_other_code(tmp_path, monkeypatch):
    run = tmp_path / "mine"
    own_runs.remember(run, ["my.py:score"])
    (tmp_path / "elsewhere").mkdir()

    monkeypatch.chdir(tmp_path / "elsewhere")
    assert not own_runs.is_own(run, ["my.py:score"])


def test_broken_notes_and_no_home_mean_that_nothing_is_own(tmp_path, monkeypatch):
    run = tmp_path / "mine"
    own_runs.remember(run, ["my.py:score"])
    with own_runs.notes_path().open("a") as file:
        file.write('{"run": "half')
    assert own_runs.is_own(run, ["my.py:score"])

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    own_runs.remember(run, ["my.py:score"])
    assert not own_runs.is_own(run, ["my.py:score"])


def test_an_evaluation_takes_the_reward_of_an_own_run_only(tmp_path):
    parts = ["my.py:score", "sparse"]
    mine, gift, plain = (
        RunFolder.create(tmp_path / name, {"reward": {"parts": given}}, {})
        for name, given in (("mine", parts), ("gift", parts), ("plain", ["sparse"]))
    )
    own_runs.remember(mine.path, ["my.py:score"])

    assert own_reward(mine) == ("my.py:score", "sparse")
    assert own_reward(gift) == ()
    assert own_reward(plain) == ()  # nothing of the user's own to call

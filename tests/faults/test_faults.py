"""A small sample of `make faults`, and a larger one among the slow tests."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from faults import fuzz, readers
from faults.kills import fork, kill_at, wait
from mesotron.runs import RunFolder, newest_whole
from mesotron.runs.checkpoints import prune, writing

TESTS = Path(__file__).parents[1]
QUICK_INPUTS = 60  # for each reader; `make faults` has 2,000
OPERATIONS = [*range(1, 28, 2), 100]  # the last is more than the session below has


def save(run: RunFolder, step: int) -> None:
    run.append("metrics", {"step": step})
    with writing(run.checkpoints, step) as draft:
        for name in ("model", "state"):
            (draft / name).write_text(f"{name} of step {step}")

    prune(run.checkpoints, keep=1, newest=step)


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")  # JAX may run in this process
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_at_any_file_operation_leaves_a_run_that_goes_on(tmp_path):
    codes = set()
    for number in OPERATIONS:
        run = RunFolder.create(tmp_path / str(number), {"steps": 2}, {})
        save(run, 1)

        def work(run=run, number=number) -> int:
            kill_at(run.path, number, 0.0)()
            with run:
                save(run, 2)
                run.finish({"steps": 2}, lambda: "done")

            return 0

        ended = wait(fork(work, tmp_path / "log", tmp_path), tmp_path / "log")
        codes.add(ended.code)
        checkpoint, damaged = newest_whole(run.checkpoints)

        assert checkpoint is not None
        assert not damaged

        texts = [(checkpoint.path / name).read_text() for name in ("model", "state")]
        assert texts == [f"{name} of step {checkpoint.step}" for name in ("model", "state")]

        run.cut_after(checkpoint.step)
        assert [row["step"] for row in run.rows("metrics")] == [*range(1, checkpoint.step + 1)]

        if run.result is not None:
            assert run.result == {"steps": 2}

        with run:  # whose lock is free again
            save(run, 2)

    assert codes == {-signal.SIGKILL, 0}  # the last ones come after the end


@pytest.mark.parametrize(
    ("name", "inputs"),
    [("toml", 3), ("config", 3), ("rows", 3), ("log", 15), ("answer", 50), ("reward", 40)],
)
def test_random_input_is_one_sentence_or_an_answer(name, inputs):
    assert fuzz.fuzz(name, inputs) >= min(inputs, 3)


@pytest.fixture(scope="module")
def few_seconds():
    readers.warm_up()
    with readers.small_allowance():
        yield


@pytest.mark.usefixtures("few_seconds")
@pytest.mark.parametrize("name", readers.READERS)
def test_random_files_of_others_run_nothing_and_stay_in_their_folder(name):
    for number in range(QUICK_INPUTS):
        readers.feed(name, number)


def write_outside() -> None:
    Path("../outside").write_text("x")


def change_the_home() -> None:
    target = Path(os.environ["HOME"], ".profile")
    handle = os.open(target, os.O_RDONLY)
    os.utime(handle, (0, 0))  # which no hook sees
    os.close(handle)


def start_a_program() -> None:
    subprocess.run(["true"], check=True)


def run_its_code() -> None:
    path = Path("evil.py")
    path.write_text("ran = 1")
    exec(compile(path.read_text(), str(path.resolve()), "exec"))


def raise_a_bug() -> None:
    readers.one_sentence(lambda: {}["no such key"])


@pytest.mark.parametrize(
    "work", [write_outside, change_the_home, start_a_program, run_its_code, raise_a_bug]
)
def test_the_watch_over_the_readers_notices(work, monkeypatch):
    reader = readers.Reader(lambda source, folder: work, "a reader that must not pass")
    monkeypatch.setitem(readers.READERS, "bad", reader)

    with pytest.raises(fuzz.Traceback):
        readers.feed("bad", 0)


def test_a_dead_run_without_a_cause_is_read(tmp_path):
    fuzz.TARGETS["rows"].check(([{"step": -1, "reward": 10**150}], [], None), tmp_path)


@pytest.mark.slow
def test_a_sample_of_the_attacks_holds(tmp_path):
    # Without budgets: they read a clock, which a busy machine outruns.
    small = (
        "--kills 12 --damage 7 --inputs 300 --each 100 --steps 40 --only kills damage strangers "
    )
    small += "fuzz readers gifts soak"
    small = [*small.split(), "--cases", "dr_grpo warn", "sft", "vla"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
    command = [sys.executable, "-P", "-m", "faults", *small, "--out", str(tmp_path / "out.json")]

    done = subprocess.run(
        command,
        cwd=TESTS.parent,
        env=env,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["kills"]["kills"] >= 12
    assert found["strangers"]["executed"] == 0
    assert found["readers"]["inputs"] == 100 * len(readers.READERS)

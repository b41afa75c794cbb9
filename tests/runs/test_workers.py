"""Child processes: calls, failures, timeouts, forks, and commands with a GPU each."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mesotron.runs.workers import CommandPool, Worker, WorkerDied, WorkerPool, last_line


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as shared:
        yield shared


def test_map_and_each(pool):
    assert sorted(pool.map("operator:neg", [(k,) for k in range(6)])) == [(k, -k) for k in range(6)]
    first, nothing = pool.each("os:getpid", [(), None])
    assert nothing is None
    assert pool.each("os:getpid", [(), ()])[0] == first != os.getpid()  # state stays with a worker


def test_zero_workers_is_this_process():
    with WorkerPool(0) as inline:
        assert inline.submit("os:getpid").result() == os.getpid()
        assert list(inline.map("operator:neg", [(1,)])) == [(0, -1)]

        with pytest.raises(ValueError, match="math domain"):
            inline.submit("math:sqrt", -1).result()


def test_errors_come_back_and_leave_the_worker_alive():
    worker = Worker(stderr=subprocess.DEVNULL, setup=("os:umask", 0o77))
    assert worker.call("os:umask", 0) == 0o77  # the setup ran first

    for error, match, *call in (
        (ValueError, "math domain", "math:sqrt", -1),
        (RuntimeError, "ZeroDivisionError", "operator:truediv", 1, 0),
        (RuntimeError, "no_such_module", "no_such_module:f"),
    ):
        with pytest.raises(error, match=match):
            worker.call(*call)

    worker.call("builtins:print", "does not disturb the protocol")
    assert worker.call("operator:add", 1, 2) == 3

    worker.kill()
    assert worker.process.poll() is not None

    with pytest.raises(ValueError, match="no_such_module"):
        Worker(setup=("no_such_module:f",), stderr=subprocess.DEVNULL)


def test_a_dead_worker_is_reported_and_replaced(pool):
    with pytest.raises(WorkerDied) as death:
        Worker(stderr=subprocess.DEVNULL).call("sys:exit", 5)

    assert death.value.returncode == 5
    with pytest.raises(WorkerDied) as death:
        pool.submit("os:_exit", 3).result()

    assert (death.value.returncode, death.value.timed_out) == (3, False)
    with pytest.raises(WorkerDied) as death:
        pool.submit("time:sleep", 1000, timeout=0.2).result()

    assert (death.value.returncode, death.value.timed_out) == (-signal.SIGKILL, True)
    assert pool.submit("operator:neg", 1).result() == -1

    for process in pool.processes:  # between calls
        process.kill()
        process.wait()

    assert pool.each("operator:neg", [(1,), (2,)]) == [-1, -2]


def test_json_replies_and_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    worker = Worker(
        env={"PATH": os.environ["PATH"]},
        replies="json",
        stderr=subprocess.DEVNULL,
    )

    assert worker.call("os:getenv", "SECRET") is None
    assert worker.call("builtins:divmod", 7, 2) == [3, 1]

    with pytest.raises(RuntimeError, match="not JSON serializable"):
        worker.call("builtins:object")

    worker.kill()


def test_close_and_garbage_collection_end_the_processes():
    pool = WorkerPool(1)
    pool.submit("os:getpid").result()
    (process,) = pool.processes
    pool.close()

    assert process.poll() is not None
    pool.submit("os:getpid").result()  # a later call starts again
    process = next(one for one in pool.processes if one.poll() is None)
    del pool

    assert process.poll() is not None


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].startswith("Z")
    except OSError:
        return True


def test_workers_end_with_their_parent():
    code = (
        "from mesotron.runs.workers import Worker; import sys\n"
        "print(Worker().call('os:getpid'), flush=True); sys.stdin.read()"
    )

    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()

    for _ in range(500):
        if has_ended(pid):
            return
        time.sleep(0.02)

    pytest.fail("the worker outlived its parent")


def test_commands_get_a_gpu_each_and_their_failure_is_the_last_line(tmp_path):
    pool = CommandPool(2, gpus=["3", "5"])
    code = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES']); sys.exit('no memory')"
    for key in ("a", "b"):
        pool.start(key, [sys.executable, "-c", code], tmp_path / key, {})

    assert not pool.has_free_slot
    ended = {}
    while pool.jobs:
        ended |= {job.key: job for job in pool.take_ended()}

    assert [(tmp_path / key).read_text().split()[0] for key in ("a", "b")] == ["3", "5"]
    assert ended["a"].failure == "no memory"
    assert last_line(tmp_path / "none") == ""


def test_terminate_is_sent_once_and_kill_ends_the_rest(tmp_path):
    pool = CommandPool(1)
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('stop', flush=True))\n"
        "signal.signal(signal.SIGWINCH, lambda *_: print('after', flush=True))\n"
        "print('ready\\n', end='', flush=True)\n"  # in one write: a signal may come in between
        "while True: time.sleep(0.1)"
    )

    job = pool.start("a", [sys.executable, "-c", code], tmp_path / "log", {})
    while last_line(job.log) != "ready":
        time.sleep(0.02)

    pool.terminate()
    while last_line(job.log) != "stop":
        time.sleep(0.02)

    pool.terminate()
    job.process.send_signal(signal.SIGWINCH)  # taken after a SIGTERM, whose number is lower
    while last_line(job.log) != "after":
        time.sleep(0.02)

    pool.kill()
    assert (tmp_path / "log").read_text().split() == ["ready", "stop", "after"]
    assert "SIGKILL" in job.failure
    assert pool.jobs == []  # nothing is left to wait for


def test_closing_ends_every_worker_also_beside_one_that_was_replaced():
    with WorkerPool(2) as pool:
        first, second = pool.each("os:getpid", [(), ()])
        with pytest.raises(WorkerDied):
            pool.submit("os:_exit", 3).result()

        pids = {first, second, *pool.each("os:getpid", [(), ()])}
        processes = set(pool.processes)

    assert len(pids) == 3
    assert len(processes) == 2
    assert all(process.poll() is not None for process in processes)

"""The tools of `mesotron mcp`, called with the client of the mcp package."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from mesotron.agents.children import Children
from mesotron.agents.folder import MAX_TEXT, Folder, as_data
from mesotron.agents.server import make_server
from mesotron.runs import RunFolder
from support import mcp_child

FAKE = (sys.executable, mcp_child.__file__)
READS = {
    "list_runs",
    "run_status",
    "diagnose_log",
    "forecast_log",
    "compare_runs",
    "read_evidence",
}
ACTS = {"start_run", "stop_run", "resume_run"}
LIMIT = {"time_limit": "5m"}

Call = Callable[..., dict[str, Any]]


class Refused(Exception):
    """A tool answered with an error."""


def call_tool(server: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    async def call() -> Any:
        async with Client(server) as client:
            return await client.call_tool(tool, arguments)

    answer = anyio.run(call)
    if answer.is_error:
        raise Refused(answer.content[0].text)

    return answer.structured_content


@pytest.fixture
def children(tmp_path) -> Iterator[Children]:
    made = Children(Folder.open(tmp_path / "runs"), command=FAKE)
    yield made
    end(made)


def end(children: Children) -> None:
    for child in children._started.values():
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest.fixture
def call(children) -> Call:
    server = make_server(children.folder, children)
    return lambda tool, **arguments: call_tool(server, tool, **arguments)


def write_run(root: Path, name: str, rewards: list[float], **config: Any) -> Path:
    run = RunFolder.create(root / name, {"steps": len(rewards), **config}, {"device": "cpu"})
    for step, reward in enumerate(rewards, 1):
        run.append("metrics", {"step": step, "loss": 0.1, "reward": reward, "eval/greedy": reward})

    return root / name


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)

    raise AssertionError("it did not happen")


RISING = [0.2 + 0.02 * k for k in range(30)]
FALLING = [0.8] * 20 + [0.05] * 40


def test_tools_say_whether_they_change_anything(children):
    server = make_server(children.folder, children)

    async def list_tools() -> Any:
        async with Client(server) as client:
            return (await client.list_tools()).tools

    tools = anyio.run(list_tools)
    assert {tool.name for tool in tools if tool.annotations.read_only_hint} == READS
    assert {tool.name for tool in tools if not tool.annotations.read_only_hint} == ACTS
    assert all(tool.description for tool in tools)


def test_a_run_is_started_watched_stopped_and_resumed(call, children):
    started = call("start_run", name="a", settings={"lr": 1e-4, "steps": 1000}, **LIMIT)
    assert (started["run"], started["state"]) == ("a", "running")
    assert "--optim.lr" not in started["untrusted"]["log"][0]

    wait_until(lambda: call("run_status", run="a")["step"] >= 3)
    assert call("list_runs")["runs"][0]["state"] == "running"
    with pytest.raises(Refused, match="nothing to resume"):
        call("resume_run", run="a", **LIMIT)

    stopped = call("stop_run", run="a")
    assert stopped["state"] == "stopped"
    step = call("run_status", run="a")["step"]
    assert stopped["untrusted"]["log"][-1] == f"saved step {step}"
    with pytest.raises(Refused, match="not running"):
        call("stop_run", run="a")

    assert call("resume_run", run="a", **LIMIT)["state"] == "running"
    wait_until(lambda: call("run_status", run="a")["step"] > step)
    assert call("stop_run", run="a", now=True)["state"] == "stopped"
    assert call("run_status", run="a")["step"] > step


def test_a_run_outlives_its_server(call, children):
    call("start_run", name="a", **LIMIT)
    later = Children(children.folder, command=FAKE)
    server = make_server(children.folder, later)

    assert call_tool(server, "run_status", run="a")["state"] == "running"
    with pytest.raises(Refused, match="at-once"):
        call_tool(server, "start_run", name="b", **LIMIT)
    assert call_tool(server, "stop_run", run="a")["state"] == "stopped"


def test_a_process_of_the_same_number_is_not_stopped(call, children):
    write_run(children.folder.root, "a", RISING)
    note = {"pid": os.getpid(), "began": "1"}
    children.folder.own("a.json").write_text(json.dumps(note))
    with pytest.raises(Refused, match="not running"):
        call("stop_run", run="a")


@pytest.mark.parametrize("tool", ["start_run", "resume_run"])
def test_a_limit_is_needed(tool, call, children):
    write_run(children.folder.root, "a", RISING, budget=None)
    arguments = {"run": "a"} if tool == "resume_run" else {"name": "b"}
    with pytest.raises(Refused, match="time_limit"):
        call(tool, **arguments)

    assert children._started == {}


def test_a_budget_of_its_own_is_a_limit_of_a_resumed_run(call, children):
    write_run(children.folder.root, "a", [0.1], budget=2.0)
    assert call("resume_run", run="a")["run"] == "a"


def test_a_start_that_fails_says_why_and_frees_its_name(call, children):
    for _ in range(2):
        with pytest.raises(Refused, match="--lr 0 must be positive"):
            call("start_run", name="a", settings={"lr": 0}, **LIMIT)


@pytest.mark.parametrize(
    "settings",
    [
        {"reward": "os:system"},
        {"reward": ["two_part", "mine.py:score"]},
        {"data": "/etc/passwd"},
        {"data": ["../../secret.jsonl"]},
        {"data": "~/secret.jsonl:main"},
        {"trl": "chat_template_path=/etc/passwd"},
        {"trl": ['chat_template_path="/etc/passwd"']},
        {"watch.forgetting-file": "/etc/passwd"},
        {"watch.alerts": ["wandb"]},
        {"report-to": "trackio"},
        {"seed": "--trust"},
        {"out": "elsewhere"},
        {"time_limit": "9h"},
        {"trust": True},
        {"config": "mine.toml"},
        {"no_such_setting": 1},
    ],
)
def test_settings_that_reach_out_are_refused(settings, call, children):
    with pytest.raises(Refused):
        call("start_run", name="a", settings=settings, **LIMIT)

    assert children._started == {}


def test_trust_admits_code_and_files(tmp_path):
    children = Children(Folder.open(tmp_path / "runs"), trust=True, command=FAKE)
    server = make_server(children.folder, children)
    settings = {"reward": ["mine.py:score"], "data": "/data/mine.jsonl", "rollout.fast": False}
    try:
        started = call_tool(server, "start_run", name="a", settings=settings, **LIMIT)
        words = started["untrusted"]["log"][0].split()
        data = "--data=/data/mine.jsonl"
        assert words[2:6] == ["--reward", "mine.py:score", data, "--no-rollout.fast"]
    finally:
        end(children)


@pytest.mark.parametrize("name", ["../outside", "/etc", "a/../../x", "a\0b", "link", "link#b"])
def test_nothing_outside_the_folder_is_read(name, call, children, tmp_path):
    (tmp_path / "outside").mkdir()
    (children.folder.root / "link").symlink_to(tmp_path / "outside")
    for tool, key in (("run_status", "run"), ("diagnose_log", "path"), ("read_evidence", "run")):
        with pytest.raises(Refused):
            call(tool, **{key: name})


def test_a_linked_log_in_a_folder_is_not_read(call, children, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    place = children.folder.root / "logs"
    place.mkdir()
    (place / "log.jsonl").symlink_to(tmp_path / "log.jsonl")
    with pytest.raises(Refused, match="outside"):
        call("diagnose_log", path="logs")


def test_names_of_new_runs(call, children):
    write_run(children.folder.root, "a", RISING)
    for name in ("a", "../b", "-b", ".b", "x" * 80):
        with pytest.raises(Refused):
            call("start_run", name=name, **LIMIT)


def test_a_diagnosis_is_that_of_the_watch(call, children):
    write_run(children.folder.root, "good", RISING)
    write_run(children.folder.root, "bad", FALLING)

    bad = call("diagnose_log", path="bad")
    assert (bad["verdict"], bad["path"], bad["schema"]) == ("dead", "bad", "mesotron.watch/1")
    assert bad["cause"] is not None

    both = call("diagnose_log", path=".")
    assert both["verdict"] == "dead"
    assert [run["path"] for run in both["runs"]] == ["bad", "good"]


def test_a_forecast_has_intervals(call, children):
    write_run(children.folder.root, "a", RISING)
    (one,) = call("forecast_log", path="a", steps=60)["runs"]
    assert one["forecast"]["reward"]["low"] <= one["forecast"]["reward"]["high"]


def test_a_comparison_names_what_differs(call, children):
    write_run(children.folder.root, "a", RISING, seed=0, optim={"lr": 1e-4})
    write_run(children.folder.root, "b", FALLING[:30], seed=0, optim={"lr": 1e-2})

    compared = call("compare_runs", runs=["a", "b"])
    assert compared["untrusted"]["settings_that_differ"] == {"optim.lr": [1e-4, 1e-2]}
    assert [run["run"] for run in compared["runs"]] == ["a", "b"]
    assert compared["runs"][0]["last_reward"] > compared["runs"][1]["last_reward"]

    with pytest.raises(Refused):
        call("compare_runs", runs=["a"])


def test_evidence_is_given_in_parts(call, children):
    path = write_run(children.folder.root, "a", RISING)
    rows = call("read_evidence", run="a", what="metrics", start=-2)["untrusted"]["metrics"]
    assert [row["step"] for row in rows] == [29, 30]

    part = call("read_evidence", run="a", what="metrics", start=5, count=3)
    assert [row["step"] for row in part["untrusted"]["metrics"]] == [6, 7, 8]
    assert part["total"] == 30

    with pytest.raises(Refused, match="no report yet"):
        call("read_evidence", run="a")

    RunFolder(path).finish({"steps": 30}, lambda: "# Report\n\nIgnore this.\x1b[2J")
    report = call("read_evidence", run="a")["untrusted"]["report"]
    assert "\x1b" not in report
    assert "Ignore this." in report
    assert call("read_evidence", run="a", what="result")["untrusted"]["result"] == {"steps": 30}


def test_a_damaged_run_hides_no_other(call, children):
    write_run(children.folder.root, "a", RISING)
    bad = write_run(children.folder.root, "b", RISING)
    (bad / "metrics.jsonl").write_text("no JSON\n{}\n")
    states = {run["run"]: run["state"] for run in call("list_runs")["runs"]}
    assert states == {"a": "stopped", "b": "damaged"}


@pytest.mark.parametrize("note", ["{}", '{"pid": [1], "began": "2"}', "[]", "no JSON"])
def test_a_damaged_note_names_no_process(note, children):
    children.folder.own("a.json").write_text(note)
    assert children.pid("a") is None


def test_an_answer_that_floods_is_refused(call, children):
    path = write_run(children.folder.root, "a", RISING)
    for step in range(100):
        RunFolder(path).append("samples", {"step": step, "text": "x" * MAX_TEXT})

    with pytest.raises(Refused, match="fewer"):
        call("read_evidence", run="a", what="samples", count=100)
    assert call("read_evidence", run="a", what="samples", count=5)["untrusted"]["samples"]


def test_texts_are_cut_and_numbers_are_plain():
    value = {"a\x1b": ["x" * (MAX_TEXT + 5), float("inf"), True, None, (1, 2)]}
    (key, items), *_ = as_data(value).items()
    assert key == "a\\x1b"
    assert len(items[0]) < MAX_TEXT + 10
    assert items[1:] == [None, True, None, [1, 2]]


def test_the_command_speaks_on_standard_input(tmp_path):
    write_run(tmp_path / "runs", "a", FALLING)
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "mesotron", "mcp", "--runs", str(tmp_path / "runs")],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )

    async def talk() -> tuple[Any, Any]:
        async with Client(server) as client:
            diagnosis = await client.call_tool("diagnose_log", {"path": "a"})
            return diagnosis, await client.call_tool("start_run", {})

    diagnosis, refused = anyio.run(talk)
    assert diagnosis.structured_content["verdict"] == "dead"
    assert refused.is_error


@pytest.mark.slow
def test_a_real_run_under_a_budget(tmp_path):
    children = Children(Folder.open(tmp_path / "runs"))
    server = make_server(children.folder, children)
    settings = {"steps": 6, "task.num-eval": 8}
    try:
        call_tool(server, "start_run", name="a", settings=settings, budget=0.5, price=1.0)
        wait_until_step(server, 2)
        assert call_tool(server, "stop_run", run="a")["state"] in ("stopped", "stopping")
        children._started["a"].wait()
        call_tool(server, "resume_run", run="a", time_limit="5m")
        assert children._started["a"].wait() == 0
    finally:
        end(children)

    done = call_tool(server, "run_status", run="a")
    assert (done["state"], done["step"]) == ("finished", 6)
    assert done["dollars"] < 0.5


def wait_until_step(server: Any, step: int) -> None:
    while True:
        now = call_tool(server, "run_status", run="a")
        assert now["state"] in ("starting", "running"), now
        if now.get("step", 0) >= step:
            return
        time.sleep(0.5)

"""Environments of verifiers and OpenEnv: listed, played and trained with the real packages.

Without a package its tests are skipped; the two cannot be installed together with what they need.
"""

import json
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from mesotron import cli
from mesotron.config import TaskConfig
from mesotron.config.registry import ENVIRONMENTS
from mesotron.models.load import load_model
from mesotron.sampling import turns
from mesotron.sampling.turns import TurnSampler
from mesotron.tasks.environment import open_environment
from mesotron.tasks.environments.openenv import ActionFields, RefusedAction, spell
from mesotron.tasks.environments.vf import follows, plain_message
from mesotron.tasks.load import load_task
from mesotron.tasks.problem import own_row
from support.rlvr_tiny import save_arith_model

HERE = Path(__file__).parents[1] / "support" / "environments"
PATIENCE = 1200  # tries of a tenth of a second for a server to start
needs_verifiers = pytest.mark.skipif(not find_spec("verifiers"), reason="needs verifiers")
needs_openenv = pytest.mark.skipif(not find_spec("openenv"), reason="needs openenv-core")
# What the packages and their own dependencies warn of.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def tiny():
    from mesotron.config import ModelConfig

    return load_model(ModelConfig())


@pytest.fixture
def packages(monkeypatch):
    """The folder of environments, on the path of this process and of those it starts."""
    monkeypatch.syspath_prepend(str(HERE))
    open_environment.cache_clear()
    yield HERE
    open_environment.cache_clear()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def start_server():
    """Starts servers, which end with the test."""
    started = []

    def start(*words):
        port = free_port()
        command = [sys.executable, str(HERE / "openenv_arith.py"), str(port), *words]
        started.append(subprocess.Popen(command))
        for _ in range(PATIENCE):
            time.sleep(0.1)
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    return f"openenv:http://127.0.0.1:{port}"

        raise AssertionError("the server did not start")

    yield start
    for process in started:
        process.kill()
        process.wait()


def answers(tiny, text):
    """Writes the same text each time."""
    _, tokenizer = tiny
    ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)

    def write(contexts, left):
        return [list(ids) for _ in contexts], None

    return write


def play(tiny, name, text, count=4, max_tokens=200):
    sampler = TurnSampler([name], tiny[1])
    problems = load_task(TaskConfig(env=(name,), num_train=12, num_eval=2)).train[:count]
    try:
        return sampler.sample([own_row(one) for one in problems], answers(tiny, text), max_tokens)
    finally:
        sampler.close()


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(folder, names, *more):
    save_arith_model(folder / "model")
    words = ["--model", str(folder / "model"), "--env", *names, "--steps", "3"]
    words += [
        "--batch",
        "2",
        "--group",
        "3",
        "--max-tokens",
        "60",
        "--task.num-train",
        "12",
        "--task.num-eval",
    ]
    words += ["2", "--device", "cpu", "--threads", "1", "--out", str(folder / "run"), *more]
    assert cli.main(["train", *words]) == 0
    return rows_of(folder / "run")


# verifiers


@needs_verifiers
@pytest.mark.usefixtures("packages")
def test_a_verifiers_environment_takes_turns_and_pays_by_parts(tiny):
    wrong = play(tiny, "vf:vf_arith", r"\boxed{1000}")
    assert [one.error for one in wrong] == [""] * 4
    for one in wrong:
        assert one.turns == 2  # it hears that it was wrong
        roles = [message["role"] for message in one.messages]
        assert roles == ["system", *["user", "assistant"] * 2]
        assert one.played.parts == {"correct": 0, "at_once": 0}
        assert one.played.metrics == {"boxes": 2}

    golds = {task.data.answer for task in open_environment("vf:vf_arith").tasks}
    (right,) = play(tiny, "vf:vf_arith", rf"\boxed{{{golds_of(1)[0]}}}", count=1)
    assert golds
    assert right.turns == 1
    assert right.played.parts == {"correct": 1, "at_once": 0.2}
    assert right.played.reward == pytest.approx(1.2)


def golds_of(count):
    """Of the first problems that `play` takes."""
    tasks = open_environment("vf:vf_arith").tasks
    problems = load_task(TaskConfig(env=("vf:vf_arith",), num_train=12, num_eval=2)).train
    return [tasks[one.columns["environment"][1]].data.answer for one in problems[:count]]


@needs_verifiers
@pytest.mark.usefixtures("packages")
def test_an_episode_of_verifiers_ends_with_its_tokens(tiny):
    (one,) = play(tiny, "vf:vf_arith", r"\boxed{1000}", count=1, max_tokens=12)
    assert one.turns == 1
    assert one.played is not None
    assert len(one.ids) <= 12


@needs_verifiers
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("misdeed", ["raises", "hangs", "blocks"])
def test_a_reward_of_verifiers_costs_its_own_episode(tiny, monkeypatch, misdeed):
    monkeypatch.setenv("VF_ARITH_MISDEED", misdeed)
    monkeypatch.setattr(turns, "SECONDS", 20.0)
    monkeypatch.setattr(turns, "BLOCKED", 5.0)
    episodes = play(tiny, "vf:vf_arith", r"\boxed{1000}", count=6)

    starts = [one.start % 4 == 0 for one in episodes]
    assert any(starts)
    assert [one.played is None for one in episodes] == starts


@needs_verifiers
@pytest.mark.usefixtures("packages")
def test_a_run_in_a_verifiers_environment(tmp_path):
    rows = train(tmp_path, ["vf:vf_arith"])
    assert len(rows) == 3
    for row in rows:
        assert row["environment/vf_vf_arith/lost"] == 0
        parts = [row[f"environment/vf_vf_arith/part/{name}"] for name in ("correct", "at_once")]
        assert row["reward"] == pytest.approx(sum(parts))

    assert cli.main(["eval", str(tmp_path / "run"), "--samples", "1", "--device", "cpu"]) == 0


# OpenEnv


@needs_openenv
def test_an_openenv_server_takes_turns_and_pays(tiny, start_server):
    name = start_server()
    episodes = play(tiny, name, r"\boxed{1000}")
    assert [one.error for one in episodes] == [""] * 4
    for one in episodes:
        assert one.turns == 2
        assert one.played.reward == 0
        assert one.played.metrics == {"steps": 2, "done": 1, "refused": 0}


@needs_openenv
@pytest.mark.parametrize("misdeed", ["raises", "hangs", "floods"])
def test_a_server_that_misbehaves_costs_episodes(tiny, start_server, monkeypatch, misdeed):
    monkeypatch.setattr(turns, "SECONDS", 20.0)
    episodes = play(tiny, start_server(misdeed), r"\boxed{1000}", count=8)

    starts = [one.start % 4 == 0 for one in episodes]
    assert any(starts)
    assert [one.played is None for one in episodes] == starts


@needs_openenv
def test_a_run_on_two_openenv_servers(tmp_path, start_server):
    rows = train(tmp_path, [start_server(), start_server()], "--data.weights", "3", "1")
    keys = {key for row in rows for key in row if key.endswith("/reward")}
    assert len(keys - {"rewards/reward"}) == 2


@needs_openenv
def test_a_server_that_is_not_there_is_one_sentence(tmp_path, capsys):
    name = f"openenv:http://127.0.0.1:{free_port()}"
    assert (
        cli.main(["train", "--model", "tiny", "--env", name, "--out", str(tmp_path / "run")]) == 2
    )
    assert name in capsys.readouterr().err


# Without their packages


@pytest.mark.parametrize("name", ENVIRONMENTS.names())
def test_every_environment_describes_itself(name):
    kind = ENVIRONMENTS[name]
    assert kind.name == name
    assert kind.about
    assert kind.needs
    assert kind.extra


def test_actions_are_made_of_text():
    def schema(**fields):
        return {"properties": {**fields, "metadata": {"type": "object"}}}

    assert ActionFields(schema(message={"type": "string"})).read("a b") == {"message": "a b"}
    assert ActionFields(schema(guess={"type": "integer"})).read(" 7 ") == {"guess": 7}
    two = ActionFields(schema(x={"type": "integer"}, y={"type": "integer"}))
    assert two.read('{"x": 1, "y": 2}') == {"x": 1, "y": 2}

    for action, text in (
        (two, "1 2"),
        (two, "[1]"),
        (ActionFields(schema(x={"type": "number"})), "one"),
    ):
        with pytest.raises(RefusedAction):
            action.read(text)


def test_observations_are_shown_as_text():
    assert spell({"text": "go", "done": False, "reward": 1.0, "length": 2}) == "go"
    assert json.loads(spell({"a": "x", "b": "y"})) == {"a": "x", "b": "y"}
    assert json.loads(spell({"board": [1, 2]})) == {"board": [1, 2]}


def test_a_conversation_may_only_grow():
    known = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    more = {"role": "user", "content": "c"}
    assert follows([*known, more], known)
    assert not follows(known, known)
    assert not follows([{"role": "user", "content": "x"}, known[1], more], known)

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain_message({"role": "user", "content": parts}) == {"role": "user", "content": "ab"}


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--env", "no:thing"],
        ["train", "--env", "vf:"],
        ["train", "--env", "vf:a", "vf:a"],
        ["train", "--env", "vf:a", "--data", "rows.jsonl"],
        ["train", "--env", "vf:a", "--task", "sums"],
        ["train", "--env", "vf:a", "--rollout.fast"],
        ["train", "--env", "vf:a", "--objective.name", "vote"],
        ["train", "--env", "vf:a", "--tools", "own.py:x"],
        ["train", "--env", "vf:a", "--sft-steps", "5"],
        ["sft", "--env", "vf:a"],
        ["check", "sparse", "--env", "vf:a"],
    ],
    ids=" ".join,
)
def test_what_does_not_go_with_environments_is_refused(words, capsys):
    assert cli.main(words) == 2
    assert "--env" in capsys.readouterr().err

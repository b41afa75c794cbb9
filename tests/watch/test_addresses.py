"""Addresses instead of paths: recorded answers, and servers and stores on this machine.

The vendors' own clients run where they are installed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mesotron.cli import main
from mesotron.config.registry import ADDRESSES
from mesotron.watch import address
from mesotron.watch.addresses import hf
from support.hub_server import serve_hub
from support.wandb_server import serve_wandb

RISING = [{"step": k, "reward": 0.2 + 0.02 * k, "eval/greedy": 0.2 + 0.02 * k} for k in range(30)]
FALLING = [{"step": k, "reward": 0.8 if k < 20 else 0.05} for k in range(60)]
HISTORY = [{"_step": row["step"], "_timestamp": 1e9, "reward": row["reward"]} for row in FALLING]


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def watch_json(place: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["watch", place, "--json"])
    return code, json.loads(capsys.readouterr().out)


# What every scheme shares


def test_paths_and_addresses_are_told_apart(tmp_path):
    assert address.split(Path("wandb://e/p/r")) == ("wandb", "e/p/r")
    assert address.split(Path("hf:/o/n")) == ("hf", "o/n")
    assert address.spell(Path("trackio://p/r")) == "trackio://p/r"
    for path in ("runs/last", "C:/x", "ftp://x/y", "wandb/run-1", "wandb:"):
        assert address.split(Path(path)) is None


def test_every_scheme_says_what_it_is():
    assert {"hf", "trackio", "wandb"} <= {*ADDRESSES}
    for name in ADDRESSES:
        scheme = ADDRESSES[name]
        assert (scheme.name, bool(scheme.about), bool(scheme.form)) == (name, True, True)


def test_a_client_that_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr("mesotron.runs.extras.is_installed", lambda name: False)
    assert main(["watch", "wandb://e/p/r"]) == 2
    assert "mesotron[wandb]" in capsys.readouterr().err


def test_an_address_is_not_followed(capsys):
    assert main(["watch", "hf://o/n", "--follow"]) == 2
    assert "hf://o/n" in capsys.readouterr().err


def test_names_of_runs_stay_inside_the_folder(tmp_path):
    for name in ("../../evil", "..", "", "a/b", "a b", "x" * 300, "a/b"):
        place = address.write_history(tmp_path, name, [{"step": 1}])
        assert place.parent.parent == tmp_path
        assert place.is_file()

    assert len(list(tmp_path.iterdir())) == 7


def test_endless_histories_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(address, "MAX_ROWS", 10)
    with pytest.raises(ValueError, match="more than 10"):
        address.write_history(tmp_path, "a", ({"step": k} for k in range(1000)))


def test_histories_of_huge_rows_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(address, "MAX_CHARACTERS", 1000)
    with pytest.raises(ValueError, match="more than"):
        address.write_history(tmp_path, "a", ({"step": k, "text": "x" * 600} for k in range(2)))


def test_an_address_with_a_quote_is_put_into_a_record(tmp_path):
    named = Path('wandb:/team/project/a"b')
    record = {"path": f"{tmp_path}/run"}
    assert address.rename(record, tmp_path, named) == {"path": 'wandb://team/project/a"b/run'}


# W&B


RUNS = (("r1", "good run", RISING), ("r2", "../bad", HISTORY))


class RecordedError(Exception):
    pass


class RecordedApi:
    """W&B's public API with recorded answers."""

    def __init__(self, timeout: int) -> None:
        assert timeout > 0

    def run(self, path: str) -> Any:
        for run in self.runs("", "", 0):
            if path == f"e/p/{run.id}":
                return run

        raise RecordedError(f"Could not find run <Run {path} (not found)>")

    def runs(self, path: str, order: str, per_page: int) -> Iterator[Any]:
        for number, name, rows in RUNS:
            history = lambda page_size, rows=rows: iter(rows)  # noqa: E731
            yield SimpleNamespace(id=number, name=name, scan_history=history)


@pytest.fixture
def recorded(monkeypatch) -> None:
    module = ModuleType("wandb")
    module.Api = RecordedApi
    module.errors = SimpleNamespace(Error=RecordedError)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("mesotron.runs.extras.is_installed", lambda name: True)
    for variable in ("WANDB_SILENT", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(variable, "true")


@pytest.mark.usefixtures("recorded")
def test_a_run_of_wandb(capsys):
    code, record = watch_json("wandb://e/p/r2", capsys)
    assert (code, record["verdict"], record["path"]) == (3, "dead", "wandb://e/p/r2")
    assert record["last_step"] == 59


@pytest.mark.usefixtures("recorded")
def test_a_project_of_wandb(capsys):
    code, record = watch_json("wandb://e/p", capsys)
    assert (code, record["verdict"]) == (3, "dead")
    paths = [run["path"] for run in record["runs"]]
    assert paths == ["wandb://e/p/bad/history.jsonl", "wandb://e/p/good-run/history.jsonl"]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("place", ["wandb://e", "wandb://e/p/r/x", "wandb://e/p/none"])
def test_what_wandb_does_not_have(place, capsys):
    assert main(["watch", place]) == 2
    assert place in capsys.readouterr().err


# The vendors' clients, each in a process of its own: they read their variables at import


def run_watch(place: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HOME": str(folder), **variables}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "mesotron", "watch", place, "--json"]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


@contextmanager
def needs(package: str) -> Iterator[None]:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    yield


def test_wandbs_own_client_and_a_server(tmp_path):
    with needs("wandb"), serve_wandb("e/p/r1", "my run", HISTORY) as url:
        key = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40}
        places = {"WANDB_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path / "cache")}
        done = run_watch("wandb://e/p/r1", tmp_path, **key, **places)

    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["path"] == "wandb://e/p/r1"


def test_trackios_own_store(tmp_path):
    write = (
        "import json, sys, trackio\n"
        "for name, rows in json.load(sys.stdin).items():\n"
        "    trackio.init(project='p', name=name, embed=False)\n"
        "    for row in rows: trackio.log(row)\n"
        "    trackio.finish()\n"
    )
    store = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    with needs("trackio"):
        subprocess.run(
            [sys.executable, "-c", write],
            env={**os.environ, **store},
            input=json.dumps({"good": RISING, "bad": FALLING}),
            text=True,
            check=True,
            capture_output=True,
        )
        one = run_watch("trackio://p/bad", tmp_path, **store)
        both = run_watch("trackio://p", tmp_path, **store)
        none = run_watch("trackio://p/none", tmp_path, **store)

    assert one.returncode == 3, one.stderr
    assert json.loads(one.stdout)["path"] == "trackio://p/bad"
    runs = [run["path"] for run in json.loads(both.stdout)["runs"]]
    assert runs == ["trackio://p#bad", "trackio://p#good"]
    assert none.returncode == 2
    assert "good" in none.stderr


def test_the_hubs_own_client_and_a_server(tmp_path):
    state = json.dumps({"log_history": FALLING}).encode()
    files = {
        "README.md": b"# A model",
        "checkpoint-20/trainer_state.json": state,
        "checkpoint-60/trainer_state.json": state,
        "logs/metrics.jsonl": as_lines(RISING),
        "../evil.jsonl": as_lines(RISING),
    }
    with serve_hub("o/n", files) as url:
        both = run_watch("hf://o/n", tmp_path, HF_ENDPOINT=url)
        one = run_watch("hf://o/n@main/logs/metrics.jsonl", tmp_path, HF_ENDPOINT=url)
        none = run_watch("hf://o/missing", tmp_path, HF_ENDPOINT=url)

    assert both.returncode == 3, both.stderr  # the output folder of a trainer is one run
    assert json.loads(both.stdout)["path"].startswith("hf://o/n")
    assert one.returncode == 0, one.stderr
    assert none.returncode == 2
    assert not [path for path in tmp_path.rglob("evil*") if path.is_file()]


# Files of a repository


def named(*names: str, size: int = 10) -> list[Any]:
    return [SimpleNamespace(rfilename=name, size=size) for name in names]


def test_logs_of_a_repository():
    files = named("model.safetensors", "a.jsonl", "runs/x/events.out.tfevents.1", "b/../c.jsonl")
    assert hf.choose(files, "", "o/n") == ["a.jsonl", "runs/x/events.out.tfevents.1"]
    assert hf.choose(files, "runs", "o/n") == ["runs/x/events.out.tfevents.1"]
    assert hf.choose(files, "a.jsonl", "o/n") == ["a.jsonl"]

    for wrong in ("model", "runs/y"):
        with pytest.raises(ValueError, match="o/n"):
            hf.choose(files, wrong, "o/n")
    with pytest.raises(ValueError, match="too many"):
        hf.choose(named("a.jsonl", size=2**40), "", "o/n")


@pytest.mark.parametrize("place", ["o", "o/n/../x", "datasets/o", "a b/c"])
def test_places_that_no_repository_has(place, tmp_path):
    with pytest.raises(ValueError, match="hf://"):
        hf.hf(place, tmp_path)


# The page of a job


def test_a_github_job_gets_the_verdicts(tmp_path, monkeypatch, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "good.jsonl").write_bytes(as_lines(RISING))
    (tmp_path / "logs" / "bad|<img>.jsonl").write_bytes(as_lines(FALLING))
    page = tmp_path / "summary.md"
    page.write_text("before\n")

    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    assert main(["watch", str(tmp_path / "logs"), "--check"]) == 1
    text = page.read_text()
    assert text.startswith("before\n### mesotron watch\n\n| verdict |")
    assert r"| dead | bad\|\<img\>.jsonl |" in text

    assert main(["watch", str(tmp_path / "logs")]) == 0
    assert page.read_text() == text

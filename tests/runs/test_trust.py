"""Files of others name code in every way they can, and none of it runs."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mesotron import cli
from mesotron.compare.kinds import make_kind
from mesotron.compare.record import Cell, read_tournament
from mesotron.compare.tournament import Progress
from mesotron.config import (
    CompareConfig,
    RewardConfig,
    RunWatchConfig,
    TrainConfig,
    WorldConfig,
)
from mesotron.config.base import to_plain
from mesotron.runs import RunFolder
from mesotron.vla.checkpoint import Saved
from mesotron.vla.demos import write_manifest
from mesotron.vla.evaluation import choose_world

EVIL = "gift.evil:f"
ALERT = "command:touch ran"
STRANGER = TrainConfig(
    reward=RewardConfig(parts=(EVIL,)), watch=RunWatchConfig(alerts=(ALERT,)), trust=True
)
ROWS = "".join(
    json.dumps(
        {
            "step": k,
            "reward": 0.5,
            "loss": 0.1,
        }
    )
    + "\n"
    for k in range(1, 9)
)


@pytest.fixture
def gift(tmp_path, monkeypatch) -> Path:
    """A folder that is a package, a run and demonstrations at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    folder = tmp_path / "gift"
    RunFolder.create(folder, to_plain(STRANGER) | {"resume": "gift"}, {})
    (folder / "metrics.jsonl").write_text(ROWS)
    (folder / "checkpoints" / "checkpoint-1").mkdir()
    write_manifest(folder, WorldConfig(name=EVIL), False, {"num_shards": 0, "cameras": []})
    (folder / "evil.py").write_text("open('ran', 'w').close()\nf = W = dict\n")

    return folder


@pytest.mark.parametrize(
    "words",
    [
        "train --resume gift",
        "train --resume gift --reward sparse",
        "sft --resume gift",
        "train --resume gift --trust",  # allowed, but not found: not in the working folder
        "eval gift",
        "eval gift/checkpoints/checkpoint-1",
        "plan --resume gift",
        "vla train gift",
        "vla eval gift",
        "vla demos --render gift --out images",
        "compare vla --set demos=gift",
        "watch gift",
        "report gift",
    ],
)
def test_nothing_of_a_stranger_runs(gift, capsys, words):
    assert cli.main(words.split()) == (0 if words in ("watch gift", "report gift") else 2)
    assert not Path("ran").exists()
    assert "gift.evil" not in sys.modules

    if words in ("train --resume gift", "vla train gift", "compare vla --set demos=gift"):
        error = capsys.readouterr().err
        assert EVIL in error
        assert "--trust" in error


@pytest.mark.parametrize(
    "option", ["vllm_server_host=192.0.2.1", "trackio_space_id=them/theirs", "deepspeed=ds.json"]
)
def test_an_option_of_trl_that_reaches_elsewhere_needs_trust(tmp_path, capsys, option):
    """None of them has a colon."""
    config = TrainConfig(trl=("top_k=20", option))
    RunFolder.create(tmp_path / "gift", config, {})
    words = ["train", "--resume", str(tmp_path / "gift")]

    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert option in error
    assert "top_k" not in error

    key, _, value = option.partition("=")
    assert cli.parse(TrainConfig, [*words[1:], f"--trl.{key}", value]).trust


def test_a_world_of_a_checkpoint_needs_trust_or_its_name(gift):
    policy: Any = None
    saved = Saved(policy, 1, WorldConfig(name=EVIL), gift, None)
    with pytest.raises(ValueError, match=EVIL):
        choose_world(saved, None)

    assert choose_world(saved, None, trust=True) == choose_world(saved, EVIL) == saved.world


@pytest.mark.parametrize("own", [False, True])
def test_names_on_the_command_line_or_in_a_file_are_the_users_own(gift, own):
    assert not cli.parse(TrainConfig, ["--resume", "gift"]).trust  # whatever the folder says
    assert os.getcwd() not in sys.path

    if own:
        words = ["--resume", "gift", "--reward", EVIL]
        assert not cli.parse(TrainConfig, words).trust  # the alert is still the stranger's
        assert cli.parse(TrainConfig, [*words, "--watch.alerts", ALERT]).trust
    else:
        Path("own.toml").write_text(f'[reward]\nparts = ["{EVIL}"]\n')
        assert cli.parse(TrainConfig, ["--config", "own.toml"]).reward.parts == (EVIL,)

    assert os.getcwd() == sys.path[-1]


def test_cells_of_a_tournament_are_not_believed(gift):
    kind = make_kind("arith")
    progress = Progress(kind, CompareConfig(), gift.parent)

    cell = Cell(
        id="gift", contender="muon", objective="", rate=1e-3, seed=0, stage="final", run="gift"
    )
    with pytest.raises(ValueError, match=EVIL):
        progress.settings(cell)

    record = {
        "recipe": "arith",
        "kind": "rlvr",
        "measure": "",
        "rule": [],
        "contenders": [],
        "plan": {},
        "cells": [vars(cell) | {"run": "../precious"}],
    }

    for place in ({"run": "../precious"}, {"id": "..", "run": "cells/.."}):
        record["cells"] = [vars(cell) | place]
        (gift / "tournament.json").write_text(json.dumps(record))
        with pytest.raises(ValueError, match="not in cells/"):
            read_tournament(gift)

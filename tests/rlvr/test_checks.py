"""Settings refused before anything heavy is imported and before a folder is made."""

import subprocess
import sys
from dataclasses import replace

import pytest

from mesotron import cli
from mesotron.config import ObjectiveConfig, RewardConfig, RolloutConfig, TrainConfig
from mesotron.rlvr.train import check

RESAMPLE = ("--objective.dynamic-sampling", "resample", "--objective.dynamic-oversample")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--optim.rank", "0"], "--optim.rank 0"),
        (["--rollout.prompts", "3", "--rollout.updates", "7"], "7 updates"),
        ([*RESAMPLE, "2.6", "--task.num-train", "40"], "--objective.dynamic-oversample 2.6"),
        (["--reward.parts", "two_parts"], "did you mean two_part"),
        (["--task.name", "file", "--task.path", "no.jsonl"], "no.jsonl"),
        (["--model.name", "nope"], "'nope'"),
        (["--task.name", "sums", "--task.num-eval", "700"], "--task.num-eval"),
    ],
)
def test_a_wrong_setting_is_refused_before_torch_is_imported(flags, named, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mesotron.rlvr.session", None)
    assert cli.main(["train", *flags]) == 2
    assert named in capsys.readouterr().err


def test_prompts_cannot_be_added_where_groups_span_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    rollout = RolloutConfig(prompts=3, generations=4)
    check(TrainConfig(rollout=rollout, out=tmp_path))
    more = ObjectiveConfig(dynamic_sampling="resample", dynamic_oversample=2)
    with pytest.raises(ValueError, match="dynamic_oversample"):
        check(TrainConfig(rollout=rollout, objective=more, out=tmp_path))


@pytest.mark.parametrize("name", ["vote", "mgrpo", "corewarding", "grpo"])
def test_an_unused_reward_is_reported(name, caplog):
    config = TrainConfig(objective=ObjectiveConfig(name=name))
    check(config)
    assert not caplog.records
    check(replace(config, reward=RewardConfig(parts=("two_part", "near"))))
    assert ("two_part + near" in caplog.text) == (name != "grpo")


def test_the_checks_load_no_torch():
    code = (
        "import sys\nfrom mesotron.config import SftConfig, TrainConfig\n"
        "from mesotron.rlvr import train\n"
        "train.check(TrainConfig())\ntrain.check(SftConfig())\n"
        "print({'torch', 'trl', 'transformers', 'datasets', 'jax'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "flags",
    [["nope"], ["tiny", "--task.levels", "9"], ["runs/last"], ["tiny", "--temperature", "inf"]],
)
def test_a_wrong_evaluation_is_refused_before_torch_is_imported(flags, tmp_path):
    code = (
        "import sys\nfrom mesotron import cli\ncode = cli.main(['eval', *sys.argv[1:]])\n"
        "print(code, {'torch', 'transformers', 'datasets'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "2 set()\n", done.stderr

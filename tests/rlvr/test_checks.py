"""Settings refused before anything heavy is imported and before a folder is made."""

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
        ([*RESAMPLE, "2.6", "--task.num-train", "40"], "--objective.dynamic-oversample 2.6"),
        (["--reward.parts", "two_parts"], "did you mean two_part"),
        (["--task.name", "file", "--task.path", "no.jsonl"], "no.jsonl"),
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

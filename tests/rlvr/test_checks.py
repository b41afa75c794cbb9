"""Settings refused before anything heavy is imported and before a folder is made."""

from dataclasses import replace

import pytest

from mesotron.config import ObjectiveConfig, RewardConfig, RolloutConfig, TrainConfig
from mesotron.rlvr.train import check


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

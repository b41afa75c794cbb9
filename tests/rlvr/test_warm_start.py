"""A run of two stages: supervised, then reinforcement learning, killed and resumed in either."""

from dataclasses import replace

import pytest
from safetensors.torch import load_file

from mesotron.config import (
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    WarmStartConfig,
)
from mesotron.evaluate.subject import find_subject
from mesotron.rlvr import train, warm_start
from mesotron.runs import RunFolder
from mesotron.runs.resume import settings_to_resume
from mesotron.serve.export import model_card
from mesotron.watch import budget as budget_of_run
from support.rlvr_tiny import SlowBudget, same

LAST = "checkpoints/checkpoint-3/model.safetensors"


@pytest.fixture
def config(folder, tmp_path) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(name=str(folder)),
        task=TaskConfig(levels=(1,), num_train=20, num_eval=2),
        sft=WarmStartConfig(steps=2, lr=1e-3, batch=3),
        optim=OptimConfig(name="adamw", lr=1e-3),
        objective=ObjectiveConfig(beta=0.1),
        rollout=RolloutConfig(prompts=2, generations=2, max_tokens=8),
        steps=3,
        save_every=0,
        guard="off",
        out=tmp_path / "whole",
        device="cpu",
    )


def test_reinforcement_learning_starts_from_the_supervised_weights(config, folder):
    assert train.run(config) == 0
    run = RunFolder(config.out)
    stage = RunFolder(config.out / "sft")
    weights = config.out / "sft" / "checkpoints" / "checkpoint-2"

    assert [row["step"] for row in stage.rows("metrics")] == [1, 2]
    assert [row["step"] for row in run.rows("metrics")] == [1, 2, 3]
    assert run.config["model"]["name"] == str(folder)
    assert not same(
        load_file(folder / "model.safetensors"), load_file(weights / LAST.split("/")[-1])
    )

    # The first step is taken at the reference of the KL term.
    assert run.rows("metrics")[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert find_subject(str(config.out)).start.name == str(weights)

    assert "2 supervised steps" in (config.out / "report.md").read_text()
    assert "2 supervised steps and 3 steps" in model_card(run, "a", whole=True)


@pytest.mark.parametrize(("limit", "stage_steps", "steps"), [(150, 1, 0), (250, 2, 2)])
def test_stopped_in_either_stage_and_resumed_equals_uninterrupted(
    config, tmp_path, monkeypatch, limit, stage_steps, steps
):
    assert train.run(config) == 0
    for module in (budget_of_run, warm_start):
        monkeypatch.setattr(module, "Budget", SlowBudget)

    stopped = replace(config, out=tmp_path / "stopped", time_limit=f"{limit}s")
    assert train.run(stopped) == 0
    run = RunFolder(stopped.out)
    assert len(RunFolder(stopped.out / "sft").rows("metrics")) == stage_steps
    assert len(run.rows("metrics")) == steps
    assert run.result is None

    resumed = settings_to_resume(TrainConfig, stopped.out)
    assert train.run(replace(resumed, time_limit="1h")) == 0
    assert same(load_file(config.out / LAST), load_file(stopped.out / LAST))

    first, second = (
        [(row["step"], row["loss"], row["kl"]) for row in RunFolder(out).rows("metrics")]
        for out in (config.out, stopped.out)
    )
    assert first == second


def test_what_cannot_have_a_supervised_start_is_refused(config, monkeypatch):
    with pytest.raises(ValueError, match="--sft-steps"):
        replace(config, model=replace(config.model, lora=4))

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--sft-steps"):
        train.run(config)

"""Tiny real runs inside other trainers, offline, on models built here."""

import torch
from optim.test_contracts import assert_equal, weights
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import mesotron
from support.rlvr_tiny import make_network

TOKENS = [(torch.arange(8) + row) % 32 for row in range(64)]
COUNTING = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]


def assert_all_moved(model: nn.Module, before: list[Tensor]) -> None:
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


COMMON = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
}
COMMON |= {"dataloader_pin_memory": False, "seed": 0}


def test_trainer_resumes_exactly_with_the_class_and_its_own_groups(tmp_path):
    # The Trainer's groups have no rule: the optimizer splits vectors and matrices.
    def trainer(model: nn.Module) -> Trainer:
        settings = TrainingArguments(
            str(tmp_path),
            max_steps=4,
            save_steps=2,
            **COMMON,
        )

        optimizer = (mesotron.Pion, {"lr": 1e-2, "cutoff": 0.3})
        return Trainer(model, settings, train_dataset=COUNTING, optimizer_cls_and_kwargs=optimizer)

    alone = make_network("qwen2")
    before = weights(make_network("qwen2"))
    whole = trainer(alone)
    whole.train()
    assert_all_moved(alone, before)
    rules = {group["rule"] for group in whole.optimizer.optimizer.param_groups}

    assert rules == {"pion", "adamw"}
    resumed = make_network("qwen2")
    trainer(resumed).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(weights(resumed), weights(alone))


def test_stable_baselines_trains_saves_and_loads(tmp_path):
    from stable_baselines3 import PPO

    policy = {"optimizer_class": mesotron.Pion, "optimizer_kwargs": {"cutoff": 0.3}}
    settings = {
        "n_steps": 64,
        "n_epochs": 2,
        "seed": 0,
        "device": "cpu",
    }

    model = PPO("MlpPolicy", "CartPole-v1", policy_kwargs=policy, **settings)
    before = weights(model.policy)
    model.learn(128)
    assert_all_moved(model.policy, before)
    model.save(tmp_path / "ppo")
    again = PPO.load(tmp_path / "ppo", device="cpu")

    assert type(again.policy.optimizer) is mesotron.Pion
    for p, q in zip(model.policy.parameters(), again.policy.parameters(), strict=True):
        ours = model.policy.optimizer.state[p]
        theirs = again.policy.optimizer.state[q]
        assert ours.keys() == theirs.keys() != set()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)

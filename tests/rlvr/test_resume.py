"""Exact resume: a trainer stopped at any step and resumed ends with the same bits."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement
from transformers import LlamaForCausalLM, TrainerCallback

import mesotron
from mesotron.config import ObjectiveConfig, OptimConfig
from mesotron.rlvr import checkpoint as resume
from mesotron.rlvr.state import load_state, save_state
from mesotron.tasks.rows import Curriculum
from support import rlvr_tiny
from support.rlvr_tiny import make_data, rows, same, weights

LORA = LoraConfig(
    r=2,
    target_modules="all-linear",
    lora_dropout=0.1,
)
PION = OptimConfig(name="pion", lr=1e-2, cutoff="noise")
MGRPO = ObjectiveConfig(name="mgrpo", beta=0.005)
POOLS = [
    [{"id": str(k), "prompt": f"{(k + level) % 10} + 1 ="} for k in range(10)] for level in range(3)
]
RESAMPLE = ObjectiveConfig(
    name="grpo",
    dynamic_sampling="resample",
    dynamic_tolerance=1.2,
)


class Noise:
    """State beyond the trainer's own: drawn at each step and added to the rewards."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def draw(self) -> float:
        self.total += torch.rand(2)
        return float(self.total.sum()) % 0.1

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


def make_trainer(folder, parts=None, pools=None, **changed: Any):
    noise = Noise()

    def reward(completions: list[str], **_: Any) -> list[float]:
        extra = noise.draw()
        return [sum(word in "02468" for word in text.split()) + extra for text in completions]

    parts = {
        "reward_funcs": reward,
        "train_dataset": make_data(10),
        **(parts or {}),
    }

    settings = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        **changed,
    }

    trainer = rlvr_tiny.make_trainer(folder, parts=parts, **settings)
    trainer.stateful["noise"] = noise

    if pools is not None:
        trainer.use_curriculum(Curriculum(pools, bound=0.0))  # up after every four rollouts

    return trainer


def train(folder, **changed: Any):
    trainer = make_trainer(folder, **changed)
    trainer.train()
    return trainer


def log_rows(trainer: Any) -> list[dict[str, float]]:
    return [{key: row[key] for key in row if "time" not in key} for row in rows(trainer)]


# The step to resume from, and the settings. A step of the plain run takes two of ten prompts, so
# the data is shuffled again after five.
CASES = {
    "a new epoch": (5, {"parts": {"average": 0.7}}),
    "accumulation": (3, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
    "inside a buffer": (3, {"num_iterations": 2, "steps_per_generation": 2}),
    "schedule": (1, {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "muon": (3, {"parts": {"optim": "muon"}}),
    "pion": (4, {"parts": {"optim": PION}, "steps_per_generation": 3}),
    "lora with dropout": (3, {"parts": {"peft_config": LORA}, "num_iterations": 2}),
    "anchor": (3, {"parts": {"objective": MGRPO}, "steps_per_generation": 2}),
    "anchor that moves twice a step": (
        3,
        {
            "parts": {"objective": MGRPO},
            "steps_per_generation": 1,
            "gradient_accumulation_steps": 2,
        },
    ),
    "curriculum": (3, {"parts": {"train_dataset": Dataset.from_list(POOLS[0])}, "pools": POOLS}),
    "fast": (3, {"parts": {"fast": True, "objective": RESAMPLE}, "steps_per_generation": 2}),
}
QUICK = ("a new epoch", "inside a buffer", "lora with dropout", "anchor", "curriculum", "fast")
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in QUICK]


@pytest.mark.parametrize("case", [*QUICK, *SLOW])
def test_resumed_at_any_step_equals_uninterrupted(tmp_path, case):
    step, settings = CASES[case]
    whole = train(tmp_path, **settings)
    again = make_trainer(tmp_path / "again", **settings, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))

    assert same(weights(whole), weights(again))
    assert log_rows(again) == log_rows(whole)


FAILING = [*QUICK, "anchor that moves twice a step"]


@pytest.mark.parametrize("case", FAILING)
def test_the_step_before_a_rollout_that_failed_can_be_saved(tmp_path, case, monkeypatch):
    step, settings = CASES[case]
    settings = {**settings, "save_strategy": "no"}
    whole = train(tmp_path, **settings)
    stopped = make_trainer(tmp_path, **settings)
    draw = Noise.draw

    def fail(noise: Noise) -> float:
        value = draw(noise)
        if stopped.state.global_step >= step:
            raise ValueError("moody")
        return value

    monkeypatch.setattr(Noise, "draw", fail)
    with pytest.raises(ValueError, match="moody"):
        stopped.train()

    stopped.save_last_step()
    monkeypatch.undo()
    again = make_trainer(tmp_path, **settings)
    again.train(resume_from_checkpoint=True)

    assert same(weights(whole), weights(again))
    assert log_rows(again) == log_rows(whole)


def test_checkpoints_are_loadable_models_and_no_pickle_is_written_or_read(tmp_path, monkeypatch):
    train(tmp_path, max_steps=2)
    suffixes = {path.suffix for path in (tmp_path / "checkpoint-1").iterdir()}
    assert not suffixes & {".pt", ".pth", ".bin", ".pkl"}
    assert LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-1").config.hidden_size == 16

    monkeypatch.setattr(torch, "load", Mock(side_effect=AssertionError))
    resumed = make_trainer(tmp_path, max_steps=3)
    resumed.train(resume_from_checkpoint=True)

    assert resumed.state.global_step == 3


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, caplog):
    with pytest.raises(ValueError, match="no complete checkpoint"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)

    whole = train(tmp_path, max_steps=3)
    (tmp_path / "checkpoint-3" / "optimizer.safetensors").write_bytes(b"cut short")

    with pytest.raises(ValueError, match=r"optimizer\.safetensors"):
        make_trainer(tmp_path, max_steps=3).train(str(tmp_path / "checkpoint-3"))

    resumed = make_trainer(tmp_path, max_steps=3)
    with caplog.at_level("WARNING", resume.__name__):
        resumed.train(resume_from_checkpoint=True)

    assert "optimizer.safetensors has 9 bytes" in caplog.text
    assert same(weights(whole), weights(resumed))


def test_a_failed_write_keeps_earlier_checkpoints(tmp_path, monkeypatch):
    trainer = train(tmp_path, max_steps=1)
    for error, reason in (
        (OSError(28, "No space left on device"), "disk is full"),
        (SafetensorError("I/O error: File too large (os error 27)"), "File too large"),
    ):
        monkeypatch.setattr(resume, "save_state", Mock(side_effect=error))
        with pytest.raises(ValueError, match=reason):
            trainer._save_checkpoint(trainer.model, None)

        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
        assert resume.checkpoints.damage(tmp_path / "checkpoint-1") is None


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)

    class Spoil(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model, **_):
            if state.global_step == 1:  # counted before the step
                next(model.parameters()).data.view(-1)[3] = torch.inf

    trainer.add_callback(Spoil())
    with pytest.raises(ValueError, match="not finite"):
        trainer.train()

    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_another_model_or_objective_is_refused(tmp_path):
    train(tmp_path, max_steps=1)
    other = make_trainer(tmp_path, max_steps=2)
    other.stateful["anchor"] = Noise()

    with pytest.raises(ValueError, match="anchor"):
        other.train(resume_from_checkpoint=True)

    model: Any = torch.nn.Linear(2, 2)
    model.all_tied_weights_keys = {}

    with pytest.raises(ValueError, match="different model"):
        other._load_from_checkpoint(str(tmp_path / "checkpoint-1"), model)


def test_an_adapter_without_a_weight_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, parts={"peft_config": LORA})
    trainer.model.save_pretrained(tmp_path)
    resume.load_adapter(trainer.model, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    saved = load_file(path)
    saved.pop(next(name for name in saved if "up_proj.lora_B" in name))
    save_file(saved, path)

    with pytest.raises(ValueError, match=r"up_proj\.lora_B"):
        resume.load_adapter(trainer.model, tmp_path)


def test_state_round_trip(tmp_path):
    shared = torch.arange(6.0)
    tree = {
        "a": [1, 2.5, None, True, "x", (1, (2,))],
        "inf": float("inf"),
        3: {"t": shared[2:4]},
        "whole": shared,
        "scalar": torch.tensor(2),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "across": torch.ones(2, 3).T,
    }

    save_state(tmp_path, "state", tree)
    loaded = load_state(tmp_path, "state")
    assert (loaded["a"], loaded["inf"]) == (tree["a"], tree["inf"])
    assert torch.equal(loaded[3]["t"], shared[2:4])

    for key in ("whole", "scalar", "flags", "half", "across"):
        assert loaded[key].dtype == tree[key].dtype
        assert torch.equal(loaded[key], tree[key])

    with pytest.raises(ValueError, match=r"state\.a\.1 is a set"):
        save_state(tmp_path, "state", {"a": [1, {2}]})


def test_the_state_of_a_sharded_optimizer_is_restored_sharded(tmp_path):
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.nn.Linear(6, 4).parameters()
        params = [
            torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [ShardPlacement(0)]))
            for p in whole
        ]

        optimizer = mesotron.Muon(params, lr=0.1)
        resumed = mesotron.Muon(params, lr=0.1)

        for p in params:
            p.grad = p.detach().clone()

        optimizer.step()
        save_state(tmp_path, "optimizer", optimizer.state_dict())
        loaded = load_state(tmp_path, "optimizer")
        resume.shard_like_parameters(loaded, resumed)
        resumed.load_state_dict(loaded)

        for p in params:
            for name, value in optimizer.state[p].items():
                other = resumed.state[p][name]
                assert type(other) is type(value)

                if isinstance(value, DTensor):
                    assert torch.equal(other.to_local(), value.to_local())

        assert any(isinstance(x, DTensor) for p in params for x in resumed.state[p].values())
    finally:
        dist.destroy_process_group()


def test_the_level_of_a_curriculum_is_in_each_row(tmp_path):
    parts = {"train_dataset": Dataset.from_list(POOLS[0])}
    trainer = train(tmp_path, parts=parts, pools=POOLS, max_steps=2)
    levels = [row["curriculum/level"] for row in log_rows(trainer) if "loss" in row]
    assert len(levels) == 2
    assert all(level >= 0 for level in levels)

"""Rollouts by vLLM: which weights it holds when it samples. The engine is a stand-in."""

import pytest
import torch
from transformers import TrainerCallback

from mesotron.config import ObjectiveConfig
from mesotron.watch.metrics import sources
from support.rlvr_tiny import EOS, make_trainer, rows, same, weights


class Engine:
    """Like TRL's `VLLMGeneration`; keeps the weights it was given last."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.held = None
        self.calls = []

    def sync_weights(self):
        self.held = weights(self.trainer)

    def generate(self, prompts, images, num_generations, profiler):
        self.calls.append((len(prompts), num_generations, self.held))
        places = range(len(self.calls), len(self.calls) + len(prompts))
        ids = [[15 + place % 7, 3 + place % 5, EOS] for place in places]

        return prompts, ids, [[[-3.0]] * len(row) for row in ids], None


class Starts(TrainerCallback):
    """The weights at the start of each step."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.seen = []

    def on_step_begin(self, *_, **__):
        self.seen.append(weights(self.trainer))


def train(folder, parts, **settings):
    trainer = make_trainer(folder, parts=parts, **settings)
    trainer.use_vllm = True
    trainer._last_loaded_step = -1
    trainer.vllm_generation = Engine(trainer)
    starts = Starts(trainer)
    trainer.add_callback(starts)
    trainer.train()

    return trainer, starts.seen


def test_each_rollout_is_sampled_from_the_weights_of_the_last_step(tmp_path):
    trainer, starts = train(tmp_path, {"optim": "pion", "objective": "grpo"})
    held = [weights for _, _, weights in trainer.vllm_generation.calls]
    assert [same(a, b) for a, b in zip(held, starts, strict=True)] == [True] * 3
    assert not same(held[0], held[1])
    assert not same(held[1], held[2])


@pytest.mark.parametrize("merged", [False, True], ids=["apart", "merged"])
def test_the_anchors_completions_are_sampled_from_the_anchor(tmp_path, merged):
    objective = ObjectiveConfig(
        name="mgrpo", momentum=0.5, momentum_generations=2, loss_on_momentum=merged, beta=0.0
    )
    trainer, starts = train(tmp_path, {"optim": "muon", "objective": objective}, max_steps=2)
    calls = trainer.vllm_generation.calls
    policy = calls[::2]
    anchor = calls[1::2]

    assert [call[1] for call in anchor] == [2, 2]
    assert [call[:2] for call in policy] == [(4, 2) if merged else (8, 4)] * 2
    assert all(same(call[2], start) for call, start in zip(policy, starts, strict=True))

    mean = {n: (starts[0][n] + starts[1][n]) / 2 for n in starts[0]}
    assert same(anchor[0][2], starts[0])

    for name, weight in anchor[1][2].items():
        torch.testing.assert_close(weight, mean[name])

    assert not same(anchor[1][2], policy[1][2])


def test_masked_tokens_are_counted_without_padding(tmp_path, monkeypatch):
    def generate(_, prompts, **rest):
        ids = [[15, EOS] if k % 2 else [15, 3, EOS] for k in range(len(prompts))]
        return prompts, ids, [[[3.0]] * len(row) for row in ids], None

    monkeypatch.setattr(Engine, "generate", generate)
    options = {"mode": "token_mask", "clip_min": 0.5}
    bound = {f"vllm_importance_sampling_{name}": value for name, value in options.items()}
    trainer, _ = train(tmp_path, {"objective": "grpo"}, max_steps=1, **bound)
    (row,) = rows(trainer)

    assert row["sampling/masked"] == 1
    assert sources(row)["gap_cut"] == ["sampling/masked"]

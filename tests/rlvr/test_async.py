"""TRL's AsyncGRPOTrainer with our optimizers and watch, through its own injection points.

The worker samples for real, with weights that the trainer sends it; TRL's attention kernel, which
needs a Hopper GPU, is replaced by the same sums in PyTorch. No vLLM server takes part.
"""

import queue
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

import mesotron
from mesotron.optim import RoutedOptimizer
from mesotron.watch.metrics import canonical
from support import rlvr_tiny as tiny

PER_STEP = 8

# Where the module is today, and where modules go that leave TRL's experiments.
HOMES = ("trl.experimental.async_grpo", "trl.async_grpo", "trl.trainer.async_grpo")
HOME = next(name for name in HOMES if find_spec(name))
packing = pytest.importorskip(f"{HOME}.packing", reason="TRL 1.15 packs nothing here")
async_grpo_trainer = import_module(f"{HOME}.async_grpo_trainer")
RolloutSample = import_module(f"{HOME}.async_rollout_worker").RolloutSample


def varlen_attention(q, k, v, starts_q, starts_k, *_, softmax_scale, causal, window_size):  # noqa: PLR0913  # the signature of a kernel
    assert causal
    assert window_size == (-1, -1)

    out = []
    for (a, b), (c, d) in zip(starts_q.unfold(0, 2, 1), starts_k.unfold(0, 2, 1), strict=True):
        # The segment is the end of its path.
        sees = torch.arange(d - c) <= torch.arange(d - c - (b - a), d - c)[:, None]
        heads = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        mixed = scaled_dot_product_attention(
            *heads, attn_mask=sees, scale=softmax_scale, enable_gqa=True
        )
        out.append(mixed.transpose(0, 1))

    return torch.cat(out)


class Worker(queue.Queue):
    """Rollouts of its own copy of the model, `ahead` steps before the trainer needs them."""

    def __init__(self, folder, ahead):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.rollout_buffer = self
        self.metrics_queue = queue.Queue()
        self.ahead = ahead
        self.version = 0
        self.syncs = 0

    def start(self):
        for _ in range(self.ahead):
            self.produce()

    def get(self, *args, **kwargs):
        if self.empty():
            self.produce()
        return super().get(*args, **kwargs)

    def produce(self):
        """One step: two groups of four for a prompt of four tokens."""
        prompt = torch.tensor([[3, 13, 4, 14]]).expand(PER_STEP, -1)
        with torch.no_grad():
            ids = self.model.generate(
                prompt,
                do_sample=True,
                min_new_tokens=4,
                max_new_tokens=4,
            )
            logp = self.model(ids).logits.log_softmax(-1)[:, :-1]

        logp = logp.gather(2, ids[:, 1:, None]).squeeze(2)
        rewards = (ids[:, 4:] < 8).float().mean(1).view(2, 4)

        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
        for k, (row, old) in enumerate(zip(ids, logp, strict=True)):
            self.put(
                RolloutSample(
                    [],
                    [],
                    row.numpy(),
                    np.array([0] * 4 + [1] * 4),
                    np.append(0.0, old.numpy()),
                    advantages[k],
                    self.version,
                    k // 4,
                    {"reward": rewards.flatten()[k].item()},
                )
            )

    def update_model_version(self, version):
        self.version = version

    def send_weights(self, iterator):
        self.model.load_state_dict(dict(iterator), strict=False)
        self.syncs += 1

    def check_health(self, stale_after_s): ...

    stop = init_weight_transfer = pause = resume = destroy = lambda self: None


@pytest.mark.parametrize("build", [mesotron.muon, mesotron.pion])
def test_our_optimizers_and_watch_work_in_trls_async_trainer(tmp_path, monkeypatch, build):
    kernel = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # a GPU's
    tiny.make_model().save_pretrained(tmp_path / "model")
    worker = Worker(tmp_path / "model", ahead=6)
    watch = mesotron.Watch("warn")

    args = async_grpo_trainer.AsyncGRPOConfig(
        str(tmp_path / "out"),
        max_steps=4,
        per_device_train_batch_size=PER_STEP,
        use_cpu=True,
        num_generations=4,
        token_budget=-1,
        bf16=False,
        gradient_checkpointing=False,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )

    trainer = async_grpo_trainer.AsyncGRPOTrainer(
        str(tmp_path / "model"),
        tiny.small_digits,
        args,
        tiny.make_data(),
        processing_class=tiny.make_tokenizer(),
        callbacks=[watch],
        rollout_worker=worker,
        weight_transfer=worker,
    )

    trainer.optimizer = build(trainer.model, lr=1e-2)
    before = tiny.weights(trainer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]

    assert isinstance(trainer.optimizer.optimizer, RoutedOptimizer)
    assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())

    # Its log-probabilities are the worker's at first, and drift with the samples' age.
    assert rows[0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert rows[2]["ratio"] != pytest.approx(1, abs=1e-5)
    assert [row["sample/staleness_mean"] for row in rows] == [0, 1, 2, 3]
    assert [canonical(row).get("staleness") for row in watch.monitor.rows][:4] == [0, 1, 2, 3]
    assert "stale_samples" not in watch.engine.blind()
    assert worker.syncs == 5
    assert torch.equal(worker.model.lm_head.weight, trainer.model.lm_head.weight)

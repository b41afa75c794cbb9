"""Tiny real runs inside other trainers, offline, on models built here."""

import lightning
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

import mesotron
from mesotron.optim import BUILDERS

pytestmark = [
    # lightning 2.6 uses a pytree check that torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    # lightning advises more data-loading workers.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


def qwen() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=1))


# The classes share their code: two cover both auxiliary rules and both filters.
two_builders = pytest.mark.parametrize("name", ["pion", "muon_sgd"])


class Counting(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        tokens = (torch.arange(8) + row) % 32
        return {"input_ids": tokens, "labels": tokens}


def tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.arange(8) + torch.randint(0, 32, (8, 1), generator=generator)) % 32


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


def assert_all_moved(model: nn.Module, before: list[Tensor]) -> None:
    trained = [(p, b) for p, b in zip(model.parameters(), before, strict=True) if p.requires_grad]
    assert all(not torch.equal(p, b) for p, b in trained)


COMMON = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
COMMON |= {"dataloader_pin_memory": False, "seed": 0}


@two_builders
def test_trainer_resumes_exactly(name, tmp_path):
    def trainer(model: nn.Module) -> Trainer:
        optimizer = BUILDERS[name](model, lr=1e-2)
        settings = TrainingArguments(str(tmp_path), max_steps=4, save_steps=2, **COMMON)
        return Trainer(model, settings, train_dataset=Counting(), optimizers=(optimizer, None))

    alone, before = qwen(), weights(qwen())
    trainer(alone).train()
    assert_all_moved(alone, before)
    resumed = qwen()
    trainer(resumed).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(resumed, alone)


def test_trainer_takes_the_class_with_its_own_groups(tmp_path):
    # The Trainer's groups have no rule: the optimizer splits vectors and matrices.
    model, before = qwen(), weights(qwen())
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), max_steps=2, save_strategy="no", **COMMON),
        train_dataset=Counting(),
        optimizer_cls_and_kwargs=(mesotron.Pion, {"lr": 1e-2, "cutoff": 0.3}),
    )
    trainer.train()
    assert_all_moved(model, before)
    rules = {group["rule"] for group in trainer.optimizer.optimizer.param_groups}
    assert rules == {"pion", "adamw"}


@two_builders
def test_accelerate_accumulates_to_the_same_step(name):
    plain, model = qwen(), qwen()
    reference = BUILDERS[name](plain, lr=1e-2)
    for seed in (0, 2):
        reference.zero_grad()
        for part in (0, 1):
            batch = tokens(seed + part)
            (plain(batch, labels=batch).loss / 2).backward()
        reference.step()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, BUILDERS[name](model, lr=1e-2))
    for seed in range(4):
        with accelerator.accumulate(prepared):
            batch = tokens(seed)
            accelerator.backward(prepared(batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", BUILDERS)
def test_lora_trains_its_factors_alone(name):
    base = qwen()
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = BUILDERS[name](model, lr=1e-2)
    for seed in range(3):
        optimizer.zero_grad()
        model(input_ids=tokens(seed), labels=tokens(seed)).loss.backward()
        optimizer.step()
    for key, p in model.named_parameters():
        assert torch.equal(p, before[key]) == ("lora" not in key)


class Regression(lightning.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = BUILDERS[self.name](self, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def fit(module: lightning.LightningModule, epochs: int, folder, checkpoint=None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "default_root_dir": str(folder), **dict.fromkeys(quiet, False)}
    trainer = lightning.Trainer(max_epochs=epochs, **options)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8), ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")


@two_builders
def test_lightning_resumes_exactly(name, tmp_path):
    alone = Regression(name)
    before = weights(alone)
    fit(alone, 2, tmp_path)
    assert_all_moved(alone, before)
    fit(Regression(name), 1, tmp_path)
    resumed = Regression(name)
    fit(resumed, 2, tmp_path, checkpoint=str(tmp_path / "1.ckpt"))
    assert_equal(resumed, alone)


def test_stable_baselines_trains_saves_and_loads(tmp_path):
    from stable_baselines3 import PPO

    policy = {"optimizer_class": mesotron.Pion, "optimizer_kwargs": {"cutoff": 0.3}}
    settings = {"n_steps": 64, "n_epochs": 2, "seed": 0, "device": "cpu"}
    model = PPO("MlpPolicy", "CartPole-v1", policy_kwargs=policy, **settings)
    before = weights(model.policy)
    model.learn(128)
    assert_all_moved(model.policy, before)
    model.save(tmp_path / "ppo")
    again = PPO.load(tmp_path / "ppo", device="cpu")
    assert type(again.policy.optimizer) is mesotron.Pion
    for p, q in zip(model.policy.parameters(), again.policy.parameters(), strict=True):
        ours, theirs = model.policy.optimizer.state[p], again.policy.optimizer.state[q]
        assert ours.keys() == theirs.keys() != set()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_grpo_trainer(tmp_path):
    from datasets import Dataset as Table
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {word: k for k, word in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789", "+", "="])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model, before = qwen(), weights(qwen())
    optimizer = mesotron.pion(model, lr=1e-2, per_head=True)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        args=GRPOConfig(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=6,
            save_steps=2,
            bf16=False,
            gradient_checkpointing=False,
            **COMMON,
        ),
        train_dataset=Table.from_dict({"prompt": [f"{k} + 1 =" for k in range(10)]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ),
        optimizers=(optimizer, None),
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert_all_moved(model, before)
    assert optimizer.stats()["skipped"] == 0
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert len(saved["state"]) == len(list(model.parameters()))

"""mesotron.GRPOTrainer by names, and TRL's own trainer with our optimizer and watch."""

import sys

import small
from peft import LoraConfig
from trl import GRPOTrainer

import mesotron


def train(name, cls, optimizer=None, model=None, rewards=small.even_digits, **parts):
    model = model or small.make_model()
    if optimizer is not None:
        parts["optimizers"] = (optimizer(model), None)
    trainer = cls(
        model=model,
        reward_funcs=rewards,
        args=small.make_arguments(name, **parts.pop("settings", {})),
        train_dataset=small.make_data(),
        processing_class=parts.pop("tokenizer", None) or small.make_tokenizer(),
        **parts,
    )
    trainer.add_callback(mesotron.Watch(guard="stop"))
    trainer.train()
    small.save(name, trainer)


def main():
    ours = mesotron.GRPOTrainer
    updates = {"num_iterations": 2, "gradient_accumulation_steps": 2}
    lora = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1)

    train("plain", ours)
    train("muon", ours, optim="muon", objective="dr_grpo", settings=updates)
    train("gmpo", ours, optim="pion", objective="gmpo", average=0.7)
    train("lora", ours, optim="normuon", peft_config=lora)
    train("vote", ours, optim="adamw", objective="vote", fast=True)
    train("trl", GRPOTrainer, optimizer=lambda model: mesotron.muon(model, lr=1e-2))


sys.exit(main())

"""A random model of two layers, a tokenizer of words and a data set, for the scripts beside it."""

import json

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig

WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "="]


def make_tokenizer():
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return Qwen2ForCausalLM(config)


def make_data():
    sums = [(a, b) for a in range(4) for b in range(4)]
    prompts = [f"{a} + {b} =" for a, b in sums]
    return Dataset.from_dict({"prompt": prompts, "gold": [str(a + b) for a, b in sums]})


def make_arguments(folder, **changed):
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **changed,
    }
    return GRPOConfig(folder, **settings)


def even_digits(completions, **_):
    words = [text.split() for text in completions]
    return [sum(word in "02468" for word in row) / max(len(row), 1) for row in words]


def save(name, trainer):
    """Write the trainer's log and weights, to be compared."""
    with open(f"{name}.jsonl", "w") as file:
        for row in trainer.state.log_history:
            print(json.dumps(row), file=file)
    save_weights(name, trainer.model)


def save_weights(name, model):
    weights = {key: value.detach().clone() for key, value in model.named_parameters()}
    save_file(weights, f"{name}.safetensors")


def write(name, value):
    with open(f"{name}.json", "w") as file:
        json.dump(value, file)

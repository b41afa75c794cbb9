"""LoRA with PEFT: wrap the model first, then build the optimizer, which filters B and not A.

Run: python examples/peft_lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

import mesotron


def main() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )

    lora = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "up_proj"],
        task_type="CAUSAL_LM",
    )

    model = get_peft_model(Qwen2ForCausalLM(config), lora)
    optimizer = mesotron.muon(model, lr=0.02)
    for group in optimizer.param_groups:
        print(f"{group['name']:20s} {len(group['params'])} factors, e.g. {group['param_names'][0]}")

    tokens = (torch.arange(12) + torch.arange(16)[:, None]) % 32
    for step in range(41):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 10 == 0:
            print(f"step {step:2d}  loss {loss:.3f}")


if __name__ == "__main__":
    main()

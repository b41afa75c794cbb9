"""Every torch optimizer, under several settings, on one model and one sequence of gradients."""

import sys

import small
import torch
from peft import LoraConfig, get_peft_model

import mesotron

SETTINGS = {
    "muon": (mesotron.muon, {}),
    "muon_per_head": (mesotron.muon, {"per_head": True, "weight_decay": 0.1}),
    "muon_spectral": (mesotron.muon, {"scale": "spectral", "steps": 3, "nesterov": False}),
    "muon_cubic": (mesotron.muon, {"filter": "cubic", "batched": False}),
    "muon_polar_express": (mesotron.muon, {"filter": "polar_express", "dtype": "float64"}),
    "muon_low_rank": (mesotron.muon, {"filter": "low_rank", "rank": 4}),
    "muon_leash": (mesotron.muon, {"leash": 0.1}),
    "muon_aux_lr": (mesotron.muon, {"aux_lr": 1e-4, "momentum_dtype": "bfloat16"}),
    "pion": (mesotron.pion, {}),
    "pion_promote": (mesotron.pion, {"promote": 2, "scale": "moonlight"}),
    "pion_noise": (mesotron.pion, {"cutoff": "noise"}),
    "pion_aligned": (mesotron.pion, {"cutoff": "aligned"}),
    "pion_cutoff": (mesotron.pion, {"cutoff": 0.3, "per_head": True}),
    "normuon": (mesotron.normuon, {"beta2": 0.9}),
    "muon_sgd": (mesotron.muon_sgd, {}),
    "adamw": (mesotron.adamw, {"betas": (0.8, 0.99)}),
}
LORA = {
    "lora_muon": (mesotron.muon, {"lora": "product"}),
    "lora_direction": (mesotron.muon, {"lora": "product", "lora_unit": "direction"}),
    "lora_pion": (mesotron.pion, {"lora": "product", "cutoff": "noise"}),
    "lora_adamw": (mesotron.adamw, {}),
}


def train(model, optimizer, steps):
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(3, 15, (4, 12), generator=draw)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


def run(name, make, settings, lora=False):
    model = small.make_model()
    if lora:
        torch.manual_seed(2)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))

    optimizer = make(model, lr=1e-2, **settings)
    train(model, optimizer, steps=3)

    # A state that is saved and loaded goes on as if nothing had happened.
    state = optimizer.state_dict()
    optimizer = make(model, lr=1e-2, **settings)
    optimizer.load_state_dict(state)
    train(model, optimizer, steps=2)

    small.save_weights(name, model)
    return {key: float(value) for key, value in optimizer.stats().items()}


def main():
    stats = {}
    for name, (make, settings) in SETTINGS.items():
        stats[name] = run(name, make, settings)
    for name, (make, settings) in LORA.items():
        stats[name] = run(name, make, settings, lora=True)

    small.write("stats", stats)
    small.write("routing", str(mesotron.route(small.make_model())).splitlines())


sys.exit(main())

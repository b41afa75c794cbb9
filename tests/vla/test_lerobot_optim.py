"""LeRobot's own trainer with our optimizers, on a dataset that we exported; needs `lerobot`."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from mesotron.config import DemosConfig, WorldConfig
from mesotron.vla.demos import make_demos
from mesotron.vla.lerobot import export_lerobot

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lerobot") is None, reason="needs lerobot"),
]
PLUGIN = "--optimizer.discover_packages_path=mesotron.vla.lerobot_optim"
TINY = """
    --policy.type=act --policy.device=cpu --policy.push_to_hub=false --policy.dim_model=64
    --policy.pretrained_backbone_weights=null --policy.n_heads=4 --policy.dim_feedforward=128
    --policy.n_encoder_layers=1 --policy.n_vae_encoder_layers=1 --policy.chunk_size=8
    --policy.n_action_steps=8 --use_policy_training_preset=false --scheduler.type=diffuser
    --scheduler.name=constant --scheduler.num_warmup_steps=0 --dataset.repo_id=local/demos
    --dataset.video_backend=pyav --batch_size=4 --num_workers=0 --eval_freq=0 --save_freq=2
    --steps=2 --optimizer.type=mesotron_pion --optimizer.lr=1e-3
"""


def lerobot_train(*words: str) -> None:
    command = [sys.executable, "-P", "-m", "lerobot.scripts.lerobot_train", PLUGIN, *words]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def test_act_trains_and_resumes_with_muon_on_vision_and_pion_on_actions(tmp_path):
    world = WorldConfig(name="object10", pixels=64)
    demos = make_demos(
        DemosConfig(
            out=tmp_path / "ours",
            episodes=2,
            starts=0,
            workers=1,
            world=world,
        ),
        log=None,
    )

    export_lerobot(demos, tmp_path / "data")
    out = tmp_path / "out"
    lerobot_train(*TINY.split(), f"--dataset.root={tmp_path / 'data'}", f"--output_dir={out}")
    saved = out / "checkpoints/last/pretrained_model/train_config.json"
    lerobot_train(f"--config_path={saved}", "--resume=true", "--steps=4")
    state = out / "checkpoints/000004/training_state/optimizer_param_groups.json"

    rules = {
        name: (group["rule"], group["step"])
        for group in json.loads(state.read_text())
        for name in group["param_names"]
    }

    assert {step for _, step in rules.values()} == {4}
    assert rules["model.backbone.layer4.1.conv2.weight"][0] == "muon"
    assert rules["model.decoder.layers.0.linear1.weight"][0] == "pion"

    for name in ("action_head.weight", "decoder_pos_embed.weight", "backbone.conv1.weight"):
        assert rules[f"model.{name}"][0] == "adamw"

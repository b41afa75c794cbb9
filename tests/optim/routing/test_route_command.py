"""`mesotron route`: tables from configs alone, and one sentence for every broken one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mesotron.config import RouteConfig
from mesotron.optim.routing.command import load_on_meta, run

transformers = pytest.importorskip("transformers")

TINY = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_prints_the_table_and_writes_json(folder, capsys):
    out = folder / "table.json"
    config = RouteConfig(model=str(folder), optim="muon_sgd", per_head=True, out=out)
    assert run(config) == 0
    text = capsys.readouterr().out
    assert "model.layers.{0..1}.self_attn.k_proj.weight" in text
    assert "optimizer state in fp32: muon" in text
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert rows["model.layers.1.self_attn.o_proj.weight"]["view"] == "cols:4"
    assert rows["lm_head.weight"]["rule"] == "sgd"


def test_config_file_overrides_and_lora(folder, capsys):
    config = RouteConfig(
        model=str(folder / "config.json"), optim="pion", override=("*mlp*lora_B*=muon",), lora=4
    )
    assert run(config) == 0
    lines = capsys.readouterr().out.splitlines()
    rule = {line.split()[0]: line.split()[3] for line in lines if "lora_" in line}
    stem = "base_model.model.model.layers.{0..1}."
    assert rule[stem + "self_attn.q_proj.lora_B.default.weight"] == "pion"
    assert rule[stem + "mlp.up_proj.lora_B.default.weight"] == "muon"
    assert rule[stem + "mlp.up_proj.lora_A.default.weight"] == "adamw"


def test_model_is_built_without_weights(folder):
    model = load_on_meta(str(folder))
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert all(param.is_meta for param in model.parameters())


def test_unnamed_architecture_falls_back_to_the_language_model(tmp_path):
    fields = {**TINY, "architectures": ["os", "torch", "AutoConfig"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert type(load_on_meta(str(tmp_path))).__name__ == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": 3}', "has no model_type"),
        ('{"model_type": "no_such_model"}', "cannot read this config"),
        (json.dumps({**TINY, "hidden_size": "wide"}), "cannot read this config.*hidden_size"),
        (json.dumps({**TINY, "hidden_size": -4}), "cannot be built from this config"),
        (
            '{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}',
            "cannot read this config",
        ),
    ],
)
def test_broken_configs_get_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        run(RouteConfig(model=str(path)))
    assert "\n" not in str(caught.value)
    assert ". " not in str(caught.value)
    assert "trust_remote_code" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("/no/such/folder", "does not exist"),
        ("missing.json", "does not exist"),
        ("somebody/no-such-model", "could not be read from the hub"),
    ],
)
def test_places_that_are_not_there(model, sentence, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=sentence):
        run(RouteConfig(model=model))


def test_bad_arguments(folder):
    with pytest.raises(ValueError, match="is not PATTERN=RULE"):
        run(RouteConfig(model=str(folder), override=("pion",)))
    with pytest.raises(ValueError, match="rank of at least 1"):
        run(RouteConfig(model=str(folder), lora=0))
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"folder without a config.json"):
        run(RouteConfig(model=str(folder)))


@pytest.mark.parametrize("name", ["nope", "nope/nope"])
def test_without_a_network_a_name_is_refused_at_once(name):
    """The hub's client would try again and again, and say so on stderr."""
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "https_proxy": "", "all_proxy": ""}
    command = [sys.executable, "-m", "mesotron", "route", name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 2
    assert "could not be read from the hub" in done.stderr
    assert "Retry" not in done.stderr
    assert done.stderr.count("\n") == 1

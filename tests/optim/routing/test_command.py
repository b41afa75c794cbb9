"""`mesotron optim route`: tables from configs alone, and one-line errors for broken ones."""

from __future__ import annotations

import json

import pytest
from optim.routing.test_golden import GQA

from mesotron.config import RouteConfig
from mesotron.optim.routing.command import load_on_meta, run

transformers = pytest.importorskip("transformers")

TINY = {
    **GQA,
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_prints_the_table_and_writes_json(folder, capsys):
    out = folder / "table.json"
    config = RouteConfig(
        model=str(folder),
        optim="muon_sgd",
        per_head=True,
        out=out,
    )

    assert run(config) == 0
    text = capsys.readouterr().out
    assert "model.layers.{0..1}.self_attn.k_proj.weight" in text
    assert "optimizer state" in text

    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert rows["model.layers.1.self_attn.o_proj.weight"]["view"] == "cols:4"
    assert rows["lm_head.weight"]["rule"] == "sgd"


def test_config_file_overrides_and_lora(folder, capsys):
    config = RouteConfig(
        model=str(folder / "config.json"), optim="pion", override=("*mlp*lora_B*=muon",), lora=4
    )
    assert run(config) == 0

    lines = capsys.readouterr().out.splitlines()
    rule = {}
    for line in lines:
        if "lora_" in line:
            rule[line.split()[0]] = line.split()[3]

    stem = "base_model.model.model.layers.{0..1}."

    assert rule[stem + "self_attn.q_proj.lora_B.default.weight"] == "pion"
    assert rule[stem + "mlp.up_proj.lora_B.default.weight"] == "muon"
    assert rule[stem + "mlp.up_proj.lora_A.default.weight"] == "adamw"


def test_the_shipped_model_is_known_by_name():
    assert load_on_meta("tiny").config.hidden_size == 128


def test_unnamed_architecture_falls_back_to_the_language_model_without_weights(folder):
    fields = {**TINY, "architectures": ["os", "torch", "AutoConfig"]}
    (folder / "config.json").write_text(json.dumps(fields))
    model = load_on_meta(str(folder))

    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "model_type"),
        ('{"model_type": 3}', "model_type"),
        ('{"model_type": "no_such_model"}', "no_such_model"),
        (json.dumps({**TINY, "hidden_size": "wide"}), "hidden_size"),
        (json.dumps({**TINY, "hidden_size": -4}), "Qwen2ForCausalLM"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}', "config"),
    ],
)
def test_broken_configs_give_one_line(tmp_path, content, match):
    path = tmp_path / "config.json"
    path.write_text(content)

    with pytest.raises(ValueError, match=match) as caught:
        run(RouteConfig(model=str(path)))

    assert "\n" not in str(caught.value)
    assert ". " not in str(caught.value)
    assert "trust_remote_code" not in str(caught.value)


def test_missing_sources_and_wrong_arguments_are_refused_by_name(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    for source, options, match in (
        ("/no/such/folder", {}, "/no/such/folder"),
        ("missing.json", {}, "missing.json"),
        ("user/no-such-model", {}, "user/no-such-model"),
        (empty, {}, r"config\.json"),
        (folder, {"override": ("pion",)}, "'pion'"),
        (folder, {"lora": 0}, "--lora 0"),
    ):
        with pytest.raises(ValueError, match=match):
            run(RouteConfig(model=str(source), **options))

"""Routing of plain torch modules: rules, views, overrides, LoRA, shards, groups and errors."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from torch import nn

from mesotron.optim.routing import route


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3, groups=16))
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.fc = nn.Linear(8, 5)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.layer_scale = nn.Parameter(torch.ones(8))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        encoder_layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder_layer, 2)
        self.head = nn.Linear(8, 32, bias=False)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8))
        self.language = nn.Sequential(nn.Linear(8, 8))
        self.action = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
        self.action_extra = nn.Sequential(nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)


class Mystery(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(4, 6))
        self.linear = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)


def test_convolutional_network():
    table = route(ResNet())
    spectral = {row.name: row.view for row in table if row.rule == "muon"}
    assert spectral == {"block.0.weight": "conv", "up.weight": "conv/T"}
    assert "first layer" in table.row("conv1.weight").reason
    assert "depthwise" in table.row("block.1.weight").reason
    assert table.row("fc.weight").role == "head"


class Wrapper(nn.Module):
    def __init__(self, **inner):
        super().__init__()
        self._modules.update(inner)


def bert_and(last: nn.Module) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 40}
    config = transformers.BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    return Wrapper(bert=transformers.BertModel(config), fc=last)


def mlp(*widths: int) -> list[nn.Module]:
    return [nn.Linear(i, o) for i, o in itertools.pairwise(widths)]


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (Wrapper(model=ResNet()), {"model.fc.weight"}),
        (nn.DataParallel(ResNet()), {"module.fc.weight"}),
        (torch.compile(ResNet(), backend="eager"), {"_orig_mod.fc.weight"}),
        (Wrapper(layers=nn.ModuleList(mlp(8, 16, 16, 4))), {"layers.2.weight"}),
        (bert_and(nn.Linear(16, 3)), {"fc.weight"}),
        (Wrapper(body=nn.Sequential(*mlp(8, 16, 16)), heads=nn.ModuleList(mlp(4, 5, 6))),
         {"heads.0.weight", "heads.1.weight"}),
        (Wrapper(policy_head=nn.Sequential(*mlp(8, 16, 4)), value=nn.Sequential(*mlp(8, 16, 1))),
         {"policy_head.1.weight", "value.1.weight"}),
        (Wrapper(blocks=nn.ModuleList([Wrapper(up=nn.Linear(8, 16), down=nn.Linear(16, 8)),
                                       Wrapper(up=nn.Linear(8, 16), down=nn.Linear(16, 8))])),
         set()),
    ],
)  # fmt: skip
def test_output_layers_are_found_through_wrappers(model, heads):
    assert {row.name for row in route(model) if row.role == "head"} == heads


def test_plain_transformer():
    table = route(Tokens())
    roles = {row.name: row.role for row in table}
    assert roles["embed.weight"] == "embedding"
    assert roles["pos_embed"] == "table"
    assert roles["cls_token"] == roles["layer_scale"] == "vector"
    assert roles["temperature"] == "scalar"
    assert roles["head.weight"] == "head"
    assert table.row("encoder.layers.1.self_attn.in_proj_weight").view == "rows:3"
    assert table.row("encoder.layers.1.linear1.weight").rule == "muon"
    heads = route(Tokens(), per_head=True)
    assert heads.row("encoder.layers.0.self_attn.in_proj_weight").view == "rows:6"
    assert heads.row("encoder.layers.0.self_attn.out_proj.weight").view == "cols:2"
    assert heads.row("encoder.layers.0.linear1.weight").view == "whole"


def test_multihead_attention_with_separate_inputs():
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True)
    table = route(attention, per_head=True)
    assert {row.name: row.view for row in table if row.rule == "muon"} == {
        "q_proj_weight": "rows:2",
        "k_proj_weight": "rows:2",
        "v_proj_weight": "rows:2",
        "out_proj.weight": "cols:2",
    }
    assert table.row("bias_k").rule == "adamw"


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.LSTMCell, 4)])
def test_recurrent_gates_are_split(cell, gates):
    table = route(cell(6, 8))
    views = {row.view for row in table if row.rule == "muon"}
    assert views == {f"rows:{gates}"}
    assert sum(row.rule == "adamw" for row in table) == 2  # the biases


def test_parametrized_weight_keeps_its_role():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    nn.utils.parametrizations.orthogonal(model[0])
    nn.utils.parametrizations.weight_norm(model[1])
    table = route(model)
    assert table.row("0.parametrizations.weight.original").rule == "muon"
    assert table.row("1.parametrizations.weight.original1").rule == "adamw"


def test_stable_baselines_policy():
    spaces = pytest.importorskip("gymnasium").spaces
    policies = pytest.importorskip("stable_baselines3.common.policies")
    policy = policies.ActorCriticPolicy(
        spaces.Box(-1, 1, (4,)), spaces.Box(-1, 1, (2,)), lr_schedule=lambda _: 1e-3
    )
    table = route(policy)
    hidden = {row.name for row in table if row.rule == "muon"}
    nets = ("policy_net", "value_net")
    assert hidden == {f"mlp_extractor.{net}.{i}.weight" for net in nets for i in (0, 2)}
    assert table.row("action_net.weight").role == table.row("value_net.weight").role == "head"
    assert table.row("log_std").rule == "adamw"


def test_tied_weights_are_one_row_and_the_embedding_wins():
    model = Tokens()
    model.head.weight = model.embed.weight
    table = route(model)
    row = table.row("head.weight")
    assert (row.name, row.role, row.aliases) == ("embed.weight", "embedding", ("head.weight",))
    grouped = [p for group in table.groups(model) for p in group["params"]]
    assert sum(p is model.embed.weight for p in grouped) == 1


def test_head_tied_into_a_hidden_layer_stays_a_head():
    model = nn.ModuleDict({"inner": nn.Linear(8, 8), "lm_head": nn.Linear(8, 8)})
    model["lm_head"].weight = model["inner"].weight
    assert route(model).row("inner.weight").role == "head"


def test_only_trainable_parameters_have_rows():
    model = Tokens()
    model.encoder.requires_grad_(False)
    assert not any(row.name.startswith("encoder") for row in route(model))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        route(model)


def test_overrides_take_rule_view_and_scale():
    overrides = {
        "vision.0.weight": {"view": "rows:2", "lr_scale": 0.5},
        "vision.*": "sgd",
        "*.bias": {"lr_scale": 2.0},
    }
    table = route(Policy(), overrides=overrides)
    first = table.row("vision.0.weight")
    assert (first.rule, first.view, first.lr_scale) == ("muon", "rows:2", 0.5)
    assert table.row("vision.0.bias").rule == "sgd"  # the first matching pattern wins
    assert table.row("action.0.bias").lr_scale == 2.0
    assert "override 'vision.*'" in table.row("vision.1.weight").reason


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"overrides": {"vison.*": "sgd"}}, r"vison.*vision\."),
        ({"overrides": {"norm.weight": "pion"}}, "norm.weight"),
        ({"overrides": {"vision.0.weight": "adam"}}, "'adam'"),
        ({"overrides": {"vision.0.weight": {"lr": 1.0}}}, "'lr'"),
        ({"overrides": {"vision.0.weight": {"view": "rows:3"}}}, "vision.0.weight.*rows:3"),
        ({"overrides": {"*": "sgd", "norm.*": "adamw"}}, r"norm\.\*"),
        ({"modalities": {"actoin": "pion"}}, "actoin.*action"),
        ({"modalities": {"action": "poin"}}, "'poin'"),
        ({"matrix": "shampoo"}, "matrix"),
        ({"aux": "muon"}, "aux"),
        ({"lora": "C"}, "lora"),
        ({"per_head": True}, "per_head"),
        ({"per_head": {"*.query.weight": 2}}, "per_head"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, match):
    with pytest.raises(ValueError, match=match):
        route(Policy(), **arguments)


def test_modalities_choose_the_rule_below_a_prefix():
    table = route(Policy(), modalities={"action": "pion", "vision": "muon"}, aux="sgd")
    assert table.row("action.0.weight").rule == "pion"
    assert table.row("action_extra.0.weight").rule == "muon"  # a prefix ends at a dot
    assert table.row("vision.0.weight").rule == "muon"
    assert table.row("action.0.bias").rule == "sgd"


def test_unclear_parameters_need_an_override():
    with pytest.raises(ValueError, match=r"kernel.*overrides=\{'kernel': 'adamw'\}"):
        route(Mystery())
    assert route(Mystery(), overrides={"kernel": "adamw"}).row("kernel").rule == "adamw"
    filtered = route(Mystery(), overrides={"kernel": {"rule": "pion", "view": "T"}}).row("kernel")
    assert (filtered.rule, filtered.view) == ("pion", "T")


def test_head_counts_by_pattern():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                self.add_module(name, nn.Linear(8, 8, bias=False))
            self.norm = nn.LayerNorm(8)

    with pytest.raises(ValueError, match=r"q_proj\.weight"):
        route(nn.Sequential(Block()), per_head=True)
    table = route(nn.Sequential(Block()), per_head={"*_proj.weight": 4})
    assert [row.view for row in table if row.rule == "muon"] == ["rows:4"] * 3 + ["cols:4"]
    with pytest.raises(ValueError, match="3 heads"):
        route(nn.Sequential(Block()), per_head={"*_proj.weight": 3})


def test_unknown_output_projection_is_refused_under_per_head():
    block = nn.ModuleDict(
        {"qkv": nn.Linear(8, 24), "mix": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}
    )
    with pytest.raises(ValueError, match=r"mix\.weight"):
        route(block, per_head={"qkv.weight": 2})
    overrides = {"mix.weight": {"view": "cols:2"}}
    table = route(block, per_head={"qkv.weight": 2}, overrides=overrides)
    assert (table.row("qkv.weight").view, table.row("mix.weight").view) == ("rows:6", "cols:2")
    with pytest.raises(ValueError, match=r"qkv\.weight"):
        route(block, per_head=True, overrides=overrides)


def test_lora_factors_by_choice():
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_head=4, n_layer=1, vocab_size=32)
    lora = peft.LoraConfig(r=4, target_modules=["c_attn", "wte"], fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    stem = "base_model.model.transformer.h.0.attn.c_attn.lora_{}.default.weight"
    for choice, filtered in {"B": "B", "A": "A", "both": "AB", "none": ""}.items():
        table = route(model, lora=choice)
        for factor in "AB":
            assert (table.row(stem.format(factor)).rule == "muon") == (factor in filtered)
        assert all(row.rule == "adamw" for row in table if "lora_embedding" in row.name)
        assert not any("base_layer" in row.name for row in table)  # frozen
    # The split of its fused base weight, but not stored transposed.
    assert route(model).row(stem.format("B")).view == "rows:3"
    assert route(model, per_head=True).row(stem.format("B")).view == "rows:12"


def test_zero_placeholders_are_refused():
    placeholder, empty = nn.Linear(4, 4), nn.Linear(4, 4)
    placeholder.weight.ds_id = 7
    empty.weight = nn.Parameter(torch.empty(0))
    for model, match in ((placeholder, "ZeRO-3"), (empty, "weight is empty")):
        with pytest.raises(ValueError, match=match):
            route(model)


def test_groups_refuse_a_model_that_changed():
    model = Tokens()
    table = route(model)
    model.cls_token.requires_grad_(False)
    with pytest.raises(ValueError, match="cls_token"):
        table.groups(model)
    model.cls_token.requires_grad_(True)
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"extra\.weight"):
        table.groups(model)


def test_full_text_counts_and_unknown_names():
    table = route(Tokens())
    assert "encoder.layers.1.linear1.weight" in table.to_text(full=True)
    numel = sum(p.numel() for p in Tokens().parameters())
    assert sum(count.parameters for count in table.counts().values()) == numel
    with pytest.raises(ValueError, match="'x'"):
        table.row("x")

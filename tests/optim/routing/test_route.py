"""Routing of plain torch modules: rules, views, overrides, LoRA, shards, groups and errors."""

from __future__ import annotations

import functools
import itertools

import gymnasium
import peft
import pytest
import torch
import transformers
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from mesotron.optim.routing import route
from mesotron.optim.views import View


class Parts(nn.Module):
    """A module of named modules and parameters."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def resnet() -> nn.Module:
    return Parts(
        conv1=nn.Conv2d(3, 8, 3, bias=False),
        bn1=nn.BatchNorm2d(8),
        block=nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3, groups=16)),
        up=nn.ConvTranspose2d(16, 8, 2, stride=2),
        fc=nn.Linear(8, 5),
    )


def tokens() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return Parts(
        embed=nn.Embedding(32, 8),
        pos_embed=nn.Parameter(torch.zeros(1, 16, 8)),
        cls_token=nn.Parameter(torch.zeros(1, 1, 8)),
        layer_scale=nn.Parameter(torch.ones(8)),
        temperature=nn.Parameter(torch.tensor(1.0)),
        encoder=nn.TransformerEncoder(layer, 2),
        head=nn.Linear(8, 32, bias=False),
    )


def policy() -> nn.Module:
    return Parts(
        vision=nn.Sequential(*mlp(6, 8, 8)),
        action=nn.Sequential(*mlp(8, 8, 2)),
        action_extra=nn.Sequential(*mlp(8, 8)),
        norm=nn.LayerNorm(8),
    )


def mystery() -> nn.Module:
    kernel = nn.Parameter(torch.zeros(4, 6))
    return Parts(
        kernel=kernel,
        linear=nn.Linear(6, 6),
        norm=nn.LayerNorm(6),
    )


def bert_and(last: nn.Module) -> nn.Module:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 40,
    }

    config = transformers.BertConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        **sizes,
    )
    return Parts(bert=transformers.BertModel(config), fc=last)


def mlp(*widths: int) -> list[nn.Module]:
    return [nn.Linear(i, o) for i, o in itertools.pairwise(widths)]


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (Parts(model=resnet()), {"model.fc.weight"}),
        (nn.DataParallel(resnet()), {"module.fc.weight"}),
        (torch.compile(resnet(), backend="eager"), {"_orig_mod.fc.weight"}),
        (Parts(layers=nn.ModuleList(mlp(8, 16, 16, 4))), {"layers.2.weight"}),
        (bert_and(nn.Linear(16, 3)), {"fc.weight"}),
        (
            Parts(body=nn.Sequential(*mlp(8, 16, 16)), heads=nn.ModuleList(mlp(4, 5, 6))),
            {"heads.0.weight", "heads.1.weight"},
        ),
        (
            Parts(policy_head=nn.Sequential(*mlp(8, 16, 4)), value=nn.Sequential(*mlp(8, 16, 1))),
            {"policy_head.1.weight", "value.1.weight"},
        ),
        (
            Parts(
                body=nn.Sequential(*mlp(8, 16)),
                classifier=nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1)),
            ),
            {"classifier.1.weight"},
        ),
        (
            Parts(
                blocks=nn.ModuleList(
                    [
                        Parts(up=nn.Linear(8, 16), down=nn.Linear(16, 8)),
                        Parts(up=nn.Linear(8, 16), down=nn.Linear(16, 8)),
                    ]
                )
            ),
            set(),
        ),
    ],
)
def test_output_layers_are_found_through_wrappers(model, heads):
    assert {row.name for row in route(model) if row.role == "head"} == heads


def reparametrized() -> nn.Module:
    model = nn.Sequential(*mlp(8, 8, 8, 2))
    nn.utils.parametrizations.orthogonal(model[0])
    nn.utils.parametrizations.weight_norm(model[1])

    return model


def stable_baselines_policy() -> nn.Module:
    box = functools.partial(gymnasium.spaces.Box, -1, 1)
    return ActorCriticPolicy(box((4,)), box((2,)), lr_schedule=lambda _: 1e-3)


def encoder(fused: str, output: str) -> dict[str, str]:
    views = {"self_attn.in_proj_weight": fused, "self_attn.out_proj.weight": output}
    views |= {"linear1.weight": "whole", "linear2.weight": "whole"}
    return {f"encoder.layers.{k}.{name}": view for k in range(2) for name, view in views.items()}


def test_the_reason_names_the_axes_of_the_matrix():
    """A transposed convolution stores (in, out, *kernel)."""
    model = resnet()
    table = route(model)
    for name, reason, shape in (
        ("block.0.weight", "outputs x (inputs * kernel)", (16, 8 * 3 * 3)),
        ("up.weight", "(outputs * kernel) x inputs", (8 * 2 * 2, 16)),
    ):
        row = table.row(name)
        (window,) = View.parse(row.view).windows(model.get_parameter(name))
        assert (window.rows, window.cols) == shape
        assert reason in row.reason


@pytest.mark.parametrize(
    ("model", "per_head", "views"),
    [
        (resnet(), False, {"block.0.weight": "conv", "up.weight": "conv/T"}),
        (tokens(), False, encoder("rows:3", "whole")),
        (tokens(), True, encoder("rows:6", "cols:2")),
        (
            nn.MultiheadAttention(
                8,
                2,
                kdim=6,
                vdim=4,
                add_bias_kv=True,
            ),
            True,
            {**{f"{name}_proj_weight": "rows:2" for name in "qkv"}, "out_proj.weight": "cols:2"},
        ),
        (nn.LSTM(6, 8), False, {"weight_ih_l0": "rows:4", "weight_hh_l0": "rows:4"}),
        (nn.GRUCell(6, 8), False, {"weight_ih": "rows:3", "weight_hh": "rows:3"}),
        (reparametrized(), False, {"0.parametrizations.weight.original": "whole"}),
        (
            stable_baselines_policy(),
            False,
            {
                f"mlp_extractor.{net}_net.{layer}.weight": "whole"
                for net in ("policy", "value")
                for layer in (0, 2)
            },
        ),
    ],
)
def test_the_filtered_matrices_and_their_views(model, per_head, views):
    table = route(model, per_head=per_head)
    assert {row.name: row.view for row in table if row.rule == "muon"} == views


def test_what_is_no_hidden_matrix_has_a_role():
    roles = {row.name: row.role for row in route(tokens())}
    expected = {
        "embed.weight": "embedding",
        "pos_embed": "table",
        "cls_token": "vector",
    }

    expected |= {
        "layer_scale": "vector",
        "temperature": "scalar",
        "head.weight": "head",
    }

    assert roles | expected == roles


def test_tied_weights_are_one_row_and_embeddings_and_heads_win():
    model = tokens()
    model.head.weight = model.embed.weight
    table = route(model)
    row = table.row("head.weight")

    assert (row.name, row.role, row.aliases) == ("embed.weight", "embedding", ("head.weight",))
    grouped = [p for group in table.groups(model) for p in group["params"]]
    assert sum(p is model.embed.weight for p in grouped) == 1

    model = nn.ModuleDict({"inner": nn.Linear(8, 8), "lm_head": nn.Linear(8, 8)})
    model["lm_head"].weight = model["inner"].weight
    assert route(model).row("inner.weight").role == "head"


def test_overrides_and_modalities():
    overrides = {
        "vision.0.weight": {"view": "rows:2", "lr_scale": 0.5},
        "vision.*": "sgd",
        "*.bias": {"lr_scale": 2.0},
    }

    table = route(policy(), overrides=overrides)
    first = table.row("vision.0.weight")
    assert (first.rule, first.view, first.lr_scale) == ("muon", "rows:2", 0.5)
    assert table.row("vision.0.bias").rule == "sgd"  # the first matching pattern wins
    assert table.row("action.0.bias").lr_scale == 2.0
    assert "override 'vision.*'" in table.row("vision.1.weight").reason

    table = route(policy(), modalities={"action": "pion", "vision": "muon"}, aux="sgd")
    rules = {name: table.row(f"{name}.0.weight").rule for name in ("action", "action_extra")}
    assert rules == {"action": "pion", "action_extra": "muon"}  # a prefix ends at a dot
    assert table.row("action.0.bias").rule == "sgd"


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
        route(policy(), **arguments)


def test_unclear_parameters_need_an_override():
    with pytest.raises(ValueError, match=r"kernel.*overrides=\{'kernel': 'adamw'\}"):
        route(mystery())

    assert route(mystery(), overrides={"kernel": "adamw"}).row("kernel").rule == "adamw"
    filtered = route(mystery(), overrides={"kernel": {"rule": "pion", "view": "T"}}).row("kernel")
    assert (filtered.rule, filtered.view) == ("pion", "T")


def test_head_counts_by_pattern():
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    layers = {name: nn.Linear(8, 8, bias=False) for name in names} | {"norm": nn.LayerNorm(8)}
    model = nn.Sequential(nn.ModuleDict(layers))
    table = route(model, per_head={"*_proj.weight": 4})

    assert [row.view for row in table if row.rule == "muon"] == ["rows:4"] * 3 + ["cols:4"]
    for heads, match in ((True, r"q_proj\.weight"), ({"*_proj.weight": 3}, "3 heads")):
        with pytest.raises(ValueError, match=match):
            route(model, per_head=heads)


def test_unknown_output_projection_is_refused_under_per_head():
    block = nn.ModuleDict(
        {
            "qkv": nn.Linear(8, 24),
            "mix": nn.Linear(8, 8),
            "norm": nn.LayerNorm(8),
        }
    )
    with pytest.raises(ValueError, match=r"mix\.weight"):
        route(block, per_head={"qkv.weight": 2})

    overrides = {"mix.weight": {"view": "cols:2"}}
    table = route(block, per_head={"qkv.weight": 2}, overrides=overrides)
    assert (table.row("qkv.weight").view, table.row("mix.weight").view) == ("rows:6", "cols:2")

    with pytest.raises(ValueError, match=r"qkv\.weight"):
        route(block, per_head=True, overrides=overrides)


def test_lora_factors_by_choice():
    config = transformers.GPT2Config(
        n_embd=16,
        n_head=4,
        n_layer=1,
        vocab_size=32,
    )

    lora = peft.LoraConfig(
        r=4,
        target_modules=["c_attn", "wte"],
        fan_in_fan_out=True,
    )

    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    stem = "base_model.model.transformer.h.0.attn.c_attn.lora_{}.default.weight"
    for choice, filtered in {
        "B": "B",
        "A": "A",
        "both": "AB",
        "none": "",
    }.items():
        table = route(model, lora=choice)
        for factor in "AB":
            assert (table.row(stem.format(factor)).rule == "muon") == (factor in filtered)

        assert all(row.rule == "adamw" for row in table if "lora_embedding" in row.name)
        assert not any("base_layer" in row.name for row in table)  # frozen

    # The split of its fused base weight, but not stored transposed.
    assert route(model).row(stem.format("B")).view == "rows:3"
    assert route(model, per_head=True).row(stem.format("B")).view == "rows:12"


def test_models_without_whole_trainable_parameters_are_refused():
    placeholder, empty, frozen = (nn.Linear(4, 4) for _ in range(3))
    placeholder.weight.ds_id = 7
    empty.weight = nn.Parameter(torch.empty(0))
    frozen.requires_grad_(False)

    words = "ZeRO-3", "weight is empty", "no trainable parameter"
    for model, match in zip((placeholder, empty, frozen), words, strict=True):
        with pytest.raises(ValueError, match=match):
            route(model)


def test_groups_refuse_a_model_that_changed():
    model = tokens()
    table = route(model)
    model.cls_token.requires_grad_(False)

    assert {row.name for row in table} - {row.name for row in route(model)} == {"cls_token"}
    with pytest.raises(ValueError, match="cls_token"):
        table.groups(model)

    model.cls_token.requires_grad_(True)
    model.extra = nn.Linear(2, 2)

    with pytest.raises(ValueError, match=r"extra\.weight"):
        table.groups(model)


def test_the_full_text_and_counts_hold_every_parameter():
    table = route(tokens())
    assert "encoder.layers.1.linear1.weight" in table.to_text(full=True)

    numel = sum(p.numel() for p in tokens().parameters())
    assert sum(count.parameters for count in table.counts().values()) == numel

    with pytest.raises(ValueError, match="'x'"):
        table.row("x")


def test_a_bare_parameter_with_a_leading_1_holds_rows_and_others_are_unclear():
    """ViTs broadcast such rows over the batch; a stack of experts has its number in front."""
    rows = Parts(thing=nn.Parameter(torch.zeros(1, 16, 8)), layer=nn.Linear(8, 8))
    row = route(rows).row("thing")
    assert (row.role, row.rule) == ("table", "adamw")

    for shape in ((16, 1, 8), (16, 8, 8)):
        with pytest.raises(ValueError, match="overrides"):
            route(Parts(thing=nn.Parameter(torch.zeros(shape)), layer=nn.Linear(8, 8)))

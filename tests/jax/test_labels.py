"""Routing of parameter trees: flax, nnx, Equinox and plain trees, and unclear leaves."""

import jax
import jax.numpy as jnp
import pytest

from mesotron.jax import chain_with_muon, label, labels


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dense(inputs: int, outputs: int, *stack: int) -> dict:
    return {"kernel": leaf(*stack, inputs, outputs), "bias": leaf(*stack, outputs)}


def attention(width: int, heads: int, *stack: int, bias: bool = True) -> dict:
    size = width // heads
    queries = {"kernel": leaf(*stack, width, heads, size)}

    out = {"kernel": leaf(*stack, heads, size, width)}
    if bias:
        queries["bias"], out["bias"] = leaf(*stack, heads, size), leaf(*stack, width)

    return {
        "query": queries,
        "key": queries,
        "value": queries,
        "out": out,
    }


def norm(width: int, *stack: int) -> dict:
    return {"scale": leaf(*stack, width), "bias": leaf(*stack, width)}


def table(tree, **options) -> dict[str, str]:
    """Path -> role and view of all but vectors."""
    rows = label(tree, **options).rows
    return {r.name: f"{r.role} {r.view}" for r in rows if r.role not in ("bias", "norm")}


INPUTS = ("query", "key", "value")


def test_flax_linen():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Embed(7, 8)(x) + self.param("pos_embedding", nn.initializers.zeros, (1, 3, 8))
            x = nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
            x = nn.gelu(nn.Dense(16)(x))
            x = nn.Dense(8)(x)

            return nn.Dense(7, name="lm_head")(x), nn.Dense(1, name="value")(x)

    attention = "params/MultiHeadDotProductAttention_0"
    variables = jax.eval_shape(Net().init, jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    assert table(variables) == {
        "params/Embed_0/embedding": "embedding -",
        **{f"{attention}/{name}/kernel": "attention ioo" for name in INPUTS},
        f"{attention}/out/kernel": "attention iio",
        "params/Dense_0/kernel": "matrix io",
        "params/Dense_1/kernel": "matrix io",
        "params/lm_head/kernel": "head -",
        "params/value/kernel": "head -",
        "params/pos_embedding": "position or token -",
    }

    heads = table(variables, per_head=True)
    assert heads[f"{attention}/query/kernel"] == "attention iso"
    assert heads[f"{attention}/out/kernel"] == "attention sio"
    assert heads["params/Dense_0/kernel"] == "matrix io"


def test_flax_nnx():
    """nnx wraps each array in a variable; paths and views equal those of linen, under jit too."""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(7, 8, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])
            self.head = nnx.Linear(8, 7, rngs=rngs)

    params = nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), nnx.Param)
    assert table(params) == {
        "embed/embedding": "embedding -",
        **{f"attention/{name}/kernel": "attention ioo" for name in INPUTS},
        "attention/out/kernel": "attention iio",
        **{f"layers/{k}/kernel": "matrix io" for k in range(2)},
        "head/kernel": "head -",
    }

    tx = chain_with_muon(0.1, weight_decay=0.0)
    updates = jax.eval_shape(lambda grads: tx.update(grads, tx.init(grads))[0], params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_equinox_has_outputs_first():
    eqx = pytest.importorskip("equinox")

    def shapes(module, *sizes):
        made = eqx.filter_eval_shape(module, *sizes, key=jax.random.key(0))
        return eqx.filter(made, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    mlp = table(shapes(eqx.nn.MLP, 3, 2, 16, 3))
    assert list(mlp.values()) == ["input -", "matrix oi", "matrix oi", "head -"]

    attention = shapes(eqx.nn.MultiheadAttention, 2, 8)
    roles = table({"embed": {"weight": leaf(7, 8)}, "attention": attention})
    for name in ("query", "key", "value", "output"):
        assert roles[f"attention/{name}_proj/weight"] == "attention oi"


def mlp(*sizes: tuple[int, int]) -> dict:
    return {f"Dense_{k}": dense(*size) for k, size in enumerate(sizes)}


def stacked(bias: bool) -> dict:
    layers = {"attention": attention(16, 4, 3, bias=bias), "LayerNorm_0": norm(16, 3)}
    layers |= {"Dense_0": dense(16, 64, 3), "Dense_1": dense(64, 16, 3)}

    return {
        "input_proj": dense(5, 16),
        "layers": layers,
        "policy_head": dense(16, 4),
    }


def convolutional(*channels: tuple[int, int]) -> dict:
    tree = {f"Conv_{k}": dense(*size) for k, size in enumerate(channels)}
    for k, size in enumerate(channels):
        tree[f"Conv_{k}"]["kernel"] = leaf(3, 3, *size)

    experts = {"up": {"kernel": leaf(4, 8, 16)}, "down": {"kernel": leaf(4, 16, 8)}}
    return tree | {
        "experts": experts,
        "router": {"kernel": leaf(8, 4)},
        "head": dense(8, 2),
    }


ENDS = ["input -", "matrix io", "head -"]
STACKED = [
    "input -",
    "matrix sio",
    "matrix sio",
    "attention sioo",
    "attention siio",
    "attention sioo",
    "attention sioo",
    "head -",
]
EXPERTS = ["expert sio", "expert sio", "head -", "router -"]
ACTOR = ((5, 8), (8, 8), (8, 4))
CRITIC = ((5, 8), (8, 8), (8, 1))
# Sorted as text, Dense_10 comes before Dense_2.
DEEP = mlp((3, 8), *[(8, 8)] * 9, (8, 2))


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (stacked(bias=True), STACKED),
        (stacked(bias=False), STACKED),
        (list(DEEP.values()), ["input -", *["matrix io"] * 9, "head -"]),
        (DEEP, ["input -", "matrix io", "head -", *["matrix io"] * 8]),
        (
            {
                "w0": leaf(3, 8),
                "w1": leaf(8, 8),
                "w2": leaf(8, 2),
            },
            ENDS,
        ),
        (mlp(*ACTOR, *CRITIC), ENDS * 2),
        ({"actor": mlp(*ACTOR), "critic": mlp(*CRITIC)}, ENDS * 2),
        (
            convolutional((5, 16), (16, 32), (1, 32)),
            ["input -", "convolution iiio", "depthwise -", *EXPERTS],
        ),
        (
            convolutional((3, 16), (16, 32), (32, 32)),
            ["input -", "convolution iiio", "convolution iiio", *EXPERTS],
        ),
    ],
)
def test_roles_and_views_in_the_order_of_the_leaves(tree, expected):
    assert list(table(tree).values()) == expected


UNCLEAR = {
    "unknown name": {"mixing": leaf(8, 8), "head": dense(8, 2)},
    "no bias": {"a": {"mlp": {"kernel": leaf(3, 8, 8)}}, "head": dense(8, 2)},
    "bottleneck": mlp((4, 8), (8, 4), (4, 8), (8, 1)),
    "single layer without a number": {"trunk": dense(8, 8)},
    "no output layer": {"Block_0": {"up": dense(8, 8)}, "Block_1": {"up": dense(8, 8)}},
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_unclear_leaves_are_filtered_with_one_warning_or_refused(name, monkeypatch):
    monkeypatch.setattr(labels, "_warned", set())
    with pytest.raises(ValueError, match="overrides="):
        label(UNCLEAR[name], strict=True)

    with pytest.warns(UserWarning, match="overrides="):
        found = label(UNCLEAR[name])

    assert [r.rule for r in label(UNCLEAR[name]).rows] == [r.rule for r in found.rows]
    unclear = [r for r in found.rows if r.reason == "unclear, so filtered"]
    assert all(r.rule == "matrix" for r in unclear)
    assert bool(unclear) == (name != "no output layer")


ATTENTION = [f"block/~/multi_head_attention/{x}" for x in ("query", "key", "value", "linear")]
HAIKU = {
    "embed": {"embeddings": leaf(9, 8)},
    "mlp/~/linear_0": {"w": leaf(8, 32), "b": leaf(32)},
    "mlp/~/linear_1": {"w": leaf(32, 8), "b": leaf(8)},
    **{path: {"w": leaf(8, 8), "b": leaf(8)} for path in ATTENTION},
    "layer_norm": {"scale": leaf(8), "offset": leaf(8)},
    "logits": {"w": leaf(8, 9), "b": leaf(9)},
}
# First and last layer without a number, as Haiku names them.
HAIKU_MLP = {
    name: {"w": leaf(*shape), "b": leaf(shape[1])}
    for name, shape in (("linear", (3, 8)), ("linear_1", (8, 8)), ("linear_2", (8, 2)))
}
NAMED = {
    "embed": {"embedding": leaf(9, 8)},
    "up": dense(8, 32),
    "down": dense(32, 8),
}


@pytest.mark.parametrize(
    ("tree", "hidden"),
    [
        (HAIKU, {f"{path}/w" for path in (*ATTENTION, "mlp/~/linear_0", "mlp/~/linear_1")}),
        (HAIKU_MLP, {"linear_1/w"}),
        ({**NAMED, "head": dense(8, 9)}, {"up/kernel", "down/kernel"}),
        (
            {
                "input_proj": dense(5, 8),
                **mlp((8, 8)),
                "actor_head": dense(8, 4),
            },
            {"Dense_0/kernel"},
        ),
    ],
)
def test_usual_trees_need_no_override(tree, hidden):
    assert {path for path, role in table(tree).items() if not role.endswith("-")} == hidden


def test_per_head_needs_an_axis_of_heads():
    tree = {"b": {"q_proj": dense(8, 8), "k_proj": dense(8, 8)}, "embed": {"embedding": leaf(9, 8)}}
    assert table(tree)["b/q_proj/kernel"] == "attention io"

    with pytest.raises(ValueError, match="k_proj"):
        label(tree, per_head=True)


def test_overrides():
    tree = UNCLEAR["no bias"]  # each override decides, so that nothing warns
    assert table(tree, overrides={"*mlp/kernel": "ioo"})["a/mlp/kernel"] == "matrix ioo"
    assert table(tree, stacked=["a/*"])["a/mlp/kernel"] == "matrix sio"
    assert table(tree, overrides={"*mlp*": "adamw"})["a/mlp/kernel"] == "override -"

    blocks = UNCLEAR["no output layer"]
    overridden = table(blocks, overrides={"Block_1/up/kernel": "matrix"})
    assert overridden["Block_1/up/kernel"] == "matrix io"

    with pytest.raises(ValueError, match="typo"):
        label(tree, overrides={"*typo*": "adamw"})

    with pytest.raises(ValueError, match="'io'"):
        label(tree, overrides={"*mlp/kernel": "io"})

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
    return {"query": queries, "key": queries, "value": queries, "out": out}


def norm(width: int, *stack: int) -> dict:
    return {"scale": leaf(*stack, width), "bias": leaf(*stack, width)}


def table(tree, **options) -> dict[str, tuple[str, str]]:
    """Path -> (role, view) of all but vectors."""
    rows = label(tree, **options).rows
    return {r.name: (r.role, r.view) for r in rows if r.role not in ("bias", "norm")}


@pytest.mark.parametrize("bias", [True, False])
def test_stacked_layers_and_their_biases(bias):
    layers = {
        "attention": attention(16, 4, 3, bias=bias),
        "Dense_0": dense(16, 64, 3),
        "Dense_1": dense(64, 16, 3),
        "LayerNorm_0": norm(16, 3),
    }
    roles = table({"input_proj": dense(5, 16), "layers": layers, "policy_head": dense(16, 4)})
    assert roles["layers/attention/query/kernel"] == ("attention", "sioo")
    assert roles["layers/attention/out/kernel"] == ("attention", "siio")
    assert roles["layers/Dense_0/kernel"] == ("matrix", "sio")
    assert "layers/Dense_0/bias" not in roles


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

    variables = jax.eval_shape(Net().init, jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    assert table(variables) == {
        "params/Embed_0/embedding": ("embedding", "-"),
        "params/MultiHeadDotProductAttention_0/query/kernel": ("attention", "ioo"),
        "params/MultiHeadDotProductAttention_0/key/kernel": ("attention", "ioo"),
        "params/MultiHeadDotProductAttention_0/value/kernel": ("attention", "ioo"),
        "params/MultiHeadDotProductAttention_0/out/kernel": ("attention", "iio"),
        "params/Dense_0/kernel": ("matrix", "io"),
        "params/Dense_1/kernel": ("matrix", "io"),
        "params/lm_head/kernel": ("head", "-"),
        "params/value/kernel": ("head", "-"),
        "params/pos_embedding": ("position or token", "-"),
    }
    heads = table(variables, per_head=True)
    assert heads["params/MultiHeadDotProductAttention_0/query/kernel"] == ("attention", "iso")
    assert heads["params/MultiHeadDotProductAttention_0/out/kernel"] == ("attention", "sio")
    assert heads["params/Dense_0/kernel"] == ("matrix", "io")


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
        "embed/embedding": ("embedding", "-"),
        "attention/query/kernel": ("attention", "ioo"),
        "attention/key/kernel": ("attention", "ioo"),
        "attention/value/kernel": ("attention", "ioo"),
        "attention/out/kernel": ("attention", "iio"),
        "layers/0/kernel": ("matrix", "io"),
        "layers/1/kernel": ("matrix", "io"),
        "head/kernel": ("head", "-"),
    }
    tx = chain_with_muon(0.1, weight_decay=0.0)
    updates = jax.eval_shape(lambda grads: tx.update(grads, tx.init(grads))[0], params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_equinox_has_outputs_first():
    eqx = pytest.importorskip("equinox")

    def shapes(module, *sizes):
        made = eqx.filter_eval_shape(module, *sizes, key=jax.random.key(0))
        return eqx.filter(made, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    assert table(shapes(eqx.nn.MLP, 3, 2, 16, 3)) == {
        "layers/0/weight": ("input", "-"),
        "layers/1/weight": ("matrix", "oi"),
        "layers/2/weight": ("matrix", "oi"),
        "layers/3/weight": ("head", "-"),
    }
    attention = shapes(eqx.nn.MultiheadAttention, 2, 8)
    roles = table({"embed": {"weight": leaf(7, 8)}, "attention": attention})
    for name in ("query", "key", "value", "output"):
        assert roles[f"attention/{name}_proj/weight"] == ("attention", "oi")


def test_plain_mlp_ends_go_to_adam():
    layers = [{"w": leaf(i, o), "b": leaf(o)} for i, o in ((3, 8), (8, 8), (8, 8), (8, 2))]
    roles = {"0/w": "input", "1/w": "matrix", "2/w": "matrix", "3/w": "head"}
    assert {path: role for path, (role, _) in table(layers).items()} == roles
    flat = {f"w{k}": leaf(i, o) for k, (i, o) in enumerate(((3, 8), (8, 8), (8, 2)))}
    assert [role for role, _ in table(flat).values()] == ["input", "matrix", "head"]


def test_layers_are_ordered_by_number():
    """Sorted as text, Dense_10 would come before Dense_2."""
    sizes = [(3, 8), *[(8, 8)] * 9, (8, 2)]
    roles = table({f"Dense_{k}": dense(*size) for k, size in enumerate(sizes)})
    assert roles["Dense_10/kernel"][0] == "head"
    assert roles["Dense_0/kernel"][0] == "input"
    assert [role for role, _ in roles.values()].count("matrix") == 9


def test_two_networks_have_their_own_ends_in_one_run_and_apart():
    def net(sizes) -> dict:
        return {f"Dense_{k}": dense(*size) for k, size in enumerate(sizes)}

    actor, critic = ((5, 8), (8, 8), (8, 4)), ((5, 8), (8, 8), (8, 1))
    for tree in (net(actor + critic), {"params": {"actor": net(actor), "critic": net(critic)}}):
        assert [role for role, _ in table(tree).values()] == ["input", "matrix", "head"] * 2


def test_convolutions_and_experts():
    sizes = ((5, 16), (16, 32), (1, 32))  # the last is depthwise
    tree = {f"Conv_{k}": dense(i, o) for k, (i, o) in enumerate(sizes)}
    for k, size in enumerate(sizes):
        tree[f"Conv_{k}"]["kernel"] = leaf(3, 3, *size)
    experts = {"up": {"kernel": leaf(4, 8, 16)}, "down": {"kernel": leaf(4, 16, 8)}}
    tree |= {"experts": experts, "router": {"kernel": leaf(8, 4)}, "head": dense(8, 2)}
    roles = table(tree)
    assert roles["Conv_0/kernel"] == ("input", "-")
    assert roles["Conv_1/kernel"] == ("convolution", "iiio")
    assert roles["Conv_2/kernel"] == ("depthwise", "-")
    assert roles["experts/up/kernel"] == ("expert", "sio")
    assert roles["router/kernel"] == ("router", "-")
    for k, size in enumerate(((3, 16), (16, 32), (32, 32))):  # reads an image
        tree[f"Conv_{k}"]["kernel"] = leaf(3, 3, *size)
    roles = table(tree)
    assert [roles[f"Conv_{k}/kernel"][0] for k in range(3)] == ["input", *["convolution"] * 2]


UNCLEAR = {
    "unknown name": {"mixing": leaf(8, 8), "head": dense(8, 2)},
    "no bias": {"a": {"mlp": {"kernel": leaf(3, 8, 8)}}, "head": dense(8, 2)},
    "bottleneck": {f"Dense_{k}": dense(*s) for k, s in enumerate(((4, 8), (8, 4), (4, 8), (8, 1)))},
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


HAIKU = {
    "embed": {"embeddings": leaf(9, 8)},
    "mlp/~/linear_0": {"w": leaf(8, 32), "b": leaf(32)},
    "mlp/~/linear_1": {"w": leaf(32, 8), "b": leaf(8)},
    "block/~/multi_head_attention/query": {"w": leaf(8, 8), "b": leaf(8)},
    "block/~/multi_head_attention/key": {"w": leaf(8, 8), "b": leaf(8)},
    "block/~/multi_head_attention/value": {"w": leaf(8, 8), "b": leaf(8)},
    "block/~/multi_head_attention/linear": {"w": leaf(8, 8), "b": leaf(8)},
    "layer_norm": {"scale": leaf(8), "offset": leaf(8)},
    "logits": {"w": leaf(8, 9), "b": leaf(9)},
}
# First and last layer without a number, as Haiku names them.
HAIKU_MLP = {
    name: {"w": leaf(*shape), "b": leaf(shape[1])}
    for name, shape in (("linear", (3, 8)), ("linear_1", (8, 8)), ("linear_2", (8, 2)))
}
NAMED = {"embed": {"embedding": leaf(9, 8)}, "up": dense(8, 32), "down": dense(32, 8)}


def test_usual_trees_need_no_override():
    hidden = lambda tree: {path for path, (_, view) in table(tree).items() if view != "-"}  # noqa: E731
    inside = {f"block/~/multi_head_attention/{x}/w" for x in ("query", "key", "value", "linear")}
    assert hidden(HAIKU) == inside | {"mlp/~/linear_0/w", "mlp/~/linear_1/w"}
    assert hidden(HAIKU_MLP) == {"linear_1/w"}
    assert hidden({**NAMED, "head": dense(8, 9)}) == {"up/kernel", "down/kernel"}
    ends = {"input_proj": dense(5, 8), "Dense_0": dense(8, 8), "actor_head": dense(8, 4)}
    assert hidden(ends) == {"Dense_0/kernel"}


def test_per_head_needs_an_axis_of_heads():
    tree = {"b": {"q_proj": dense(8, 8), "k_proj": dense(8, 8)}, "embed": {"embedding": leaf(9, 8)}}
    assert table(tree)["b/q_proj/kernel"] == ("attention", "io")
    with pytest.raises(ValueError, match="k_proj"):
        label(tree, per_head=True)


def test_overrides():
    tree = UNCLEAR["no bias"]  # each override decides, so that nothing warns
    assert table(tree, overrides={"*mlp/kernel": "ioo"})["a/mlp/kernel"] == ("matrix", "ioo")
    assert table(tree, stacked=["a/*"])["a/mlp/kernel"] == ("matrix", "sio")
    assert table(tree, overrides={"*mlp*": "adamw"})["a/mlp/kernel"] == ("override", "-")
    blocks = UNCLEAR["no output layer"]
    assert table(blocks, overrides={"Block_1/up/kernel": "matrix"})["Block_1/up/kernel"][1] == "io"
    with pytest.raises(ValueError, match="typo"):
        label(tree, overrides={"*typo*": "adamw"})
    with pytest.raises(ValueError, match="'io'"):
        label(tree, overrides={"*mlp/kernel": "io"})

"""The policy: its inputs, heads and data, optimizer groups, checkpoints and pretrained towers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from scipy import stats

from mesotron.config import ModelConfig, PartsOptimConfig, PolicyConfig, WorldConfig
from mesotron.models.load import load_model
from mesotron.vla import checkpoint, encoders
from mesotron.vla import policy as policies
from mesotron.vla.data import Frames, RowOrder, body_of
from mesotron.vla.interface import STATE, Demos
from mesotron.vla.optimizer import GradientProbe, build_optimizer, part_updates, route_parts
from mesotron.vla.policy import PARTS, Body, Inputs, KeyedRandom, Policy, Targets, make_act

BODY = Body(
    cameras=("front",),
    pixels=24,
    state_dim=4,
    action_dim=4,
)
CI = PolicyConfig(size="ci", chunk=6)
CPU = torch.device("cpu")


def make_policy(config=CI, body=BODY, **options) -> Policy:
    torch.manual_seed(0)
    return Policy(config, body, **options)


def make_demos(body=BODY, episodes: int = 3, length: int = 7) -> Demos:
    rng = np.random.default_rng(0)
    num = episodes * length
    shape = (num, body.pixels, body.pixels, 3)

    return Demos(
        images={name: rng.integers(0, 256, shape).astype(np.uint8) for name in body.cameras},
        state=rng.normal(size=(num, body.state_dim)).astype(np.float32),
        task_index=np.repeat(np.arange(episodes) % 2, length),
        tasks=["put the red cube in the bin", "lift it"],
        start=np.arange(num),
        action=rng.uniform(-1, 1, (num, body.action_dim)).astype(np.float32),
        episode_index=np.repeat(np.arange(episodes), length),
        frame_index=np.tile(np.arange(length), episodes),
        where=rng.normal(size=(num, 3)).astype(np.float32),
        world=WorldConfig(),
    )


def make_batch(policy: Policy) -> tuple[Inputs, Targets]:
    demos = make_demos(policy.body)
    frames = Frames(demos, policy.config.chunk, policy.language.encode, CPU)
    return frames.batch(torch.arange(5))


def make_inputs(policy: Policy) -> Inputs:
    return make_batch(policy)[0]


def make_random(key: int = 0) -> KeyedRandom:
    return KeyedRandom(torch.tensor([key]))


def action_loss(policy: Policy) -> torch.Tensor:
    return policy.losses(*make_batch(policy), make_random())["loss/action"]


@pytest.mark.parametrize("head", ["l1", "flow"])
@pytest.mark.parametrize("size", ["ci", "small"])
def test_actions_depend_on_images_text_and_state(size, head):
    policy = make_policy(PolicyConfig(size=size, head=head)).eval()
    inputs = make_inputs(policy)
    before = policy.act(inputs)

    assert before.shape == (5, 8, 4)
    for name, other in (
        ("images", 255 - inputs.images),
        ("state", inputs.state + 1),
        ("text_index", 1 - inputs.text_index),
    ):
        after = policy.act(inputs._replace(**{name: other}))
        assert not torch.allclose(after, before, atol=1e-5), name


@pytest.mark.parametrize("config", [replace(CI, head="flow"), PolicyConfig(size="small")])
def test_text_padding_and_the_rest_of_the_batch_change_nothing(config):
    policy = make_policy(config).eval()
    short = make_inputs(policy)._replace(text_ids=policy.language.encode(["lift it"]))
    longer = policy.language.encode(["lift it", "take the cube and place it in the bin"])
    one = Inputs(short.images[2:3], short.state[2:3], short.text_ids, short.text_index[:1])
    actions = policy.act(short)
    padded = policy.act(short._replace(text_ids=longer))
    torch.testing.assert_close(padded, actions, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(policy.act(one)[0], actions[2], atol=1e-5, rtol=1e-4)


def test_cameras():
    policy = make_policy(body=replace(BODY, cameras=("front", "wrist"))).eval()
    inputs = make_inputs(policy)
    swapped = inputs._replace(images=inputs.images.flip(1))

    assert not torch.allclose(policy.act(swapped), policy.act(inputs), atol=1e-5)
    with pytest.raises(ValueError, match="front"):
        make_act(policy)([{STATE: np.zeros(4, np.float32), "task": "lift"}])

    policy = make_policy(body=Body((), 0, 7, 4))
    assert policy.vision is None
    assert policy.act(make_inputs(policy)).shape == (5, 6, 4)

    with pytest.raises(ValueError, match="patch"):
        make_policy(body=replace(BODY, pixels=25))


def make_tables(num: int = 40, pixels: int = 24) -> np.ndarray:
    """Images of one table with a bin; a red object of one patch lies somewhere on each."""
    rng = np.random.default_rng(0)
    images = np.full((num, pixels, pixels, 3), (140, 130, 120), np.uint8)
    images[:, :4] = 230

    for image, row, column in zip(images, rng.integers(1, 6, num), rng.integers(0, 6, num)):
        image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = (200, 30, 30)

    return images


def to_batch(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)[:, None]


def test_unusual_patches_are_salient():
    vision = encoders.Vision(encoders.SIZES["ci"], 1, 24, 4)
    images = make_tables()
    vision.fit({"front": images})
    tokens, salience = vision(to_batch(images))

    assert tokens.shape == (40, 36, encoders.SIZES["ci"].width)
    is_object = torch.from_numpy((images[:, 1::4, 1::4, 0] == 200).reshape(40, 36))
    assert salience.softmax(dim=1)[is_object].min() > 0.8
    assert salience[:, :6].max() < np.log(2 * encoders.ENERGY_FLOOR)  # the bin is always there

    dim = vision((0.6 * to_batch(images).float()).to(torch.uint8)).salience
    assert torch.equal(salience.argmax(dim=1), dim.argmax(dim=1))
    assert (salience - dim).abs().max() < 0.5

    policy = make_policy()
    policy.vision.fit({"front": images})
    inputs = make_inputs(policy)
    bias = policy.context(inputs).bias  # of fusion and actions

    assert torch.equal(bias[:, 1:], policy.vision(inputs.images).salience)
    assert (bias[:, 0] == 0).all()  # the state token


@pytest.mark.parametrize(("black", "light"), [(0.6, 0.5), (0.95, 1.0)])
def test_dark_pixels_do_not_affect_brightness(black, light):
    vision = encoders.Vision(
        encoders.SIZES["ci"],
        num_cameras=1,
        pixels=32,
        patch=8,
    )

    table = np.full((1, 32, 32, 3), 120, dtype=np.uint8)
    table[:, : int(32 * black)] = 1
    vision.fit({"front": table})
    image = table // 2
    image[:, : int(32 * black)] = 6

    assert vision.brightness(to_batch(image)).flatten().tolist() == [light]
    assert torch.isfinite(vision(to_batch(table)).tokens).all()  # of a constant camera


def test_words_are_known_hashed_and_truncated():
    ids = encoders.encode_words(["Red, RED red!", "", "zeppelin " * 40])
    assert ids.shape == (3, encoders.MAX_WORDS)
    assert len(set(ids[0, :3].tolist())) == 1
    assert ids[0, 3] == encoders.PADDING
    assert (ids[:, 0] != encoders.PADDING).all()  # an empty text has one word
    assert ids[2, 0] == encoders.encode_words(["zeppelin"])[0, 0]

    other = encoders.encode_words(["拿起红色方块", "拿起蓝色方块", "Поднять куб!", "поднять_куб"])
    assert len({tuple(row) for row in other.tolist()}) == 3  # other scripts are words too

    tokens = torch.tensor([[[1.0], [3.0], [100.0]]])
    assert encoders.TextTokens(tokens, torch.tensor([[True, True, False]])).pooled().item() == 2


def test_heads_with_known_predictions():
    one = torch.tensor([[[1.0], [5.0]]])
    padded = torch.tensor([[True, False]])
    zeros = torch.zeros(1, 2, 1)
    loss = policies.RegressionHead().loss(lambda x, t: zeros, one, padded, make_random())

    assert loss.item() == 1
    assert policies.masked_mean(one, torch.zeros(1, 2, dtype=torch.bool)).item() == 0

    num = 20_000
    times = []
    actions = torch.randn(num, 3, 2, generator=torch.Generator().manual_seed(3))

    def perfect(x, t):
        times.append(t)
        return (x - actions[: len(x)]) / t[:, None, None]

    real = torch.ones(num, 3, dtype=torch.bool)
    assert policies.FlowHead(5).loss(perfect, actions, real, make_random()).item() < 1e-6
    assert times[0].mean().item() == pytest.approx(0.6, abs=0.01)  # Beta(1.5, 1), nearer noise

    for steps in (1, 7):
        sample = policies.FlowHead(steps).sample(perfect, (64, 3, 2), CPU)
        torch.testing.assert_close(sample, actions[:64], atol=1e-5, rtol=1e-4)


def test_keyed_random_is_uniform_normal_and_independent():
    randoms = make_random(5), make_random(6)
    one, other = (random.uniform((20_000,)) for random in randoms)
    normal = randoms[0].normal((20_000,))

    assert stats.kstest(one, "uniform").pvalue > 0.01
    assert stats.kstest(normal, "norm").pvalue > 0.01

    for a, b in ((one, other), (one[1:], one[:-1]), (normal, one), (normal[1:], normal[:-1])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.03


def test_normalizer_inverts():
    unit = policies.Normalizer(3)
    values = np.random.default_rng(0).normal(3, 5, (100, 3))
    values[:, 2] = 7.0
    unit.fit(values)
    x = torch.from_numpy(values).float()
    torch.testing.assert_close(unit.inverse(unit(x)), x)

    assert unit(x).std(dim=0, correction=0).tolist() == pytest.approx([1, 1, 0], abs=1e-4)


def test_frames_hold_observations_and_chunks():
    demos = make_demos()
    assert body_of(demos) == BODY

    inputs, targets = Frames(demos, 4, encoders.encode_words, CPU).batch(torch.tensor([5, 7]))
    assert np.array_equal(inputs.images[1, 0].permute(1, 2, 0).numpy(), demos.images["front"][7])
    assert torch.equal(inputs.text_ids[inputs.text_index[1]], encoders.encode_words(demos.tasks)[1])
    assert targets.real.tolist() == [[True, True, False, False], [True] * 4]
    assert np.array_equal(targets.actions[1].numpy(), demos.action[7:11])
    assert np.array_equal(targets.where[0].numpy(), demos.where[5])

    demos.images["wrist"] = np.zeros((21, 12, 12, 3), np.uint8)
    with pytest.raises(ValueError, match="wrist 12x12"):
        body_of(demos)


def test_row_order_is_a_function_of_seed_and_step():
    order = RowOrder(10, seed=3)
    rows = torch.cat([order.rows(k, 4) for k in range(5)])
    assert sorted(rows[:10].tolist()) == sorted(rows[10:].tolist()) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()
    assert torch.equal(RowOrder(10, seed=3).rows(3, 4), rows[12:16])
    assert not torch.equal(RowOrder(10, seed=4).rows(0, 10), RowOrder(10, seed=3).rows(0, 10))


def rules_of(policy: Policy, config: PartsOptimConfig) -> dict[str, set[str]]:
    rules: dict[str, set[str]] = {}
    for row in route_parts(policy, config):
        if row.role.startswith(("attention", "linear")):
            rules.setdefault(row.name.split(".")[0], set()).add(row.rule)

    return rules


def test_each_part_has_its_own_rule_and_learning_rate():
    policy = make_policy(replace(CI, head="flow"))
    assert rules_of(policy, PartsOptimConfig(action="pion")) == {
        "vision": {"muon"},
        "language": {"muon"},
        "fusion": {"muon"},
        "action": {"pion"},
    }

    mixed = PartsOptimConfig(
        vision="adamw",
        language="pion",
        fusion="low_rank",
        action="muon",
    )

    assert rules_of(policy, mixed)["vision"] == {"adamw"}
    groups = build_optimizer(policy, mixed).param_groups
    filters = {g["name"].split()[0]: g["filter"] for g in groups if g["rule"] in ("muon", "pion")}

    assert filters == {
        "language/pion": "pion",
        "fusion/muon": "low_rank",
        "action/muon": "muon",
    }

    table = route_parts(policy, PartsOptimConfig())
    for name in (
        "vision.patches.weight",
        "vision.positions",
        "language.embedding.weight",
        "action.queries",
        "action.head.weight",
    ):
        assert table.row(name).rule == "adamw", name

    config = PartsOptimConfig(
        action="pion",
        lr=0.1,
        aux_lr=0.25,
        action_scale=4,
    )

    groups = {g["name"]: g for g in build_optimizer(policy, config).param_groups}
    expected = {
        "action/pion": 0.4,
        "fusion/muon": 0.1,
        "action/adamw": 0.25,
    }

    assert {name: groups[name]["lr"] for name in expected} == expected
    assert all(g["weight_decay"] == 0 for name, g in groups.items() if "_vectors" in name)

    config = PartsOptimConfig(
        **dict.fromkeys(PARTS, "adamw"),
        lr=0.5,
        aux_lr=0.25,
    )

    rates = {g["name"]: g["lr"] for g in build_optimizer(policy, config).param_groups}
    assert (rates["action/adamw matrices"], rates["action/adamw"]) == (0.5, 0.25)


@pytest.mark.parametrize("action", ["pion", "low_rank", "adamw"])
def test_update_rms_by_part(action):
    policy = make_policy()
    optimizer = build_optimizer(policy, PartsOptimConfig(action=action, lr=1e-2))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    action_loss(policy).backward()
    optimizer.step()
    updates = part_updates(optimizer, optimizer.stats())

    assert set(updates) == {f"update_rms/{part}" for part in PARTS}
    moved = [
        (p.detach() - before[name]).flatten()
        for name, p in policy.named_parameters()
        if name.startswith("vision") and "mlp" in name and p.ndim == 2
    ]

    rms = torch.cat(moved).square().mean().sqrt().item()
    assert updates["update_rms/vision"] == pytest.approx(rms, rel=0.2)
    assert updates["update_rms/action"] > 1e-5


def test_gradient_probe_by_part():
    policy = make_policy()
    frames = Frames(make_demos(), 6, policy.language.encode, CPU)

    def loss(rows):
        return policy.losses(*frames.batch(rows), make_random())["loss/action"]

    probe = GradientProbe(policy)
    metrics = probe.measure(loss, torch.arange(16), policy.zero_grad)
    for part in PARTS:
        assert 0 < metrics[f"gradient/{part}/top_share"] <= 1
        assert 1 <= metrics[f"gradient/{part}/effective_rank"] <= 64

    assert all(p.grad is None for p in policy.parameters())

    # Four equal micro-batches have no noise.
    same = probe.measure(loss, torch.arange(4).repeat(4), policy.zero_grad)
    assert same["gradient/action/snr"] > 1e6


def save_and_load(policy: Policy, folder) -> checkpoint.Saved:
    folder.mkdir()
    checkpoint.save_policy(folder, policy, 7, WorldConfig(pixels=24))
    return checkpoint.load_policy(folder)


def test_checkpoint_is_self_contained(tmp_path):
    policy = make_policy(replace(CI, head="flow"), where=True).eval()
    policy.fit(make_demos())
    saved = save_and_load(policy, tmp_path / "c")

    assert torch.equal(saved.policy.act(make_inputs(policy)), policy.act(make_inputs(policy)))
    assert (saved.step, saved.world) == (7, WorldConfig(pixels=24))
    assert {path.suffix for path in (tmp_path / "c").iterdir()} == {".json", ".safetensors"}

    with pytest.raises(ValueError, match="no checkpoint"):
        checkpoint.load_policy(tmp_path)


def test_damaged_checkpoints_are_refused_by_name(tmp_path):
    folder = tmp_path / "c"
    save_and_load(make_policy(), folder)
    description = folder / checkpoint.DESCRIPTION
    weights = folder / checkpoint.WEIGHTS
    text = description.read_text()
    tensors = load_file(weights)
    del tensors["vision.usual"]

    damaged = {weights: [b"torn", save(tensors)], description: [b"{}", b"[]"]}
    for old, new in (("action_dim", "actions"), ('"action_dim": 4', '"action_dim": 9')):
        damaged[description].append(text.replace(old, new).encode())

    for path, contents in damaged.items():
        whole = path.read_bytes()
        for data in contents:
            path.write_bytes(data)
            with pytest.raises(ValueError, match=str(folder)):
                checkpoint.load_policy(folder)

        path.write_bytes(whole)


TOWER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    from transformers import BertConfig, BertModel, ViTConfig, ViTModel

    root = tmp_path_factory.mktemp("towers")
    torch.manual_seed(0)
    vit = ViTConfig(**TOWER, image_size=16, patch_size=8)
    ViTModel(vit, add_pooling_layer=False).save_pretrained(root / "vit")
    processing = {"image_mean": [0.4, 0.4, 0.4], "image_std": [0.2, 0.2, 0.2]}
    (root / "vit" / "preprocessor_config.json").write_text(json.dumps(processing))
    _, tokenizer = load_model(ModelConfig(name="tiny"))
    tokenizer.save_pretrained(root / "bert")

    bert = BertConfig(
        **TOWER,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
    )

    BertModel(bert, add_pooling_layer=False).save_pretrained(root / "bert")
    return {"vision_tower": str(root / "vit"), "language_tower": str(root / "bert")}


@pytest.mark.parametrize("options", [{}, {"lora": 2}, {"freeze_towers": True}], ids=str)
def test_pretrained_towers(towers, options, tmp_path):
    with pytest.raises(ValueError, match="freeze-towers"):
        make_policy(
            replace(
                CI,
                **towers,
                lora=2,
                freeze_towers=True,
            )
        )

    with pytest.raises(ValueError, match="tower"):
        make_policy(replace(CI, vision_tower=str(tmp_path)))

    policy = make_policy(replace(CI, **towers, **options))
    assert policy.vision.mean == (0.4, 0.4, 0.4)

    action_loss(policy).backward()
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    inside = [name for name in trained if ".tower." in name]

    assert bool(inside) is not bool(options.get("freeze_towers"))
    assert all("lora_" in name for name in inside) is bool(options)
    assert rules_of(policy, PartsOptimConfig())["vision"] == {"muon"}

    build_optimizer(policy, PartsOptimConfig()).step()
    policy.eval()
    saved = save_and_load(policy, tmp_path / "c")

    assert torch.equal(saved.policy.act(make_inputs(policy)), policy.act(make_inputs(policy)))
    own = tmp_path / "c" / "vision_tower" / "preprocessor_config.json"  # not the tower's folder
    own.write_text(own.read_text().replace("0.4", "0.3"))

    assert checkpoint.load_policy(tmp_path / "c").policy.vision.mean == (0.3, 0.3, 0.3)


def test_a_language_tower_of_an_image_text_model_is_loaded_from_a_checkpoint(tmp_path):
    from transformers import SiglipConfig, SiglipModel

    _, tokenizer = load_model(ModelConfig(name="tiny"))
    text = {
        **TOWER,
        "vocab_size": len(tokenizer),
        "projection_size": 16,
    }

    image = {**TOWER, "image_size": 16, "patch_size": 8}
    SiglipModel(SiglipConfig(text_config=text, vision_config=image)).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    policy = make_policy(replace(CI, language_tower=str(tmp_path / "m"))).eval()
    saved = save_and_load(policy, tmp_path / "c")

    assert torch.equal(saved.policy.act(make_inputs(policy)), policy.act(make_inputs(policy)))

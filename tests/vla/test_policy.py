"""The policy's parts: what it sees, its two heads, who optimizes what, checkpoints, towers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mesotron.config import PartsOptimConfig, PolicyConfig, WorldConfig
from mesotron.vla import checkpoint
from mesotron.vla.acting import make_act
from mesotron.vla.draws import Draws
from mesotron.vla.encoders import FAINT, Sentence, Vision, coordinates
from mesotron.vla.frames import Frames, Order, body_of
from mesotron.vla.gradients import GradientProbe
from mesotron.vla.heads import NOISE_SEED, Flow, Regression, masked_mean
from mesotron.vla.interface import Demos
from mesotron.vla.normalise import Normaliser
from mesotron.vla.optimizer import build_optimizer, part_steps, route_parts
from mesotron.vla.policy import PARTS, Body, Inputs, Policy, Targets, place_waves
from mesotron.vla.sizes import SIZES
from mesotron.vla.words import MAX_WORDS, PADDING, encode_words

BODY = Body(cameras=("front",), pixels=24, state_dim=4, action_dim=4)
CI = PolicyConfig(size="ci", chunk=6)


def make_policy(config=CI, body=BODY, **options) -> Policy:
    torch.manual_seed(0)
    return Policy(config, body, **options)


def look(policy: Policy, num: int = 5, text: str = "put the red cube in the bin") -> Inputs:
    generator = torch.Generator().manual_seed(1)
    shape = (num, len(policy.body.cameras), 3, policy.body.pixels, policy.body.pixels)
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    state = torch.randn(num, policy.body.state_dim, generator=generator)
    words = policy.language.encode([text, "lift it"])
    told = torch.zeros(num, dtype=torch.long)
    return Inputs(images if policy.body.cameras else None, state, words, told)


def draws(key: int = 0) -> Draws:
    return Draws(torch.tensor([key]))


def wanted(policy: Policy, num: int = 5) -> Targets:
    generator = torch.Generator().manual_seed(2)
    shape = (num, policy.config.chunk, policy.body.action_dim)
    real = torch.ones(shape[:2], dtype=torch.bool)
    return Targets(torch.randn(shape, generator=generator), real, torch.zeros(num, 3))


def make_demos(episodes: int = 3, length: int = 7, pixels: int = 24) -> Demos:
    rng = np.random.default_rng(0)
    num = episodes * length
    frame = np.tile(np.arange(length), episodes)
    return Demos(
        images={"front": rng.integers(0, 256, (num, pixels, pixels, 3)).astype(np.uint8)},
        state=rng.normal(size=(num, 4)).astype(np.float32),
        task_index=np.repeat(np.arange(episodes) % 2, length),
        tasks=["put the red cube in the bin", "put the blue cube in the bin"],
        start=np.arange(num),
        action=rng.uniform(-1, 1, (num, 4)).astype(np.float32),
        episode_index=np.repeat(np.arange(episodes), length),
        frame_index=frame,
        where=rng.normal(size=(num, 3)).astype(np.float32),
        world=WorldConfig(),
    )


# What it sees.


@pytest.mark.parametrize("head", ["l1", "flow"])
@pytest.mark.parametrize("size", ["ci", "small"])
def test_a_chunk_depends_on_images_words_and_state(size, head):
    policy = make_policy(PolicyConfig(size=size, head=head)).eval()
    seen = look(policy)
    before = policy.act(seen)
    assert before.shape == (5, 8, 4)
    assert seen.images is not None
    changed = {
        "images": seen._replace(images=255 - seen.images),
        "state": seen._replace(state=seen.state + 1),
        "words": seen._replace(told=torch.ones(5, dtype=torch.long)),
    }
    for name, other in changed.items():
        assert not torch.allclose(policy.act(other), before, atol=1e-5), name


@pytest.mark.parametrize("size", ["ci", "small"])
def test_padding_of_a_sentence_changes_nothing(size):
    policy = make_policy(PolicyConfig(size=size)).eval()
    alone = look(policy)._replace(words=policy.language.encode(["lift it"]))
    longer = policy.language.encode(["lift it", "take the cube and place it in the bin"])
    assert longer.shape[1] > 2
    torch.testing.assert_close(
        policy.act(alone._replace(words=longer)), policy.act(alone), atol=1e-5, rtol=1e-4
    )


def test_an_episode_does_not_depend_on_its_neighbours():
    policy = make_policy(replace(CI, head="flow")).eval()
    seen = look(policy)
    assert seen.images is not None
    one = seen._replace(images=seen.images[2:3], state=seen.state[2:3], told=seen.told[:1])
    torch.testing.assert_close(policy.act(one)[0], policy.act(seen)[2], atol=1e-5, rtol=1e-4)


def test_cameras_are_told_apart():
    policy = make_policy(body=replace(BODY, cameras=("front", "wrist"))).eval()
    seen = look(policy)
    assert seen.images is not None
    swapped = seen._replace(images=seen.images.flip(1))
    assert not torch.allclose(policy.act(swapped), policy.act(seen), atol=1e-5)


def test_a_policy_without_cameras_has_no_vision():
    policy = make_policy(body=Body((), 0, 7, 4))
    assert policy.vision is None
    assert policy.act(look(policy)).shape == (5, 6, 4)


def test_patches_must_fit_the_image():
    with pytest.raises(ValueError, match="25 pixels do not divide into patches of 4"):
        make_policy(body=replace(BODY, pixels=25))


def tables_with_a_thing(num: int = 40, pixels: int = 24) -> np.ndarray:
    """Pictures of one table; a red thing of a patch stands somewhere on each."""
    rng = np.random.default_rng(0)
    pictures = np.full((num, pixels, pixels, 3), (140, 130, 120), np.uint8)
    pictures[:, :4] = 230  # a bin, which always stands there
    for picture, row, column in zip(pictures, rng.integers(1, 6, num), rng.integers(0, 6, num)):
        picture[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = (200, 30, 30)
    return pictures


def test_what_is_unusual_is_noticed():
    """Attention that begins even heard five objects among sixty patches a tenth as loud, and ten
    objects were never told apart."""
    vision = Vision(SIZES["ci"], 1, 24, 4)
    pictures = tables_with_a_thing()
    vision.fit({"front": pictures})
    sight = vision(torch.from_numpy(pictures).permute(0, 3, 1, 2)[:, None])
    assert sight.tokens.shape == (40, 36, SIZES["ci"].width)
    assert sight.notice is not None
    reds = pictures[:, 1::4, 1::4, 0] == 200
    thing = torch.from_numpy(reds.reshape(40, 36))
    even = sight.notice.softmax(dim=1)  # the scores of an attention that has learned nothing
    assert even[thing].min() > 0.8
    # The bin is as bright as anything and always there: it is not worth a look.
    assert sight.notice[:, :6].max() < np.log(2 * FAINT)


@pytest.mark.parametrize(("black", "light"), [(0.6, 0.5), (0.95, 1.0)])
def test_dark_pixels_say_nothing_of_the_light(black, light):
    """A letterboxed picture in half the light, with noise in its bars; one that is nearly all bar
    is left as it is."""
    vision = Vision(SIZES["ci"], num_cameras=1, pixels=32, patch=8)
    table = np.full((1, 32, 32, 3), 120, dtype=np.uint8)
    table[:, : int(32 * black)] = 1
    vision.fit({"front": table})
    seen = table // 2
    seen[:, : int(32 * black)] = 6
    images = torch.from_numpy(seen).permute(0, 3, 1, 2)[:, None]
    assert vision.brightness(images).flatten().tolist() == [light]


def test_a_picture_in_less_light_is_the_same_picture():
    vision = Vision(SIZES["ci"], 1, 24, 4)
    pictures = torch.from_numpy(tables_with_a_thing()).permute(0, 3, 1, 2)[:, None]
    vision.fit({"front": tables_with_a_thing()})
    dim = (0.6 * pictures.float()).to(torch.uint8)
    bright, dark = vision(pictures).notice, vision(dim).notice
    assert torch.equal(bright.argmax(dim=1), dark.argmax(dim=1))
    assert (bright - dark).abs().max() < 0.5


def test_every_attention_is_told_what_to_notice():
    policy = make_policy()
    seen = look(policy)
    policy.vision.fit({"front": tables_with_a_thing()})
    context = policy.context(seen)
    sight = policy.vision(seen.images)
    assert torch.equal(context.bias[:, 1:], sight.notice)
    assert (context.bias[:, 0] == 0).all()  # the state's own token


def test_a_camera_that_sees_nothing_new_is_not_divided_by_nothing():
    vision = Vision(SIZES["ci"], 1, 24, 4)
    vision.fit({"front": np.full((3, 24, 24, 3), 7, np.uint8)})
    sight = vision(torch.full((2, 1, 3, 24, 24), 7, dtype=torch.uint8))
    assert torch.isfinite(sight.tokens).all()


def test_places_are_read_by_one_matrix():
    table = coordinates(8, 64)
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    wanted_places = torch.stack([rows.flatten(), columns.flatten()], dim=1) - 3.5
    matrix = torch.linalg.lstsq(table.double(), wanted_places.double(), driver="gelsd").solution
    assert torch.allclose(table.double() @ matrix, wanted_places.double(), atol=1e-5)
    assert table.square().mean().item() == pytest.approx(0.5, abs=0.02)


def test_the_actions_of_a_chunk_begin_apart():
    queries = place_waves(8, 64)
    gaps = torch.cdist(queries, queries) + 10 * torch.eye(8)
    assert gaps.min() > 0.3 * queries.norm(dim=1).mean()


def test_words_are_known_hashed_and_cut():
    numbers = encode_words(["Red, RED red!", "", "zeppelin " * 40])
    assert numbers.shape == (3, MAX_WORDS)
    assert len(set(numbers[0, :3].tolist())) == 1
    assert numbers[0, 3] == PADDING
    assert (numbers[:, 0] != PADDING).all()  # a sentence without words is not nothing
    assert numbers[2, 0] == encode_words(["zeppelin"])[0, 0]


def test_a_sentence_is_the_mean_of_its_words():
    tokens = torch.tensor([[[1.0], [3.0], [100.0]]])
    sentence = Sentence(tokens, torch.tensor([[True, True, False]]))
    assert sentence.pooled().item() == 2


# Heads.


def test_padded_actions_do_not_count():
    policy = make_policy()
    seen, targets = look(policy), wanted(policy)
    real = targets.real.clone()
    real[:, 3:] = False
    broken = targets.actions.clone()
    broken[:, 3:] = 1e6

    def loss(actions: torch.Tensor) -> float:
        there = Targets(actions, real, None)
        return policy.losses(seen, there, draws())["loss/action"].item()

    assert loss(broken) == loss(targets.actions)


def test_regression_is_the_mean_absolute_error():
    actions = torch.tensor([[[1.0], [5.0]]])
    real = torch.tensor([[True, False]])
    found = Regression().loss(lambda x, t: torch.zeros(1, 2, 1), actions, real, draws())
    assert found.item() == 1
    assert masked_mean(actions, torch.zeros(1, 2, dtype=torch.bool)).item() == 0


def test_flow_learns_the_velocity_from_actions_to_noise():
    """A predictor that knows the actions gets no loss, and its path ends at them."""
    actions = torch.randn(64, 3, 2, generator=torch.Generator().manual_seed(3))

    def perfect(x: torch.Tensor | None, t: torch.Tensor | None) -> torch.Tensor:
        assert x is not None
        assert t is not None
        return (x - actions[: len(x)]) / t[:, None, None]

    real = torch.ones(64, 3, dtype=torch.bool)
    loss = Flow(5).loss(perfect, actions, real, draws())
    assert loss.item() < 1e-6
    for steps in (1, 7):
        found = Flow(steps).sample(perfect, (64, 3, 2), actions)
        torch.testing.assert_close(found, actions, atol=1e-5, rtol=1e-4)


def test_flow_times_are_nearer_noise():
    seen = []

    def remember(x: torch.Tensor | None, t: torch.Tensor | None) -> torch.Tensor:
        seen.append(t)
        assert x is not None
        return x

    Flow(1).loss(
        remember,
        torch.zeros(20_000, 1, 1),
        torch.ones(20_000, 1, dtype=torch.bool),
        draws(),
    )
    assert seen[0].mean().item() == pytest.approx(0.6, abs=0.01)  # of Beta(1.5, 1)
    assert NOISE_SEED


# Normalisation and data.


def test_units_go_there_and_back():
    unit = Normaliser(3)
    values = np.random.default_rng(0).normal(3, 5, (100, 3))
    values[:, 2] = 7.0  # never changes
    unit.fit(values)
    x = torch.from_numpy(values).float()
    torch.testing.assert_close(unit.back(unit(x)), x)
    assert unit(x)[:, :2].std(dim=0, correction=0).tolist() == pytest.approx([1, 1], rel=1e-4)
    assert unit(x)[:, 2].abs().max() < 1e-4


def test_frames_hold_each_observation_with_its_chunk():
    demos = make_demos()
    frames = Frames(demos, 4, encode_words, torch.device("cpu"))
    seen, targets = frames.batch(torch.tensor([5, 7]))
    assert seen.images is not None
    assert np.array_equal(seen.images[1, 0].permute(1, 2, 0).numpy(), demos.images["front"][7])
    assert torch.equal(seen.words[seen.told[1]], encode_words(demos.tasks)[1])
    assert targets.real.tolist() == [[True, True, False, False], [True] * 4]
    assert np.array_equal(targets.actions[1].numpy(), demos.action[7:11])
    assert targets.where is not None
    assert np.array_equal(targets.where[0].numpy(), demos.where[5])


def test_the_order_is_a_function_of_seed_and_step():
    order = Order(10, seed=3)
    rows = torch.cat([order.rows(k, 4) for k in range(5)])
    assert sorted(rows[:10].tolist()) == sorted(rows[10:].tolist()) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()
    assert torch.equal(Order(10, seed=3).rows(3, 4), rows[12:16])
    assert not torch.equal(Order(10, seed=4).rows(0, 10), Order(10, seed=3).rows(0, 10))


def test_bodies_come_from_demonstrations():
    assert body_of(make_demos()) == BODY
    odd = make_demos()
    odd.images["wrist"] = np.zeros((21, 12, 12, 3), np.uint8)
    with pytest.raises(ValueError, match="front 24x24, wrist 12x12"):
        body_of(odd)


# Who optimizes what.


def rules_of(policy: Policy, config: PartsOptimConfig) -> dict[str, set[str]]:
    """Rules of the hidden matrices of each part."""
    found: dict[str, set[str]] = {}
    for row in route_parts(policy, config):
        if row.role.startswith(("attention", "linear")):
            found.setdefault(row.name.split(".")[0], set()).add(row.rule)
    return found


def test_every_combination_of_rules_can_be_said():
    policy = make_policy(replace(CI, head="flow"))
    assert rules_of(policy, PartsOptimConfig(action="pion")) == {
        "vision": {"muon"}, "language": {"muon"}, "fusion": {"muon"}, "action": {"pion"},
    }  # fmt: skip
    mixed = PartsOptimConfig(vision="adamw", language="pion", fusion="low_rank", action="muon")
    assert rules_of(policy, mixed) == {
        "vision": {"adamw"}, "language": {"pion"}, "fusion": {"muon"}, "action": {"muon"},
    }  # fmt: skip
    groups = build_optimizer(policy, mixed).param_groups
    spectral = [group for group in groups if group["rule"] in ("muon", "pion")]
    filters = {group["name"].split()[0]: group["filter"] for group in spectral}
    assert filters == {"language/pion": "pion", "fusion/muon": "low_rank", "action/muon": "muon"}


def test_embeddings_tables_and_the_head_are_adamws():
    policy = make_policy()
    table = route_parts(policy, PartsOptimConfig())
    for name in ("vision.patches.weight", "vision.positions", "language.embedding.weight",
                 "action.queries", "action.head.weight"):  # fmt: skip
        assert table.row(name).rule == "adamw", name
    optimizer = build_optimizer(policy, PartsOptimConfig(action="pion", lr=0.5, aux_lr=0.25))
    rates = {g["rule"]: g["lr"] for g in optimizer.param_groups}
    assert rates == {"adamw": 0.25, "muon": 0.5, "pion": 0.5}
    assert all(g["weight_decay"] == 0 for g in optimizer.param_groups if "_vectors" in g["name"])


def test_the_action_modules_rate_can_differ():
    config = PartsOptimConfig(action="pion", lr=0.1, aux_lr=0.25, action_scale=4)
    rates = {g["name"]: g["lr"] for g in build_optimizer(make_policy(), config).param_groups}
    assert (rates["action/pion"], rates["fusion/muon"], rates["action/adamw"]) == (0.4, 0.1, 0.25)


def test_adamws_matrices_keep_the_matrix_rate():
    everything = dict.fromkeys(PARTS, "adamw")
    config = PartsOptimConfig(**everything, lr=0.5, aux_lr=0.25)
    optimizer = build_optimizer(make_policy(), config)
    rates = {g["name"]: g["lr"] for g in optimizer.param_groups}
    assert rates["action/adamw matrices"] == 0.5
    assert rates["action/adamw"] == 0.25


@pytest.mark.parametrize("action", ["muon", "pion", "low_rank", "adamw"])
def test_each_parts_step_is_told(action):
    policy = make_policy()
    optimizer = build_optimizer(policy, PartsOptimConfig(action=action, lr=1e-2))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    policy.losses(look(policy), wanted(policy), draws())["loss/action"].backward()
    optimizer.step()
    steps = part_steps(optimizer, optimizer.stats())
    assert set(steps) == {f"update_rms/{part}" for part in PARTS}
    moved = [(p.detach() - before[name]).flatten() for name, p in policy.named_parameters()
             if name.startswith("vision") and "mlp" in name and p.ndim == 2]  # fmt: skip
    rms = torch.cat(moved).square().mean().sqrt().item()
    assert steps["update_rms/vision"] == pytest.approx(rms, rel=0.2)
    assert steps["update_rms/action"] > 1e-5


def test_the_probe_tells_rank_and_signal_of_each_part():
    policy = make_policy()
    demos = make_demos()
    frames = Frames(demos, 6, policy.language.encode, torch.device("cpu"))

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return policy.losses(*frames.batch(rows), draws())["loss/action"]

    probe = GradientProbe(policy)
    found = probe.measure(loss, torch.arange(16), lambda: policy.zero_grad(set_to_none=True))
    assert {name.split("/")[1] for name in found} == set(PARTS)
    for part in PARTS:
        assert 0 < found[f"gradient/{part}/rank_share"] <= 1
        assert 0 < found[f"gradient/{part}/top_share"] <= 1
        assert 1 <= found[f"gradient/{part}/effective_rank"] <= 64
    assert all(p.grad is None for p in policy.parameters())
    # The same rows four times over are all signal.
    same = probe.measure(
        loss, torch.arange(4).repeat(4), lambda: policy.zero_grad(set_to_none=True)
    )
    assert same["gradient/action/snr"] > 1e6


# Checkpoints and towers.


def save_and_load(policy: Policy, folder) -> checkpoint.Saved:
    folder.mkdir()
    checkpoint.save_policy(folder, policy, 7, WorldConfig(pixels=24))
    return checkpoint.load_policy(folder)


def test_weights_of_another_architecture_are_refused(tmp_path):
    save_and_load(make_policy(), tmp_path / "now")
    path = tmp_path / "now" / checkpoint.WEIGHTS
    older = load_file(path)
    del older["vision.usual"]
    save_file(older, path)
    with pytest.raises(ValueError, match=r"vision.usual is in one .* train it once more"):
        checkpoint.load_policy(tmp_path / "now")


def test_a_checkpoint_is_whole_by_itself(tmp_path):
    policy = make_policy(replace(CI, head="flow"), where=True).eval()
    unit = policy.units["action"]
    assert isinstance(unit, Normaliser)
    unit.fit(np.random.default_rng(0).normal(2, 3, (50, 4)))
    saved = save_and_load(policy, tmp_path / "c")
    assert torch.equal(saved.policy.act(look(policy)), policy.act(look(policy)))
    assert (saved.step, saved.world) == (7, WorldConfig(pixels=24))
    assert {path.suffix for path in (tmp_path / "c").iterdir()} == {".json", ".safetensors"}


def test_a_missing_policy_is_told(tmp_path):
    with pytest.raises(ValueError, match="has nothing to act with"):
        checkpoint.load_policy(tmp_path)


def test_a_world_without_the_policys_camera_is_refused():
    act = make_act(make_policy())
    with pytest.raises(ValueError, match="camera 'front'"):
        act([{"observation.state": np.zeros(4, np.float32), "task": "lift"}])


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    """A vision and a language model, built here and saved as a user would have them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, ViTConfig, ViTModel

    root = tmp_path_factory.mktemp("towers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    ViTModel(
        ViTConfig(**sizes, intermediate_size=32, image_size=16, patch_size=8),
        add_pooling_layer=False,
    ).save_pretrained(root / "vit")
    processing = {"image_mean": [0.4, 0.4, 0.4], "image_std": [0.2, 0.2, 0.2]}
    (root / "vit" / "preprocessor_config.json").write_text(json.dumps(processing))
    words = {"[UNK]": 0, "[PAD]": 1, "put": 2, "the": 3, "red": 4, "cube": 5, "lift": 6, "it": 7}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    fast.save_pretrained(root / "bert")
    BertModel(
        BertConfig(**sizes, intermediate_size=32, vocab_size=8, max_position_embeddings=32),
        add_pooling_layer=False,
    ).save_pretrained(root / "bert")
    return {"vision_tower": str(root / "vit"), "language_tower": str(root / "bert")}


@pytest.mark.parametrize("options", [{}, {"lora": 2}, {"freeze_towers": True}], ids=str)
def test_pretrained_towers_take_the_place_of_eyes_and_ears(towers, options, tmp_path):
    policy = make_policy(replace(CI, **towers, **options))
    policy.losses(look(policy), wanted(policy), draws())["loss/action"].backward()
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    inside = {name for name in trained if ".tower." in name}
    if options.get("lora"):
        assert inside
        assert all("lora_" in name for name in inside)
    else:
        assert bool(inside) is not bool(options.get("freeze_towers"))
    rules = rules_of(policy, PartsOptimConfig())
    assert rules["vision"] == {"muon"}
    build_optimizer(policy, PartsOptimConfig()).step()
    policy.eval()
    saved = save_and_load(policy, tmp_path / "c")
    assert torch.equal(saved.policy.act(look(policy)), policy.act(look(policy)))


def test_a_towers_pixels_are_as_it_was_trained_with(towers):
    policy = make_policy(replace(CI, **towers))
    assert policy.vision is not None
    assert policy.vision.mean == (0.4, 0.4, 0.4)


def test_lora_on_frozen_towers_is_refused(towers):
    with pytest.raises(ValueError, match="freeze-towers"):
        make_policy(replace(CI, **towers, lora=2, freeze_towers=True))


def test_a_missing_tower_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="cannot load this tower"):
        make_policy(replace(CI, vision_tower=str(tmp_path)))

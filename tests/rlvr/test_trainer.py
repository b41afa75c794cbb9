"""The trainer: TRL's to the last bit by default; losses, optimizers, facts, dynamic sampling."""

import inspect
import math

import pytest
import torch
import trl
from peft import LoraConfig

import mesotron
from mesotron.config import ObjectiveConfig, OptimConfig, PlanConfig, RolloutConfig
from mesotron.optim.groups import clip_gradients
from mesotron.rlvr.answers.facts import Judge
from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.answers.verify import Verifier
from mesotron.rlvr.cost import completions_per_update
from mesotron.rlvr.optimizer import build_optimizer, check_all_train
from mesotron.rlvr.trainer import OVERRIDDEN, TESTED_TRL, GRPOTrainer, loss_mask
from support.rlvr_tiny import (
    make_model,
    make_tokenizer,
    make_trainer,
    rows,
    same,
    small_digits,
    spy,
    weights,
)

OFF_POLICY = {"steps_per_generation": 2, "max_steps": 4}
TIMES = {"step_time", "time/step", "time/rollout", "time/optimizer", "train_runtime"}


def train(folder, **settings):
    trainer = make_trainer(folder, **settings)
    trainer.train()
    return trainer


# Against TRL


def test_overridden_methods_have_the_signatures_of_the_tested_versions():
    for name, parameters in OVERRIDDEN.items():
        found = ", ".join(inspect.signature(getattr(trl.GRPOTrainer, name)).parameters)
        assert found == parameters, f"{name} changed: check its override and OVERRIDDEN"
    assert trl.__version__.rpartition(".")[0] in TESTED_TRL


def test_every_override_is_in_the_table():
    ours = GRPOTrainer.__mro__[: GRPOTrainer.__mro__.index(trl.GRPOTrainer)]
    replaced = {name for cls in ours for name in vars(cls) if name in dir(trl.GRPOTrainer)}
    assert {name for name in replaced if not name.startswith("__")} == set(OVERRIDDEN)


@pytest.mark.parametrize("settings", [{}, OFF_POLICY], ids=["on_policy", "off_policy"])
def test_by_default_it_is_trls_trainer_to_the_bit(tmp_path, settings):
    theirs = train(tmp_path, cls=trl.GRPOTrainer, **settings)
    ours = train(tmp_path, **settings)
    assert same(weights(theirs), weights(ours))
    for their, our in zip(rows(theirs), rows(ours), strict=True):
        assert {k: our[k] for k in their if k not in TIMES} == {
            k: v for k, v in their.items() if k not in TIMES
        }


def test_grpo_by_name_is_trls_grpo_to_the_bit(tmp_path):
    theirs = train(tmp_path, cls=trl.GRPOTrainer, loss_type="grpo")
    objective = ObjectiveConfig(name="grpo", beta=0.0)
    assert same(weights(theirs), weights(train(tmp_path, parts={"objective": objective})))


def test_arguments_that_contradict_the_objective_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"args\.epsilon = 0\.3"):
        make_trainer(tmp_path, parts={"objective": "gmpo"}, epsilon=0.3)


# Losses


@pytest.mark.slow
def test_on_policy_gmpo_and_gspo_make_the_steps_of_grpo(tmp_path):
    found = [
        weights(train(tmp_path, parts={"objective": ObjectiveConfig(name=name, beta=0.0)}))
        for name in ("grpo", "gspo", "gmpo")
    ]
    for other in found[1:]:
        for name, weight in found[0].items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=2e-5)


def test_off_policy_gmpo_sees_ratios_and_differs(tmp_path):
    settings = {**OFF_POLICY, "learning_rate": 0.1}
    grpo = train(tmp_path, parts={"objective": ObjectiveConfig(beta=0.0)}, **settings)
    gmpo = train(tmp_path, parts={"objective": "gmpo"}, **settings)
    assert not same(weights(grpo), weights(gmpo))
    first, second = rows(gmpo)[:2]
    assert first["ratio/log_min"] == pytest.approx(0, abs=1e-5)
    assert second["ratio/log_min"] < -1e-3 < 1e-3 < second["ratio/log_max"]


def loss_of(trainer, batch, **settings) -> float:
    for name, value in settings.items():
        setattr(trainer, name, value)
    trainer.model.train()
    return trainer._compute_loss(trainer.model, batch).item()


@pytest.fixture(scope="module")
def gmpo(tmp_path_factory):
    """A trainer and a batch whose old log-probabilities are a little off."""
    trainer = make_trainer(tmp_path_factory.mktemp("gmpo"), parts={"objective": "gmpo"})
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(1)
    ids = torch.randint(3, 25, (4, 5))
    batch = {
        "prompt_ids": torch.randint(3, 25, (4, 3)),
        "prompt_mask": torch.ones(4, 3, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": (torch.arange(5) < torch.tensor([[5], [3], [4], [0]])).long(),
        "advantages": torch.tensor([1.0, -1.0, 0.5, 2.0]),
        "num_items_in_batch": torch.tensor(12),
    }
    trainer._compute_loss(trainer.model, batch)
    full, mask = torch.cat([batch["prompt_ids"], ids], 1), torch.ones(4, 8, dtype=torch.long)
    with torch.no_grad():
        mask[:, 3:] = batch["completion_mask"]
        logprobs, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, full, mask, 5, compute_entropy=True
        )
    shift = 0.6 * torch.randn(4, 5)
    batch["old_per_token_logps"] = logprobs - shift
    return trainer, batch, shift, logprobs, entropies


def by_hand(batch, shift, weight=(1, 1, 1, 1)) -> float:
    total = 0.0
    for k, A in enumerate(batch["advantages"].tolist()):
        size = int(batch["completion_mask"][k].sum())
        d = shift[k, :size].tolist()
        d = [min(x, 0.4) if A > 0 else max(x, -0.4) for x in d]
        total -= A * math.exp(sum(d) / max(size, 1)) * weight[k]
    return total / 4


def test_gmpo_in_the_trainer_by_hand(gmpo):
    trainer, batch, shift, *_ = gmpo
    assert loss_of(trainer, batch) == pytest.approx(by_hand(batch, shift), rel=1e-4)
    mask = batch["completion_mask"].bool()
    up, down = batch["advantages"][:, None] > 0, batch["advantages"][:, None] < 0
    found = trainer._metrics["train"]
    assert found["clip_ratio/high_mean"][-1] == pytest.approx(
        ((shift > 0.4) & up & mask).sum().item() / 12
    )
    assert found["clip_ratio/low_mean"][-1] == pytest.approx(
        ((shift < -0.4) & down & mask).sum().item() / 12
    )
    assert found["ratio/log_max"][-1] == pytest.approx(shift[mask].max().item(), rel=1e-4)
    assert found["ratio/log_min"][-1] == pytest.approx(shift[mask].min().item(), rel=1e-4)


def test_gmpo_honours_the_rollout_correction(gmpo):
    trainer, batch, shift, *_ = gmpo
    ratio = torch.tensor([[0.5], [2.0], [0.0], [1.0]])
    corrected = {**batch, "importance_sampling_ratio": ratio}
    loss = loss_of(trainer, corrected, use_vllm=True)
    trainer.use_vllm = False
    assert loss == pytest.approx(by_hand(batch, shift, ratio[:, 0].tolist()), rel=1e-4)


def test_gmpo_honours_the_off_policy_mask(gmpo):
    trainer, batch, shift, *_ = gmpo
    # Only sequence 1 has A < 0; its KL is the mean of -shift over three tokens.
    kl = -shift[1, :3].mean().item()
    strict = loss_of(trainer, batch, off_policy_mask_threshold=kl - 0.01)
    lax = loss_of(trainer, batch, off_policy_mask_threshold=kl + 0.01)
    trainer.off_policy_mask_threshold = None
    assert lax == pytest.approx(by_hand(batch, shift), rel=1e-4)
    assert strict == pytest.approx(by_hand(batch, shift, (1, 0, 1, 1)), rel=1e-4)


def test_gmpo_keeps_the_kl_term_and_the_entropy_bonus(gmpo):
    trainer, batch, shift, logprobs, entropies = gmpo
    mask = batch["completion_mask"]
    moved = {**batch, "ref_per_token_logps": logprobs - 0.1}
    # TRL weighs the KL of each token by its ratio (use_bias_correction_kl).
    ratio = (shift.exp() * mask).sum(1) / mask.sum(1).clamp(min=1)
    kl = (math.exp(-0.1) + 0.1 - 1) * ratio.mean().item()
    loss = loss_of(trainer, moved, beta=0.5)
    trainer.beta = 0.0
    assert loss == pytest.approx(by_hand(batch, shift) + 0.5 * kl, rel=1e-4)
    H = (entropies * mask).sum().item() / 12
    loss = loss_of(trainer, batch, entropy_coef=0.1, _entropy_bonus_enabled=True)
    trainer.entropy_coef, trainer._entropy_bonus_enabled = 0.0, False
    assert loss == pytest.approx(by_hand(batch, shift) - 0.1 * H, rel=1e-4)
    assert trainer._metrics["train"]["policy_loss"][-1] == pytest.approx(
        by_hand(batch, shift), rel=1e-4
    )


# The KL term's reference


def test_the_reference_is_the_model_as_it_was_given(tmp_path):
    objective = ObjectiveConfig(name="grpo", beta=0.1)
    trainer = train(tmp_path, parts={"objective": objective}, **OFF_POLICY, learning_rate=0.1)
    start = {n: p.detach() for n, p in make_model().named_parameters()}
    assert same(trainer.ref_model.weights, start)
    assert rows(trainer)[0]["kl"] == 0
    assert rows(trainer)[-1]["kl"] > 1e-3


@pytest.mark.slow
def test_the_reference_in_memory_equals_trls_own_from_a_folder(tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    theirs = train(
        tmp_path, cls=trl.GRPOTrainer, loss_type="grpo", beta=0.1,
        parts={"model": str(tmp_path / "model")},
    )  # fmt: skip
    ours = train(tmp_path, parts={"objective": ObjectiveConfig(name="grpo", beta=0.1)})
    for name, weight in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], weight, rtol=0, atol=1e-6)


# The optimizer


@pytest.mark.parametrize("name", ["pion", "muon_sgd", "adamw"])
def test_an_optimizer_by_name_trains_and_is_measured(tmp_path, name):
    before = {n: p.detach() for n, p in make_model().named_parameters()}
    trainer = train(tmp_path, parts={"optim": name}, max_steps=2)
    assert not same(weights(trainer), before)
    last = rows(trainer)[-1]
    assert last["optim/skipped"] == 0
    assert any(key.endswith("/update_rms") and key.startswith("optim/") for key in last)
    assert 0 < last["grad_norm/auxiliary"] <= last["grad_norm"]
    assert 0 < last["time/optimizer"] < last["time/step"]


def test_a_name_alone_takes_the_rate_of_the_arguments(tmp_path):
    trainer = make_trainer(tmp_path, parts={"optim": "muon"}, learning_rate=0.03)
    assert {group["lr"] for group in trainer.create_optimizer().param_groups} == {0.03}


def test_lora_is_wrapped_first_and_its_adapters_train(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    config = OptimConfig(name="muon", lr=0.01)
    trainer = make_trainer(tmp_path, parts={"optim": config, "peft_config": lora})
    before = weights(trainer)
    trainer.train()
    changed = {n for n, w in weights(trainer).items() if not torch.equal(w, before[n])}
    assert changed == {n for n in before if "lora" in n}


def test_an_optimizer_built_before_wrapping_is_refused(tmp_path):
    model = make_model()
    early = mesotron.muon(model)
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    parts = {"model": model, "peft_config": lora, "optimizers": (early, None)}
    trainer = make_trainer(tmp_path, parts=parts)
    with pytest.raises(ValueError, match="lora_A"):
        trainer.train()


def test_small_steps_reach_bfloat16_weights(tmp_path):
    """To the nearest, AdamW at 1e-6 would move none of them."""
    parts = {"model": make_model().to(torch.bfloat16), "optim": "adamw"}
    trainer = make_trainer(tmp_path, parts=parts, learning_rate=1e-6)
    optimizer, before = trainer.create_optimizer(), weights(trainer)
    for _ in range(30):
        for p in trainer.model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    moved = [(before[n] - p).detach().double() for n, p in trainer.model.named_parameters()]
    assert torch.cat([x.flatten() for x in moved]).mean().item() == pytest.approx(30e-6, rel=0.2)


def test_gmpo_with_one_update_per_rollout_warns(tmp_path, caplog):
    make_trainer(tmp_path, parts={"objective": "gmpo"}, num_iterations=2)
    assert "equals grpo" not in caplog.text
    make_trainer(tmp_path, parts={"objective": "gmpo"}, gradient_accumulation_steps=2)
    assert "equals grpo" in caplog.text


def test_two_optimizers_are_refused(tmp_path):
    parts = {"optim": "muon", "optimizers": (mesotron.muon(make_model()), None)}
    with pytest.raises(ValueError, match="optimizers="):
        make_trainer(tmp_path, parts=parts)


def test_a_cutoff_needs_pion():
    with pytest.raises(ValueError, match=r"optim\.cutoff"):
        build_optimizer(make_model(), OptimConfig(name="muon", cutoff="noise"))


def test_a_weight_in_two_groups_is_refused():
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups.append(optimizer.param_groups[0])
    with pytest.raises(ValueError, match="in two groups"):
        check_all_train(model, optimizer)


def test_clipping_touches_the_auxiliary_groups_alone():
    model = make_model()
    optimizer = build_optimizer(model, OptimConfig(name="muon"))
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    spectral = [p for g in optimizer.param_groups if g["rule"] == "muon" for p in g["params"]]
    others = [p for g in optimizer.param_groups if g["rule"] != "muon" for p in g["params"]]
    assert spectral
    norms = clip_gradients(optimizer, 0.5)
    assert all(p.grad.eq(3.0).all() for p in spectral)
    clipped = torch.cat([p.grad.flatten() for p in others]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.5), rtol=1e-4, atol=0)
    size = sum(p.numel() for p in model.parameters())
    assert norms.total.item() == pytest.approx(3 * size**0.5, rel=1e-4)
    assert norms.auxiliary.item() == pytest.approx(
        3 * sum(p.numel() for p in others) ** 0.5, rel=1e-4
    )


@pytest.mark.parametrize(("clip", "led_by_the_first"), [("auxiliary", True), ("all", False)])
def test_a_large_first_gradient_dominates_matrices_unless_they_are_clipped(clip, led_by_the_first):
    """Ten gradients a twentieth of the first's size: whose direction is the tenth step's?"""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 2))
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=1e-2))
    matrix = optimizer.param_groups[0]["params"][0]
    first, later = torch.eye(8).roll(1, 0), torch.eye(8)
    for step in range(11):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        matrix.grad = first.mul(20.0) if step == 0 else later.clone()
        before = matrix.detach().clone()
        clip_gradients(optimizer, 1.0, matrices=clip == "all")
        optimizer.step()
    moved = before - matrix.detach()
    assert ((moved * first).sum() > (moved * later).sum()) == led_by_the_first


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_one_broken_matrix_does_not_stop_the_others_that_are_clipped(broken):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=1e-2))
    whole, ill = (p for g in optimizer.param_groups[:1] for p in g["params"][:2])
    for p in model.parameters():
        p.grad = torch.eye(8)
    ill.grad[0, 0] = broken
    before = [p.detach().clone() for p in (whole, ill)]
    clip_gradients(optimizer, 1.0, matrices=True)
    optimizer.step()
    assert not torch.equal(whole, before[0])
    assert torch.equal(ill, before[1])


def test_the_config_decides_what_is_clipped(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "mesotron.rlvr.trainer.clip_gradients",
        lambda optimizer, norm, matrices: asked.append(matrices) or clip_gradients(optimizer, norm),
    )
    for clip in ("auxiliary", "all"):
        optim = OptimConfig(name="muon", lr=1e-3, clip=clip)
        make_trainer(tmp_path / clip, parts={"optim": optim}, max_steps=1).train()
    assert asked == [False, True]


# Facts, metrics and dynamic sampling


@pytest.fixture
def judge():
    with Verifier() as verifier:
        yield Judge(FORMATS["boxed"], verifier)


def test_reward_functions_get_the_facts(tmp_path, judge):
    seen = []

    def right(completions, facts, truncated, row, gold, **_):
        seen.append((facts, truncated, row, gold))
        return [float(fact.correct) for fact in facts]

    trainer = train(tmp_path, parts={"judge": judge, "reward_funcs": right}, max_steps=1)
    facts, truncated, row, gold = seen[0]
    assert [one["gold"] for one in row] == gold
    assert [fact.truncated for fact in facts] == truncated
    found = rows(trainer)[0]
    assert found["facts/correct"] == found["reward"] == sum(f.correct for f in facts) / 8
    groups = [found[f"groups/{name}"] for name in ("all_right", "all_wrong", "mixed")]
    assert sum(groups) == 1
    assert {"answers/top_share", "answers/distinct_in_group", "facts/parsed"} <= found.keys()
    assert found["facts/truncated"] == found["completions/clipped_ratio"]


def constant_for_even(completions, prompts, **_):
    """No signal for prompts that start with an even digit."""
    scores = small_digits(completions)
    even = [int(prompt[0]) % 2 == 0 for prompt in prompts]
    return [0.5 if e else s for s, e in zip(scores, even, strict=True)]


def test_zero_spread_is_counted_by_group_whatever_rewards_are_scaled_by(tmp_path):
    parts = {"reward_funcs": constant_for_even}
    trainer = train(tmp_path, parts=parts, scale_rewards="batch", per_device_train_batch_size=24)
    for row in rows(trainer):
        assert row["frac_reward_zero_std"] == row["groups/zero_signal"]
    assert max(row["groups/zero_signal"] for row in rows(trainer)) >= 1 / 6


def test_dropped_groups_leave_the_loss(tmp_path):
    objective = ObjectiveConfig(name="grpo", beta=0.1, dynamic_sampling="drop")
    parts = {"objective": objective, "reward_funcs": constant_for_even}
    trainer = make_trainer(tmp_path, parts=parts, per_device_train_batch_size=24)
    kept = spy(trainer)
    trainer.train()
    seen = 0
    for batch, row in zip(kept, rows(trainer), strict=True):
        even = [int(trainer._tokenizer.decode(ids[:1])) % 2 == 0 for ids in unpadded(batch)]
        assert (batch["completion_mask"].sum(1) > 0).all()  # attention and lengths stay
        lengths = loss_mask(batch).sum(1).tolist()
        silent = [n == 0 for n in lengths]
        assert all(s for s, e in zip(silent, even, strict=True) if e)
        assert batch["num_items_in_batch"] == sum(lengths)
        assert row["dynamic/filled"] == pytest.approx(1 - sum(silent) / 24)
        seen += sum(silent)
    assert seen


def unpadded(batch) -> list[torch.Tensor]:
    return [i[m.bool()] for i, m in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]


def test_resampling_fills_the_batch_with_prompts_with_a_signal(tmp_path):
    objective = ObjectiveConfig(
        name="grpo", beta=0.0, dynamic_sampling="resample", dynamic_max_rounds=20
    )
    parts = {"objective": objective, "reward_funcs": constant_for_even}
    trainer = make_trainer(tmp_path, parts=parts, per_device_train_batch_size=24)
    kept = spy(trainer)
    trainer.train()
    for batch, row in zip(kept, rows(trainer), strict=True):
        firsts = [int(trainer._tokenizer.decode(ids[:1])) for ids in unpadded(batch)]
        assert all(digit % 2 == 1 for digit in firsts)
        groups = batch["advantages"].view(-1, 4)
        assert (groups.amax(1) > groups.amin(1)).all()
        torch.testing.assert_close(groups.sum(1), torch.zeros(6), atol=1e-4, rtol=0)
        assert row["dynamic/filled"] == 1
    assert max(row["dynamic/rounds"] for row in rows(trainer)) > 1
    assert trainer.stream.taken > 0


def test_oversampling_fills_the_batch_in_one_round(tmp_path):
    """What it adds is drawn as further rounds would be, and what the batch had keeps its place."""
    objective = ObjectiveConfig(
        name="grpo", dynamic_sampling="resample", dynamic_max_rounds=1, dynamic_oversample=4
    )
    parts = {"objective": objective, "reward_funcs": constant_for_even}
    trainer = make_trainer(tmp_path, parts=parts, per_device_train_batch_size=24)
    kept, asked = spy(trainer), []
    generate = trainer._generate_single_turn
    trainer._generate_single_turn = lambda ids, *rest: (
        asked.append(len(ids)) or generate(ids, *rest)
    )
    trainer.train()
    assert set(asked) == {96}
    for batch, row in zip(kept, rows(trainer), strict=True):
        firsts = [int(trainer._tokenizer.decode(ids[:1])) for ids in unpadded(batch)]
        assert len(firsts) == 24
        assert all(digit % 2 == 1 for digit in firsts)
        groups = batch["advantages"].view(-1, 4)
        assert (groups.amax(1) > groups.amin(1)).all()
        assert (row["dynamic/rounds"], row["dynamic/filled"]) == (1, 1)
    assert trainer.stream.taken == 18 * len(kept)
    assert trainer.usual_rows == 96


def test_the_groups_with_the_largest_spread_are_chosen(tmp_path):
    """Rewards differ by the first digit of the prompt: the largest digits train."""
    objective = ObjectiveConfig(
        name="grpo", dynamic_sampling="resample", dynamic_max_rounds=1, dynamic_oversample=4,
        dynamic_choice="widest",
    )  # fmt: skip
    sampled = []

    def wide_for_large(prompts, **_):
        digits = [int(prompt[0]) for prompt in prompts]
        sampled.append(sorted(digits[::4], reverse=True))
        return [1.0 + digit * (k % 2) for k, digit in enumerate(digits)]

    parts = {"objective": objective, "reward_funcs": wide_for_large}
    trainer = make_trainer(tmp_path, parts=parts, per_device_train_batch_size=24)
    kept = spy(trainer)
    trainer.train()
    for batch, digits in zip(kept, sampled, strict=True):
        firsts = [int(trainer._tokenizer.decode(ids[:1])) for ids in unpadded(batch)]
        assert sorted(firsts[::4], reverse=True) == digits[:6]
        assert len(digits) == 24


def test_a_little_oversampling_of_few_prompts_adds_one(tmp_path):
    objective = ObjectiveConfig(
        name="grpo", dynamic_sampling="resample", dynamic_max_rounds=1, dynamic_oversample=1.2
    )
    trainer = make_trainer(tmp_path, parts={"objective": objective}, max_steps=2)
    assert trainer.usual_rows == 12
    planned = PlanConfig(objective=objective, rollout=RolloutConfig(prompts=2, generations=4))
    assert completions_per_update(planned, 24) == 12, "a plan counts what the trainer samples"
    trainer.train()
    assert trainer.stream.taken == 2


@pytest.mark.parametrize("name", ["grpo", "gmpo"])
def test_a_step_without_tokens_logs_no_entropy(tmp_path, name):
    """Every group is silent: no entropy is logged as 0, and the bonus is not raised for it."""
    objective = ObjectiveConfig(
        name=name, beta=0.1, dynamic_sampling="drop", entropy_bonus=0.02, entropy_target=1e-9
    )
    silent = {
        "objective": objective,
        "reward_funcs": lambda completions, **_: [1.0] * len(completions),
    }
    settings = {"max_steps": 1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    trainer = train(tmp_path / "silent", parts=silent, **settings)
    (row,) = rows(trainer)
    assert (row["entropy"], row["kl"], row["entropy_coef"]) == (None, None, 0.02)
    assert trainer._last_world_entropy == torch.inf
    trainer = train(tmp_path / "heard", parts={"objective": objective}, **settings)
    (row,) = rows(trainer)
    assert row["entropy"] == pytest.approx(trainer._last_world_entropy)
    assert (row["entropy_coef"], trainer.entropy_coef) == pytest.approx((0.015, 0.015))


def test_resampling_stops_at_its_cap_and_drops_the_rest(tmp_path):
    objective = ObjectiveConfig(name="grpo", dynamic_sampling="resample", dynamic_max_rounds=2)
    parts = {
        "objective": objective,
        "reward_funcs": lambda completions, **_: [1.0] * len(completions),
    }
    trainer = train(tmp_path, parts=parts, max_steps=1)
    row = rows(trainer)[0]
    assert (row["dynamic/rounds"], row["dynamic/filled"], row["loss"]) == (2, 0, 0)
    assert same(weights(trainer), {n: p.detach() for n, p in make_model().named_parameters()})


@pytest.mark.parametrize("seed", [0, 1])
def test_further_prompts_have_an_order_of_their_own(tmp_path, seed):
    """With the seed 0 both orders were drawn from one generator's state."""
    objective = ObjectiveConfig(name="grpo", beta=0.0, dynamic_sampling="resample")
    trainer = make_trainer(tmp_path, parts={"objective": objective}, seed=seed)
    order = list(dict.fromkeys(trainer._get_train_sampler()))
    further = trainer.stream.take(len(trainer.train_dataset))
    assert sorted(order) == sorted(further)
    assert order != further


def test_a_resampling_run_resumes_exactly(tmp_path):
    objective = ObjectiveConfig(name="grpo", beta=0.0, dynamic_sampling="resample")
    parts = {"objective": objective, "reward_funcs": constant_for_even}
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(tmp_path / "whole", parts=parts, **settings)
    resumed = make_trainer(tmp_path / "whole", parts={**parts, "model": make_model()}, **settings)
    checkpoint = next((tmp_path / "whole").glob("*2"))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same(weights(whole), weights(resumed))
    assert whole.stream.taken == resumed.stream.taken

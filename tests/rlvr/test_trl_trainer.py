"""The trainer: TRL's to the last bit by default; losses, optimizers, facts, dynamic sampling."""

import gc
import math
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import trl
from peft import LoraConfig
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, TrainerCallback

import mesotron
from mesotron.answers.facts import Judge
from mesotron.answers.formats import FORMATS
from mesotron.answers.verify import Verifier
from mesotron.config import ObjectiveConfig, OptimConfig
from mesotron.optim import Muon
from mesotron.optim.clipping import clip_gradients
from mesotron.rlvr.anchor import Anchor
from mesotron.rlvr.checkpoint import SafeCheckpoints
from mesotron.rlvr.grpo import TOO_LARGE, warn_once
from mesotron.rlvr.optimizer import build_optimizer
from mesotron.rlvr.trl_trainer import GRPOTrainer
from support import rlvr_tiny as tiny

OFF_POLICY = {"steps_per_generation": 2, "max_steps": 3}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (OFF_POLICY, {}),
        ({"loss_type": "grpo"}, {"objective": ObjectiveConfig(name="grpo", beta=0.0)}),
    ],
    ids=["off_policy", "grpo_by_name"],
)
def test_by_default_it_is_trls_trainer_to_the_bit(tmp_path, settings, parts):
    plain = tiny.train(tmp_path, trl.GRPOTrainer, **settings)
    ours = tiny.train(tmp_path, parts=parts, **settings)
    assert tiny.same(tiny.weights(plain), tiny.weights(ours))

    for row, own in zip(tiny.rows(plain), tiny.rows(ours), strict=True):
        names = row.keys() - tiny.TIMES
        assert {k: own[k] for k in names} == {k: row[k] for k in names}


def test_unknown_and_contradicting_arguments_are_refused(tmp_path):
    both = {"optim": "muon", "optimizers": (mesotron.muon(tiny.make_model()), None)}
    for parts, settings, named in (
        ({"objective": "mgpro"}, {}, "mgpro"),
        ({"objective": "gmpo"}, {"epsilon": 0.3}, r"args\.epsilon"),
        (both, {}, "optimizers="),
    ):
        with pytest.raises(ValueError, match=named):
            tiny.make_trainer(tmp_path, parts=parts, **settings)


def test_the_reference_is_the_model_as_it_was_given(tmp_path):
    objective = ObjectiveConfig(name="grpo", beta=0.1)
    trainer = tiny.train(
        tmp_path,
        parts={"objective": objective},
        **OFF_POLICY,
        learning_rate=0.1,
    )

    assert tiny.same(trainer.ref_model.weights, tiny.initial_weights())
    assert tiny.rows(trainer)[0]["kl"] == 0
    assert tiny.rows(trainer)[-1]["kl"] > 1e-3


def test_the_reference_has_no_dropout(tmp_path):
    parts = {"model": tiny.make_model(attention_dropout=0.5)}
    trainer = tiny.make_trainer(tmp_path, parts=parts, beta=0.1)
    ids = torch.tensor([[15, 3, 4]])
    trainer.policy.train()
    passed = trainer._get_per_token_logps_and_entropies
    (a, _, _), (b, _, _) = (passed(trainer.ref_model, ids, ids > 0, 2) for _ in range(2))

    assert torch.equal(a, b)
    assert trainer.policy.training


def test_a_reference_that_trl_moves_is_trls_own(tmp_path):
    tiny.make_model().save_pretrained(tmp_path)
    parts = {"model": AutoModelForCausalLM.from_pretrained(tmp_path)}
    trainer = tiny.make_trainer(
        tmp_path,
        parts=parts,
        beta=0.1,
        sync_ref_model=True,
    )

    assert "SyncRefModelCallback" in str(trainer.callback_handler.callback_list)


@pytest.mark.parametrize("name", ["pion", "adamw"])
def test_an_optimizer_by_name_trains_at_the_rate_of_the_arguments_and_is_measured(tmp_path, name):
    trainer = tiny.train(
        tmp_path,
        parts={"optim": name},
        max_steps=2,
        learning_rate=0.03,
    )

    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {0.03}
    assert not tiny.same(tiny.weights(trainer), tiny.initial_weights())

    last = tiny.rows(trainer)[-1]
    assert last["optim/skipped"] == 0
    assert any(key.endswith("/update_rms") and key.startswith("optim/") for key in last)
    assert 0 < last["grad_norm/auxiliary"] <= last["grad_norm"]
    assert 0 < last["time/optimizer"] < last["time/step"]


def test_the_logged_learning_rate_is_that_of_the_matrices(tmp_path):
    optim = OptimConfig(name="muon", lr=0.03, aux_lr=0.001)
    trainer = tiny.train(tmp_path, parts={"optim": optim}, lr_scheduler_type="linear")
    assert [row["learning_rate"] for row in tiny.rows(trainer)] == pytest.approx([0.03, 0.02, 0.01])


def test_lora_is_wrapped_first_and_its_adapters_train(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    config = OptimConfig(name="muon", lr=0.01)
    trainer = tiny.make_trainer(tmp_path, parts={"optim": config, "peft_config": lora}, max_steps=2)
    before = tiny.weights(trainer)
    trainer.train()
    changed = {n for n, w in tiny.weights(trainer).items() if not torch.equal(w, before[n])}

    assert changed == {n for n in before if "lora" in n}


@pytest.mark.filterwarnings("ignore:Model has `tie_word")
def test_adapters_on_the_head_and_an_optimizer_built_before_them_are_refused(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="lm_head"):
        tiny.make_trainer(tmp_path, parts={"peft_config": lora})

    model = tiny.make_model()
    lora = LoraConfig(r=2, target_modules=["q_proj"])

    parts = {
        "model": model,
        "peft_config": lora,
        "optimizers": (mesotron.muon(model), None),
    }
    with pytest.raises(ValueError, match="lora_A"):
        tiny.train(tmp_path, parts=parts)


def test_clipping_scales_the_auxiliary_groups_and_if_wanted_the_matrices():
    model = tiny.make_model()
    optimizer = build_optimizer(model, OptimConfig(name="muon"))

    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)

    spectral = [p for g in optimizer.param_groups if g["rule"] == "muon" for p in g["params"]]
    others = [p for g in optimizer.param_groups if g["rule"] != "muon" for p in g["params"]]
    assert spectral

    norms = clip_gradients(optimizer, 0.5)
    assert all(p.grad.eq(3.0).all() for p in spectral)

    clip_gradients(optimizer, 0.5, matrices=True)
    for params in (spectral, others):
        clipped = torch.cat([p.grad.flatten() for p in params]).norm()
        torch.testing.assert_close(clipped, torch.tensor(0.5), rtol=1e-4, atol=0)

    size = sum(p.numel() for p in model.parameters())
    assert norms.total.item() == pytest.approx(3 * size**0.5, rel=1e-4)

    size = sum(p.numel() for p in others)
    assert norms.auxiliary.item() == pytest.approx(3 * size**0.5, rel=1e-4)


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_broken_matrix_is_skipped_alone_and_a_broken_bias_with_all_clipped_beside_it(broken):
    """Scaled to zero, the latter would still be stepped, along their old momentum."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=1e-2))

    first, second = (p for group in optimizer.param_groups[:1] for p in group["params"][:2])
    for bad, value in ((None, 1.0), (first, broken), (model[0].bias, broken)):
        before = {p: p.detach().clone() for p in model.parameters()}
        for p in model.parameters():
            p.grad = torch.eye(8) if p.ndim == 2 else torch.ones(8)

        if bad is not None:
            bad.grad.view(-1)[0] = value

        clip_gradients(optimizer, 1.0, matrices=True)
        optimizer.step()
        moved = {p for p in before if not torch.equal(p, before[p])}

        assert second in moved
        assert (first in moved) == (bad is not first)
        assert (model[1].bias in moved) == (bad is not model[0].bias)


def test_clip_is_passed_on(tmp_path, monkeypatch):
    clip = Mock(side_effect=clip_gradients)
    monkeypatch.setattr("mesotron.rlvr.trl_trainer.clip_gradients", clip)
    optim = OptimConfig(name="muon", lr=1e-3, clip="all")
    tiny.train(tmp_path, parts={"optim": optim}, max_steps=1)

    assert clip.call_args.args[2] is True


def test_reward_functions_get_the_facts(tmp_path):
    seen = []

    def right(completions, facts, truncated, row, gold, **_):
        seen.append((facts, truncated, row, gold))
        return [float(fact.correct) for fact in facts]

    with Verifier() as verifier:
        parts = {"judge": Judge(FORMATS["boxed"], verifier), "reward_funcs": right}
        (logged,) = tiny.rows(tiny.train(tmp_path, parts=parts, max_steps=1))

    facts, truncated, row, gold = seen[0]
    assert [one["gold"] for one in row] == gold
    assert [fact.truncated for fact in facts] == truncated
    assert logged["facts/correct"] == logged["reward"] == sum(f.correct for f in facts) / 8
    assert sum(logged[f"groups/{name}"] for name in ("all_right", "all_wrong", "mixed")) == 1
    assert {"answers/top_share", "answers/distinct_in_group", "facts/parsed"} <= logged.keys()
    assert logged["facts/truncated"] == logged["completions/clipped_ratio"]


def constant_for_even(completions, prompts, **_):
    """No signal for prompts that start with an even digit."""
    scores = tiny.small_digits(completions)
    even = [int(prompt[0]) % 2 == 0 for prompt in prompts]
    return [0.5 if e else s for s, e in zip(scores, even, strict=True)]


def constant(completions, **_):
    return [1.0] * len(completions)


def resample(**options):
    return ObjectiveConfig(
        name="grpo",
        beta=0.0,
        dynamic_sampling="resample",
        **options,
    )


def train_and_spy(folder, objective, reward=constant_for_even):
    """The trainer, and (batch, log row) of each step; a batch has 6 groups of 4."""
    parts = {"objective": objective, "reward_funcs": reward}
    trainer = tiny.make_trainer(
        folder,
        parts=parts,
        per_device_train_batch_size=24,
        max_steps=2,
    )

    batches = tiny.spy(trainer)
    trainer.train()

    return trainer, list(zip(batches, tiny.rows(trainer), strict=True))


def first_digits(trainer, batch) -> list[int]:
    pairs = zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    return [int(trainer._tokenizer.decode(ids[mask.bool()][:1])) for ids, mask in pairs]


def test_zero_spread_is_counted_by_group_whatever_rewards_are_scaled_by(tmp_path):
    parts = {"reward_funcs": constant_for_even}
    trainer = tiny.train(
        tmp_path, parts=parts, scale_rewards="batch", per_device_train_batch_size=24
    )
    for row in tiny.rows(trainer):
        assert row["frac_reward_zero_std"] == row["groups/zero_signal"]

    assert max(row["groups/zero_signal"] for row in tiny.rows(trainer)) >= 1 / 6


def test_dropped_groups_leave_the_loss(tmp_path):
    objective = ObjectiveConfig(
        name="grpo",
        beta=0.1,
        dynamic_sampling="drop",
    )

    trainer, steps = train_and_spy(tmp_path, objective)
    num_silent = 0
    for batch, row in steps:
        assert (batch["completion_mask"].sum(1) > 0).all()  # attention and lengths stay
        lengths = (batch["completion_mask"] * batch["tool_mask"]).sum(1).tolist()
        silent = [n == 0 for n in lengths]
        digits = first_digits(trainer, batch)

        assert all(s for s, digit in zip(silent, digits, strict=True) if digit % 2 == 0)
        assert batch["num_items_in_batch"] == sum(lengths)
        assert row["dynamic/filled"] == pytest.approx(1 - sum(silent) / 24)

        num_silent += sum(silent)

    assert num_silent


@pytest.mark.parametrize("oversample", [1, 4])
def test_resampling_fills_the_batch_with_prompts_with_a_signal(tmp_path, monkeypatch, oversample):
    sampled = []
    generate = GRPOTrainer._generate_single_turn
    monkeypatch.setattr(
        GRPOTrainer,
        "_generate_single_turn",
        lambda self, ids, *rest: sampled.append(len(ids)) or generate(self, ids, *rest),
    )

    rounds = 20 if oversample == 1 else 1
    objective = resample(dynamic_max_rounds=rounds, dynamic_oversample=oversample)

    trainer, steps = train_and_spy(tmp_path, objective)
    for batch, row in steps:
        digits = first_digits(trainer, batch)
        assert len(digits) == 24
        assert all(digit % 2 == 1 for digit in digits)

        groups = batch["advantages"].view(-1, 4)
        assert (groups.amax(1) > groups.amin(1)).all()

        torch.testing.assert_close(groups.sum(1), torch.zeros(6), atol=1e-4, rtol=0)
        assert row["dynamic/filled"] == 1

    rounds = {row["dynamic/rounds"] for _, row in steps}
    if oversample == 1:
        assert max(rounds) > 1
        assert trainer.resampler.stream.taken > 0
    else:
        assert (rounds, set(sampled), trainer.usual_rows) == ({1}, {96}, 96)
        assert trainer.resampler.stream.taken == 18 * len(steps)


def test_the_groups_with_the_largest_spread_are_chosen(tmp_path):
    """Rewards differ by the first digit of the prompt: the largest digits train."""
    sampled = []

    def wide_for_large(prompts, **_):
        digits = [int(prompt[0]) for prompt in prompts]
        sampled.append(sorted(digits[::4], reverse=True))
        return [1.0 + digit * (k % 2) for k, digit in enumerate(digits)]

    objective = resample(
        dynamic_max_rounds=1,
        dynamic_oversample=4,
        dynamic_choice="widest",
    )

    trainer, steps = train_and_spy(tmp_path, objective, wide_for_large)
    for (batch, _), digits in zip(steps, sampled, strict=True):
        assert sorted(first_digits(trainer, batch)[::4], reverse=True) == digits[:6]
        assert len(digits) == 24


def test_a_router_loss_needs_no_signal(tmp_path):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
    }

    experts = {
        "num_local_experts": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }

    config = MixtralConfig(
        vocab_size=len(tiny.WORDS),
        **sizes,
        **experts,
    )

    model = MixtralForCausalLM(config)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    parts = {
        "model": model,
        "optim": "muon",
        "reward_funcs": constant,
    }

    assert not tiny.same(tiny.weights(tiny.train(tmp_path, parts=parts, max_steps=1)), start)


def test_a_step_without_tokens_logs_no_entropy(tmp_path):
    """When every group is silent, entropy is not logged as 0 and does not raise the bonus."""
    objective = ObjectiveConfig(
        name="gmpo", beta=0.1, dynamic_sampling="drop", entropy_bonus=0.02, entropy_target=1e-9
    )
    settings = {
        "max_steps": 1,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
    }

    parts = {"objective": objective}
    trainer = tiny.train(tmp_path, parts={**parts, "reward_funcs": constant}, **settings)
    (row,) = tiny.rows(trainer)

    assert [row[name] for name in ("entropy", "kl", "clip_ratio/region_mean")] == [None] * 3
    assert row["entropy_coef"] == 0.02
    assert trainer.bonus.entropy == torch.inf

    trainer = tiny.train(tmp_path, parts=parts, **settings)
    (row,) = tiny.rows(trainer)
    assert row["entropy"] == pytest.approx(trainer.bonus.entropy)
    assert (row["entropy_coef"], trainer.bonus.coef) == pytest.approx((0.015, 0.015))


@pytest.mark.parametrize(
    ("optim", "beta", "how"),
    [("muon", 0.0, "off"), ("muon", 0.1, "drop"), ("muon", 0.1, "skip"), (None, 0.1, "skip")],
)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_batch_without_a_signal_moves_nothing(tmp_path, optim, beta, how, clip):
    """Nor do momentum and rounding (eight times 0.1 are not their mean), at Muon's full size."""
    seen = []

    def fading(completions, **_):
        seen.append(tiny.weights(trainer))
        if len(seen) == 1:
            return tiny.small_digits(completions)

        return [0.1] * len(completions)

    objective = ObjectiveConfig(
        name="grpo",
        beta=beta,
        dynamic_sampling=how,
    )

    parts = {
        "objective": objective,
        "optim": optim,
        "reward_funcs": fading,
    }

    trainer = tiny.make_trainer(
        tmp_path,
        parts=parts,
        num_generations=8,
        max_grad_norm=clip,
    )

    trainer.train()
    start, moved, still = seen
    assert not tiny.same(moved, start)
    assert tiny.same(still, moved)
    assert tiny.same(tiny.weights(trainer), moved)


def test_an_update_after_a_short_one_keeps_its_signal(tmp_path):
    """Six micro-batches an epoch in updates of four: the third update begins with the seventh."""
    seen = []

    def sometimes(completions, **_):
        seen.append(tiny.weights(trainer))
        signal = len(seen) in (1, 7)
        if signal:
            return tiny.small_digits(completions)

        return [0.0] * len(completions)

    parts = {"reward_funcs": sometimes, "train_dataset": tiny.make_data(12)}
    parts |= {"optim": "muon", "objective": "dr_grpo"}
    accumulated = {"gradient_accumulation_steps": 4, "steps_per_generation": 1}
    trainer = tiny.make_trainer(tmp_path, parts=parts, **accumulated)
    trainer.train()
    first = seen[0]
    second = seen[4]
    third = seen[6]
    last = tiny.weights(trainer)

    assert not tiny.same(first, second)
    assert tiny.same(second, third)
    assert not tiny.same(third, last)


def test_resampling_stops_at_its_cap_and_drops_the_rest(tmp_path):
    parts = {"objective": resample(dynamic_max_rounds=2), "reward_funcs": constant}
    (row,) = tiny.rows(tiny.train(tmp_path, parts=parts, max_steps=1))
    assert (row["dynamic/rounds"], row["dynamic/filled"], row["loss"]) == (2, 0, 0)


def test_huge_rewards_are_clipped_and_still_train(tmp_path, caplog):
    def huge(completions: list[str], **_: object) -> list[float]:
        return [1e38 * (k % 2) for k in range(len(completions))]

    warn_once.cache_clear()
    (row,) = tiny.rows(tiny.train(tmp_path, parts={"reward_funcs": huge}, max_steps=1))
    assert row["grad_norm"] > 0
    assert TOO_LARGE in caplog.messages


@pytest.mark.parametrize("name", ["gmpo", "luspo", "vespo", "clip_cov", "kl_cov"])
def test_further_objectives_train_off_policy(tmp_path, name):
    trainer = tiny.train(
        tmp_path,
        parts={"objective": name},
        **OFF_POLICY,
        learning_rate=0.1,
    )

    rows = tiny.rows(trainer)
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)
    assert all(("cov/treated" in row) == name.endswith("_cov") for row in rows)

    if name == "gmpo":
        assert rows[0]["ratio/log_min"] == pytest.approx(0, abs=1e-5)
        assert rows[1]["ratio/log_min"] < -1e-3 < 1e-3 < rows[1]["ratio/log_max"]


def test_garbage_is_gone_before_training_and_the_rest_is_not_searched(tmp_path):
    class Node:
        pass

    class Probe(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append((gc.get_freeze_count() > 0, garbage() is None))

    gc.unfreeze()  # the whole session's
    seen = []
    trainer = tiny.make_trainer(tmp_path, max_steps=1)
    trainer.add_callback(Probe())
    gc.disable()
    node = Node()
    node.itself = node
    garbage = weakref.ref(node)
    del node

    try:
        trainer.train()
        assert (seen, gc.get_freeze_count()) == ([(True, True)], 0)
    finally:
        gc.enable()
        gc.freeze()


def test_only_a_run_that_votes_gets_a_judge_by_itself(tmp_path):
    assert tiny.make_trainer(tmp_path).judge is None


def test_matrices_are_not_clipped_under_deepspeed():
    model = torch.nn.Linear(2, 2)
    trainer = SimpleNamespace(
        optimizer=Muon([model.weight]),
        optim=OptimConfig(clip="all"),
        is_deepspeed_enabled=True,
        args=SimpleNamespace(max_grad_norm=1.0),
        auxiliary_norm=SimpleNamespace(observe=lambda norm: None),
    )
    with pytest.raises(ValueError, match="FSDP2"):
        GRPOTrainer._clip_grad_norm(trainer, model)  # pyright: ignore


def test_a_rollout_takes_a_part_of_its_step(tmp_path):
    trainer = tiny.make_trainer(tmp_path)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "time/rollout" in row]
    assert len(rows) == 3
    assert all(0 < row["time/rollout"] < row["time/step"] for row in rows)


def test_averages_that_moved_after_the_last_step_are_put_back_before_it_is_saved(monkeypatch):
    class Put(Anchor):
        def put_back(self, model):
            done.append(model)

    done = []
    monkeypatch.setattr(GRPOTrainer, "policy", "the policy")
    monkeypatch.setattr(SafeCheckpoints, "save_last_step", lambda self: done.append("saved"))
    trainer = object.__new__(GRPOTrainer)
    trainer.anchor = Put()
    trainer.average = Put()
    trainer.ref_model = torch.nn.Linear(1, 1)
    trainer.save_last_step()
    assert done == ["the policy", "the policy", "saved"]

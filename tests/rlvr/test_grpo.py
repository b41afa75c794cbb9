"""The step without a trainer, and its losses against TRL's to the bit."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl

from mesotron.rlvr import grpo, objectives
from mesotron.rlvr.entropy_bonus import EntropyBonus
from support import rlvr_tiny as tiny

DOCS = Path(__file__).parents[2] / "docs" / "grpo_step.md"


def test_the_page_of_the_step_runs_and_learns():
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(code, DOCS.name, "exec"), names)

    rows = [{"prompt": [1, 2, 3]}] * 64
    rewards = names["reward"](rows, names["sample"](rows))
    assert rewards.mean() > 2  # of four tokens; a random model writes 0.4
    assert {"entropy", "clip_ratio/region_mean"} <= names["output"].metrics.keys()


def test_rows_are_padded_on_either_side():
    ids, mask = grpo.pad_rows([[1, 2, 3], [], [4]], 9, "left", multiple=4)
    assert ids.tolist() == [[9, 1, 2, 3], [9, 9, 9, 9], [9, 9, 9, 4]]
    assert mask.tolist() == [[0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]]

    logprobs, _ = grpo.pad_rows([[-1.0, None], [-2.0]], 0.0)
    assert logprobs.nan_to_num(nan=5.0).tolist() == [[-1.0, 5.0], [-2.0, 0.0]]


def scored(rewards) -> grpo.Scored:
    rewards = torch.tensor(rewards)
    by_function = rewards.reshape(-1, 1)
    return grpo.Scored(rewards=rewards, by_function=by_function, tolerance=1e-6)


def test_advantages_by_hand():
    rewards = [[1.0, 0.0], [5.0, 5.0], [2.0, torch.nan]]
    spread = 0.5**0.5 + 1e-4

    by_group = grpo.compute_advantages(scored(rewards), grpo.Scaling())
    expected = torch.tensor([0.5 / spread, -0.5 / spread, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(by_group.values, expected)

    unscaled = grpo.compute_advantages(scored(rewards), grpo.Scaling(by="none"))
    assert unscaled.values.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]


def test_rewards_of_a_batch_share_one_spread():
    rewards = [[1.0, 0.0], [5.0, 5.0], [2.0, torch.nan]]
    spread = torch.tensor([1.0, 0.0, 5.0, 5.0, 2.0]).std()
    by_batch = grpo.compute_advantages(scored(rewards), grpo.Scaling(by="batch"))
    values = torch.tensor([0.5, -0.5, 0.0, 0.0, 0.0, 0.0]) / (spread + 1e-4)
    torch.testing.assert_close(by_batch.values, values)
    torch.testing.assert_close(by_batch.spread, spread.expand(6))


def test_parts_are_normalized_before_they_are_summed():
    """The large part would drown the small one if they were summed first."""
    parts = torch.tensor([[0.0, 100.0], [1.0, 300.0], [0.0, 200.0], [1.0, torch.nan]])
    batch = grpo.Scored(rewards=torch.zeros(2, 2), by_function=parts, tolerance=1e-6)
    how = grpo.Scaling(aggregation="normalize_then_sum", weights=torch.tensor([1.0, 2.0]))
    result = grpo.compute_advantages(batch, how)

    first = 0.5 / (0.5**0.5 + 1e-4)
    second = 100.0 / (200.0 * 0.5**0.5 + 1e-4)
    # Where one of two is left there is no spread, so the part counts for nothing.
    totals = torch.tensor([-first - 2 * second, first + 2 * second, -first, first])
    expected = totals / (totals.std() + 1e-4)
    torch.testing.assert_close(result.values, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(result.spread, totals.std().expand(4), atol=1e-3, rtol=1e-3)


def test_the_spread_leaves_out_what_has_no_reward():
    nan = torch.nan
    rows = torch.tensor([[1.0, 3.0, nan], [2.0, nan, nan], [nan, nan, nan], [4.0, 4.0, 4.0]])
    spread = grpo.nan_std(rows, dim=1)
    assert spread[0] == pytest.approx(2**0.5)
    assert spread[3] == 0
    assert spread[1].isnan()
    assert spread[2].isnan()
    assert grpo.nan_std(torch.tensor([[7.0], [nan]]), dim=1).tolist() == [0.0, 0.0]


def test_episodes_with_tools_are_counted_by_turns_and_ends():
    call = {"role": "assistant", "content": "", "tool_calls": ["add"]}
    result = {"role": "tool", "content": "7"}
    answer = {"role": "assistant", "content": "7"}
    episodes = [[call, result, answer], [call, result], [answer], [call]]
    rollout = SimpleNamespace(completions=episodes, completion_tokens=[[1, 2]] * 4)

    metrics = grpo.rollout_metrics(rollout, "cpu", with_tools=True)  # pyright: ignore
    assert metrics["tools/turns"] == (2 + 1 + 1 + 1) / 4
    assert metrics["tools/unfinished"] == 0.5
    assert not any(name.startswith("tools") for name in grpo.rollout_metrics(rollout, "cpu"))  # pyright: ignore


def test_ratios_to_the_sampler_are_bounded_or_masked():
    old = torch.tensor([[0.0, 0.0, 0.0]])
    sampler = torch.tensor([[-1.0, torch.nan, 0.5]])
    mask = torch.ones(1, 3)

    def ratio(mode):
        how = grpo.Correction(mode=mode, low=None, high=2.0)
        return grpo.correct_sampler(old, sampler, mask, how)[0]

    e = torch.e
    torch.testing.assert_close(ratio("token_truncate"), torch.tensor([2.0, 1.0, e**-0.5]))
    torch.testing.assert_close(ratio("token_mask"), torch.tensor([0.0, 1.0, e**-0.5]))
    torch.testing.assert_close(ratio("sequence_mask"), torch.tensor([e**0.5]))


def test_the_entropy_bonus_moves_once_an_update_and_not_without_tokens():
    bonus = EntropyBonus(coef=0.02, target=1.0, delta=0.005, highest=0.1)
    assert bonus.weight() == 0  # nothing was measured

    for total, coef in ((4.0, 0.025), (40.0, 0.02)):
        bonus.observe(torch.tensor([total / 2, 5.0]))
        bonus.observe(torch.tensor([total / 2, 5.0]))
        bonus.end_update(lambda x: x)
        assert bonus.coef == pytest.approx(coef)

    assert bonus.weight() == 0
    bonus.observe(torch.zeros(2))
    bonus.end_update(lambda x: x)
    assert (bonus.coef, bonus.entropy) == (pytest.approx(0.02), 4.0)


SETTINGS = {
    "plain": {},
    "kl": {"beta": 0.1},
    "plain_kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "delta": {"delta": 1.1},
    "high_entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "off_policy": {"off_policy_mask_threshold": 0.05},
    "accumulated": {"gradient_accumulation_steps": 3, "steps_per_generation": 9},
}


def make_inputs(logprobs) -> dict[str, torch.Tensor]:
    """A micro-batch in TRL's names, somewhat off policy."""
    mask = (torch.arange(4) < torch.tensor([[4], [2], [3], [1]])).long()
    return {
        "prompt_ids": torch.full((4, 2), 5),
        "prompt_mask": torch.ones(4, 2, dtype=torch.long),
        "completion_ids": torch.randint(3, 25, (4, 4)),
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -2.0]),
        "num_items_in_batch": torch.tensor(31),
        "old_per_token_logps": logprobs + 0.3 * torch.randn(4, 4),
        "ref_per_token_logps": logprobs + 0.3 * torch.randn(4, 4),
    }


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    "loss", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
)
def test_loss_gradient_and_metrics_are_those_of_trl(tmp_path, loss, settings):
    level = "sequence" if loss == "luspo" else "token"
    settings = {"epsilon_high": 1.2, **settings}
    trainer = tiny.make_trainer(
        tmp_path, loss_type=loss, importance_sampling_level=level, **settings
    )
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.train()
    torch.manual_seed(0)
    inputs = make_inputs(torch.full((4, 4), -3.2))

    results = []
    for compute in (trl.GRPOTrainer._compute_loss, type(trainer)._compute_loss):
        trainer._metrics["train"].clear()
        trainer.model.zero_grad()
        value = compute(trainer, trainer.model, inputs)
        value.backward()
        results.append((value, dict(trainer._metrics["train"]), tiny.gradients(trainer)))

    (value, metrics, gradients), (own_value, own_metrics, own_gradients) = results
    assert own_value.item() == value.item()
    assert tiny.same(own_gradients, gradients)
    assert {name: own_metrics[name] for name in metrics} == metrics


@pytest.mark.parametrize("name", ["gmpo", "clip_cov", "kl_cov"])
def test_tokens_of_low_entropy_do_not_train(name):
    """TRL's top_entropy_quantile holds for the losses that TRL lacks, too."""
    torch.manual_seed(0)
    old = torch.full((4, 4), -3.2)
    logprobs = (old + 0.05 * torch.randn(4, 4)).requires_grad_()
    entropies = torch.tensor([[0.1, 2.0, 0.2, 3.0]]).expand(4, 4)
    ones = torch.ones(4, 4, dtype=torch.long)
    batch = grpo.Batch(
        prompt_ids=ones[:, :1],
        prompt_mask=ones[:, :1],
        completion_ids=ones,
        completion_mask=ones,
        loss_mask=ones,
        advantages=torch.tensor([1.0, -1.0, 0.5, -2.0]),
        num_tokens=torch.tensor(16),
        old_logprobs=old,
    )

    def gradient(share: float) -> torch.Tensor:
        settings = grpo.LossSettings(
            objective=objectives.get(name),
            cov_share=0.1,
            high_entropy_share=share,
        )
        passed = grpo.Passed(logprobs, entropies)
        output = grpo.compute_loss(passed, batch, settings)
        return torch.autograd.grad(output.loss, logprobs)[0]

    assert (gradient(1.0)[:, ::2] != 0).any()
    half = gradient(0.5)
    assert (half[:, ::2] == 0).all()
    assert (half[:, 1::2] != 0).any()


def test_a_row_that_was_dropped_leaves_every_mean():
    torch.manual_seed(0)
    batch = grpo.Batch(
        prompt_ids=torch.ones(2, 1, dtype=torch.long),
        prompt_mask=torch.ones(2, 1, dtype=torch.long),
        completion_ids=torch.randint(3, 9, (2, 3)),
        completion_mask=torch.ones(2, 3, dtype=torch.long),
        loss_mask=torch.ones(2, 3, dtype=torch.long),
        advantages=torch.tensor([1.0, -1.0]),
        num_tokens=torch.tensor(6),
    )
    dropped = grpo.without_rows(batch, [False, True])

    assert dropped.num_tokens == 3
    assert dropped.loss_mask.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert dropped.completion_mask is batch.completion_mask


def test_the_router_adds_its_part_of_the_loss():
    ids = torch.ones(2, 3, dtype=torch.long)

    def loss_of(router_loss, **more):
        passed = grpo.Passed(torch.zeros(2, 3), torch.ones(2, 3), router_loss)
        ones = torch.ones(2, 3)
        batch = grpo.Batch(
            prompt_ids=ids,
            prompt_mask=ones,
            completion_ids=ids,
            completion_mask=ones,
            loss_mask=ones,
            advantages=torch.tensor([1.0, -1.0]),
            num_tokens=torch.tensor(6.0),
        )
        settings = grpo.LossSettings(objective=objectives.get("grpo"), micro_batches=2, **more)
        return grpo.compute_loss(passed, batch, settings)

    plain = loss_of(None).loss
    routed = loss_of(torch.tensor(3.0), router_coef=0.5)
    assert (routed.loss - plain).item() == pytest.approx(0.5 * 3.0 / 2)
    assert routed.metrics["aux_loss"] == 3.0

"""M-GRPO, voting and Co-rewarding as whole runs: sampling, votes, filter, anchor, resume."""

import pytest
import torch
from peft import LoraConfig

from mesotron.config import ObjectiveConfig
from mesotron.rlvr.trainer import GRPOTrainer
from support.rlvr_tiny import make_data, make_model, make_trainer, rows, same, spy, weights


def objective(name="mgrpo", **options) -> ObjectiveConfig:
    return ObjectiveConfig(name=name, **{"beta": 0.0, **options})


def train(folder, chosen, cls=GRPOTrainer, parts=None, **settings):
    trainer = make_trainer(folder, cls, parts={"objective": chosen, **(parts or {})}, **settings)
    trainer.train()
    return trainer


class Watched(GRPOTrainer):
    """Keeps the weights of each rollout, and its number of rows."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.calls = getattr(self, "calls", [])
        self.calls.append((len(prompt_ids), weights(self)))
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)


def test_without_anchor_and_filter_it_is_a_plain_vote_to_the_bit(tmp_path):
    vote = train(tmp_path, objective("vote"))
    mgrpo = train(tmp_path, objective(momentum_generations=0, entropy_filter="off"))
    assert same(weights(vote), weights(mgrpo))
    assert not same(weights(vote), {n: p.detach() for n, p in make_model().named_parameters()})


def test_the_gold_is_never_used(tmp_path):
    wrong = make_data().map(lambda row: {"gold": "999"})
    without = make_data().remove_columns("gold")
    found = [
        train(tmp_path, objective(), parts={"train_dataset": data})
        for data in (make_data(), wrong, without)
    ]
    assert same(weights(found[0]), weights(found[1]))
    assert same(weights(found[0]), weights(found[2]))
    assert rows(found[1])[0]["votes/label_accuracy"] == 0
    assert "votes/label_accuracy" not in rows(found[2])[0]
    assert "facts/correct" not in rows(found[2])[0]


def test_reward_functions_are_logged_and_do_not_train(tmp_path):
    constant = train(
        tmp_path,
        objective(),
        parts={"reward_funcs": lambda completions, **_: [1.0] * len(completions)},
    )
    bare = train(tmp_path, objective(), parts={"reward_funcs": None})
    assert same(weights(constant), weights(bare))
    assert rows(constant)[0]["rewards/<lambda>/mean"] == 1
    assert rows(bare)[0]["reward"] == rows(bare)[0]["rewards/vote/mean"]


@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
def test_the_anchor_follows_the_policy_rollout_by_rollout(tmp_path, momentum):
    trainer = train(
        tmp_path, objective(momentum=momentum), cls=Watched, max_steps=4, steps_per_generation=2
    )
    start = {n: p.detach() for n, p in make_model().named_parameters()}
    (_, first), (_, second) = trainer.calls
    assert same(first, start)
    mean = {n: momentum * start[n] + (1 - momentum) * second[n] for n in start}
    for name, weight in trainer.anchor.weights.items():
        torch.testing.assert_close(weight, mean[name])
    assert trainer.anchor.updates == 1
    distance = rows(trainer)[2]["anchor/distance"]
    assert (distance == 0) == (momentum == 0)


def test_the_anchor_can_follow_every_optimizer_step(tmp_path):
    trainer = train(
        tmp_path,
        objective(momentum=0.0, momentum_update="optimizer_step"),
        max_steps=4,
        steps_per_generation=2,
    )
    assert trainer.anchor.updates == 4
    assert same(trainer.anchor.weights, weights(trainer))


def test_the_anchor_samples_a_third_as_many_voters(tmp_path):
    trainer = train(
        tmp_path, objective(), num_generations=6, per_device_train_batch_size=12, max_steps=1
    )
    assert len(trainer._voters.completion_ids) == 4  # two prompts, two voters each
    assert trainer.objective.momentum_generations == 2


def test_advantages_are_over_the_policys_own_completions(tmp_path):
    trainer = make_trainer(tmp_path, parts={"objective": objective(entropy_filter="off")})
    kept = spy(trainer)
    trainer.train()
    for batch in kept:
        assert batch["advantages"].shape == (8,)
        torch.testing.assert_close(
            batch["advantages"].view(2, 4).sum(1), torch.zeros(2), atol=1e-4, rtol=0
        )


class Boxes(GRPOTrainer):
    """The policy writes box 7 three times and box 8 once per prompt, the anchor always box 8."""

    calls = 0

    def _sample(self, prompt_ids, *_):
        self.calls += 1  # the policy first
        policy = [[15 + 7, 1]] * 3 + [[15 + 8, 1]]
        return (policy if self.calls == 1 else [[15 + 8, 1]] * len(prompt_ids)), None


@pytest.mark.parametrize(
    ("name", "voters", "label"),
    [("mgrpo", 1, "7"), ("mgrpo", 3, "8"), ("corewarding", 1, "8"), ("vote", None, "7")],
)
def test_the_whole_step_by_hand(tmp_path, name, voters, label):
    """Hand-worked: rewards, advantages and the loss of one group of four."""
    chosen = objective(name, momentum_generations=voters, entropy_filter="off")
    data = make_data(1).map(lambda row: {"prompt": "3 + 5 =", "gold": "8"})
    trainer = make_trainer(
        tmp_path, Boxes, parts={"objective": chosen, "train_dataset": data},
        per_device_train_batch_size=4, max_steps=1,
    )  # fmt: skip
    before = make_model()
    trainer.train()
    reward = torch.tensor([1.0, 1.0, 1.0, 0.0]) if label == "7" else torch.tensor([0.0, 0, 0, 1])
    A = (reward - reward.mean()) / (reward.std() + 1e-4)
    row = rows(trainer)[0]
    assert row["reward"] == pytest.approx(reward.mean().item())
    assert row["votes/label_accuracy"] == float(label == "8")
    assert row["votes/reward_accuracy"] == float(label == "8")
    prompt = torch.tensor(trainer._tokenizer("3 + 5 =")["input_ids"])
    box = [15 + 7] * 3 + [15 + 8]
    ids = torch.stack([torch.cat([prompt, torch.tensor([b, 1])]) for b in box])
    logprobs = before(ids).logits.log_softmax(-1)[:, -3:-1]
    taken = logprobs.gather(2, ids[:, -2:, None])[..., 0]
    loss = -(A[:, None] * (taken - taken.detach()).exp()).mean(1).mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in before.parameters()]).norm().item()
    assert row["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_entropy_filter_takes_the_lowest_out_of_vote_and_loss(tmp_path):
    class Filtered(GRPOTrainer):
        def _trajectory_entropies(self, prompt_ids, completion_ids):
            H = super()._trajectory_entropies(prompt_ids, completion_ids)
            H[1], H[-1] = 0.0, 0.0  # one of the policy's and one of the anchor's
            return H

    trainer = make_trainer(
        tmp_path, Filtered, parts={"objective": objective(beta=0.5)}, num_generations=12,
        per_device_train_batch_size=12, max_steps=1,
    )  # fmt: skip
    kept = spy(trainer)
    trainer.train()
    (batch,) = kept
    assert batch["advantages"][1] == 0
    assert trainer.scored.rewards[0].isnan()[1]
    assert rows(trainer)[0]["anchor/dropped"] >= 2 / 16
    out = trainer.scored.rewards[0].isnan()
    tokens = (batch["completion_mask"] * ~out[:, None]).sum()
    assert batch["num_items_in_batch"] == tokens

    def loss_and_figures(batch):
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(trainer.model.train(), batch).item()
        return loss, *(trainer._metrics["train"][name][-1] for name in ("kl", "entropy"))

    # Whatever a dropped completion says, it moves neither the loss nor a mean.
    ids = batch["completion_ids"].clone()
    ids[1] = (ids[1] + 3) % 20
    far = batch["ref_per_token_logps"] - 5.0 * out[:, None]
    other = {**batch, "completion_ids": ids, "ref_per_token_logps": far}
    assert loss_and_figures(other) == pytest.approx(loss_and_figures(batch), rel=1e-5)
    assert batch["completion_mask"][1].sum() > 0  # it is still read as it was written


def test_the_filters_entropies_are_those_of_the_loss(tmp_path):
    trainer = make_trainer(tmp_path, parts={"objective": objective()}, max_steps=1)
    seen = []
    compute = trainer._trajectory_entropies

    def keep(prompt_ids, completion_ids):
        found = compute(prompt_ids, completion_ids)
        seen.append(found[:8])
        return found

    trainer._trajectory_entropies = keep
    trainer.train()
    quarters = torch.quantile(seen[0], torch.tensor([0.25, 0.5, 0.75])).tolist()
    row = rows(trainer)[0]
    found = [row[f"entropy/trajectory_q{k}"] for k in (1, 2, 3)]
    assert found == pytest.approx(quarters, abs=1e-5)


def test_the_merged_variant_trains_on_the_anchors_completions_too(tmp_path):
    start = {n: p.detach() for n, p in make_model().named_parameters()}
    sampled = []

    class Merged(GRPOTrainer):
        def _sample(self, prompt_ids, images, fields, generations, *rest):
            sampled.append((len(prompt_ids), generations, same(weights(self), start)))
            return super()._sample(prompt_ids, images, fields, generations, *rest)

    train(tmp_path, objective(loss_on_momentum=True, momentum=1.0), cls=Merged, max_steps=2)
    # The anchor with m = 1 stays where the policy started.
    assert sampled == [(6, 3, True), (2, 1, True), (6, 3, False), (2, 1, True)]


def test_the_reference_of_corewarding_is_the_anchor(tmp_path):
    trainer = train(tmp_path, objective("corewarding", beta=0.1, momentum=0.0))
    assert trainer.ref_model is trainer.anchor
    # m = 0 and a cosine: at the start the anchor is the policy itself.
    assert rows(trainer)[0]["kl"] == 0


def test_lora_anchors_the_adapters_alone(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    trainer = train(tmp_path, objective(), parts={"peft_config": lora, "optim": "muon"})
    assert trainer.anchor.weights
    assert all("lora" in name for name in trainer.anchor.weights)
    assert rows(trainer)[-1]["anchor/distance"] > 0


def test_a_killed_run_resumes_to_the_bit(tmp_path):
    """Killed after its first rollout, and inside its second one."""
    settings = {
        "max_steps": 4, "steps_per_generation": 2, "save_strategy": "steps", "save_steps": 1,
        "learning_rate": 0.05,
    }  # fmt: skip
    chosen = objective(beta=0.005)
    whole = train(tmp_path, chosen, **settings)
    for step in (2, 3):
        resumed = make_trainer(tmp_path, parts={"objective": chosen}, **settings)
        resumed.train(resume_from_checkpoint=str(next(tmp_path.glob(f"*-{step}"))))
        assert same(weights(whole), weights(resumed))
        assert same(whole.anchor.weights, resumed.anchor.weights)


def test_evaluation_votes_without_the_anchor(tmp_path):
    trainer = make_trainer(
        tmp_path, parts={"objective": objective(), "eval_dataset": make_data(4)},
        per_device_eval_batch_size=8,
    )  # fmt: skip
    found = trainer.evaluate()
    assert 0 <= found["eval_reward"] <= 1
    assert not trainer.anchor.weights


def test_tools_and_rollout_functions_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with pytest.raises(ValueError, match="rollout_func"):
        make_trainer(
            tmp_path, parts={"objective": "mgrpo", "rollout_func": lambda prompts, trainer: {}}
        )


def test_weights_of_rewards_that_are_only_logged_are_refused(tmp_path):
    with pytest.raises(ValueError, match="reward_weights"):
        make_trainer(tmp_path, parts={"objective": objective()}, reward_weights=[0.5])

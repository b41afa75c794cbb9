"""The momentum policy, and M-GRPO, voting and Co-rewarding as whole runs."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch import nn

from mesotron.config import ObjectiveConfig
from mesotron.rlvr.anchor import Anchor, AnchoredSampler, momentum_at, refuse_flat_shards
from mesotron.rlvr.trl_trainer import GRPOTrainer
from support import rlvr_tiny as tiny


def make_model(dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).to(dtype)


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by)


def copy_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# For momentum 0.9: 0.9 (0.1 * 1) + 0.1 * 2 = 0.29.
@pytest.mark.parametrize(("momentum", "moved"), [(0.9, 0.29), (0.0, 2.0), (1.0, 0.0)])
def test_the_average_and_its_distance_by_hand(momentum, moved):
    model = make_model()
    start = copy_of(model)

    anchor = Anchor().start(model)
    for _ in range(2):
        move(model, 1.0)
        anchor.update(model, momentum)

    means = list(anchor.weights.values())
    for mean, old in zip(means, start, strict=True):
        torch.testing.assert_close(mean, old + moved)

    if momentum in (0, 1):  # exact at the ends
        assert all(map(torch.equal, means, copy_of(model) if momentum == 0 else start))

    now = torch.cat([p.flatten() for p in copy_of(model)])
    distance = (now - torch.cat([w.flatten() for w in means])).norm() / now.norm()
    away, size = anchor.moved.tolist()

    assert (away / size) ** 0.5 == pytest.approx(distance.item(), rel=1e-5)


def test_a_bfloat16_model_has_a_float32_average_that_moves():
    model = make_model(torch.bfloat16)
    for p in model.parameters():
        nn.init.ones_(p)

    anchor = Anchor().start(model)
    first = {name: mean.clone() for name, mean in anchor.weights.items()}
    move(model, 2**-6)

    for _ in range(3):
        anchor.update(model, 0.99)

    for name, mean in anchor.weights.items():
        assert mean.dtype == torch.float32
        assert not torch.equal(mean, first[name])
        assert torch.equal(mean.bfloat16(), first[name].bfloat16())  # bfloat16 would stand still


def test_it_replaces_the_models_weights_and_restores_them_to_the_bit():
    model = make_model()
    anchor = Anchor().start(model)
    start = copy_of(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    move(model, 1.0)
    trained = copy_of(model)

    def fail() -> None:
        with anchor.in_place_of(model):
            assert all(map(torch.equal, copy_of(model), start))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert all(map(torch.equal, copy_of(model), trained))
    assert addresses == [p.data_ptr() for p in model.parameters()]


def test_another_models_checkpoint_is_refused():
    model = make_model()
    anchor = Anchor()
    state = Anchor().start(model).state_dict()
    state["tensors"] |= {"0.weight": torch.zeros(9, 9)}
    anchor.load_state_dict(state)

    # Resumed inside a rollout, an anchor that follows every optimizer step is updated first.
    with pytest.raises(ValueError, match="does not fit"):
        anchor.update(model, 0.9)


def test_the_cosine_ends_where_the_anchor_hardly_moves():
    values = [momentum_at(k / 10, 0.99, "cosine") for k in range(11)]
    assert values[0] == 0.99
    assert values[-1] == pytest.approx(1 - 1e-5)
    assert values == sorted(values)
    assert momentum_at(0.5, 1.0, "cosine") == 1.0
    assert momentum_at(7.0, 0.99) == 0.99


def test_a_mean_of_the_last_models_starts_as_a_plain_mean():
    model = make_model()
    mean = Anchor()

    start = copy_of(model)
    for moved in (1.0, 1.5, 2.0, 2.5, 3.125):  # the last is 0.75 * 2.5 + 0.25 * 5
        move(model, 1.0)
        mean.add(model, decay=0.75)

        for weight, old in zip(mean.weights.values(), start, strict=True):
            torch.testing.assert_close(weight, old + moved)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_outside_0_to_1_is_refused(tmp_path, decay):
    with pytest.raises(ValueError, match="average"):
        tiny.make_trainer(tmp_path, parts={"average": decay})


def make(folder, name="mgrpo", cls=GRPOTrainer, *, parts=None, settings=None, **options):
    """`settings` go to the trainer's arguments, `options` to the objective."""
    objective = ObjectiveConfig(name=name, **{"beta": 0.0, **options})
    parts = {"objective": objective, **(parts or {})}
    return tiny.make_trainer(folder, cls, parts=parts, **(settings or {}))


def train(folder, name="mgrpo", cls=GRPOTrainer, **options):
    trainer = make(folder, name, cls, **options)
    trainer.train()
    return trainer


def test_without_anchor_and_filter_it_is_a_plain_vote_to_the_bit(tmp_path):
    two = {"max_steps": 2}
    vote = train(tmp_path, "vote", settings=two)
    mgrpo = train(
        tmp_path,
        momentum_generations=0,
        entropy_filter="off",
        settings=two,
    )

    assert tiny.same(tiny.weights(vote), tiny.weights(mgrpo))
    assert not tiny.same(tiny.weights(vote), tiny.initial_weights())


class WhoWrote:
    """Samples the weight that it finds in the model; the anchor's is 0, the policy's 1."""

    def __init__(self, model: nn.Module, with_logprobs: bool) -> None:
        self._model = model
        self._with_logprobs = with_logprobs

    def __call__(self, prompt_ids, number):
        (weight,) = {int(p.detach().flatten()[0]) for p in self._model.parameters()}
        rows = [[*ids, weight] for ids in prompt_ids]
        logprobs = [[-float(ids[0])] for ids in prompt_ids]
        return rows, logprobs if self._with_logprobs else None


@pytest.mark.parametrize("with_logprobs", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_last_of_each_group_are_the_anchors_in_the_order_of_the_prompts(rank, with_logprobs):
    """Groups of four over two processes of six rows; plain sampling gives no log-probabilities."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    anchor = Anchor().start(model)
    model.weight.data.fill_(1.0)

    sample = WhoWrote(model, with_logprobs)
    sampler = AnchoredSampler(anchor, model, sample, synced=lambda: None, rank=rank, world=2)
    rows, logprobs = sampler.merged([[k] for k in range(6)], generations=4, number=1)

    is_anchors = [(6 * rank + k) % 4 == 3 for k in range(6)]
    assert rows == [[k, int(not out)] for k, out in enumerate(is_anchors)]
    assert model.weight.item() == 1
    if with_logprobs:
        assert logprobs == [[-float(k)] for k in range(6)]
    else:
        assert logprobs is None


@pytest.mark.parametrize(("rank", "share"), [(0, [[1], [1]]), (1, [[1], [1]])])
def test_processes_sample_equal_shares_of_what_the_anchor_writes(rank, share):
    model = nn.Linear(1, 1, bias=False)
    sampler = AnchoredSampler(
        Anchor().start(model), model, WhoWrote(model, False), lambda: None, rank, 2
    )
    own, completions = sampler.voters([[1]], 3)  # of three rows the last is written twice
    assert own == share
    assert len(completions) == 2
    with pytest.raises(ValueError, match="momentum_generations"):
        sampler.voters([[1]], 3, even=True)
    assert len(sampler.voters([[1]], 4, even=True)[0]) == 2


@pytest.mark.parametrize(
    ("is_fsdp", "is_fsdp2", "is_deepspeed", "refused"),
    [
        (False, False, False, False),
        (True, True, False, False),
        (True, False, False, True),
        (False, False, True, True),
        (True, True, True, True),
    ],
)
def test_flat_shards_are_refused(is_fsdp, is_fsdp2, is_deepspeed, refused):
    trainer = SimpleNamespace(
        is_fsdp_enabled=is_fsdp,
        is_deepspeed_enabled=is_deepspeed,
        accelerator=SimpleNamespace(is_fsdp2=is_fsdp2),
    )
    if refused:
        with pytest.raises(ValueError, match="FSDP2"):
            refuse_flat_shards(trainer, "average")
    else:
        refuse_flat_shards(trainer, "average")


def test_gold_answers_and_rewards_do_not_train(tmp_path):
    wrong = tiny.make_data().map(lambda row: {"gold": "999"})
    without = tiny.make_data().remove_columns("gold")

    def one(completions, **_):
        return [1.0] * len(completions)

    changes = {"train_dataset": wrong, "reward_funcs": one}
    nothing = {"train_dataset": without, "reward_funcs": None}

    plain, misled, bare = (
        train(tmp_path, parts=parts, settings={"max_steps": 1}) for parts in ({}, changes, nothing)
    )
    for other in (misled, bare):
        assert tiny.same(tiny.weights(plain), tiny.weights(other))

    (row,), (bare_row,) = tiny.rows(misled), tiny.rows(bare)
    assert (row["votes/label_accuracy"], row["rewards/one/mean"]) == (0, 1)
    assert not {"votes/label_accuracy", "facts/correct"} & bare_row.keys()
    assert bare_row["reward"] == bare_row["rewards/vote/mean"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_anchor_follows_the_policy_rollout_by_rollout(tmp_path, momentum):
    at_rollout = []

    class Watched(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            at_rollout.append(tiny.weights(self))
            return super()._generate_single_turn(*args, **kwargs)

    settings = {"max_steps": 3, "steps_per_generation": 2}
    trainer = train(
        tmp_path,
        cls=Watched,
        momentum=momentum,
        settings=settings,
    )

    start, (first, second) = tiny.initial_weights(), at_rollout
    assert tiny.same(first, start)

    for name, weight in trainer.anchor.weights.items():
        mean = momentum * start[name] + (1 - momentum) * second[name]
        torch.testing.assert_close(weight, mean)

    assert trainer.anchor.updates == 1
    assert (tiny.rows(trainer)[2]["anchor/distance"] == 0) == (momentum == 0)


def test_the_anchor_can_follow_every_optimizer_step(tmp_path):
    settings = {"max_steps": 2, "steps_per_generation": 2}
    trainer = train(
        tmp_path,
        momentum=0.0,
        momentum_update="optimizer_step",
        settings=settings,
    )

    assert trainer.anchor.updates == 2
    assert tiny.same(trainer.anchor.weights, tiny.weights(trainer))


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
    """Rewards, advantages and the loss of one group of four."""
    data = tiny.make_data(1).map(lambda row: {"prompt": "3 + 5 =", "gold": "8"})
    trainer = train(
        tmp_path,
        name,
        Boxes,
        momentum_generations=voters,
        entropy_filter="off",
        parts={"train_dataset": data},
        settings={"per_device_train_batch_size": 4, "max_steps": 1},
    )

    before = tiny.make_model()

    if label == "7":
        reward = torch.tensor([1.0, 1.0, 1.0, 0.0])
    else:
        reward = torch.tensor([0.0, 0, 0, 1])

    A = (reward - reward.mean()) / (reward.std() + 1e-4)
    (row,) = tiny.rows(trainer)

    assert row["reward"] == pytest.approx(reward.mean().item())
    assert row["votes/label_accuracy"] == row["votes/reward_accuracy"] == float(label == "8")

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


def test_the_entropy_filter_removes_the_lowest_from_vote_and_loss(tmp_path):
    class Filtered(GRPOTrainer):
        def _trajectory_entropies(self, rollout):
            H = super()._trajectory_entropies(rollout)
            H[1] = 0.0
            H[-1] = 0.0  # one of the policy's and one of the anchor's

            return H

    settings = {
        "num_generations": 12,
        "per_device_train_batch_size": 12,
        "max_steps": 1,
    }

    trainer = make(
        tmp_path,
        cls=Filtered,
        beta=0.5,
        settings=settings,
    )

    batches = tiny.spy(trainer)
    trainer.train()
    (batch,) = batches
    dropped = batch["tool_mask"].sum(1) == 0

    assert dropped[1]
    assert batch["advantages"][1] == 0
    assert tiny.rows(trainer)[0]["anchor/dropped"] >= 2 / 16
    assert batch["num_items_in_batch"] == (batch["completion_mask"] * ~dropped[:, None]).sum()

    def loss_and_metrics(batch):
        trainer.current_gradient_accumulation_steps = 1
        output = trainer.loss_of(trainer.model.train(), batch)
        return output.loss.item(), output.metrics["kl"], output.metrics["entropy"]

    # Whatever a dropped completion says, it changes neither the loss nor a mean.
    ids = batch["completion_ids"].clone()
    ids[1] = (ids[1] + 3) % 20
    far = batch["ref_per_token_logps"] - 5.0 * dropped[:, None]

    other = {
        **batch,
        "completion_ids": ids,
        "ref_per_token_logps": far,
    }

    assert loss_and_metrics(other) == pytest.approx(loss_and_metrics(batch), rel=1e-5)
    assert batch["completion_mask"][1].sum() > 0  # it is still read as it was written


def test_the_entropies_of_the_filter_are_those_of_the_loss(tmp_path):
    seen = []

    class Recorded(GRPOTrainer):
        def _trajectory_entropies(self, rollout):
            H = super()._trajectory_entropies(rollout)
            seen.append(H[:8])
            return H

    (row,) = tiny.rows(train(tmp_path, cls=Recorded, settings={"max_steps": 1}))
    quartiles = torch.quantile(seen[0], torch.tensor([0.25, 0.5, 0.75])).tolist()
    logged = [row[f"entropy/trajectory_q{k}"] for k in (1, 2, 3)]

    assert logged == pytest.approx(quartiles, abs=1e-5)


def test_the_reference_of_corewarding_is_the_anchor(tmp_path):
    trainer = train(
        tmp_path,
        "corewarding",
        beta=0.1,
        momentum=0.0,
        settings={"max_steps": 1},
    )

    assert trainer.ref_model is trainer.anchor

    # m = 0 and a cosine: at the start the anchor is the policy itself.
    assert tiny.rows(trainer)[0]["kl"] == 0


def test_with_lora_the_anchor_averages_the_adapters_alone(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    parts = {"peft_config": lora, "optim": "muon"}
    trainer = train(tmp_path, parts=parts, settings={"max_steps": 2})

    assert trainer.anchor.weights
    assert all("lora" in name for name in trainer.anchor.weights)
    assert tiny.rows(trainer)[-1]["anchor/distance"] > 0


def test_evaluation_votes_without_the_anchor(tmp_path):
    parts = {"eval_dataset": tiny.make_data(4)}
    trainer = make(tmp_path, parts=parts, settings={"per_device_eval_batch_size": 8})
    assert 0 <= trainer.evaluate()["eval_reward"] <= 1
    assert not trainer.anchor.weights


def test_rollout_functions_and_reward_weights_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with pytest.raises(ValueError, match="rollout_func"):
        make(tmp_path, parts={"rollout_func": lambda prompts, trainer: {}})

    with pytest.raises(ValueError, match="reward_weights"):
        make(tmp_path, settings={"reward_weights": [0.5]})

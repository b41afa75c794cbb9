"""Passes over the tokens that top-k and top-p left, against the sums over a small vocabulary."""

import pytest
import torch

from mesotron.config import ObjectiveConfig
from mesotron.rlvr.passes.truncated import kept_tokens, logprobs_among, pack, unpack
from mesotron.sampling.graphs import Sampling
from support import rlvr_tiny as tiny

V = 11


def make_logits() -> torch.Tensor:
    torch.manual_seed(0)
    return (2 * torch.randn(V, dtype=torch.float64)).requires_grad_()


def every_token(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The sampler's probability of each token (V,), and its log-probability by the pass."""
    chosen = torch.arange(V)[:, None]  # one row per token
    rows = logits.expand(V, 1, V)
    kept = kept_tokens(rows, torch.full((V, 1), int(logits.argmax())), sampling)

    probs = sampling.truncate(logits.detach().softmax(-1)[None])[0]
    return probs / probs.sum(), logprobs_among(rows, chosen, kept).squeeze(1)


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.8), Sampling(top_k=4), Sampling(1, 6, 0.7)])
def test_a_constant_reward_has_no_gradient(sampling):
    """A policy gradient without a bias is 0 when all tokens earn the same."""
    logits = make_logits()
    probs, logprobs = every_token(logits, sampling)
    drawn = probs > 0
    assert 1 < drawn.sum() < V
    torch.testing.assert_close(logprobs[drawn].exp(), probs[drawn])

    mean = (probs * logprobs)[drawn].sum()
    gradient = torch.autograd.grad(mean, logits, retain_graph=True)[0]
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))

    # A softmax over all tokens pushes those up that were kept.
    biased = torch.autograd.grad((probs * logits.log_softmax(-1))[drawn].sum(), logits)[0]
    assert (biased[drawn] > 0.01).any()


def test_ratios_of_a_new_policy_weigh_the_old_one_to_it():
    sampling = Sampling(top_p=0.8)
    old = make_logits()
    probs, old_logprobs = every_token(old, sampling)
    drawn = probs > 0

    new = old.detach() + torch.linspace(-1, 1, V, dtype=torch.float64)
    kept = drawn.expand(V, 1, V)
    logprobs = logprobs_among(new.expand(V, 1, V), torch.arange(V)[:, None], kept).squeeze(1)
    ratio = (logprobs - old_logprobs).exp()

    assert (probs * ratio)[drawn].sum().item() == pytest.approx(1.0)
    full = (new.log_softmax(-1) - old.log_softmax(-1)).exp()
    assert abs((probs * full)[drawn].sum().item() - 1) > 0.02


def test_a_chosen_token_counts_as_kept():
    logits = torch.tensor([[[3.0, 2.0, 1.0, 0.0]]])
    assert kept_tokens(logits, torch.tensor([[3]]), Sampling(top_k=2)).tolist() == [
        [[True, True, False, True]]
    ]


@pytest.mark.parametrize("size", [1, 8, 13, 16])
def test_bits_come_back(size):
    torch.manual_seed(0)
    kept = torch.rand(2, 3, size) < 0.5
    packed = pack(kept)

    assert packed.shape == (2, 3, -(-size // 8))
    assert torch.equal(unpack(packed, size), kept)


MASK = ObjectiveConfig(name="dapo", sampling_mask=True)


def test_it_trains_from_the_probabilities_that_sampled(tmp_path):
    """Two updates of one rollout: at the first the ratio is 1, at the second it is not."""
    trainer = tiny.make_trainer(
        tmp_path,
        parts={"objective": MASK},
        top_k=3,
        temperature=0.8,
        max_steps=2,
        per_device_train_batch_size=4,
        steps_per_generation=2,
    )
    [kept] = [tiny.spy(trainer)]
    trainer.train()

    batch = kept[0]
    assert batch["kept_tokens"].shape == (*batch["completion_ids"].shape, -(-len(tiny.WORDS) // 8))
    sizes = unpack(batch["kept_tokens"], len(tiny.WORDS)).sum(-1)
    assert sizes.tolist() == [[3] * sizes.shape[1]] * len(sizes)

    # One of three was drawn.
    old = batch["old_per_token_logps"][batch["completion_mask"].bool()].exp()
    assert old.mean() > 1 / 4

    first, second = tiny.rows(trainer)
    assert first["ratio/log_max"] == pytest.approx(0, abs=1e-5)
    assert abs(second["ratio/log_max"]) > 1e-4


def test_a_whole_vocabulary_gives_the_usual_pass(tmp_path):
    everything = {"top_k": len(tiny.WORDS), "max_steps": 2}
    usual = tiny.train(tmp_path, parts={"objective": "dapo"}, **everything)
    masked = tiny.train(tmp_path, parts={"objective": MASK}, **everything)
    tiny.assert_same_steps(usual, masked)


@pytest.mark.parametrize(
    ("changed", "word"),
    [({}, "top_p"), ({"top_p": 0.9, "min_p": 0.1}, "min_p"), ({"top_k": 3, "beta": 0.1}, "beta")],
)
def test_what_it_would_miss_is_refused(tmp_path, changed, word):
    objective = ObjectiveConfig(name="dapo", sampling_mask=True, beta=changed.get("beta"))
    with pytest.raises(ValueError, match=word):
        tiny.make_trainer(tmp_path, parts={"objective": objective}, **changed)

"""Passes of fixed shapes, recorded and not, against passes over packed rows as they come."""

import copy
from contextlib import nullcontext

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from mesotron.rlvr.passes.packing import Frame, find_groups, pack_groups
from mesotron.rlvr.passes.recording import FixedPass, Recorder, Tokens, recording_obstacle
from support.rlvr_tiny import NETWORKS, long_sums, make_groups, make_network, make_trainer, rows

G = 4
LONGEST = 6
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
DYNAMIC_ROPE = {
    "rope_type": "dynamic",
    "factor": 2.0,
    "rope_theta": 1e4,
}


def plain(model, batch):
    """TRL's head on packed rows."""
    ids, mask, T = batch
    packed = pack_groups(ids, mask, T)
    assert packed is not None

    out = model(
        input_ids=packed.ids,
        attention_mask=packed.visible(),
        shift_labels=packed.labels,
        position_ids=packed.frame.positions(ids.device),
        fused_lm_head=True,
    )
    return packed.unpack(out.log_probs), packed.unpack(out.entropy)


def pack(batch, most=G, longest=LONGEST):
    packed = pack_groups(*batch, most, longest)
    assert packed is not None
    return packed


def fixed(recorder, batch, temperature=1.0):
    packed = pack(batch)
    scores = recorder(packed, temperature)
    return packed.pick(scores.logprobs), packed.pick(scores.entropies)


def make_pair(kind="llama", device="cpu", temperature=1.0, entropy=False):
    """A model with TRL's head, and a recorder of an equal one."""
    first = make_network(kind, tie_word_embeddings=True).to(device)
    second = copy.deepcopy(first)
    add_fused_lm_head(first, temperature=temperature, outputs=("log_probs", "entropy"))

    return first, Recorder(FixedPass(second, nullcontext, entropy))


def backward(scores, seed, entropy=False):
    """A backward pass with random weights of each token; gradients accumulate."""
    draw = torch.Generator().manual_seed(seed)
    weigh = [torch.randn(x.shape, generator=draw).to(x.device) for x in scores]
    loss = (weigh[0] * scores[0]).sum()
    (loss + (weigh[1] * scores[1]).sum() if entropy else loss).backward()


def same_gradients(first, second, **close):
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        torch.testing.assert_close(a.grad, b.grad, **close)


BATCHES = [
    make_groups(1),
    make_groups(2, T=3),
    make_groups(3, P=14),
    make_groups(4, P=14, groups=(4, 1, 3, 2)),  # as a micro-batch of shuffled rows
    make_groups(5, groups=(8, 4)),  # the same problem drawn twice
]


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_are_those_of_packed_rows(kind, entropy):
    model, recorder = make_pair(kind, temperature=0.7, entropy=entropy)
    for seed, batch in enumerate(BATCHES):  # never zeroed: gradients are added up
        expected = plain(model, batch)
        result = fixed(recorder, batch, 0.7)
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

        assert result[1].requires_grad == entropy
        backward(expected, seed, entropy)
        backward(result, seed, entropy)
        same_gradients(recorder.work.model, model, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_leaves_take_the_place_of_weights(tied):
    """Recordings have their own leaves on the memory of the weights."""
    work = FixedPass(make_network(tie_word_embeddings=tied), nullcontext)
    leaves = {p: p.detach().requires_grad_() for p in work.params}
    packed = pack(make_groups(1))
    tokens = Tokens(packed.ids, packed.prompt, packed.labels)
    both = [work(tokens, packed.frame, 1.0, replaced) for replaced in (leaves, None)]

    assert torch.equal(*(scores.logprobs for scores in both))
    result = torch.autograd.grad(both[0].logprobs.sum(), list(leaves.values()))
    expected = torch.autograd.grad(both[1].logprobs.sum(), work.params)

    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_few_shapes_serve_many_batches():
    frames = set()
    for seed in range(12):
        packed = pack(make_groups(seed, P=12 + seed % 3, T=4 + seed % 3))
        assert packed.frame.tokens % 8 == 0
        frames.add(packed.frame)

    assert frames == {
        Frame(
            rows=3,
            lead=16,
            segments=G,
            length=LONGEST,
        )
    }


def test_a_problem_drawn_twice_has_two_rows():
    ids, mask, T = make_groups(5, groups=(8, 4, 4))
    packed = pack((ids, mask, T), most=4, longest=None)
    assert (packed.frame.rows, packed.frame.segments) == (4, 4)
    assert sorted(packed.slots.tolist()) == list(range(16))

    parts = find_groups(ids[:, :-T], most=3)
    assert parts.largest == 3
    assert len(parts.first) == 3 + 2 + 2

    for row, slot in enumerate(parts.slots.tolist()):
        assert torch.equal(ids[row, :-T], ids[parts.first[slot // 3], :-T])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"attention_dropout": 0.1}, "dropout"),
        ({"rope_parameters": DYNAMIC_ROPE}, "dynamic"),
        ({"logits_scaling": 2.0}, "logits_scaling"),
    ],
)
def test_models_whose_pass_cannot_be_recorded(changed, reason):
    obstacle = recording_obstacle(make_network(**changed))
    assert obstacle is None if reason is None else reason in obstacle


@CUDA
@pytest.mark.parametrize("entropy", [False, True])
def test_a_recording_equals_eager_passes_while_the_weights_change(entropy):
    """Over optimizer steps, two shapes, and two passes to a step."""
    model, recorder = make_pair(device="cuda", entropy=entropy)
    both = (model, recorder.work.model)

    steps = [torch.optim.SGD(one.parameters(), lr=0.05) for one in both]
    for turn in range(6):
        for seed in (2 * turn, 2 * turn + 1):
            batch = make_groups(seed, P=9 if turn % 2 else 20, device="cuda")
            expected = plain(model, batch)

            result = fixed(recorder, batch)
            for a, b in zip(result, expected, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)

            backward(expected, seed, entropy)
            backward(result, seed, entropy)

        # Single entries are sums that cancel: compare whole tensors by their norm.
        for a, b in zip(both[1].parameters(), model.parameters(), strict=True):
            assert (a.grad - b.grad).norm() <= 1e-3 * b.grad.norm()

        for step in steps:
            step.step()
            step.zero_grad()

        with torch.no_grad():  # rounding of one step must not grow in the next ones
            for a, b in zip(both[1].parameters(), model.parameters(), strict=True):
                assert (a - b).norm() <= 1e-3 * b.norm()
                a.copy_(b)

    assert len(recorder.recordings) == 2


def record(batch):
    """A model with TRL's head, and a recorder that has recorded the batch's shape."""
    model, recorder = make_pair(device="cuda")
    for _ in range(2):
        backward(fixed(recorder, batch), 0)

    assert recorder.recordings
    return model, recorder


@CUDA
def test_a_recording_serves_passes_without_gradient_and_gradients_by_name():
    batch = make_groups(1, device="cuda")
    model, recorder = record(batch)
    with torch.no_grad():
        torch.testing.assert_close(
            fixed(recorder, batch)[0], plain(model, batch)[0], atol=1e-4, rtol=1e-4
        )

    params = list(recorder.work.model.parameters())
    first = torch.autograd.grad(fixed(recorder, batch)[0].sum(), params)
    kept = [x.clone() for x in first]
    torch.autograd.grad(fixed(recorder, make_groups(2, device="cuda"))[0].sum(), params)

    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


@CUDA
def test_two_recorded_passes_before_one_backward_are_refused():
    batch = make_groups(1, device="cuda")
    _, recorder = record(batch)
    first = fixed(recorder, batch)
    fixed(recorder, batch)

    with pytest.raises(ValueError, match="backward"):
        backward(first, 0)


@CUDA
def test_weights_that_were_moved_are_recorded_again():
    batch = make_groups(1, device="cuda")
    model, recorder = record(batch)
    with torch.no_grad():
        for one in (model, recorder.work.model):
            for p in one.parameters():
                p.data = p.data * 1.5

    result = fixed(recorder, batch)[0]
    expected = plain(model, batch)[0]
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


@CUDA
@pytest.mark.parametrize("bf16", [False, True])
def test_a_recorded_run_on_a_gpu_makes_the_same_steps(tmp_path, bf16):
    """At a learning rate where rounding does not change what is sampled."""
    trainers = []
    for record in (False, True):
        trainer = make_trainer(
            tmp_path,
            parts={"fast": True, "train_dataset": long_sums()},
            use_cpu=False,
            bf16=bf16,
            learning_rate=1e-5,
            max_steps=6,
        )

        assert trainer.shared_prompts.record
        trainer.shared_prompts.record = record
        trainer.train()
        trainers.append(trainer)

    assert trainers[1].shared_prompts.recorder.recordings
    loose = 0.05 if bf16 else 1e-3
    for a, b in zip(*map(rows, trainers), strict=True):
        assert a["completions/mean_length"] == b["completions/mean_length"]
        assert a["entropy"] == pytest.approx(b["entropy"], rel=loose)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=4 * loose)

"""Passes of fixed shapes, recorded and not, against the passes over packed rows as they come."""

import copy
import logging
from contextlib import nullcontext

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from mesotron.rlvr.fast import recording
from mesotron.rlvr.fast.packing import Frame, find_groups, pack_groups
from mesotron.rlvr.fast.recording import FixedPass, Recorder, Tokens, recording_obstacle
from support.rlvr_tiny import make_data, make_trainer, rows

V, G, LONGEST = 50, 4, 6
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
MOVING = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def make_model(kind="llama", **changed):
    torch.manual_seed(0)
    config, model = KINDS[kind]
    settings = {
        "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": True, **changed,
    }  # fmt: skip
    return model(config(**settings))


def make_batch(seed, P=9, T=5, groups=(4, 4, 4), device="cpu"):
    """Shuffled rows: prompts and completions of several lengths."""
    draw = torch.Generator().manual_seed(seed)
    ids, mask = [], []
    for number, size in enumerate(groups):
        prompt = torch.randint(1, V, (P,), generator=draw)
        for k in range(size):
            ids.append(torch.cat([prompt, torch.randint(1, V, (T,), generator=draw)]))
            seen = torch.ones(P + T, dtype=torch.long)
            seen[:number] = 0
            seen[P + T - k % T :] = 0
            mask.append(seen)
    order = torch.randperm(len(ids), generator=draw)
    return torch.stack(ids)[order].to(device), torch.stack(mask)[order].to(device), T


def long_sums():
    """Prompts that are longer than their completions."""
    return make_data().map(lambda row: {"prompt": f"{row['gold']} + 1 + 2 + {row['prompt']}"})


def plain(model, batch):
    """As `share_prompts` has it: TRL's head on packed rows."""
    ids, mask, T = batch
    packed = pack_groups(ids, mask, T)
    assert packed is not None
    out = model(
        input_ids=packed.ids, attention_mask=packed.visible(), shift_labels=packed.labels,
        position_ids=packed.frame.positions(ids.device), fused_lm_head=True,
    )  # fmt: skip
    return packed.unpack(out.log_probs), packed.unpack(out.entropy)


def fixed(recorder, batch, temperature=1.0):
    ids, mask, T = batch
    packed = pack_groups(ids, mask, T, G, LONGEST)
    assert packed is not None
    found = recorder(packed, temperature)
    return packed.pick(found.logprobs), packed.pick(found.entropies)


def make_pair(kind="llama", device="cpu", temperature=1.0, entropy=False):
    """A model with TRL's head, and a recorder of an equal one."""
    first = make_model(kind).to(device)
    second = copy.deepcopy(first)
    add_fused_lm_head(first, temperature=temperature, outputs=("log_probs", "entropy"))
    return first, Recorder(FixedPass(second, nullcontext, entropy))


def backward(scores, seed, entropy=False):
    """A backward pass with weights of each token; the gradients are added to those there are."""
    draw = torch.Generator().manual_seed(seed)
    weigh = [torch.randn(x.shape, generator=draw).to(x.device) for x in scores]
    loss = (weigh[0] * scores[0]).sum()
    (loss + (weigh[1] * scores[1]).sum() if entropy else loss).backward()


def same_gradients(first, second, **close):
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        torch.testing.assert_close(a.grad, b.grad, **close)


BATCHES = [
    make_batch(1),
    make_batch(2, T=3),
    make_batch(3, P=14),
    make_batch(4, P=14, groups=(4, 1, 3, 2)),  # as a micro-batch of shuffled rows
    make_batch(5, groups=(8, 4)),  # the same problem drawn twice
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_added_gradients_are_those_of_packed_rows(kind, entropy):
    model, recorder = make_pair(kind, temperature=0.7, entropy=entropy)
    for seed, batch in enumerate(BATCHES):  # never zeroed: gradients are added up
        wanted, found = plain(model, batch), fixed(recorder, batch, 0.7)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert found[1].requires_grad == entropy
        backward(wanted, seed, entropy)
        backward(found, seed, entropy)
        same_gradients(recorder.work.model, model, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_leaves_take_the_place_of_weights(tied):
    """What is recorded has leaves of its own on the weights' memory."""
    work = FixedPass(make_model(tie_word_embeddings=tied), nullcontext)
    leaves = {p: p.detach().requires_grad_() for p in work.params}
    ids, mask, T = make_batch(1)
    packed = pack_groups(ids, mask, T, G, LONGEST)
    assert packed is not None
    both = [
        work(Tokens(packed.ids, packed.prompt, packed.labels), packed.frame, 1.0, given)
        for given in (leaves, None)
    ]
    assert torch.equal(*(scores.logprobs for scores in both))
    found = torch.autograd.grad(both[0].logprobs.sum(), list(leaves.values()))
    wanted = torch.autograd.grad(both[1].logprobs.sum(), work.params)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_few_shapes_serve_many_batches():
    frames = set()
    for seed in range(12):
        ids, mask, T = make_batch(seed, P=12 + seed % 3, T=4 + seed % 3)
        packed = pack_groups(ids, mask, T, G, LONGEST)
        assert packed is not None
        assert packed.frame.tokens % 8 == 0
        frames.add(packed.frame)
    assert frames == {Frame(rows=3, lead=16, segments=G, length=LONGEST)}


def test_a_problem_drawn_twice_has_two_rows():
    batch = make_batch(5, groups=(8, 4, 4))
    ids, mask, T = batch
    packed = pack_groups(ids, mask, T, most=4)
    assert packed is not None
    assert packed.frame.rows == 4
    assert packed.frame.segments == 4
    assert sorted(packed.slots.tolist()) == list(range(16))
    found = find_groups(ids[:, :-T], most=3)
    assert found.largest == 3
    assert len(found.first) == 3 + 2 + 2
    for row, slot in enumerate(found.slots.tolist()):
        assert torch.equal(ids[row, :-T], ids[found.first[slot // 3], :-T])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"attention_dropout": 0.1}, "dropout"),
        ({"rope_parameters": MOVING}, "dynamic"),
        ({"logits_scaling": 2.0}, "logits_scaling"),
    ],
)
def test_models_whose_pass_cannot_be_recorded(changed, reason):
    found = recording_obstacle(make_model(**changed))
    assert found is None if reason is None else reason in found


@CUDA
@pytest.mark.parametrize("entropy", [False, True])
def test_recorded_is_what_was_not_recorded_while_the_weights_change(entropy):
    """Over optimizer steps, two shapes, and two passes to a step."""
    model, recorder = make_pair(device="cuda", entropy=entropy)
    both = (model, recorder.work.model)
    steps = [torch.optim.SGD(one.parameters(), lr=0.05) for one in both]
    for turn in range(6):
        for seed in (2 * turn, 2 * turn + 1):
            batch = make_batch(seed, P=9 if turn % 2 else 20, device="cuda")
            wanted, found = plain(model, batch), fixed(recorder, batch)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
            backward(wanted, seed, entropy)
            backward(found, seed, entropy)
        # Single entries are sums that cancel: a tensor is as near as its norm says.
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


@CUDA
def test_a_recording_serves_passes_without_gradient_and_gradients_by_name():
    model, recorder = make_pair(device="cuda")
    batch = make_batch(1, device="cuda")
    for _ in range(2):
        backward(fixed(recorder, batch), 0)
    assert recorder.recordings
    with torch.no_grad():
        torch.testing.assert_close(
            fixed(recorder, batch)[0], plain(model, batch)[0], atol=1e-4, rtol=1e-4
        )
    params = list(recorder.work.model.parameters())
    first = torch.autograd.grad(fixed(recorder, batch)[0].sum(), params)
    kept = [x.clone() for x in first]
    torch.autograd.grad(fixed(recorder, make_batch(2, device="cuda"))[0].sum(), params)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


@CUDA
def test_two_recorded_passes_before_one_backward_are_refused():
    _, recorder = make_pair(device="cuda")
    batch = make_batch(1, device="cuda")
    for _ in range(2):
        backward(fixed(recorder, batch), 0)
    first = fixed(recorder, batch)
    fixed(recorder, batch)
    with pytest.raises(ValueError, match="backward"):
        backward(first, 0)


@CUDA
def test_weights_that_were_moved_are_recorded_anew():
    model, recorder = make_pair(device="cuda")
    batch = make_batch(1, device="cuda")
    for _ in range(2):
        backward(fixed(recorder, batch), 0)
    with torch.no_grad():
        for one in (model, recorder.work.model):
            for p in one.parameters():
                p.data = p.data * 1.5
    found, wanted = fixed(recorder, batch)[0], plain(model, batch)[0]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@CUDA
def test_more_shapes_than_are_kept_run_plainly(caplog, monkeypatch):
    monkeypatch.setattr(recording, "MAX_SHAPES", 1)
    model, recorder = make_pair(device="cuda")
    with caplog.at_level(logging.WARNING):
        for P in (9, 9, 20, 20, 20):
            batch = make_batch(P, P=P, device="cuda")
            found, wanted = fixed(recorder, batch), plain(model, batch)
            torch.testing.assert_close(found[0], wanted[0], atol=1e-4, rtol=1e-4)
            backward(found, 0)
    assert len(recorder.recordings) == 1
    assert sum("eagerly" in message for message in caplog.messages) == 1


@CUDA
@pytest.mark.parametrize("bf16", [False, True])
def test_a_recorded_run_on_a_gpu_makes_the_same_steps(tmp_path, bf16):
    """At a rate at which rounding does not change what is sampled."""
    trainers = []
    for record in (False, True):
        trainer = make_trainer(
            tmp_path, parts={"fast": True, "train_dataset": long_sums()}, use_cpu=False, bf16=bf16,
            learning_rate=1e-5, max_steps=6,
        )  # fmt: skip
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

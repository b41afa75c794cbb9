"""Probes against hand-worked cases and plain-Python oracles."""

import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mesotron import probes


def finite(found: dict[str, float]) -> bool:
    return all(type(value) is float and math.isfinite(value) for value in found.values())


def test_group_signal():
    rewards = [[1.1, 1.1, 1.1], [0.1, 0.1, 0.1], [1.1, 0.1, 0.0], [1.1, 1.0, 1.1]]
    right = [[True] * 3, [False] * 3, [True, False, False], [True] * 3]
    found = probes.group_signal(rewards, right=right)

    # The last group is all correct and still has a signal: one completion lost the format reward.
    assert found == {
        "groups/zero_signal": 0.5,
        "groups/all_right": 0.5,
        "groups/all_wrong": 0.25,
        "groups/mixed": 0.25,
        "groups/unscored": 0.0,
        "groups/spread": pytest.approx(np.std(rewards, axis=1).mean()),
    }

    tensor = torch.rand(5, 4).bfloat16()
    assert probes.group_signal(tensor) == probes.group_signal(tensor.tolist())


def test_rewards_within_the_tolerance_are_equal():
    rewards = np.full((2, 4), 0.3) + np.array([[0, 1e-8, 0, 0], [0, 0, 1e-3, 0]])
    for tolerance, share in ((1e-6, 0.5), (1e-2, 1.0), (0.0, 0.0)):
        assert probes.group_signal(rewards, tolerance)["groups/zero_signal"] == share


def test_unscored_completions():
    """TRL reports 0 zero-std groups where no completion was scored at all."""
    nan = math.nan
    found = probes.group_signal([[nan, nan], [1.0, nan], [1.0, 0.0]])
    assert found["groups/zero_signal"] == pytest.approx(2 / 3)
    assert found["groups/unscored"] == pytest.approx(3 / 6)
    assert found["groups/spread"] == pytest.approx(0.5 / 3)
    assert finite(found)
    assert math.isnan(probes.group_signal([[1.0, math.inf], [1.0, 0.0]])["groups/spread"])


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((lambda x=x: probes.group_signal(x), "rewards") for x in ([1.0, 2.0], [], [[]], 3.0)),
        (lambda: probes.group_signal([[1.0, 2.0]], right=[[True]]), "right"),
        (lambda: probes.log_ratio_extremes(torch.zeros(2, 3), torch.ones(2, 4)), "mask"),
        (lambda: probes.lengths([]), "completions"),
        (lambda: probes.gradient_snr([torch.ones(3)]), "1 part"),
        (lambda: probes.head_heterogeneity(torch.ones(4, 3), 3), "3 heads"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(call, name):
    with pytest.raises(ValueError, match=name):
        call()


def test_answer_diversity():
    constant = probes.answer_diversity([["0"] * 4] * 6)
    assert constant == {"answers/distinct_in_group": 1.0, "answers/top_share": 1.0}

    healthy = probes.answer_diversity([[str(k), str(k), "x" + str(k)] for k in range(6)])
    assert healthy["answers/distinct_in_group"] == 2.0
    assert healthy["answers/top_share"] == pytest.approx(2 / 3 / 6)

    one_vote_each = probes.answer_diversity([["1"] * 100, ["2"], ["2"]])
    assert one_vote_each["answers/top_share"] == pytest.approx(2 / 3)

    for nothing in ([], [[]], [[None, None]]):
        assert set(probes.answer_diversity(nothing).values()) == {0.0}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("vocabulary", [2, 5, 150_000])
def test_repetition_against_sets_of_tuples(n, vocabulary):
    def plain(ids: list[int]) -> float:
        if len(ids) <= n:
            return 0.0

        grams = [tuple(ids[k : k + n]) for k in range(len(ids) - n + 1)]
        return 1 - len(set(grams)) / len(grams)

    draw = random.Random(f"{n} {vocabulary}")
    batch = []
    for _ in range(20):
        length = draw.randrange(30)
        batch.append([draw.randrange(vocabulary) for _ in range(length)])

    for ids in (batch, [[1, 2, 3, 4, 5]] * 8, [[7] * 100], [[], [1]], [[]]):
        found = probes.repetition(ids, n)["completions/repetition"]
        expected = sum(map(plain, ids)) / len(ids)
        assert found == pytest.approx(expected, abs=1e-12)

    assert probes.repetition([]) == {"completions/repetition": 0}


def test_lengths():
    assert probes.lengths([[1], [1, 2, 3]], [False, True]) == {
        "completions/mean_length": 2.0,
        "completions/min_length": 1.0,
        "completions/max_length": 3.0,
        "completions/clipped_ratio": 0.5,
    }


def test_values_outside_the_mask_do_not_count():
    values = torch.randn(6, 9).abs()
    mask = (torch.rand(6, 9) < 0.6).int()
    mask[:, 0] = 1

    hostile = torch.where(mask == 1, values, torch.tensor([math.nan, math.inf, -math.inf] * 3))
    for probe in (
        probes.entropy_quartiles,
        probes.log_ratio_extremes,
        lambda x, m: probes.kl_to_start(x, x * 0.9, m),
        lambda x, m: probes.clip_fractions(x, m, torch.ones(6), -0.1, 0.1),
    ):
        assert probe(hostile, mask) == probe(values * mask, mask)
        assert finite(probe(hostile, mask))
        assert set(probe(values, mask * 0).values()) == {0.0}


def test_entropy_quartiles_against_numpy():
    values = torch.rand(12, 7)
    mask = torch.rand(12, 7) < 0.7
    mask[:, 0] = True
    mask[11] = False
    found = probes.entropy_quartiles(values, mask)
    tokens = values[mask].numpy()

    rows = [values[k][mask[k]].mean().item() for k in range(11)]  # without the empty completion
    for k in (1, 2, 3):
        of_tokens = np.quantile(tokens, k / 4)
        of_rows = np.quantile(rows, k / 4)
        assert found[f"entropy/token_q{k}"] == pytest.approx(of_tokens, abs=1e-6)
        assert found[f"entropy/trajectory_q{k}"] == pytest.approx(of_rows, abs=1e-6)


def test_clipping_on_the_side_of_the_advantage():
    ratio = torch.tensor([[0.3, -0.3, 0.0], [0.3, -0.3, 0.0]])
    found = probes.clip_fractions(
        ratio,
        torch.ones(2, 3),
        torch.tensor([1.0, -1.0]),
        -0.2,
        0.2,
    )

    assert list(found.values()) == pytest.approx([1 / 6, 1 / 6])
    per_token = torch.tensor([[1.0, -1.0, 1.0], [0.0, 0.0, 0.0]])
    found = probes.clip_fractions(
        ratio,
        torch.ones(2, 3),
        per_token,
        -0.2,
        0.2,
    )

    assert found["ratio/clipped_low"] == pytest.approx(1 / 6)


def test_the_kl_estimate_is_unbiased():
    p = torch.tensor([0.7, 0.2, 0.1]).double()
    q = torch.tensor([0.3, 0.3, 0.4]).double()
    terms = p * (p / q).log()
    exact = terms.sum().item()

    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    drawn = drawn[None]  # one completion
    mask = torch.ones_like(drawn)
    found = probes.kl_to_start(p.log()[drawn], q.log()[drawn], mask)

    assert found["kl/start"] == pytest.approx(exact, rel=0.02)


def test_effective_rank_of_known_spectra():
    left, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(9, 6, dtype=torch.float64))
    sigma = torch.tensor([4.0, 2.0, 1.0, 1.0, 0.0, 0.0]).double()
    X = left @ torch.diag(sigma) @ right.T
    found = probes.effective_rank(X)

    shares = (0.5, 0.25, 0.125, 0.125)
    entropy = -sum(share * math.log(share) for share in shares)
    assert found["gradient/effective_rank"] == pytest.approx(math.exp(entropy))
    assert found["gradient/stable_rank"] == pytest.approx(22 / 16)
    assert probes.effective_rank(X * 1e-30) == pytest.approx(found)

    half = {key: value / 2 for key, value in found.items()}
    with_zero = torch.stack([X, torch.zeros_like(X)])
    assert probes.effective_rank(with_zero) == pytest.approx(half)

    of_zero = probes.effective_rank(torch.zeros(3, 4))
    assert set(of_zero.values()) == {0.0}


def test_the_snr_estimate_is_unbiased():
    generator = torch.Generator().manual_seed(0)
    mean = 0.1
    D = 50
    K = 4
    draws = mean + torch.randn(2000, K, D, generator=generator)
    found = [probes.gradient_snr(list(parts)) for parts in draws]
    signal = np.mean([f["gradient/signal"] for f in found])
    noise = np.mean([f["gradient/noise"] for f in found])

    assert signal == pytest.approx(D * mean**2, abs=0.15)  # ||mean g||^2 would be 13
    assert noise == pytest.approx(D, rel=0.02)


def test_snr_of_lists_and_limits():
    parts = torch.randn(5, 12)
    lists = [[part[:4].reshape(2, 2), part[4:]] for part in parts]
    assert probes.gradient_snr(lists) == pytest.approx(probes.gradient_snr(list(parts)))

    found = probes.gradient_snr([torch.ones(3)] * 4)
    assert found["gradient/noise"] == pytest.approx(0, abs=1e-12)
    assert finite(found)
    assert found["gradient/snr"] > 1e6
    assert probes.gradient_snr([torch.zeros(3)] * 2)["gradient/snr"] == 0.0


def test_head_heterogeneity():
    weight = torch.cat([torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)])
    found = probes.head_heterogeneity(weight, 2)
    assert found["heads/norm_variance"] == pytest.approx(np.var([6**0.5, 2 * 6**0.5]))

    for scale in (1, 8):
        found = probes.head_heterogeneity(weight * scale, 2)
        assert found["heads/norm_variation"] == pytest.approx(1 / 3)


def test_the_docs_list_every_probe():
    x = torch.rand(3, 5)
    mask = torch.ones(3, 5)
    ids = [[1, 2, 3], [4, 5, 6]]
    found = probes.group_signal([[0.0, 1.0]], right=[[True, False]])
    found |= probes.answer_diversity([["1"]]) | probes.repetition(ids)
    found |= probes.entropy_quartiles(x, mask) | probes.log_ratio_extremes(x, mask)

    found |= probes.clip_fractions(
        x,
        mask,
        torch.ones(3),
        -0.1,
        0.1,
    )

    found |= probes.kl_to_start(x, x, mask) | probes.effective_rank(x)
    found |= probes.gradient_snr(list(x)) | probes.head_heterogeneity(x, 3)
    page = (Path(__file__).parents[2] / "docs" / "api" / "metrics.md").read_text()
    table = page.split("## Probes")[1].split("\n## ")[0]

    documented = set()
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", cell)
        base = names[0].removesuffix("_q1")
        documented |= {base + name if name.startswith("_q") else name for name in names}

    assert documented == set(found)


def test_forgetting_is_the_mean_nll_of_the_blocks(tmp_path):
    from mesotron.config import ModelConfig
    from mesotron.models.load import load_model
    from mesotron.probes.forgetting import read_text, text_blocks, text_nll

    model, tokenizer = load_model(ModelConfig(name="tiny"))
    file = tmp_path / "text.txt"
    file.write_text("Ann has 7 apples. Ben has 12 cups. " * 40)
    blocks = text_blocks(tokenizer, read_text(file), length=16)

    assert blocks.shape[1] == 16
    with torch.no_grad():
        logp = model(input_ids=blocks).logits[:, :-1].log_softmax(-1)

    expected = -logp.gather(2, blocks[:, 1:, None]).double().mean().item()
    assert text_nll(model, blocks) == pytest.approx(expected, rel=1e-5)
    assert len(read_text().split()) > 900

    (tmp_path / "empty.txt").write_text(" ")
    with pytest.raises(ValueError, match="empty"):
        read_text(tmp_path / "empty.txt")

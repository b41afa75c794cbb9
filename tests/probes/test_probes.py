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
    assert all(type(value) is float for value in found.values()), found
    return all(map(math.isfinite, found.values()))


def test_group_signal():
    rewards = [[1.1, 1.1, 1.1], [0.1, 0.1, 0.1], [1.1, 0.1, 0.0], [1.1, 1.0, 1.1]]
    right = [[True] * 3, [False] * 3, [True, False, False], [True] * 3]
    found = probes.group_signal(rewards, right=right)
    # The last group is all correct and still has a signal: one completion lost the format reward.
    assert found["groups/zero_signal"] == 0.5
    assert found["groups/all_right"] == 0.5
    assert found["groups/all_wrong"] == 0.25
    assert found["groups/mixed"] == 0.25
    assert found["groups/spread"] == pytest.approx(np.std(rewards, axis=1).mean())


def test_rewards_within_the_tolerance_are_equal():
    rewards = np.full((2, 4), 0.3) + np.array([[0, 1e-8, 0, 0], [0, 0, 1e-3, 0]])
    assert probes.group_signal(rewards)["groups/zero_signal"] == 0.5
    assert probes.group_signal(rewards, tolerance=1e-2)["groups/zero_signal"] == 1.0
    assert probes.group_signal(rewards, tolerance=0.0)["groups/zero_signal"] == 0.0


def test_unscored_completions():
    """TRL reports 0 zero-std groups where no completion was scored at all."""
    nan = math.nan
    found = probes.group_signal([[nan, nan], [1.0, nan], [1.0, 0.0]])
    assert found["groups/zero_signal"] == pytest.approx(2 / 3)
    assert found["groups/unscored"] == pytest.approx(3 / 6)
    assert found["groups/spread"] == pytest.approx(0.5 / 3)
    assert finite(found)


def test_tensors_and_lists_agree():
    rewards = torch.rand(5, 4).bfloat16()
    assert probes.group_signal(rewards) == probes.group_signal(rewards.tolist())


@pytest.mark.parametrize("rewards", [[1.0, 2.0], [], [[]], 3.0])
def test_rewards_without_groups_are_refused(rewards):
    with pytest.raises(ValueError, match="rewards"):
        probes.group_signal(rewards)


def test_shapes_must_match():
    with pytest.raises(ValueError, match="right"):
        probes.group_signal([[1.0, 2.0]], right=[[True]])
    with pytest.raises(ValueError, match="mask"):
        probes.log_ratio_extremes(torch.zeros(2, 3), torch.ones(2, 4))


def test_answer_diversity():
    constant = probes.answer_diversity([["0"] * 4] * 6)
    assert constant == {"answers/distinct_in_group": 1.0, "answers/top_share": 1.0}
    healthy = probes.answer_diversity([[str(k), str(k), "x" + str(k)] for k in range(6)])
    assert healthy["answers/distinct_in_group"] == 2.0
    assert healthy["answers/top_share"] == pytest.approx(2 / 3 / 6)
    one_vote_each = probes.answer_diversity([["1"] * 100, ["2"], ["2"]])
    assert one_vote_each["answers/top_share"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("groups", [[], [[]], [[None, None]]])
def test_no_answers(groups):
    assert set(probes.answer_diversity(groups).values()) == {0.0}


def plain_repetition(ids: list[int], n: int) -> float:
    grams = [tuple(ids[k : k + n]) for k in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if len(ids) > n else 0.0


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("vocabulary", [2, 5, 150_000])
def test_repetition_against_sets_of_tuples(n, vocabulary):
    draw = random.Random(f"{n} {vocabulary}")
    batch = [[draw.randrange(vocabulary) for _ in range(draw.randrange(30))] for _ in range(20)]
    expected = sum(plain_repetition(ids, n) for ids in batch) / len(batch)
    found = probes.repetition(batch, n)["completions/repetition"]
    assert found == pytest.approx(expected, abs=1e-12)


def test_repetition_within_completions_only():
    assert probes.repetition([[1, 2, 3, 4, 5]] * 8)["completions/repetition"] == 0.0
    loop = probes.repetition([[7] * 100])["completions/repetition"]
    assert loop == pytest.approx(1 - 1 / 97)


@pytest.mark.parametrize("batch", [[], [[]], [[], [1, 2]]])
def test_nothing_to_repeat(batch):
    assert probes.repetition(batch) == {"completions/repetition": 0.0}


def test_lengths():
    assert probes.lengths([[1], [1, 2, 3]], [False, True]) == {
        "completions/mean_length": 2.0,
        "completions/min_length": 1.0,
        "completions/max_length": 3.0,
        "completions/clipped_ratio": 0.5,
    }
    with pytest.raises(ValueError, match="completions"):
        probes.lengths([])


def test_values_outside_the_mask_do_not_count():
    values, mask = torch.randn(6, 9).abs(), (torch.rand(6, 9) < 0.6).int()
    mask[:, 0] = 1
    hostile = torch.where(mask == 1, values, torch.tensor([math.nan, math.inf, -math.inf] * 3))
    zero = values * mask
    for probe in (
        probes.entropy_quartiles,
        probes.log_ratio_extremes,
        lambda x, m: probes.kl_to_start(x, x * 0.9, m),
        lambda x, m: probes.clip_fractions(x, m, torch.ones(6), -0.1, 0.1),
    ):
        assert probe(hostile, mask) == probe(zero, mask)
        assert finite(probe(hostile, mask))


def test_entropy_quartiles_against_numpy():
    values, mask = torch.rand(11, 7), torch.rand(11, 7) < 0.7
    mask[:, 0] = True
    found = probes.entropy_quartiles(values, mask)
    tokens = values[mask].numpy()
    rows = [values[k][mask[k]].mean().item() for k in range(11)]
    for k in (1, 2, 3):
        assert found[f"entropy/token_q{k}"] == pytest.approx(np.quantile(tokens, k / 4), abs=1e-6)
        expected = np.quantile(rows, k / 4)
        assert found[f"entropy/trajectory_q{k}"] == pytest.approx(expected, abs=1e-6)


def test_quartiles_leave_out_empty_completions():
    values = torch.tensor([[2.0, 2.0], [9.0, 9.0]])
    found = probes.entropy_quartiles(values, torch.tensor([[1, 1], [0, 0]]))
    assert found["entropy/trajectory_q1"] == found["entropy/trajectory_q3"] == 2.0


def test_no_tokens():
    x, none = torch.randn(2, 3), torch.zeros(2, 3)
    found = probes.entropy_quartiles(x, none) | probes.log_ratio_extremes(x, none)
    found |= probes.clip_fractions(x, none, torch.ones(2), -0.2, 0.2)
    found |= probes.kl_to_start(x, x + 1, none)
    assert set(found.values()) == {0.0}


def test_clipping_on_the_side_of_the_advantage():
    ratio = torch.tensor([[0.3, -0.3, 0.0], [0.3, -0.3, 0.0]])
    found = probes.clip_fractions(ratio, torch.ones(2, 3), torch.tensor([1.0, -1.0]), -0.2, 0.2)
    assert found == {"ratio/clipped_low": pytest.approx(1 / 6),
                     "ratio/clipped_high": pytest.approx(1 / 6)}  # fmt: skip
    per_token = torch.tensor([[1.0, -1.0, 1.0], [0.0, 0.0, 0.0]])
    found = probes.clip_fractions(ratio, torch.ones(2, 3), per_token, -0.2, 0.2)
    assert found["ratio/clipped_low"] == pytest.approx(1 / 6)


def test_the_kl_estimate_is_unbiased():
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    exact = (p * (p / q).log()).sum().item()
    drawn = torch.multinomial(p, 200_000, replacement=True,
                              generator=torch.Generator().manual_seed(0))[None]  # fmt: skip
    found = probes.kl_to_start(p.log()[drawn], q.log()[drawn], torch.ones_like(drawn))
    assert found["kl/start"] == pytest.approx(exact, rel=0.02)


def test_effective_rank_of_known_spectra():
    left, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(9, 6, dtype=torch.float64))
    sigma = torch.tensor([4.0, 2.0, 1.0, 1.0, 0.0, 0.0]).double()
    X = left @ torch.diag(sigma) @ right.T
    found = probes.effective_rank(X)
    p = [0.5, 0.25, 0.125, 0.125]
    expected = math.exp(-sum(x * math.log(x) for x in p))
    assert found["gradient/effective_rank"] == pytest.approx(expected)
    assert found["gradient/stable_rank"] == pytest.approx(22 / 16)
    assert probes.effective_rank(X * 1e-30) == pytest.approx(found)
    assert probes.effective_rank(torch.stack([X, torch.zeros_like(X)])) == pytest.approx(
        {key: value / 2 for key, value in found.items()}
    )
    assert set(probes.effective_rank(torch.zeros(3, 4)).values()) == {0.0}


def test_the_snr_estimate_is_unbiased():
    generator = torch.Generator().manual_seed(0)
    mean, D, K = 0.1, 50, 4
    draws = mean + torch.randn(2000, K, D, generator=generator)
    found = [probes.gradient_snr(list(parts)) for parts in draws]
    signal, noise = (
        np.mean([f[f"gradient/{name}"] for f in found]) for name in ("signal", "noise")
    )
    assert signal == pytest.approx(D * mean**2, abs=0.15)  # ||mean g||^2 would be 13
    assert noise == pytest.approx(D, rel=0.02)


def test_snr_of_lists_of_tensors():
    parts = torch.randn(5, 12)
    lists = [[part[:4].reshape(2, 2), part[4:]] for part in parts]
    assert probes.gradient_snr(lists) == pytest.approx(probes.gradient_snr(list(parts)))


def test_snr_limits():
    same = [torch.ones(3)] * 4
    found = probes.gradient_snr(same)
    assert found["gradient/noise"] == pytest.approx(0, abs=1e-12)
    assert finite(found)
    assert found["gradient/snr"] > 1e6
    assert probes.gradient_snr([torch.zeros(3)] * 2)["gradient/snr"] == 0.0
    with pytest.raises(ValueError, match="1 part"):
        probes.gradient_snr([torch.ones(3)])


def test_head_heterogeneity():
    weight = torch.cat([torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)])
    norms = [math.sqrt(6), 2 * math.sqrt(6)]
    found = probes.head_heterogeneity(weight, 2)
    assert found["heads/norm_variance"] == pytest.approx(np.var(norms))
    assert found["heads/norm_variation"] == pytest.approx(1 / 3)
    assert probes.head_heterogeneity(weight * 8, 2)["heads/norm_variation"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="3 heads"):
        probes.head_heterogeneity(weight, 3)


def test_the_docs_list_every_probe():
    x, mask = torch.rand(3, 5), torch.ones(3, 5)
    ids = [[1, 2, 3], [4, 5, 6]]
    found = probes.group_signal([[0.0, 1.0]], right=[[True, False]])
    found |= probes.answer_diversity([["1"]]) | probes.repetition(ids)
    found |= probes.entropy_quartiles(x, mask) | probes.log_ratio_extremes(x, mask)
    found |= probes.clip_fractions(x, mask, torch.ones(3), -0.1, 0.1)
    found |= probes.kl_to_start(x, x, mask) | probes.effective_rank(x)
    found |= probes.gradient_snr(list(x)) | probes.head_heterogeneity(x, 3)
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    table = page.split("# What the probes measure")[1].split("\n# ")[0]
    documented = set()
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", cell)
        base = names[0].removesuffix("_q1")
        documented |= {base + name if name.startswith("_q") else name for name in names}
    assert documented == set(found)

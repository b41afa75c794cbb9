"""Two processes make the steps of one, where each holds whole groups and where groups span both."""

import errno

import pytest
import torch

from mesotron.config import ObjectiveConfig, OptimConfig
from support.rlvr_processes import move_anchor, run_everywhere, run_on

# Eight completions of each process; a group of 16 spans both.
SHAPES = {"whole": {"num_generations": 4}, "spanning": {"num_generations": 16}}
TIMES = {"step_time", "time/step", "time/rollout", "time/optimizer"}


def length(completions, prompts, **_):
    """Depends on the text alone; prompts that start with 0 teach nothing."""
    return [
        0.0 if p.startswith("0") else len(c) % 5 / 5
        for p, c in zip(prompts, completions, strict=True)
    ]


CASES = {
    "grpo": ObjectiveConfig(name="grpo", beta=0.05),
    "mgrpo": ObjectiveConfig(name="mgrpo", momentum=0.5),
    "merged": ObjectiveConfig(name="mgrpo", momentum=0.5, loss_on_momentum=True),
    "resample": ObjectiveConfig(name="grpo", beta=0.0, dynamic_sampling="resample"),
    "oversample": ObjectiveConfig(
        name="grpo",
        beta=0.0,
        dynamic_sampling="resample",
        dynamic_max_rounds=1,
        dynamic_oversample=3,
    ),
    "drop": ObjectiveConfig(name="dapo", dynamic_sampling="drop"),
}


def case(objective, shape, num):
    settings = {"per_device_train_batch_size": 16 // num, "max_steps": 2, **SHAPES[shape]}
    optim = OptimConfig(name="muon", lr=0.01)
    return settings, {"objective": CASES[objective], "optim": optim, "reward_funcs": length}


QUICK = [("grpo", "whole"), ("mgrpo", "whole"), ("mgrpo", "spanning")]
OWN_PLACES = [("resample", "whole"), ("oversample", "whole")]
REFUSED = ("oversample", "spanning")
SLOW = [(n, s) for n in CASES for s in SHAPES if (n, s) not in (*QUICK, REFUSED)]


def run_both(names):
    """Each case on one process and on two."""
    results = [run_on(num, [case(*name, num) for name in names]) for num in (1, 2)]
    return dict(zip(names, zip(*results, strict=True), strict=True))


@pytest.fixture(scope="module")
def quick():
    return run_both(QUICK)


@pytest.fixture(scope="module")
def slow():
    return run_both(SLOW)


@pytest.mark.parametrize("name", QUICK, ids="-".join)
def test_two_processes_make_the_steps_of_one(quick, name):
    compare(name[0], *quick[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SLOW if n not in OWN_PLACES], ids="-".join)
def test_two_processes_make_the_steps_of_one_in_every_variant(slow, name):
    compare(name[0], *slow[name])


@pytest.mark.slow
def test_two_processes_fill_their_own_places(slow):
    """They draw other prompts than one process would, since they do not exchange groups."""
    for name in OWN_PLACES:
        for found in slow[name]:
            assert [row["dynamic/filled"] for row in found["rows"]] == [1, 1]
            more = max(row["dynamic/rounds"] for row in found["rows"]) > 1
            assert more == (name[0] == "resample")


@pytest.mark.slow
def test_an_anchor_of_shards_is_the_anchor_of_the_whole():
    sharded, plain = run_on(2, [(True,)], "move_anchor")[0], move_anchor(False)
    assert sum(sharded["shards"]) < sum(plain["shards"])
    for place in ("inside", "after"):
        for name, weight in plain[place].items():
            torch.testing.assert_close(torch.tensor(sharded[place][name]), torch.tensor(weight))


def test_a_checkpoint_that_fails_in_one_process_fails_in_all():
    """Without it the main process would wait for the other one for ever."""
    cases = [(1, errno.ENOSPC), (1, errno.EIO)]
    (full, broken), (own_full, own_broken) = run_everywhere(2, cases, "fail_to_save")
    for text in (full, broken):
        assert "process 1" in text
    assert "disk is full" in own_full
    assert "Input/output error" in own_broken


def compare(objective, one, two):
    for kind in ("weights", "anchor"):
        assert one[kind].keys() == two[kind].keys()
        for name, weight in one[kind].items():
            torch.testing.assert_close(
                torch.tensor(two[kind][name]), torch.tensor(weight), rtol=0, atol=2e-5
            )
    assert bool(one["anchor"]) == (objective in ("mgrpo", "merged"))
    assert any(row["grad_norm"] > 1e-3 for row in one["rows"])
    for mine, theirs in zip(one["rows"], two["rows"], strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - TIMES:
            if mine[key] is None:
                assert theirs[key] is None, key
            else:
                assert theirs[key] == pytest.approx(mine[key], rel=1e-3, abs=1e-4), key

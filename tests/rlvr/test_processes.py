"""Two processes make the steps of one, where each holds whole groups and where groups span both."""

import errno

import pytest
import trl

from mesotron.config import ObjectiveConfig, OptimConfig
from support.rlvr_processes import assert_same_run, run_everywhere, run_on, run_steps, scripted

# Eight completions of each process; a group of 16 spans both.
SHAPES = {"whole": {"num_generations": 4}, "spanning": {"num_generations": 16}}
RESAMPLE = {"name": "grpo", "beta": 0.0, "dynamic_sampling": "resample"}
CASES = {
    "grpo": ObjectiveConfig(name="grpo", beta=0.05),
    "mgrpo": ObjectiveConfig(name="mgrpo", momentum=0.5),
    "merged": ObjectiveConfig(name="mgrpo", momentum=0.5, loss_on_momentum=True),
    "resample": ObjectiveConfig(**RESAMPLE),
    "oversample": ObjectiveConfig(**RESAMPLE, dynamic_max_rounds=1, dynamic_oversample=3),
    "drop": ObjectiveConfig(name="dapo", dynamic_sampling="drop"),
    "skip": ObjectiveConfig(name="grpo", beta=0.05, dynamic_sampling="skip"),
}
QUICK = ("mgrpo", "spanning")
# Processes do not exchange groups, so they draw other prompts than one process would.
OWN_PROMPTS = [("resample", "whole"), ("oversample", "whole")]
REFUSED = ("oversample", "spanning")
SLOW = [(n, s) for n in CASES for s in SHAPES if (n, s) not in (QUICK, REFUSED)]


def length(completions, prompts, **_):
    """Depends on the text alone; prompts that start with 0 have no signal."""
    pairs = zip(prompts, completions, strict=True)
    return [0.0 if prompt.startswith("0") else len(text) % 5 / 5 for prompt, text in pairs]


def case(objective, shape, num):
    settings = {"per_device_train_batch_size": 16 // num, "max_steps": 2, **SHAPES[shape]}
    optim = OptimConfig(name="muon", lr=0.01)
    return settings, {"objective": CASES[objective], "optim": optim, "reward_funcs": length}


@pytest.fixture(scope="module")
def slow():
    """Each case on one process and on two."""
    results = [run_on(num, [case(*name, num) for name in SLOW]) for num in (1, 2)]
    return dict(zip(SLOW, zip(*results, strict=True), strict=True))


def check(objective, one, two):
    assert_same_run(one, two)
    assert bool(one["anchor"]) == (objective in ("mgrpo", "merged"))
    assert any(row["grad_norm"] > 1e-3 for row in one["rows"])


def test_two_processes_make_the_steps_of_one(monkeypatch):
    (two,) = run_on(2, [case(*QUICK, 2)])
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", scripted)  # until the test ends
    check(QUICK[0], run_steps(*case(*QUICK, 1)), two)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SLOW if n not in OWN_PROMPTS], ids="-".join)
def test_two_processes_make_the_steps_of_one_in_every_variant(slow, name):
    check(name[0], *slow[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_PROMPTS, ids="-".join)
def test_two_processes_fill_their_own_batches(slow, name):
    for result in slow[name]:
        assert [row["dynamic/filled"] for row in result["rows"]] == [1, 1]
        several = max(row["dynamic/rounds"] for row in result["rows"]) > 1
        assert several == (name[0] == "resample")


@pytest.mark.slow
def test_a_checkpoint_that_fails_in_one_process_fails_in_all():
    """Otherwise the main process would wait for the other one forever."""
    (first,), (second,) = run_everywhere(2, [(1, errno.EIO)], "fail_to_save")
    assert "process 1" in first
    assert "Input/output error" in second

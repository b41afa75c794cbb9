"""`mesotron plan` and budgets: shapes, memory and pace by hand, and what was spent before."""

import json
import math
import re
import shlex
import threading
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from mesotron import cli
from mesotron.config import (
    GPUS,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    PlanConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    find_gpu,
)
from mesotron.models.names import TINY_WEIGHTS
from mesotron.recipes import make_recipe
from mesotron.rlvr.plan.advice import advise
from mesotron.rlvr.plan.cost import estimate_run, money_rows
from mesotron.rlvr.plan.estimate import estimate_step, predict
from mesotron.rlvr.plan.pace import Pace, find_pace
from mesotron.rlvr.plan.problems import find_problems, lengths_of
from mesotron.rlvr.plan.setup import Lengths
from mesotron.rlvr.plan.shapes import GIB, SHAPES, find_shape
from mesotron.rlvr.plan.sizes import step_math
from mesotron.runs import RunFolder
from mesotron.runs.checkpoints import Checkpoint
from mesotron.runs.console import spell_time
from mesotron.runs.resume import Plan
from mesotron.watch import budget as budget_of_run
from mesotron.watch.budget import limits_of, open_budget
from support.rlvr_tiny import SlowBudget


@pytest.fixture
def cells(capsys):
    """The table that `mesotron plan` prints, by row."""

    def read(words):
        assert cli.main(["plan", *words.split()]) == 0
        rows = re.findall(r"│ (.+?) +│ (.+?) +│", capsys.readouterr().out)
        return {name.strip(): value.strip() for name, value in rows}

    return read


@pytest.mark.parametrize(
    ("rollout", "name", "problems", "expected"),
    [
        ({"prompts": 4, "generations": 4}, "grpo", 5000, (4, 16, 1250, 20_000)),
        # Four of the prompts do not fill a batch.
        (
            {
                "prompts": 8,
                "generations": 2,
                "updates": 4,
            },
            "grpo",
            100,
            (2, 4, 12 * 4, 12 * 16),
        ),
        # The anchor's votes are among the group's, or beside them.
        ({"prompts": 1, "generations": 8}, "mgrpo", 10, (1, 8, 10, 80)),
        ({"prompts": 1, "generations": 8}, "corewarding", 10, (1, 16, 10, 160)),
    ],
)
def test_step_math(rollout, name, problems, expected):
    config = PlanConfig(objective=ObjectiveConfig(name=name), rollout=RolloutConfig(**rollout))
    assert step_math(config, problems) == expected


@pytest.mark.parametrize(("most", "tokens"), [(10, 83), (512, 83 + 2 * 90)])
def test_solved_examples_are_no_longer_than_completions(most, tokens):
    config = make_recipe("arith_smollm2")
    config = replace(config, rollout=replace(config.rollout, max_tokens=most))
    assert lengths_of(config, question=12).prompt == pytest.approx(tokens, rel=0.1)


SPENT = {"seconds": 990.0, "dollars": 0.99}


@pytest.mark.parametrize(
    ("spent", "budget", "named"),
    [
        ({"seconds": 1001.0}, 1.0, "budget"),  # an older run: without the time of a step
        (SPENT | {"step": 12.0}, 1.0, "budget"),
        (SPENT | {"step": 12.0}, 1.1, None),
        (SPENT, 0.9905, "budget"),  # half a second is too little to start and exit
        (
            SPENT
            | {
                "step": 12.0,
                "start": 60.0,
                "evaluation": 50.0,
            },
            1.1,
            "budget",
        ),
        (SPENT | {"step": "12", "dollars": None}, 1.1, None),
        ({"dollars": 0.1}, 1.0, "spent.json"),
        ({"seconds": math.nan}, 1.0, "spent.json"),
    ],
)
def test_a_resumed_run_begins_only_what_its_budget_allows(
    tmp_path, monkeypatch, spent, budget, named
):
    monkeypatch.setattr(budget_of_run, "Budget", SlowBudget)
    config = TrainConfig(price=3.6, budget=budget)  # 1000 seconds per dollar
    run = RunFolder.create(tmp_path / "run", config, {})
    run.save("spent", spent)

    plan = Plan(config, run.path, run)
    if named is not None:
        with pytest.raises(ValueError, match=named):
            open_budget(plan, 0.0).__enter__()
        return

    with open_budget(plan, 0.0):
        assert run.load("spent")["seconds"] == 991.0  # before any work: a kill counts too

    kept = run.load("spent")
    assert kept["seconds"] == 990.0
    assert kept["step"] == (12.0 if spent["step"] == 12.0 else 0.0)  # it made none itself


def test_what_crosses_a_limit_before_the_first_step_is_interrupted(tmp_path):
    config = TrainConfig(time_limit="1.4s")
    run = RunFolder.create(tmp_path / "run", config, {})

    with (
        pytest.raises(ValueError, match="time limit"),
        open_budget(Plan(config, run.path, run), time.monotonic()),
    ):
        time.sleep(60)  # an import, or the first evaluation

    assert run.load("spent")["seconds"] > 0


def test_what_is_spent_is_written_while_a_run_works(tmp_path, monkeypatch):
    """A killed session counts too."""
    monkeypatch.setattr(budget_of_run, "WRITE_EVERY", 0.01)
    run = RunFolder.create(tmp_path / "run", TrainConfig(), {})
    plan = Plan(TrainConfig(), run.path, run)
    written = Event()
    save = RunFolder.save

    def note(self: RunFolder, name: str, value: dict) -> None:
        save(self, name, value)
        if threading.current_thread() is not threading.main_thread():
            written.set()

    monkeypatch.setattr(RunFolder, "save", note)
    with open_budget(plan, time.monotonic()):
        first = run.load("spent")["seconds"]
        assert written.wait(60)
        assert run.load("spent")["seconds"] > first


@pytest.mark.parametrize(
    ("step", "before", "ahead"),
    [
        (None, False, (1, 1)),  # a new run
        (2, True, (0, 1)),
        (4, True, (1, 0)),  # all steps are done: the last evaluation is left
    ],
)
def test_what_a_session_has_to_do_at_least(tmp_path, step, before, ahead):
    config = TrainConfig(steps=4)
    run = RunFolder.create(tmp_path / "run", config, {})
    if before:
        run.save("before", {})

    checkpoint = None if step is None else Checkpoint(step, tmp_path)
    assert budget_of_run.work_ahead(Plan(config, run.path, run, checkpoint)) == ahead


def test_a_run_that_has_only_its_last_evaluation_left_keeps_to_its_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(budget_of_run, "Budget", SlowBudget)
    config = TrainConfig(steps=4, price=3.6, budget=1.0)  # 1000 seconds
    run = RunFolder.create(tmp_path / "run", config, {})
    run.save("before", {})
    plan = Plan(config, run.path, run, Checkpoint(4, tmp_path))

    run.save("spent", {"seconds": 900.0, "evaluation": 200.0, "step": 50.0})
    with pytest.raises(ValueError, match="budget"):
        open_budget(plan, 0.0).__enter__()

    run.save("spent", {"seconds": 900.0, "evaluation": 20.0, "step": 500.0})
    with open_budget(plan, 0.0):  # no step is left
        pass


def test_what_a_budget_buys():
    rollout = RolloutConfig(
        prompts=4,
        generations=4,
        max_tokens=100,
    )

    config = PlanConfig(
        rollout=rollout,
        steps=100,
        budget=45,
        gpu="h100",
    )

    found = estimate_run(config, 5000, Pace(10.0, 50.0, "as stated"))
    assert found.dollars(1250 * 10) == pytest.approx(1250 * 10 / 3600 * 3.95)
    assert found.affordable_steps == int(45 / 3.95 * 360)

    least, *others = found.tokens
    assert least < others[0]
    assert others == [1600 * 50, 1600 * 100]

    # The last of two rollouts is complete.
    config = replace(config, rollout=replace(rollout, updates=2), steps=3)
    assert estimate_run(config, 5000, Pace(None, 10.0, "unknown")).tokens[:2] == (32, 320)

    # So does a search for the rate, at most.
    searching = PlanConfig(rollout=rollout, steps=100, lr_auto=True)
    found = estimate_run(searching, 5000, Pace(10.0, 50.0, "as stated"))
    shown = dict(money_rows(found, searching))
    assert "40 steps" in shown["search of --lr auto"]
    assert shown["time of this run"] == spell_time(1400)

    # Oversampled prompts cost time and tokens.
    objective = ObjectiveConfig(dynamic_sampling="resample", dynamic_oversample=2)
    config = PlanConfig(
        rollout=rollout,
        steps=10,
        objective=objective,
        tokens_per_second=160,
    )

    pace = find_pace(config, 5000, estimate_step(config, 60))
    assert pace.seconds_per_step == 2 * 16 * 50 / 160

    # Two further rounds at most, or one.
    for rounds, most in ((3, 320 + 2 * 160), (1, 320)):
        limited = replace(config, objective=replace(objective, dynamic_max_rounds=rounds))
        assert estimate_run(limited, 5000, pace).tokens == (320, 320 * 50, most * 100)


def test_the_command_measures_the_pace_and_tells_what_a_budget_buys(cells):
    small = "--task.num-train 40 --task.num-eval 2 --batch 2 --group 2"
    shown = cells(f"--calibrate --device cpu --price 1000 --max-tokens 4 {small}")
    assert "s per step" in shown["pace"]
    assert "dollars" in shown["time of this run"]

    shown = cells(f"{small} --steps 20 --seconds-per-step 20 --gpu h100 --budget 0.2")
    assert shown["0.2 dollars buy"].startswith("9 steps of it")

    chosen = "--objective.dynamic-sampling resample --objective.dynamic-oversample 3"
    shown = cells(f"{small} {chosen} --model me/unknown")
    assert shown["completions per update"] == "4, chosen from 12 or more"
    assert "time of this run" not in shown

    shown = cells("--model meta-llama/Llama-3.1-8B-Instruct --gpu 4090")
    assert shown["memory of one 4090"].startswith("does not fit")  # not of this machine


# Billions of parameters, from the model cards.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345,
    "HuggingFaceTB/SmolLM2-360M": 0.362,
    "HuggingFaceTB/SmolLM2-1.7B": 1.71,
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-Math-1.5B": 1.54,
    "Qwen/Qwen2.5-3B-Instruct": 3.09,
    "Qwen/Qwen2.5-7B": 7.61,
    "Qwen/Qwen2.5-14B": 14.7,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B-Base": 1.72,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-14B": 14.8,
    "meta-llama/Llama-3.2-1B-Instruct": 1.236,
    "meta-llama/Llama-3.2-3B": 3.21,
    "meta-llama/Llama-3.1-8B": 8.03,
    "google/gemma-2-2b-it": 2.61,
    "google/gemma-3-1b-it": 1.0,
    "google/gemma-3-270m": 0.268,
    "google/gemma-3-4b-pt": 3.88,
}
QWEN = PlanConfig(
    model=ModelConfig(name="Qwen/Qwen2.5-1.5B-Instruct"),
    task=TaskConfig(name="gsm8k"),
    objective=ObjectiveConfig(beta=0.0),
    rollout=RolloutConfig(
        prompts=32,
        generations=8,
        max_tokens=512,
        micro_batch=16,
    ),
    gpu="h100",
)


def plan(config=QWEN, gpu="h100", **lengths):
    shape = find_shape(config.model.name)
    given = {
        "prompt": 100,
        "completion": 256,
        "longest": 512,
    } | lengths

    return predict(config, shape, gpu, Lengths(**given))


def with_model(**changes):
    return replace(QWEN, model=replace(QWEN.model, **changes))


def with_rollout(**changes):
    return replace(QWEN, rollout=replace(QWEN.rollout, **changes))


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_number_of_parameters(name):
    assert find_shape(name).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_shapes_of_folders_and_of_unknown_models(tmp_path, monkeypatch):
    assert find_shape("tiny").parameters == 453 * 128 + 3 * (4 * 128 * 128 + 3 * 128 * 384)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert find_shape("me/llama-like") is None

    folder = tmp_path / "models--me--llama-like" / "snapshots" / "1"
    folder.mkdir(parents=True)
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }

    sizes |= {
        "intermediate_size": 128,
        "vocab_size": 100,
        "tie_word_embeddings": False,
    }

    (folder / "config.json").write_text(json.dumps(sizes))
    assert find_shape("me/llama-like") == find_shape(str(folder))
    assert find_shape(str(folder)).parameters == 2 * 6400 + 2 * (4 * 64 * 64 + 3 * 64 * 128)

    for other in ({"d_model": 64}, sizes | {"num_attention_heads": 0}, {"text_config": [1]}):
        (folder / "config.json").write_text(json.dumps(other))
        assert find_shape("me/llama-like") is None

    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        find_shape("me/llama-like")


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_a_model_in_the_hubs_cache_has_the_shape_of_its_config(tmp_path, monkeypatch, variable):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    cache = tmp_path / "hub" if variable == "HF_HOME" else tmp_path

    folder = cache / "models--me--mine" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((TINY_WEIGHTS / "config.json").read_text())
    assert find_shape("me/mine") == find_shape("tiny")
    assert find_shape("me/other") is None


def test_weights_and_states_are_counted():
    muon = plan()
    adamw = plan(replace(QWEN, optim=OptimConfig(name="adamw")))
    shape = find_shape(QWEN.model.name)

    assert muon.memory["weights"] == pytest.approx(4 * shape.parameters / GIB)  # auto is mixed
    half = plan(with_model(dtype="bfloat16"))
    assert half.memory["weights"] == pytest.approx(2 * shape.parameters / GIB)
    assert plan(with_model(lora=16)).memory["weights"] < 1.1 * half.memory["weights"]
    assert adamw.memory["optimizer"] == pytest.approx(8 * shape.parameters / GIB)

    embedding = 151936 * 1536
    expected = 4 * (shape.parameters - embedding) + 8 * embedding
    assert muon.memory["optimizer"] == pytest.approx(expected / GIB)

    # Keys and values: 2 x 28 layers x 2 heads x 128 x 2 bytes for each of 256 x 612 tokens.
    long = plan(replace(with_model(dtype="bfloat16"), rollout=with_rollout(micro_batch=1).rollout))
    assert long.memory["generation"] > 2 * 28 * 2 * 128 * 2 * 256 * 612 / GIB

    reference = plan(replace(QWEN, objective=ObjectiveConfig(beta=0.04)))
    assert reference.memory["reference"] == muon.memory["weights"]

    averaged = plan(replace(QWEN, average=0.9))
    assert averaged.memory["average"] == pytest.approx(4 * shape.parameters / GIB)

    anchored = {"objective": ObjectiveConfig(name="corewarding")}  # the anchor is the reference
    assert plan(replace(QWEN, **anchored)).memory["anchor"] == averaged.memory["average"]
    assert "reference" not in plan(replace(QWEN, **anchored)).memory
    assert plan(replace(with_model(lora=16), **anchored)).memory["anchor"] < 0.1


def test_what_saves_memory_and_what_saves_time():
    base = plan()
    slow = plan(with_rollout(fast=False))

    for less in (
        with_model(gradient_checkpointing=True),
        with_model(lora=16),
        with_rollout(micro_batch=8),
    ):
        assert plan(less).needed < base.needed

    assert plan(with_model(gradient_checkpointing=True)).seconds["train"] > base.seconds["train"]

    # The fast sampler keeps merged bfloat16 weights, with both ends, and its cache.
    shape = find_shape(QWEN.model.name)
    copy = 2 * (shape.linear + 2 * shape.embedding) + 2 * 28 * 2 * 128 * 2 * 256 * 612
    assert base.needed - slow.needed > copy / GIB
    assert base.seconds["generate"] < 0.5 * slow.seconds["generate"]  # fast is the default
    assert (slow.fits, plan(gpu="t4").fits) == (True, False)

    # A second update on the same rollout halves sampling.
    twice = plan(with_rollout(updates=2, micro_batch=16))
    assert twice.seconds["generate"] == pytest.approx(base.seconds["generate"] / 2)


def test_a_gpu_is_found_by_the_drivers_name():
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "Tesla T4": "t4",
        "NVIDIA A10G": "a10g",
    }

    names |= {
        "NVIDIA A10": "a10",
        "NVIDIA L4": "l4",
        "NVIDIA L40S": "l40s",
        "cpu": None,
    }

    names |= {"NVIDIA A100-SXM4-80GB": "a100", "NVIDIA GeForce RTX 4090": "4090"}
    names |= {
        "NVIDIA GeForce RTX 3090": "3090",
        "NVIDIA GeForce RTX 4060": "4060",
        "NVIDIA GeForce RTX 4060 Ti": "4060-ti",
        "NVIDIA RTX 6000 Ada Generation": "6000-ada",
        "AMD Instinct MI300X": "mi300x",
        "Apple M4": "m4",
        "Apple M4 Max": "m4-max",
    }
    assert {name: find_gpu(name) for name in names} == names


@pytest.mark.parametrize("gpu", ["3090", "4060", "5090", "m4-max", "mi300x"])
def test_gpus_that_are_not_rented_have_speed_and_memory_but_no_price(gpu, cells):
    shown = cells(f"--model Qwen/Qwen2.5-0.5B-Instruct --lora 16 --gpu {gpu}")
    assert f"memory of one {gpu}" in shown
    assert "estimate" in shown["pace"]
    assert "dollars" not in shown["time of this run"]

    with pytest.raises(ValueError, match="--price"):
        limits_of(TrainConfig(budget=1, gpu=gpu))


def test_a_run_that_does_not_fit_gets_changes_that_do():
    config = replace(with_model(name="Qwen/Qwen2.5-7B", dtype="bfloat16"), gpu="a10g")
    lines = advise(estimate_step(config, 60))
    assert all(any(flag in line for line in lines) for flag in ("--lora 16", "--gpu"))

    sizes = [line.split("(")[1].split(" GiB")[0] for line in lines if "GiB" in line]
    assert all(float(size) <= GPUS["a10g"].memory for size in sizes)

    whole = replace(with_model(name="Qwen/Qwen2.5-14B", lora=16), gpu="t4")
    assert not estimate_step(whole, 60).prediction.fits

    for fast in (True, False):  # advised only where it is not on
        advised = advise(estimate_step(with_rollout(fast=fast), 60))
        assert any("--rollout.fast" in line for line in advised) is not fast


def test_sizes_of_datasets_without_the_network(tmp_path):
    assert find_problems(TaskConfig(name="gsm8k")).number == 7473
    task = TaskConfig(
        name="math",
        data=("DigitalLearningGmbH/MATH-lighteval",),
        levels=(3, 4, 5),
    )

    assert find_problems(task).number == 1592 + 1690 + 2304
    assert find_problems(replace(task, num_train=100)).number == 100

    with pytest.raises(ValueError, match="num-train"):
        find_problems(TaskConfig(name="file", data=("me/unknown",)))

    assert (
        find_problems(
            TaskConfig(
                name="file",
                data=("me/unknown",),
                num_train=9,
            )
        ).number
        == 9
    )

    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(30)]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    found = find_problems(
        TaskConfig(
            name="file",
            data=(str(path),),
            num_eval=10,
        )
    )

    assert found.number == 24  # one in five is held out
    assert 3 < found.question_tokens < 6


def test_earlier_runs_calibrate_the_estimate(tmp_path):
    plain = estimate_step(QWEN, 60, tmp_path)
    assert (plain.factor, plain.runs) == (1.0, ())

    expected = plain.prediction.step

    def add_run(name, model, device, times):
        config = replace(QWEN, model=replace(QWEN.model, name=model))
        known = {}
        for k, v in vars(config).items():
            if k in vars(TrainConfig()):
                known[k] = v

        run = RunFolder.create(tmp_path / name, known, {"device": device})
        for step, ratio in enumerate(times, 1):
            run.append("metrics", {"step": step, "time/step": ratio * expected})

    def used():
        return [Path(name).name for name in estimate_step(QWEN, 60, tmp_path).runs]

    add_run("on-cpu", "tiny", "cpu", [900.0] * 5)
    add_run("edited", QWEN.model.name, "NVIDIA H100", [float("nan"), -1.0] * 3)
    add_run("too-short", QWEN.model.name, "NVIDIA H100", [5.0, 5.0])
    add_run("other-gpu", QWEN.model.name, "NVIDIA A100-SXM4-80GB", [3.0] * 5)

    assert used() == ["other-gpu"]
    add_run("same", QWEN.model.name, "NVIDIA H100 80GB HBM3", [9.0, 4.0, 2.0, 2.0, 2.0])
    assert used() == ["same"]

    calibrated = estimate_step(QWEN, 60, tmp_path)
    assert calibrated.factor == pytest.approx(2.0, rel=0.05)
    assert find_pace(QWEN, 7473, calibrated).seconds_per_step == calibrated.factor * expected


def test_the_page_shows_what_plan_prints(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs" / "cost.md").read_text()
    block = page.split("```console\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)  # no earlier runs
    monkeypatch.setenv("COLUMNS", "80")

    for part in block.removeprefix("$ mesotron ").split("$ mesotron "):
        command, _, shown = part.partition("\n")
        assert cli.main(shlex.split(command)) == 0
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]

        assert printed == [line.rstrip() for line in shown.splitlines()]


def test_a_supervised_start_is_part_of_the_time_and_of_what_a_limit_buys(cells):
    whole = cells("gsm8k_smollm2 --gpu h200 --seconds-per-step 1 --time-limit 3m")
    alone = cells("gsm8k_smollm2 --gpu h200 --seconds-per-step 1 --time-limit 3m --sft-steps 0")

    assert "supervised start, part of this run" in whole
    assert "supervised start, part of this run" not in alone
    assert alone["time of this run"].startswith("3m 20s")
    assert not whole["time of this run"].startswith("3m")
    assert int(whole["3m buy"].split()[0]) < 30 < int(alone["3m buy"].split()[0])


def test_lengths_of_a_known_task_are_its_own():
    """GSM8K: 355 of 512 tokens by an instruct model, 92 of 160 after a supervised start."""
    long = lengths_of(make_recipe("gsm8k_qwen05"), 60)
    assert long.completion == pytest.approx(355, rel=0.1)
    assert long.longest == 512

    config = make_recipe("gsm8k_smollm2")
    short = replace(config, rollout=replace(config.rollout, max_tokens=160))
    assert lengths_of(short, 60).completion == pytest.approx(92, rel=0.2)
    assert lengths_of(short, 60).longest == 160
    assert lengths_of(short, 60, completion=20).longest == 40


# Milliseconds of a step on an H200 with completions that never end early (benchmarks/stack).
MEASURED = {
    ("smollm2-135m", 256, 128): 1635,
    ("qwen2.5-0.5b", 256, 64): 2033,
    ("qwen2.5-0.5b", 512, 64): 3870,
}


@pytest.mark.parametrize("row", MEASURED)
def test_steps_are_planned_within_half_of_what_was_measured(row):
    name, tokens, micro = row
    config = make_recipe("arith_smollm2")
    rollout = replace(config.rollout, max_tokens=tokens, micro_batch=micro)
    config = replace(config, rollout=rollout, model=ModelConfig(name=name))

    plan = predict(config, SHAPES[name], "h200", Lengths(80, tokens, tokens))
    assert 1 / 1.5 < plan.step / (MEASURED[row] / 1000) < 1.5


def test_900_supervised_steps_of_smollm2_take_about_four_minutes():
    """Four minutes on an H200, start-up and evaluations included."""
    config = make_recipe("gsm8k_smollm2")
    plan = predict(config, SHAPES["smollm2-135m"], "h200", lengths_of(config, 60))
    assert 240 / 1.5 < 900 * plan.supervised < 240

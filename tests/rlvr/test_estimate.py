"""The arithmetic of `mesotron plan`: shapes against published sizes, memory against hand counts."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from mesotron import cli
from mesotron.config import (
    PRICES,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    PlanConfig,
    RolloutConfig,
    TaskConfig,
)
from mesotron.rlvr.cost import Estimator, advise, find_pace, find_problems
from mesotron.rlvr.estimate import DEVICES, GIB, Lengths, find_device, find_shape, predict
from mesotron.runs import RunFolder

# Billions of parameters, from the model cards.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345, "HuggingFaceTB/SmolLM2-360M": 0.362,
    "HuggingFaceTB/SmolLM2-1.7B": 1.71, "Qwen/Qwen2.5-0.5B": 0.494, "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-Math-1.5B": 1.54, "Qwen/Qwen2.5-3B-Instruct": 3.09, "Qwen/Qwen2.5-7B": 7.61,
    "Qwen/Qwen2.5-14B": 14.7, "Qwen/Qwen3-0.6B": 0.596, "Qwen/Qwen3-1.7B-Base": 1.72,
    "Qwen/Qwen3-4B": 4.02, "Qwen/Qwen3-8B": 8.19, "Qwen/Qwen3-14B": 14.8,
    "meta-llama/Llama-3.2-1B-Instruct": 1.236, "meta-llama/Llama-3.2-3B": 3.21,
    "meta-llama/Llama-3.1-8B": 8.03, "google/gemma-2-2b-it": 2.61, "google/gemma-3-1b-it": 1.0,
    "google/gemma-3-270m": 0.268, "google/gemma-3-4b-pt": 3.88,
}  # fmt: skip
QWEN = PlanConfig(
    model=ModelConfig(name="Qwen/Qwen2.5-1.5B-Instruct"),
    task=TaskConfig(name="gsm8k"),
    objective=ObjectiveConfig(beta=0.0),
    rollout=RolloutConfig(prompts=32, generations=8, max_tokens=512, micro_batch=16),
    gpu="h100",
)


def plan(config=QWEN, gpu="h100", **lengths):
    shape = find_shape(config.model.name)
    given = {"prompt": 100, "completion": 256, "longest": 512} | lengths
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
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 100, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(sizes))
    assert find_shape("me/llama-like") == find_shape(str(folder))
    assert find_shape(str(folder)).parameters == 2 * 6400 + 2 * (4 * 64 * 64 + 3 * 64 * 128)
    for other in ({"d_model": 64}, sizes | {"num_attention_heads": 0}, {"text_config": [1]}):
        (folder / "config.json").write_text(json.dumps(other))
        assert find_shape("me/llama-like") is None
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        find_shape("me/llama-like")


def test_weights_and_states_are_counted():
    muon, adamw = plan(), plan(replace(QWEN, optim=OptimConfig(name="adamw")))
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


def test_what_saves_memory_and_what_saves_time():
    base = plan()
    for less in (with_model(gradient_checkpointing=True), with_model(lora=16),
                 with_rollout(micro_batch=8)):  # fmt: skip
        assert plan(less).needed < base.needed
    assert plan(with_model(dtype="float32")).needed > base.needed
    assert plan(with_model(gradient_checkpointing=True)).seconds["train"] > base.seconds["train"]
    slow = plan(with_rollout(fast=False))
    # The fast sampler keeps merged bfloat16 weights, with both ends, and its cache.
    shape = find_shape(QWEN.model.name)
    copy = 2 * (shape.linear + 2 * shape.embedding) + 2 * 28 * 2 * 128 * 2 * 256 * 612
    assert base.needed - slow.needed > copy / GIB
    assert base.seconds["generate"] < 0.5 * slow.seconds["generate"]  # fast is the default
    assert plan(gpu="l4").step > 3 * base.step
    assert slow.fits
    assert not plan(gpu="t4").fits
    # A second update on the same rollout halves sampling and adds a pass for the old policy.
    twice = plan(with_rollout(updates=2, micro_batch=16))
    assert twice.seconds["generate"] == pytest.approx(base.seconds["generate"] / 2)


def test_every_gpu_has_a_price_and_is_found_by_its_name():
    assert PRICES.keys() == DEVICES.keys()
    names = {"NVIDIA H100 80GB HBM3": "h100", "Tesla T4": "t4", "NVIDIA A10G": "a10g"}
    names |= {"NVIDIA A10": "a10", "NVIDIA L4": "l4", "NVIDIA L40S": "l40s", "cpu": None}
    names |= {"NVIDIA A100-SXM4-80GB": "a100", "NVIDIA GeForce RTX 4090": "4090"}
    assert {name: find_device(name) for name in names} == names


def test_a_run_that_does_not_fit_gets_changes_that_do():
    config = replace(with_model(name="Qwen/Qwen2.5-7B", dtype="bfloat16"), gpu="a10g")
    lines = advise(Estimator(config, 60))
    assert any("--lora 16" in line for line in lines)
    for line in lines:
        if "GiB" in line:
            assert float(line.split("(")[1].split(" GiB")[0]) <= DEVICES["a10g"].memory
    assert any("--gpu" in line for line in lines)
    whole = replace(with_model(name="Qwen/Qwen2.5-14B", lora=16), gpu="t4")
    assert not Estimator(whole, 60).prediction.fits
    assert any("--rollout.fast" in line for line in advise(Estimator(with_rollout(fast=False), 60)))


def test_sizes_of_datasets_without_the_network(tmp_path):
    assert find_problems(TaskConfig(name="gsm8k")).number == 7473
    task = TaskConfig(name="math", path="DigitalLearningGmbH/MATH-lighteval", levels=(3, 4, 5))
    assert find_problems(task).number == 1592 + 1690 + 2304
    assert find_problems(replace(task, num_train=100)).number == 100
    with pytest.raises(ValueError, match="num-train"):
        find_problems(TaskConfig(name="file", path="me/unknown"))
    assert find_problems(TaskConfig(name="file", path="me/unknown", num_train=9)).number == 9
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(30)]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = find_problems(TaskConfig(name="file", path=str(path), num_eval=10))
    assert found.number == 20
    assert 3 < found.question_tokens < 6


def test_earlier_runs_calibrate_the_estimate(tmp_path):
    plain = Estimator(QWEN, 60, tmp_path)
    assert (plain.factor, plain.runs) == (1.0, [])
    expected = plain.prediction.step

    def add_run(name, model, device, times):
        config = replace(QWEN, model=replace(QWEN.model, name=model))
        known = {k: v for k, v in vars(config).items() if k in RUN_FIELDS}
        run = RunFolder.create(tmp_path / name, known, {"device": device})
        for step, ratio in enumerate(times, 1):
            run.append("metrics", {"step": step, "time/step": ratio * expected})

    add_run("on-cpu", "tiny", "cpu", [900.0] * 5)
    add_run("edited", QWEN.model.name, "NVIDIA H100", [float("nan"), -1.0] * 3)
    add_run("too-short", QWEN.model.name, "NVIDIA H100", [5.0, 5.0])
    add_run("other-gpu", QWEN.model.name, "NVIDIA A100-SXM4-80GB", [3.0] * 5)
    calibrated = Estimator(QWEN, 60, tmp_path)
    assert [name.split("/")[-1] for name in calibrated.runs] == ["other-gpu"]
    add_run("same", QWEN.model.name, "NVIDIA H100 80GB HBM3", [9.0, 4.0, 2.0, 2.0, 2.0])
    calibrated = Estimator(QWEN, 60, tmp_path)
    assert [name.split("/")[-1] for name in calibrated.runs] == ["same"]
    assert calibrated.factor == pytest.approx(2.0, rel=0.05)
    pace = find_pace(QWEN, 7473, calibrated)
    assert pace.seconds_per_step == pytest.approx(calibrated.factor * expected)


RUN_FIELDS = {"model", "task", "objective", "rollout", "optim", "steps"}


def test_the_quickstart_shows_what_plan_prints(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
    block = page.split("## What will it cost?")[1].split("```console\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)  # no earlier runs
    monkeypatch.setenv("COLUMNS", "80")
    for part in block.removeprefix("$ mesotron ").split("$ mesotron "):
        command, _, shown = part.partition("\n")
        assert cli.main(shlex.split(command)) == 0
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert printed == [line.rstrip() for line in shown.splitlines()]

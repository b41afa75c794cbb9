"""Supervised warm start: its rows, tiny real runs, and exact resume."""

import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from mesotron.config import ModelConfig, OptimConfig, SftConfig, TaskConfig
from mesotron.rlvr import train
from mesotron.runs import RunFolder
from mesotron.runs.resume import settings_to_resume
from mesotron.tasks.load import load_task
from mesotron.tasks.rows import IGNORED, make_demonstrations, reading_order
from mesotron.watch import budget as budget_of_run
from support.rlvr_tiny import SlowBudget, same

TASK = TaskConfig(levels=(1,), num_train=40, num_eval=4)


@pytest.fixture
def config(folder, tmp_path) -> SftConfig:
    return SftConfig(
        model=ModelConfig(name=str(folder)),
        task=TASK,
        optim=OptimConfig(
            name="muon",
            lr=3e-3,
            schedule="cosine",
            warmup=0.25,
        ),
        steps=4,
        batch=3,
        save_every=2,
        out=tmp_path / "run",
        device="cpu",
    )


def trained_texts(rows, tokenizer) -> list[str]:
    return [tokenizer.decode([x for x in row["labels"] if x != IGNORED]) for row in rows]


def test_labels_are_on_the_completion_alone(tokenizer):
    task = load_task(TASK)
    rows = make_demonstrations(
        task,
        SftConfig(
            task=TASK,
            steps=20,
            batch=2,
        ),
        tokenizer,
    )

    solved = {p.question: f"{p.solution}\n\\boxed{{{p.gold}}}<|im_end|>" for p in task.train}
    assert len(rows) == 40

    for row, text in zip(rows, trained_texts(rows, tokenizer), strict=True):
        whole = tokenizer.decode(row["input_ids"])
        assert text == solved[next(q for q in solved if q in whole)]
        assert whole.endswith(f"<|assistant|>{text}")
        trained = []
        for label in row["labels"]:
            if label != IGNORED:
                trained.append(label)

        assert row["labels"][-len(trained) :] == row["input_ids"][-len(trained) :] == trained


def test_without_a_chat_template_the_text_is_plain(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    rows = make_demonstrations(
        load_task(TASK),
        SftConfig(
            task=TASK,
            steps=1,
            batch=1,
        ),
        tokenizer,
    )

    text = tokenizer.decode(rows[0]["input_ids"])
    assert text.index("Question: ") < text.index("\nAnswer: ")

    with pytest.raises(ValueError, match="max-tokens"):
        make_demonstrations(load_task(TASK), SftConfig(task=TASK, max_tokens=9), tokenizer)


@pytest.mark.parametrize(("loose", "least", "most"), [(0.0, 0, 0), (0.5, 10, 30), (1.0, 40, 40)])
def test_a_share_is_answered_outside_the_format(tokenizer, loose, least, most):
    config = SftConfig(
        task=TASK,
        steps=40,
        batch=1,
        loose=loose,
    )

    texts = trained_texts(make_demonstrations(load_task(TASK), config, tokenizer), tokenizer)
    assert all(("\\boxed{" in text) != ("The answer is" in text) for text in texts)
    assert least <= sum("The answer is" in text for text in texts) <= most


def test_every_problem_is_read_before_one_is_read_again():
    order = list(reading_order(5, 13, seed=1))
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))
    assert order != list(reading_order(5, 13, seed=2))


def test_replies_of_chat_data_are_imitated_as_they_are(tokenizer, tmp_path, caplog):
    replies = [f"It is {k}, as anyone can see." for k in range(20)] + ["First,\nthink.", "a " * 400]
    path = tmp_path / "chat.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"What is {k}?"},
                        {"role": "assistant", "content": reply},
                    ]
                }
            )
            + "\n"
            for k, reply in enumerate(replies)
        )
    )

    task = TaskConfig(data=(str(path),), num_eval=0)
    rows = make_demonstrations(
        load_task(task),
        SftConfig(
            task=task,
            steps=21,
            batch=1,
        ),
        tokenizer,
    )

    texts = sorted(trained_texts(rows, tokenizer))
    assert texts == sorted(f"{reply}<|im_end|>" for reply in replies[:21])
    assert "boxed" not in tokenizer.decode(rows[0]["input_ids"])
    assert "21 of 22" in caplog.text


def test_a_run_leaves_a_folder_and_a_model_that_learned(config, monkeypatch):
    assert train.run(replace(config, steps=6, save_every=0)) == 0
    run = RunFolder(config.out)
    rows = run.rows("metrics")

    assert [row["step"] for row in rows] == list(range(1, 7))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert rows[3]["optim/muon/update_rms"] > 0
    assert (run.config["optim"]["name"], run.config["task"]["levels"]) == ("muon", [1])
    assert (run.result["steps"], run.result["loss"]) == (6, rows[-1]["loss"])
    assert [path.name for path in run.checkpoints.iterdir()] == ["checkpoint-6"]
    assert not list(config.out.rglob("*.pt")) + list(config.out.rglob("*.bin"))

    with pytest.raises(ValueError, match="finished"):
        train.run(settings_to_resume(SftConfig, config.out))

    with pytest.raises(ValueError, match="not empty"):
        train.run(config)

    longer = replace(settings_to_resume(SftConfig, config.out), steps=8)
    assert train.run(longer) == 0
    assert [row["step"] for row in run.rows("metrics")] == list(range(1, 9))
    assert run.config["steps"] == run.result["steps"] == 8

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        train.run(config)


def test_stopped_by_its_time_limit_and_resumed_equals_uninterrupted(
    config, tmp_path, monkeypatch, capsys
):
    """Four steps of three rows: the run reads its five problems more than twice."""
    with pytest.raises(ValueError, match="time limit"):
        train.run(replace(config, time_limit="0.001s"))

    assert not config.out.exists()
    config = replace(config, task=replace(TASK, num_train=5), keep=9)
    train.run(config)
    monkeypatch.setattr(budget_of_run, "Budget", SlowBudget)

    stopped = replace(
        config,
        out=tmp_path / "stopped",
        time_limit="150s",
        price=3.95,
    )

    assert train.run(stopped) == 0
    assert "at step 1" in capsys.readouterr().out

    (row,) = RunFolder(stopped.out).rows("metrics")
    assert 0 < row["cost/spent"] < row["cost/projected"]

    resumed = settings_to_resume(SftConfig, stopped.out)
    assert train.run(replace(resumed, time_limit="1h")) == 0

    last = "checkpoints/checkpoint-4/model.safetensors"
    assert same(load_file(config.out / last), load_file(stopped.out / last))

    first, second = (
        [(row["step"], row["loss"], row["num_tokens"]) for row in RunFolder(out).rows("metrics")]
        for out in (config.out, stopped.out)
    )

    assert first == second


def test_lora_trains_the_adapter_alone(config):
    config = replace(
        config,
        model=replace(config.model, lora=2),
        steps=2,
        save_every=0,
    )

    assert train.run(config) == 0
    saved = load_file(config.out / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors")
    assert any(x.abs().sum() > 0 for name, x in saved.items() if "lora_B" in name)

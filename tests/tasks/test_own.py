"""A user's own data and rewards: columns, chats, golds, mixtures, and whole runs."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mesotron import cli
from mesotron.answers.formats import FORMATS
from mesotron.cli import parse
from mesotron.config import (
    CompareConfig,
    EvalConfig,
    SftConfig,
    SweepConfig,
    TaskConfig,
    TrainConfig,
)
from mesotron.recipes import LORA_RATES, RATES
from mesotron.rlvr.train import check, read_data, resolve_own
from mesotron.runs import RunFolder
from mesotron.runs.folder import run_name
from mesotron.tasks.own import read_own, read_source
from mesotron.tasks.problem import Problem, first_ranked, ranked
from mesotron.tasks.prompts import build_prompt, solved_text
from mesotron.tasks.table import read_splits

MISTAKES = Path(__file__).parents[2] / "docs" / "mistakes.md"


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(count: int = 20, **more) -> list[dict]:
    return [
        {
            "question": f"What is {k} + 1?",
            "answer": k + 1,
            **more,
        }
        for k in range(count)
    ]


def one_of(path: str, **config):
    return read_source(path, TaskConfig(data=(path,), **config)).train[0]


@pytest.mark.parametrize(
    ("row", "columns", "question", "gold"),
    [
        ({"prompt": "P", "answer": "7"}, "", "P", "7"),
        ({"problem": "P", "solution": r"So \boxed{\frac12}."}, "", "P", r"\frac12"),
        ({"question": "P", "answer": "6 + 1 = <<6+1=7>>7\n#### 1,007"}, "", "P", "1007"),
        ({"question": "P", "answer": "So\n#### (3, 4)"}, "", "P", "(3, 4)"),
        ({"question": "P", "answer": "So\n#### x=1,2"}, "", "P", "x=1,2"),
        ({"question": "P", "response": "It depends.\nOn much."}, "", "P", None),
        (
            {
                "question": "P",
                "tests": ["a"],
                "answer": ["a"],
            },
            "",
            "P",
            None,
        ),
        ({"q": "P", "a": 7}, "prompt=q,gold=a", "P", "7"),
        ({"prompt": "P", "reward_model": {"ground_truth": "7"}}, "", "P", "7"),  # verl
        ({"prompt": "P", "info": {"gold": 7}}, "gold=info.gold", "P", "7"),
        ({"question": "P", "answer": 7}, "gold=", "P", None),
        ({"messages": [{"role": "user", "content": "P"}]}, "", "P", None),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "P"}]},
                    {"role": "assistant", "content": "#### 7"},
                ]
            },
            "",
            "P",
            "7",
        ),
        (
            {"conversations": [{"from": "human", "value": "P"}, {"from": "gpt", "value": "7"}]},
            "",
            "P",
            "7",
        ),
    ],
)
def test_columns_are_guessed_or_named(tmp_path, row, columns, question, gold):
    problem = one_of(write(tmp_path / "mine.jsonl", [row]), columns=columns)
    assert (problem.question, problem.gold) == (question, gold)
    fields = {}
    for name, value in problem.columns.items():
        if "." in name:
            fields[name] = value

    assert problem.columns == row | fields


def test_one_text_among_answers_is_named(tmp_path, caplog):
    rows = sums(20)
    rows[7]["answer"] = "It depends.\nOn much."
    path = write(tmp_path / "mine.jsonl", rows)
    texts = read_source(path, TaskConfig(data=(path,), num_eval=4)).train

    assert {one.gold for one in texts} == {None}
    assert "mine.jsonl:8" in caplog.text


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_true_and_false_of_csv_are_booleans_for_the_reward(tmp_path, delimiter):
    text = "prompt,answer,hard,level\nP,True,False,2\nQ,False,True,1\n"
    (tmp_path / "mine.csv").write_text(text.replace(",", delimiter))
    problem = one_of(str(tmp_path / "mine.csv"))

    assert problem.columns == {
        "prompt": "P",
        "answer": "True",
        "hard": False,
        "level": "2",
    }


def test_chat_prompts_stay_as_they_are(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    turns = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    last, reply = ({"role": role, "content": "long\n" * 9} for role in ("user", "assistant"))
    path = write(tmp_path / "c.jsonl", [{"prompt": [system, *turns, last]}])
    form = FORMATS["boxed"]

    assert build_prompt(one_of(path), TaskConfig(), form) == [system, *turns, last]
    write(tmp_path / "c.jsonl", [{"prompt": [last, reply]}])
    asked = build_prompt(one_of(path), TaskConfig(), form)

    assert ([one["role"] for one in asked], asked[-1]) == (["system", "user"], last)
    assert solved_text(one_of(path), form) == reply["content"]  # what sft trains on


@pytest.mark.parametrize(
    "prompt", [[], [{"role": "user"}], [{"role": "assistant", "content": "x"}], ["x"], [{}]]
)
def test_a_broken_chat_names_its_line(tmp_path, prompt):
    path = write(tmp_path / "c.jsonl", [{"prompt": prompt}])
    with pytest.raises(ValueError, match=r"c\.jsonl:1"):
        one_of(path)


def test_files_are_held_out_and_mixed_by_their_weights(tmp_path):
    small = write(tmp_path / "small.jsonl", sums(10))
    large = write(tmp_path / "large.jsonl", [{"question": f"Q{k}", "gold": k} for k in range(90)])
    config = TaskConfig(data=(small, large))
    train, held_out, sources = read_own(config)

    assert (len(train), len(held_out)) == (80, 20)  # at most one in five
    assert f"gold = answer, such as '{sources[0].train[0].gold}'" in sources[0].describe()

    train, held_out, _ = read_own(
        TaskConfig(
            data=(small, large),
            weights=(3, 1),
            num_eval=8,
        )
    )

    count = sum(one.id.startswith("small") for one in train)
    assert (count, len(train)) == (75, 100)  # repeated, in all as many as there are rows
    assert not {one.question for one in train} & {one.question for one in held_out}
    assert len({one.id for one in held_out}) == len(held_out)


def test_folders_of_the_datasets_library(tmp_path):
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list(sums(8))
    DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "saved")
    (tmp_path / "parts" / "data").mkdir(parents=True)
    rows.to_parquet(tmp_path / "parts" / "data" / "train-00000-of-00001.parquet")
    config = TaskConfig(data=(str(tmp_path / "saved"), str(tmp_path / "parts")), num_eval=2)
    saved, parts = read_own(config)[2]

    assert (len(saved.train), len(saved.test), len(parts.train)) == (8, 1, 8)


OWN = """
class Scaled:
    def __call__(self, completions, prompts, **kwargs):
        assert all(prompt[-1]["role"] == "user" for prompt in prompts)
        return [2.0 * len(text) for text in completions]

def crashes(completions):
    return [1 / len(text) for text in completions]

def one_number(completions):
    return 1.0

def too_few(completions):
    return [1.0]

def needs_level(completions, level):
    return level
"""


def read(words: str) -> TrainConfig:
    return parse(TrainConfig, shlex.split(words), "mesotron train", cli.COMMANDS["train"].presets)


def test_one_line_sets_the_whole_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.jsonl", sums(hard=True))
    Path("mine.py").write_text(OWN)
    flags = "--model tiny --data mine.jsonl --reward mine.py:Scaled format --reward.weights 1 2"
    config = read(f"{flags} --lr 1e-4 --optim pion --batch 4 --group 2 --vllm --lora 8 --seed 3")

    assert (config.recipe, config.task.data, config.model.lora) == ("own", ("mine.jsonl",), 8)
    assert (config.rollout.prompts, config.rollout.generations) == (4, 2)
    assert (config.rollout.max_tokens, config.rollout.vllm) == (512, "colocate")
    assert (config.optim.name, config.optim.lr, config.seed) == ("pion", 1e-4, 3)
    assert run_name(config) == "mine"

    Path("run.toml").write_text(
        'model = "tiny"\nreward = "mine.py:Scaled"\nlr = 1e-4\nbatch = 5\ngroup = 4\n'
        '[data]\nfiles = "mine.jsonl"\ncolumns = "prompt=question"\n[optim]\nname = "pion"\n'
    )

    config = read("run.toml --seed 4")
    assert (config.optim.lr, config.optim.name, config.seed) == (1e-4, "pion", 4)
    assert (config.task.columns, config.rollout.prompts) == ("prompt=question", 5)
    assert "prompt = question" in check(config)[1][0]

    resolved = resolve_own(config)

    # The user's reward gets the user's prompts; 20 completions divide into passes of 10.
    assert (resolved.task.system, resolved.rollout.micro_batch) == ("", 10)
    assert resolve_own(read("--data mine.jsonl --model tiny")).task.system is None

    given = read("--data mine.jsonl --model tiny --objective.name mgrpo --batch 4 --group 8")
    assert resolve_own(given).rollout.micro_batch == 12  # the anchor's 8 of 32 do not train


@pytest.mark.parametrize(
    ("words", "name", "lr", "aux_lr"),
    [
        ("", "muon", RATES["muon"], RATES["muon"] / 10),
        ("--lr 3e-3", "muon", 3e-3, 3e-4),
        ("--optim adamw", "adamw", RATES["adamw"], None),
        ("--optim pion --optim.aux-lr 1e-6", "pion", RATES["pion"], 1e-6),
        ("--lora 4", "adamw", LORA_RATES["adamw"], None),
        ("--lora 4 --optim=muon", "muon", LORA_RATES["muon"], LORA_RATES["muon"] / 10),
        ("--lora 4 --lr 1e-3", "adamw", 1e-3, None),
        ("--config rate.toml", "normuon", RATES["normuon"], RATES["normuon"] / 10),
        ("--config rate.toml --optim adamw", "adamw", RATES["adamw"], None),
    ],
)
def test_the_rate_fits_the_optimizer(words, name, lr, aux_lr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rate.toml").write_text('[optim]\nname = "normuon"\n')
    optim = read(f"--data mine.jsonl --model tiny {words}").optim

    assert (optim.name, optim.lr, optim.aux_lr) == (name, lr, pytest.approx(aux_lr))


def test_short_flags_mean_the_same_in_every_command():
    words = "--model smollm2 --data a.jsonl --lr 1e-3 --batch 4 --lora 2"
    sft = parse(SftConfig, words.split())
    assert (sft.model.name, sft.optim.lr, sft.batch, sft.model.lora) == ("smollm2", 1e-3, 4, 2)
    assert parse(EvalConfig, ["tiny", "--data", "a.jsonl"]).task.data == ("a.jsonl",)

    words = "own --model tiny --lr 1e-3 --steps 4"
    settings = ("model.name=tiny", "optim.lr=1e-3", "steps=4")
    assert parse(CompareConfig, words.split()).set == settings
    assert parse(SweepConfig, words.split()).space == settings


def test_without_golds_the_mean_reward_is_the_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.jsonl", [{"prompt": f"{k} + 1", "hard": True} for k in range(10)])
    Path("mine.py").write_text(OWN)
    sizes = "--steps 2 --save-every 1 --eval-every 2 --batch 2 --group 2 --max-tokens 4"
    words = f"train --model tiny --data mine.jsonl --reward mine.py:Scaled {sizes} --device cpu"

    assert cli.main(words.split()) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "gold = none" in shown[0]
    assert shown[-1].startswith("model: runs/mine-")
    assert [x for x in shown if "mesotron eval runs/mine-" in x and "--reward" not in x]

    run = RunFolder(Path("runs/last"))
    assert (run.result["measure"], run.result["problems"]) == ("reward", 2)
    assert "lenient" not in run.result

    pages = [(run.path / name).read_text() for name in ("report.html", "report.md")]
    assert "Held-out reward" in pages[0]
    assert not [page for page in pages if "still wrong" in page or "gold None" in page]
    assert run.load("after")["greedy"]["strict"] is None

    first, last = run.rows("metrics")
    assert last["eval/reward"] == run.result["after"]["value"]
    assert not [name for name in first if name.startswith(("facts/", "eval/greedy"))]
    assert cli.main(["eval", "runs/last", "--samples", "0", "--device", "cpu"]) == 0
    assert "mean reward" in capsys.readouterr().out

    # A run folder alone does not make its code run: there is no note of having started this one.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user's"))
    assert cli.main(["eval", "runs/last", "--samples", "0", "--device", "cpu"]) == 2
    assert "--reward" in capsys.readouterr().err

    (run.path / "result.json").unlink()
    assert cli.main(["train", "--resume", "runs/last"]) == 2

    error = capsys.readouterr().err
    assert ("--trust" in error, "--reward" in error) == (True, True)
    assert cli.main(["train", "--resume", "runs/last", "--reward", "mine.py:Scaled"]) == 0


@pytest.mark.parametrize("every", [1, 25])
def test_a_reward_that_raises_later_costs_one_step(tmp_path, monkeypatch, capsys, every):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.jsonl", [{"prompt": f"{k} + 1"} for k in range(10)])
    Path("mine.py").write_text(
        "calls = []\ndef late(completions):\n    calls.append(1)\n    assert len(calls) < 5\n"
        "    return [float(len(x)) for x in completions]\n"
    )

    sizes = f"--steps 9 --save-every {every} --batch 2 --group 2 --max-tokens 4 --device cpu"
    words = f"train --model tiny --data mine.jsonl --reward mine.py:late {sizes}"
    assert cli.main(words.split()) == 2
    assert "--resume" in (said := capsys.readouterr().err)
    assert "step 2" in said  # an evaluation and two steps called it before


def test_a_reward_that_scores_nothing_stops_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.jsonl", [{"prompt": f"{k} + 1"} for k in range(10)])
    Path("mine.py").write_text("def none(completions):\n    return [None] * len(completions)\n")
    sizes = "--steps 9 --batch 2 --group 2 --max-tokens 4 --device cpu"
    words = f"train --model tiny --data mine.jsonl --reward mine.py:none {sizes}"

    assert cli.main(words.split()) == 2
    assert "mine.py:none" in capsys.readouterr().err
    assert len(RunFolder(Path("runs/last")).rows("metrics")) < 3


FILES = {
    "mine.jsonl": "".join(json.dumps(row) + "\n" for row in sums(hard=True)),
    "prompts.jsonl": "".join(json.dumps({"prompt": f"P{k}"}) + "\n" for k in range(20)),
    "table.csv": "text,label\nP,7\n",
    "broken.jsonl": '{"prompt": "P"}\n{"prompt": \n',
    "notes.txt": "P\n",
    "my_rewards.py": OWN,
    "run.toml": 'modle = "tiny"\n',
    "huge/model.safetensors": "",
    "huge/config.json": json.dumps(
        {
            "num_hidden_layers": 1000,
            "hidden_size": 100_000,
            "intermediate_size": 300_000,
            "num_attention_heads": 1000,
            "vocab_size": 1_000_000,
            "model_type": "llama",
        }
    ),
}
RUN_ALL = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from mesotron.cli import main
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(line)
    heavy = [name for name in ("torch", "transformers", "trl") if name in sys.modules]
    print(json.dumps([code, err.getvalue(), heavy]))
"""


def test_common_mistakes_are_answered_before_heavy_imports(tmp_path):
    (tmp_path / "huge").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    table = MISTAKES.read_text()
    rows = re.findall(r"^\| `mesotron (.*?)` \| `(.*?)`", table, re.MULTILINE)
    assert len(rows) >= 20

    command = [sys.executable, "-c", RUN_ALL]
    lines = json.dumps([shlex.split(command) for command, _ in rows])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        input=lines,
        capture_output=True,
        text=True,
    )

    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(rows), done.stderr

    for (mistake, answer), (code, text, heavy) in zip(rows, answers, strict=True):
        assert (code, heavy, text.count("\n")) == (2, [], 1), (mistake, text)
        assert answer in text, (mistake, text)

    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("rows", [3, 12, 17])
def test_few_rows_get_a_smaller_batch(rows, tmp_path, caplog):
    path = tmp_path / "few.jsonl"
    lines = [json.dumps({"question": f"What is {k} + 2?", "answer": k + 2}) for k in range(rows)]
    path.write_text("\n".join(lines))

    given = TrainConfig(recipe="own", task=TaskConfig(data=(str(path),)))
    config, _ = check(given)
    task, _ = read_data(given.task, False)
    assert 1 <= config.rollout.prompts <= len(task.train) < given.rollout.prompts
    assert f"--batch {config.rollout.prompts}" in caplog.text

    enough = replace(given, rollout=replace(given.rollout, prompts=1))
    assert check(enough)[0] == enough


def test_a_file_is_read_once_until_it_changes(tmp_path, monkeypatch):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    reads = []

    def counting(*given):
        reads.append(given)
        return read_splits(*given)

    monkeypatch.setattr("mesotron.tasks.own.read_splits", counting)
    config = TaskConfig(data=(str(path),), num_eval=0)
    for _ in range(3):  # a command checks its data, estimates and trains
        assert [one.gold for one in read_own(config)[0]] == ["2"]
    assert len(reads) == 1

    path.write_text('{"question": "1 + 2?", "answer": "33"}\n')
    assert [one.gold for one in read_own(config)[0]] == ["33"]
    assert len(reads) == 2


def test_the_first_ranked_problems_are_those_of_the_whole_order():
    problems = [Problem(question=f"{k} + 1?", gold=str(k + 1)) for k in range(50)]
    for count in (0, 1, 7, 50, 80):
        assert first_ranked(problems, count, 3) == ranked(problems, 3)[:count]

"""Tasks: generated arithmetic is correct and its splits disjoint; errors name file and line."""

import itertools
import json
import re
from collections import Counter
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from mesotron.answers.formats import FORMATS
from mesotron.config import TaskConfig
from mesotron.tasks.builtin import arith
from mesotron.tasks.builtin.sums import list_sums
from mesotron.tasks.load import load_task
from mesotron.tasks.problem import Problem, hold_out
from mesotron.tasks.prompts import build_prompt
from mesotron.tasks.table import MAX_TEXT

LEVELS = tuple(arith.LEVELS)


def questions(problems):
    return {problem.question for problem in problems}


@pytest.fixture(scope="module")
def problems():
    return {level: arith.generate("train", 300, (level,), seed=0) for level in LEVELS}


@pytest.mark.parametrize("level", LEVELS)
def test_worked_steps_lead_to_the_gold(problems, level):
    exact = {
        "+": int.__add__,
        "-": int.__sub__,
        "*": int.__mul__,
        "/": int.__truediv__,
    }

    wanted = arith.LEVELS[level]
    operations = Counter()
    for problem in problems[level]:
        value = None
        steps = problem.solution.split("\n")
        assert len(steps) == wanted.num_operations

        for step in steps:
            left, operation, right, result = re.fullmatch(
                r"(\d+) ([+*/-]) (\d+) = (\d+)", step
            ).groups()
            assert value in (None, int(left))

            value = exact[operation](int(left), int(right))
            assert value == int(result)
            assert right in problem.question.split() or f"{right}." in problem.question

            operations[operation] += 1

        assert problem.gold == str(int(value))
        assert 1 <= int(problem.gold) <= wanted.largest

    assert set(operations) == set(wanted.operations)
    assert min(operations.values()) > 0.1 * sum(operations.values())


def test_vocabulary_is_closed_and_used(problems):
    known = set(arith.vocabulary())
    more = arith.generate("train", 3000, (), seed=1)
    text = " ".join(f"{p.question} {p.solution}" for p in itertools.chain(more, *problems.values()))

    assert set(re.findall(r"[A-Za-z]+|\S", text)) == known
    assert len(known) < 200


def test_questions_are_distinct_and_seeded():
    first, other = (arith.generate("train", 500, (), seed=seed) for seed in (0, 1))
    assert len(questions(first)) == 500
    assert Counter(problem.level for problem in first) == dict.fromkeys(arith.DEFAULT_LEVELS, 125)
    assert len(questions(first) & questions(other)) < 50


def test_generated_problems_never_change():
    # The shipped model was trained on these, and results are compared across versions.
    assert arith.generate("train", 4, (4,), seed=0)[3].question == (
        "Zoe has 42 apples. Ann has 2 times as many as Zoe. Tom gives 7 more to Ann. "
        "How many apples does Ann have in the end?"
    )
    assert arith.generate("eval", 1, (1,), seed=0)[0].question == (
        "Dan finds 3 balls. Sam gives 2 more to Dan. How many balls does Dan have now?"
    )


def test_splits_are_disjoint_across_seeds(monkeypatch):
    train = [p for seed in range(2) for p in arith.generate("train", 500, (1,), seed)]
    held_out = [p for seed in range(2) for p in arith.generate("eval", 100, (1,), seed)]
    assert not questions(train) & questions(held_out)

    monkeypatch.setattr(arith, "OBJECTS", ("pens",))
    monkeypatch.setattr(arith, "NAMES", ("Ann", "Ben"))

    with pytest.raises(ValueError, match="eval"):  # there are not as many questions
        arith.generate("eval", 1_000, (1,), seed=0)


@pytest.mark.parametrize(("name", "levels"), [("arith", (2, 3)), ("sums", ())])
def test_generated_tasks_with_examples(name, levels):
    config = TaskConfig(
        name=name, num_train=50, num_eval=512, levels=levels, few_shot=2, format="answer"
    )
    task = load_task(config)
    assert (len(task.train), len(task.eval), len(task.examples)) == (50, 512, 2)
    assert len({p.question for p in (*task.train, *task.eval, *task.examples)}) == 564
    assert {p.level for p in task.train} == set(levels or [None])
    assert task.format is FORMATS["answer"]

    prompt = build_prompt(task.eval[0], config, task.format, task.examples)
    assert prompt[2]["content"].endswith(f"ANSWER: {task.examples[0].gold}")


def test_sums_are_complete_correct_and_split():
    train, held_out = (list_sums(split, None, seed=0) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (3353, 647)
    assert len(questions(train) | questions(held_out)) == 4000

    for problem in (*train[:50], *held_out[:50]):
        assert int(problem.gold) == eval(problem.question.removesuffix("="))

    other = list_sums("eval", None, seed=1)
    assert questions(other) == questions(held_out)
    assert [p.question for p in other] != [p.question for p in held_out]

    # A reordered sum is in the same split.
    for problem in held_out:
        a, first, b, second, c, _ = problem.question.split()
        for one, two, three in itertools.permutations([f"+ {a}", f"{first} {b}", f"{second} {c}"]):
            if one.startswith("+"):
                assert f"{one[2:]} {two} {three} =" not in questions(train)


@pytest.mark.parametrize(("num_train", "warns"), [(3352, True), (3351, False), (None, False)])
def test_fewer_training_problems_than_requested_warn(num_train, warns, caplog):
    task = load_task(
        TaskConfig(
            name="sums",
            num_train=num_train,
            num_eval=8,
            few_shot=2,
        )
    )

    assert len(task.train) == 3351  # of 3353, two are examples
    assert ("--task.num-train 3352" in caplog.text) == warns


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def gsm8k_row(i):
    steps = f"He has {i}+1 = <<{i}+1={i + 1}>>{i + 1}.\nTimes 1000: <<x>>."
    return {"question": f"Question {i}?", "answer": f"{steps}\n#### {1000 * (i + 1):,}"}


def test_gsm8k_from_a_file_is_split_by_the_question(tmp_path):
    rows = [gsm8k_row(i) for i in range(40)]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    config = TaskConfig(name="gsm8k", data=(path,), num_eval=10)
    task = load_task(config)

    assert (len(task.train), len(task.eval)) == (30, 10)
    problem = next(p for p in (*task.train, *task.eval) if p.question == "Question 4?")
    assert problem.gold == "5000"
    assert problem.solution == "He has 4+1 = 5.\nTimes 1000: ."

    # Another order of the rows holds out the same questions.
    write_jsonl(tmp_path / "train.jsonl", rows[::-1])
    assert questions(load_task(config).eval) == questions(task.eval)

    for change, match in (({"num_eval": 40}, "num-eval"), ({"few_shot": 31}, "few_shot=31")):
        with pytest.raises(ValueError, match=match):
            load_task(replace(config, **change))


def test_gsm8k_folder_keeps_its_test_split(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [gsm8k_row(i) for i in range(20)])
    write_jsonl(tmp_path / "test.jsonl", [gsm8k_row(i) for i in range(18, 30)])
    config = TaskConfig(
        name="gsm8k",
        data=(str(tmp_path),),
        num_eval=100,
    )

    task = load_task(config)
    assert len(task.eval) == 12
    assert len(task.train) == 18  # two questions of the test split are in the train file
    assert not questions(task.train) & questions(task.eval)
    assert len(load_task(replace(config, num_train=5)).train) == 5


def test_math_reads_level_and_the_last_box(tmp_path):
    rows = [
        {
            "problem": f"P{i}",
            "solution": rf"\boxed{{0}} no, \boxed{{{i}}}.",
            "level": f"Level {l}",
        }
        for i, l in enumerate([1, 2, 3, 4, 5, 5])
    ]

    rows.append(
        {
            "problem": "P6",
            "answer": r"\frac{1}{2}",
            "level": 5,
        }
    )

    rows.append(
        {
            "problem": "P7",
            "answer": "1",
            "level": "Level ?",
        }
    )

    path = write_jsonl(tmp_path / "math.jsonl", rows)
    task = load_task(
        TaskConfig(
            name="math",
            data=(path,),
            levels=(5,),
            num_eval=1,
        )
    )

    golds = {p.question: p.gold for p in (*task.train, *task.eval)}
    assert golds == {"P4": "4", "P5": "5", "P6": r"\frac{1}{2}"}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_user_tables(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    rows = [{"q": f"What is {i}+1?", "a": i} for i in range(6)]
    match suffix:
        case "jsonl":
            write_jsonl(path, rows)
        case "json":
            path.write_text(json.dumps(rows))
        case "csv":
            path.write_text("\ufeffq,a\n" + "".join(f'"{row["q"]}",{row["a"]}\n' for row in rows))
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    task = load_task(
        TaskConfig(
            name="file",
            data=(str(path),),
            columns="prompt=q,gold=a",
            num_eval=2,
        )
    )

    found = {(p.question, p.gold) for p in (*task.train, *task.eval)}
    assert found == {(row["q"], str(row["a"])) for row in rows}


def test_a_table_without_answers(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", [{"question": f"Q{i}"} for i in range(4)])
    task = load_task(
        TaskConfig(
            name="file",
            data=(path,),
            columns="gold=",
            num_eval=1,
        )
    )

    assert {p.gold for p in task.train} == {None}


def line(question='"Q"', answer="1"):
    return f'{{"question": {question}, "answer": {answer}}}\n'


def row(**columns):
    return json.dumps(columns) + "\n"


HEADER = "question,answer\n"
BROKEN = [
    ("file", "x.jsonl", line() + '\n{"question": ', r"x\.jsonl:3.*JSON"),
    ("file", "x.jsonl", "[1]\n", r"x\.jsonl:1.*list"),
    ("file", "x.jsonl", "[" * 100_000 + "\n", r"x\.jsonl:1.*JSON"),
    ("file", "x.jsonl", b"\xff\xfe\n", r"x\.jsonl:1.*JSON"),
    ("file", "x.jsonl", "", "--data"),
    ("file", "x.jsonl", line(answer="null"), r":1.*'answer'.*empty"),
    ("file", "x.jsonl", line(answer='" "'), r":1.*'answer'.*empty"),
    ("file", "x.jsonl", line(answer="NaN"), r":1.*'answer'.*empty"),
    ("file", "x.jsonl", line(answer="9" * 5000), r":1.*JSON"),
    ("file", "x.jsonl", line(question='"' + "x" * (MAX_TEXT + 1) + '"'), r"'question'"),
    ("file", "x.json", "{}", r"x\.json.*list"),
    ("file", "x.json", "[1]", r"x\.json: row 1"),
    ("file", "x.csv", HEADER + "Q,1\nQ2\n", r"x\.csv:3"),
    ("file", "x.csv", HEADER + "Q,1,2\n", r"x\.csv:2"),
    ("file", "x.csv", HEADER + 'Q,"1\n', r"x\.csv:\d.*CSV"),
    ("file", "x.csv", HEADER.encode() + b"\xff,1\n", r"x\.csv:\d.*CSV"),
    ("file", "x.csv", HEADER + "Q," + "x" * 200_000, r"x\.csv:\d.*CSV"),
    ("file", "x.parquet", "not a table", r"x\.parquet.*Parquet"),
    ("file", "x.pkl", "x", r"x\.pkl.*\.jsonl"),
    ("gsm8k", "x.jsonl", row(question="Q", answer="so 7"), r"x\.jsonl:1.*gold"),
    ("gsm8k", "x.jsonl", row(question="Q", answer="so 7 ####"), r"x\.jsonl:1.*gold"),
    ("math", "x.jsonl", row(problem="P", solution=r"\boxed{7"), r"x\.jsonl:1.*boxed"),
    (
        "math",
        "x.jsonl",
        row(
            problem="P",
            answer="7",
            level="9",
        ),
        r"x\.jsonl:1.*level '9'",
    ),
]


@pytest.mark.parametrize(("task", "name", "content", "match"), BROKEN)
def test_a_broken_row_names_its_file_and_line(tmp_path, task, name, content, match):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(ValueError, match=match) as error:
        load_task(TaskConfig(name=task, data=(str(path),)))

    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"name": "math"}, "--data"),
        ({"name": "sums", "num_eval": 648}, "--task.num-eval"),
        ({"name": "gsm8k", "data": ("gone.jsonl",)}, "gone.jsonl"),
        ({"name": "gsm8k", "data": ("/dev/zero",)}, "/dev/zero"),
        ({"name": "gsm8k", "data": (".",)}, "train"),
        ({"name": "gsm8k"}, "openai/gsm8k"),
        ({"name": "file", "data": ("some/dataset",)}, "HF_HUB_OFFLINE"),
    ],
)
def test_invalid_tasks_are_refused(tmp_path, monkeypatch, config, match):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    with pytest.raises(ValueError, match=re.escape(match)):
        load_task(TaskConfig(**config))


@pytest.mark.parametrize("data", [(), ("openai/gsm8k",)])
def test_gsm8k_on_the_hub_is_its_main_configuration(monkeypatch, data):
    calls = []

    def load_dataset(*names):
        calls.append(names)
        return {"train": [gsm8k_row(1)], "test": [gsm8k_row(2)]}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    task = load_task(TaskConfig(name="gsm8k", data=data))
    assert calls == [("openai/gsm8k", "main")]
    assert (len(task.train), len(task.eval)) == (1, 1)


def test_equal_questions_are_held_out_together():
    problems = [Problem("same", str(i), f"p-{i}") for i in range(10)]
    problems += [Problem(f"Q{i}", "1", f"q-{i}") for i in range(10)]

    for num_eval in range(1, 12):
        train, held_out = hold_out(problems, num_eval, seed=0)
        assert len(held_out) == num_eval
        assert not questions(train) & questions(held_out)

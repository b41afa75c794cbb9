"""Tasks: generated arithmetic is correct and its splits disjoint; errors name file and line."""

import itertools
import json
import re
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from mesotron.config import TaskConfig
from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.prompts import build_prompt
from mesotron.rlvr.tasks import arith
from mesotron.rlvr.tasks.load import load_task
from mesotron.rlvr.tasks.problem import Problem, hold_out
from mesotron.rlvr.tasks.table import MAX_TEXT

LEVELS = tuple(arith.LEVELS)


@pytest.fixture(scope="module")
def problems():
    return {level: arith.generate("train", 300, (level,), seed=0) for level in LEVELS}


@pytest.mark.parametrize("level", LEVELS)
def test_worked_steps_lead_to_the_gold(problems, level):
    for problem in problems[level]:
        value = None
        for step in problem.solution.split("\n"):
            left, operation, right, result = re.fullmatch(
                r"(\d+) ([+*/-]) (\d+) = (\d+)", step
            ).groups()
            assert value in (None, int(left))
            exact = {"+": "__add__", "-": "__sub__", "*": "__mul__", "/": "__truediv__"}
            value = getattr(int(left), exact[operation])(int(right))
            assert value == int(result)
            assert right in problem.question.split() or f"{right}." in problem.question
        assert problem.gold == str(int(value))
        assert 1 <= int(problem.gold) <= arith.LEVELS[level].largest


@pytest.mark.parametrize("level", LEVELS)
def test_operations_of_a_level(problems, level):
    wanted = arith.LEVELS[level]
    operations = Counter()
    for problem in problems[level]:
        steps = problem.solution.split("\n")
        assert len(steps) == wanted.num_operations
        operations.update(step.split()[1] for step in steps)
    assert set(operations) == set(wanted.operations)
    assert min(operations.values()) > 0.1 * sum(operations.values())


def test_vocabulary_is_closed_and_used(problems):
    known = set(arith.vocabulary())
    for problem in itertools.chain(*problems.values()):
        text = f"{problem.question} {problem.solution}"
        assert set(re.findall(r"[A-Za-z]+|\S", text)) <= known
    assert len(known) < 200
    text = " ".join(p.question + p.solution for p in arith.generate("train", 3000, (), seed=1))
    assert known <= set(re.findall(r"[A-Za-z]+|\S", text))


def test_questions_are_distinct_and_seeded():
    first, second, other = (arith.generate("train", 500, (), seed=seed) for seed in (0, 0, 1))
    assert first == second
    assert len({problem.question for problem in first}) == 500
    assert Counter(problem.level for problem in first) == dict.fromkeys(arith.DEFAULT_LEVELS, 125)
    assert len({p.question for p in first} & {p.question for p in other}) < 50


def test_generated_problems_never_change():
    """The shipped model was trained on these, and results are compared across versions."""
    assert arith.generate("train", 4, (4,), seed=0)[3].question == (
        "Zoe has 42 apples. Ann has 2 times as many as Zoe. Tom gives 7 more to Ann. "
        "How many apples does Ann have in the end?"
    )
    assert arith.generate("eval", 1, (1,), seed=0)[0].question == (
        "Dan finds 3 balls. Sam gives 2 more to Dan. How many balls does Dan have now?"
    )


def test_splits_are_disjoint_across_seeds():
    train = {p.question for seed in range(3) for p in arith.generate("train", 2000, (1,), seed)}
    held_out = {p.question for seed in range(3) for p in arith.generate("eval", 300, (1,), seed)}
    assert not train & held_out


def test_too_many_questions_are_refused(monkeypatch):
    monkeypatch.setattr(arith, "OBJECTS", ("pens",))
    monkeypatch.setattr(arith, "NAMES", ("Ann", "Ben"))
    with pytest.raises(ValueError, match="eval"):
        arith.generate("eval", 1_000, (1,), seed=0)


def test_arith_as_a_task():
    config = TaskConfig(num_train=50, num_eval=20, levels=(2, 3), few_shot=2, format="hashes")
    task = load_task(config)
    assert (len(task.train), len(task.eval), len(task.examples)) == (50, 20, 2)
    assert task.format is FORMATS["hashes"]
    asked = [p.question for p in (*task.train, *task.eval, *task.examples)]
    assert len(set(asked)) == 72
    assert {p.level for p in task.train} == {2, 3}


# Sums


def test_sums_are_complete_correct_and_split():
    train, held_out = (arith.generate_sums(split, None, seed=0) for split in ("train", "eval"))
    asked = {problem.question for problem in (*train, *held_out)}
    assert (len(train), len(held_out), len(asked)) == (3353, 647, 4000)
    for problem in (*train[:50], *held_out[:50]):
        assert int(problem.gold) == eval(problem.question.removesuffix("="))
    other = arith.generate_sums("eval", None, seed=1)
    assert {p.question for p in other} == {p.question for p in held_out}
    assert [p.question for p in other] != [p.question for p in held_out]


def test_reordered_sums_are_in_the_same_split():
    trained = {problem.question for problem in arith.generate_sums("train", None, seed=0)}
    for problem in arith.generate_sums("eval", None, seed=0):
        a, first, b, second, c, _ = problem.question.split()
        for one, two, three in itertools.permutations([f"+ {a}", f"{first} {b}", f"{second} {c}"]):
            if one.startswith("+"):
                assert f"{one[2:]} {two} {three} =" not in trained


def test_sums_as_a_task_with_examples():
    config = TaskConfig(name="sums", num_train=30, num_eval=512, few_shot=2, format="answer")
    task = load_task(config)
    assert (len(task.train), len(task.eval), len(task.examples)) == (30, 512, 2)
    asked = [p.question for p in (*task.train, *task.eval, *task.examples)]
    assert len(set(asked)) == 544
    prompt = build_prompt(task.eval[0], config, task.format, task.examples)
    assert prompt[2]["content"] == f"ANSWER: {task.examples[0].gold}"


@pytest.mark.parametrize(("num_train", "warns"), [(3352, True), (3351, False), (None, False)])
def test_fewer_training_problems_than_requested_warn(num_train, warns, caplog):
    """3,353 of which two are examples."""
    task = load_task(TaskConfig(name="sums", num_train=num_train, num_eval=8, few_shot=2))
    assert len(task.train) == 3351
    assert ("--task.num-train 3352" in caplog.text) == warns


# Files


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def gsm8k_row(i):
    steps = f"He has {i}+1 = <<{i}+1={i + 1}>>{i + 1}.\nTimes 1000: <<x>>."
    return {"question": f"Question {i}?", "answer": f"{steps}\n#### {1000 * (i + 1):,}"}


def test_gsm8k_from_a_file_is_split_by_the_question(tmp_path):
    rows = [gsm8k_row(i) for i in range(40)]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    config = TaskConfig(name="gsm8k", path=path, num_eval=10)
    task = load_task(config)
    assert (len(task.train), len(task.eval)) == (30, 10)
    problem = next(p for p in (*task.train, *task.eval) if p.question == "Question 4?")
    assert problem.gold == "5000"
    assert problem.solution == "He has 4+1 = 5.\nTimes 1000: ."
    # Another order of the rows holds out the same questions.
    write_jsonl(tmp_path / "train.jsonl", rows[::-1])
    assert {p.question for p in load_task(config).eval} == {p.question for p in task.eval}


def test_gsm8k_folder_keeps_its_test_split(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [gsm8k_row(i) for i in range(20)])
    write_jsonl(tmp_path / "test.jsonl", [gsm8k_row(i) for i in range(18, 30)])
    task = load_task(TaskConfig(name="gsm8k", path=str(tmp_path), num_train=5, num_eval=100))
    assert len(task.train) == 5
    assert len(task.eval) == 12
    assert not {p.question for p in task.train} & {p.question for p in task.eval}
    everything = load_task(TaskConfig(name="gsm8k", path=str(tmp_path), num_eval=100))
    assert len(everything.train) == 18, "two questions of the test split are in the train file"


def test_math_reads_level_and_the_last_box(tmp_path):
    rows = [
        {"problem": f"P{i}", "solution": rf"\boxed{{0}} no, \boxed{{{i}}}.", "level": f"Level {l}"}
        for i, l in enumerate([1, 2, 3, 4, 5, 5])
    ]
    rows.append({"problem": "P6", "answer": r"\frac{1}{2}", "level": 5})
    rows.append({"problem": "P7", "answer": "1", "level": "Level ?"})
    path = write_jsonl(tmp_path / "math.jsonl", rows)
    task = load_task(TaskConfig(name="math", path=path, levels=(5,), num_eval=1))
    assert {(p.question, p.gold) for p in (*task.train, *task.eval)} == {
        ("P4", "4"),
        ("P5", "5"),
        ("P6", r"\frac{1}{2}"),
    }


TABLE = [{"q": f"What is {i} + 1?", "a": i + 1} for i in range(6)]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_user_tables(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    if suffix == "jsonl":
        write_jsonl(path, TABLE)
    elif suffix == "json":
        path.write_text(json.dumps(TABLE))
    elif suffix == "csv":
        path.write_text("\ufeffq,a\n" + "".join(f'"{row["q"]}",{row["a"]}\n' for row in TABLE))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TABLE), path)
    columns = {"question_column": "q", "answer_column": "a"}
    task = load_task(TaskConfig(name="file", path=str(path), num_eval=2, **columns))
    found = {(p.question, p.gold) for p in (*task.train, *task.eval)}
    assert found == {(row["q"], str(row["a"])) for row in TABLE}


def test_a_table_without_answers(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", [{"question": f"Q{i}"} for i in range(4)])
    task = load_task(TaskConfig(name="file", path=path, answer_column="", num_eval=1))
    assert {p.gold for p in task.train} == {None}


BROKEN = [
    ("x.jsonl", '{"question": "Q", "answer": "1"}\n\n{"question": ', r"x\.jsonl:3.*JSON"),
    ("x.jsonl", "[1]\n", r"x\.jsonl:1.*list"),
    ("x.jsonl", "[" * 100_000 + "\n", r"x\.jsonl:1.*JSON"),
    ("x.jsonl", '{"question": "Q"}\n', r"x\.jsonl:1.*'answer'.*question"),
    ("x.jsonl", '{"question": "Q", "answer": null}\n', r":1.*'answer'.*empty"),
    ("x.jsonl", '{"question": "Q", "answer": " "}\n', r":1.*'answer'.*empty"),
    ("x.jsonl", '{"question": "Q", "answer": NaN}\n', r":1.*'answer'.*empty"),
    ("x.jsonl", '{"question": "\\ud800", "answer": 1}\n', r":1.*surrogate"),
    ("x.jsonl", '{"question": "Q", "answer": true}\n', r":1.*'answer'.*bool"),
    ("x.jsonl", '{"question": "Q", "answer": [1]}\n', r":1.*'answer'.*list"),
    ("x.jsonl", '{"question": "Q", "answer": ' + "9" * 5000 + "}\n", r":1.*JSON"),
    ("x.jsonl", '{"answer": 1, "question": "' + "x" * (MAX_TEXT + 1) + '"}', r"'question'"),
    ("x.jsonl", b"\xff\xfe\n", r"x\.jsonl:1.*JSON"),
    ("x.jsonl", "", r"--task\.path"),
    ("x.json", "{}", r"x\.json.*list"),
    ("x.json", "[1]", r"x\.json: row 1"),
    ("x.csv", "question,answer\nQ,1\nQ2\n", r"x\.csv:3"),
    ("x.csv", "question,answer\nQ,1,2\n", r"x\.csv:2"),
    ("x.csv", 'question,answer\nQ,"1\n', r"x\.csv:\d.*CSV"),
    ("x.csv", b"question,answer\n\xff,1\n", r"x\.csv:\d.*CSV"),
    ("x.csv", "question,answer\nQ," + "x" * 200_000 + "\n", r"x\.csv:\d.*CSV"),
    ("x.parquet", "not a table", r"x\.parquet: after row 0"),
    ("x.pkl", "x", r"x\.pkl.*\.jsonl"),
]


@pytest.mark.parametrize(("name", "content", "match"), BROKEN)
def test_a_broken_row_names_its_file_and_line(tmp_path, name, content, match):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=match) as error:
        load_task(TaskConfig(name="file", path=str(path)))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("task", "row", "match"),
    [
        ("gsm8k", {"question": "Q", "answer": "so 7"}, "gold"),
        ("gsm8k", {"question": "Q", "answer": "so 7 ####"}, "gold"),
        ("math", {"problem": "P", "solution": r"\boxed{7"}, "boxed"),
        ("math", {"problem": "P", "answer": "7", "level": "9"}, "level '9'"),
    ],
)
def test_a_row_without_a_gold_is_named(tmp_path, task, row, match):
    path = write_jsonl(tmp_path / "x.jsonl", [row])
    with pytest.raises(ValueError, match=rf"x\.jsonl:1.*{match}"):
        load_task(TaskConfig(name=task, path=path))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"name": "math"}, "--task.path"),
        ({"name": "file"}, "--task.path"),
        ({"path": "x.jsonl"}, "--task.path"),
        ({"levels": (1, 6)}, "--task.levels"),
        ({"name": "gsm8k", "path": "gone.jsonl"}, "gone.jsonl"),
        ({"name": "gsm8k", "path": "/dev/zero"}, "/dev/zero"),
        ({"name": "gsm8k", "path": "."}, "train"),
        ({"name": "gsm8k"}, "openai/gsm8k"),
        ({"name": "file", "path": "some/dataset"}, "HF_HUB_OFFLINE"),
        ({"name": "gsm8k", "path": "x", "levels": (1,)}, "--task.levels"),
        ({"name": "sums", "levels": (1,)}, "--task.levels"),
        ({"name": "sums", "path": "x.jsonl"}, "--task.path"),
        ({"name": "sums", "num_eval": 648}, "--task.num-eval"),
        ({"num_eval": -1}, "--task.num-eval"),
    ],
)
def test_invalid_tasks_are_refused(tmp_path, monkeypatch, config, match):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=re.escape(match)) as error:
        load_task(TaskConfig(**config))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", [None, "openai/gsm8k"])
def test_gsm8k_on_the_hub_is_its_main_configuration(monkeypatch, path):
    row = {"question": "How many?", "answer": "#### 72"}
    calls = []

    def load_dataset(*names):
        calls.append(names)
        return {"train": [row], "test": [row | {"question": "How many now?"}]}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    task = load_task(TaskConfig(name="gsm8k", path=path))
    assert calls == [("openai/gsm8k", "main")]
    assert (len(task.train), len(task.eval)) == (1, 1)


def test_too_few_problems_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [gsm8k_row(i) for i in range(5)])
    with pytest.raises(ValueError, match="num-eval"):
        load_task(TaskConfig(name="gsm8k", path=path, num_eval=5))
    with pytest.raises(ValueError, match="few_shot=4"):
        load_task(TaskConfig(name="gsm8k", path=path, num_eval=2, few_shot=4))


def test_equal_questions_are_held_out_together():
    problems = [Problem("same", str(i), f"p-{i}") for i in range(10)]
    problems += [Problem(f"Q{i}", "1", f"q-{i}") for i in range(10)]
    for num_eval in range(1, 12):
        train, held_out = hold_out(problems, num_eval, seed=0)
        assert len(held_out) == num_eval
        assert not {p.question for p in train} & {p.question for p in held_out}

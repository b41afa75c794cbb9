"""Answer formats, prompts and facts: what is rendered is extracted, and nothing else."""

import re
from pathlib import Path

import pytest

from mesotron.answers.facts import Facts, summarise
from mesotron.answers.formats import FORMATS, MAX_ANSWER, MAX_TAIL
from mesotron.answers.lenient import lenient_answer
from mesotron.config import TaskConfig
from mesotron.tasks.problem import Problem
from mesotron.tasks.prompts import build_prompt, plain_text, solved_text

ANSWERS = ["7", "-3", "1,080", r"\frac{1}{2}", r"\{1, 2\}", "x + 1", "a_{1}^{2}", "12 apples"]


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_and_answers_share_the_format(name):
    form = FORMATS[name]
    problem = Problem("What is 1 + 1?", "2", "mine-0", solution="1 + 1 = 2")
    system, user = build_prompt(problem, TaskConfig(), form)

    assert form.instruction in system["content"]
    assert form.prefix.strip() in form.instruction
    assert user == {"role": "user", "content": problem.question}
    assert form.extract(solved_text(problem, form)) == "2"

    for answer in ANSWERS:
        text = f"First 3 + 4 = 7.\n{form.render(answer)}"
        assert form.extract(text + "\nDone.") == lenient_answer(text) == answer

    others = [other for other in FORMATS.values() if other is not form]
    assert {form.extract(other.render("7")) for other in others} == {None}


@pytest.mark.parametrize("name", FORMATS)
def test_the_last_nonempty_answer_counts(name):
    form = FORMATS[name]
    assert form.extract("\n".join(map(form.render, "12 "))) == "2"
    assert form.extract(form.render("")) is form.extract("") is None

    # Neither answers that are too long nor answers too far from the end.
    assert form.extract(form.render("x" * MAX_ANSWER)) == "x" * MAX_ANSWER
    assert form.extract(form.render("x" * (MAX_ANSWER + 1))) is None
    assert form.extract(form.render("7") + "\n" + "." * MAX_TAIL) is None


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("boxed", r"\boxed{71} then \boxed{72}", "72"),
        ("boxed", r"\boxed{71} then \boxed{72", "71"),
        ("boxed", r"\boxed{72", None),
        ("boxed", r"\boxed {72}", "72"),
        ("boxed", r"\boxed{\boxed{7}}", "7"),
        ("boxed", r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        ("boxed", r"} \boxed{7}", "7"),
        ("boxed", r"{ \boxed{7}", "7"),
        ("boxed", r"\boxed{\{1\}}", r"\{1\}"),
        ("boxed", r"\\boxed{7}", None),  # a line break and the word boxed
        ("boxed", "boxed{7}", None),
        ("answer", "ANSWER:7", "7"),
        ("answer", "so ANSWER: 7\nbye", "7"),
        ("answer", "answer: 7", None),
        ("answer", "MY_ANSWER: 7", None),
        ("hashes", "####7", "7"),
        ("hashes", "##### 7", None),
        ("hashes", "#### 7\n####", "7"),
    ],
)
def test_extraction(name, text, answer):
    assert FORMATS[name].extract(text) == answer


def test_an_answer_at_the_cut_is_not_taken():
    """It might have become 72; a closed box cannot change."""
    for name, text, answer in (
        ("answer", "ANSWER: 7", None),
        ("answer", "ANSWER: 7\nI", "7"),
        ("hashes", "#### 1\n#### 7", "1"),
        ("boxed", r"\boxed{7}", "7"),
    ):
        assert FORMATS[name].extract(text, complete=False) == answer

    assert lenient_answer("It is 5, or 7", complete=False) == "5"
    assert lenient_answer("The answer is 7", complete=False) is None
    assert lenient_answer("The answer: total cost 42", complete=False) is None
    assert lenient_answer("The answer: total cost 42 dol", complete=False) == "42"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 72, for 3 days.", "72"),
        ("Answer: $1,080 in 4 weeks", "$1,080"),
        ("3 + 4 = 7", "7"),
        ("10-5", "5"),
        ("it fell to -5", "-5"),
        ("about 3.50 each", "3.50"),
        ("3/4 of 100%", "100%"),
        ("version 1.2.3", "1.2.3"),
        (r"\boxed{7} and 8 more", "7"),
        ("no number", None),
        ("", None),
        ("٧٢", "72"),
        ("it is .5", ".5"),
        (r"The final answer is $\frac{3}{4}$.", r"\frac{3}{4}"),
        ("so 14{,}916 in all", "14{,}916"),
        (r"The answer is: $$x \in [-2,7]$$ here", r"x \in [-2,7]"),
        ("answer is (3, 4).", "(3, 4)"),
        (r"The answer is \(12\text{ m}^2\).", r"12\text{ m}^2"),
        ("**Answer:** 2x + 3", "2x + 3"),
        ("the answer is $5 and then $7 more", "$5"),
        ("The answer is 5 or 6.", "5 or 6"),
        ("The answer is $5$ or $6$.", "5, 6"),
        (r"so we get $y = 2\sqrt{3}$.", r"2\sqrt{3}"),
        ("The answer is 20 - 5 = 15 pens.", "20 - 5 = 15 pens"),
        ("Answer: 12 (as 3*4)", "12"),
        ("He had 3. The answer is Eva.", "Eva"),
        ("The answer is as follows.\n3 + 4 = 7", "7"),
    ],
)
def test_lenient_answer(text, answer):
    assert lenient_answer(text) == answer


FLOODS = [
    "(",
    "{",
    "}",
    r"\boxed{",
    "####",
    "ANSWER:",
    "answer is ",
    "1",
    "1,111",
    "\\",
    " ",
    "-",
    "$",
    "$1",
    r"\[",
    r"\text{",
    "answer is $a ",
    "answer is a, ",
    r"\frac{1}",
    "a ",
    "\u200b",
    "\x00",
]


@pytest.mark.parametrize("text", FLOODS)
def test_extraction_is_linear(text):
    flood = text * (100_000 // len(text))
    for form in FORMATS.values():
        form.extract(flood)
        assert form.extract(flood + "\n" + form.render("7")) == "7"

    lenient_answer(flood)


def test_system_prompt_and_gold():
    problem = Problem("How many?", "12345", "mine-0", solution="worked 12345")
    default, own, none = (
        build_prompt(problem, TaskConfig(**system), FORMATS["boxed"])
        for system in ({}, {"system": "Be brief."}, {"system": ""})
    )

    assert "12345" not in plain_text(default)
    assert own[0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in none] == ["user"]

    with pytest.raises(ValueError, match="mine-0"):
        solved_text(Problem("Q", None, "mine-0"), FORMATS["boxed"])


def test_examples_come_before_the_question():
    shots = [Problem(f"Q{i}", str(i), f"mine-{i}", solution=f"S{i}") for i in range(3)]
    problem = Problem("Q", "9", "mine-9")
    config = TaskConfig(few_shot=2, system="")
    prompt = build_prompt(problem, config, FORMATS["hashes"], shots)

    assert plain_text(prompt) == (
        "Question: Q0\nAnswer: S0\n#### 0\n\nQuestion: Q1\nAnswer: S1\n#### 1\n\n"
        "Question: Q\nAnswer:"
    )
    with pytest.raises(ValueError, match="few_shot=2"):
        build_prompt(problem, config, FORMATS["hashes"])


def one(judge, completion, gold, truncated=False) -> Facts:
    return judge.judge([completion], [gold], [truncated])[0]


GOOD = "parsed formatted correct graded"
# completion, gold, truncated -> the facts that are true, and the answer
CASES = [
    (r"3+4 = \boxed{7}", "7", False, GOOD, "7"),
    (r"\boxed{7.0}", "7", False, GOOD, "7"),
    ("\\boxed{7\u200b2}", "72", False, GOOD, "72"),
    ("\\boxed{\uff17\uff12}", "72", False, GOOD, "72"),
    (r"\boxed{8}", "7", False, "parsed formatted graded", "8"),
    ("The answer is 7.", "7", False, "parsed correct_unformatted graded", None),
    ("The answer is 8.", "7", False, "parsed graded", None),
    ("#### 7", "7", False, "parsed correct_unformatted graded", None),
    ("I do not know", "7", False, "graded", None),
    ("", "7", False, "graded", None),
    (r"\boxed{?!}", "7", False, "formatted graded", None),
    (r"\boxed{7", "7", True, "truncated graded", None),
    (r"\boxed{7} and on and on", "7", True, GOOD + " truncated", "7"),
    (r"\boxed{7}", r"\frac{1}{", False, "parsed formatted gold_unparseable", "7"),
    (r"\boxed{\frac{1}{}", r"\frac{1}{", False, "parsed gold_unparseable", None),
    (r"\boxed{}", "", False, "gold_unparseable", None),
    (r"\boxed{7}", None, False, "parsed formatted", "7"),
]


@pytest.mark.parametrize(("completion", "gold", "truncated", "true", "answer"), CASES)
def test_each_fact_by_its_name(judge, completion, gold, truncated, true, answer):
    facts = one(judge, completion, gold, truncated)
    names = []
    for name in Facts.__dataclass_fields__:
        if getattr(facts, name) is True:
            names.append(name)

    assert set(names) == set(true.split())
    assert facts.answer == answer


def test_summary_shares(judge):
    completions = [r"\boxed{7}", "7", r"\boxed{8}", r"\boxed{1}"]
    golds = ["7", "7", "7", r"\frac{"]
    shares = summarise(judge.judge(completions, golds, [False, True, False, False]))

    assert shares == {
        "facts/parsed": 0.75,  # the bare 7 touches the cut
        "facts/formatted": 0.75,
        "facts/truncated": 0.25,
        "facts/gold_unparseable": 0.25,
        "facts/correct": pytest.approx(1 / 3),
        "facts/correct_unformatted": 0.0,
    }


def test_shares_are_documented_and_need_a_gold(judge):
    page = (Path(__file__).parents[2] / "docs" / "api" / "metrics.md").read_text()
    documented = re.findall(r"^\| `(facts/\w+)` \|", page, re.MULTILINE)
    assert sorted(documented) == sorted(summarise([one(judge, "", "7")]))

    shares = summarise([one(judge, r"\boxed{7}", None)])
    assert shares["facts/formatted"] == 1.0
    assert "facts/correct" not in shares
    assert summarise([]) == {}

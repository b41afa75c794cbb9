"""README's numbers are in data files, its commands run, and it stays short."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesotron import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?!\w)")


def read(name: str) -> Any:
    from benchmarks._lib.results import read_json

    return read_json(ROOT / "benchmarks" / name)


def spell(*values: float, decimals: int = 3) -> set[str]:
    return {f"{value:.{decimals}f}" for value in values}


def default_run() -> set[str]:
    rows = read("default_run/result.json.gz")
    shown = {str(rows[0]["problems"])}
    for scores in (rows, [row["lenient"] for row in rows]):
        ends = [row["after"]["value"] for row in scores]
        shown |= spell(min(ends), max(ends), *(row["before"]["value"] for row in scores))

    seconds = [row["seconds"]["processor"] for row in rows]
    return shown | spell(min(seconds), max(seconds), decimals=0)


def rescue() -> set[str]:
    """Our seeds with today's guard, and those that others measured."""
    guarded, warned = (
        read(f"default_run/arith_collapse_{guard}.json.gz") for guard in ("rollback", "warn")
    )
    elsewhere = read("default_run/elsewhere.json")
    guarded = [row for row in guarded if row["seed"] > 16]  # before, it went back too late

    shown = {str(elsewhere["runs"])}
    for rows, name in ((guarded, "rollback"), (warned, "warn")):
        values = [row["after"]["value"] for row in rows] + [*elsewhere[name].values()]
        shown |= spell(min(values), max(values))
        shown.add(str(len(rows) + elsewhere["runs"]))

    return shown


def watch() -> set[str]:
    """Healthy public runs and clear collapses that the watch and other tools stop."""
    shown = set()
    for summary in read("watch/public.json")["table"].values():
        for key in ("healthy stopped", "collapses stopped"):
            stopped, _, of, *_ = summary[key].split()
            shown |= {stopped, of}

    return shown


def stack() -> set[str]:
    """Seconds of a step of Qwen2.5-0.5B with 256 tokens."""
    cells = read("stack/result.json.gz")["cells"]
    shown = {"2.5", "0.5", "256"}
    for name, cell in cells.items():
        if name.startswith("qwen0.5b-256/"):
            shown.add(f"{cell['step_ms'] / 1000:.1f}")

    return shown


SOURCES: dict[str, Callable[[], set[str]]] = {
    "default_run/README.md)": default_run,
    "default_run/README.md#the-rescue)": rescue,
    "watch/README.md)": watch,
    "stack/README.md)": stack,
}


@pytest.mark.parametrize("link", SOURCES)
def test_results_come_from_files(link):
    rows = []
    for line in README.splitlines():
        if line.startswith("| [") and link in line:
            rows.append(line)

    assert len(rows) == 1

    _, _, result, limits, _ = rows[0].split("|")
    numbers = set(NUMBER.findall(re.sub(r"\]\([^)]*\)", "", result + limits)))
    assert len(numbers) > 1
    assert numbers - SOURCES[link]() == set()


def test_the_table_of_gpus_is_that_of_the_plan():
    words = {"": "as it is", "--rollout.micro-batch 1": "small"}
    shown = README.split("| | full | LoRA |")[1].split("\n\n")[0]
    for line in shown.splitlines()[2:]:
        model, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for method, cell in zip(("full", "LoRA", "QLoRA"), cells, strict=True):
            (row,) = [
                row
                for row in read("plan/fits.json")
                if (row["model"], row["method"]) == (model, method)
            ]
            expected = []
            latest = None
            for size, fit in row["cells"].items():
                saving = words.get(fit["flags"], "smaller")
                if fit["fits"] and saving != latest:
                    expected.append(f"{size} {saving}")
                    latest = saving

            assert cell == (", ".join(expected) or "more than 80 GB")


def test_the_page_is_short():
    assert len(README.splitlines()) <= 110
    cells = []
    for line in README.splitlines():
        if line.startswith("|"):
            cells += line.split("|")

    assert max(len(cell.split()) for cell in cells) <= 20


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The files of README's section on your data; its one row, with more sums."""
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(r'^`({"question": .*})`', README, re.MULTILINE)
    first = json.loads(shown)
    assert "2 + 3" in first["question"]
    assert first["answer"] == 5

    lines = []
    for a in range(2, 22):
        question = first["question"].replace("2 + 3", f"{a} + 3")
        lines.append(json.dumps({"question": question, "answer": a + 3}))

    Path("mine.jsonl").write_text("\n".join(lines) + "\n")
    (reward,) = re.findall(r"^```python\n(# my_rewards.py\n.*?)^```", README, re.M | re.S)
    Path("my_rewards.py").write_text(reward)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ["check", "plan", "train"])
def test_the_commands_on_own_data_run(name, capsys):
    (line,) = re.findall(rf"^mesotron ({name} .*my_rewards.py:score.*)$", README, re.MULTILINE)
    words = shlex.split(line, comments=True)
    if "--model" in words:
        words[words.index("--model") + 1] = "tiny"
    if name == "train":
        words += shlex.split("--steps 1 --batch 2 --group 2 --max-tokens 8 --task.num-eval 2")

    assert cli.main(words) == 0
    if name == "check":
        assert "not sound" not in capsys.readouterr().out


def test_the_shown_diagnosis_is_that_of_a_kept_run(capsys):
    (block,) = re.findall(r"^```console\n\$ mesotron watch \S+\n(.*?)^```", README, re.M | re.S)
    cli.main(["watch", str(ROOT / "tests" / "golden" / "runs" / "vote")])
    printed = " ".join(capsys.readouterr().out.split())
    for sentence in " ".join(block.split()).split(" [...]"):
        assert sentence in printed

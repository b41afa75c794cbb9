"""The transcripts of the pages as a new user would type them; those on one's own data with fewer
and smaller steps."""

import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from mesotron import cli
from mesotron.runs import RunFolder

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "own_data.md"
SMALLER = {
    "train": "--steps 2 --batch 4 --group 4 --task.num-eval 6 --device cpu",
    "eval": "--task.num-eval 6 --device cpu",
}
TEXT = PAGE.read_text()
TRANSCRIPTS = re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", text)
        if name:
            Path(name[1]).write_text(text)
        else:
            exec(compile(text, PAGE.name, "exec"), {})


@pytest.mark.slow
@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=["own reward", "chats", "reward of TRL"])
def test_a_transcript_runs_as_printed(transcript, capsys):
    commands = re.findall(r"^\$ mesotron (.*)", transcript.replace("\\\n", " "), re.MULTILINE)
    assert 1 <= len(commands) <= 3

    printed = []
    for line in transcript.splitlines():
        if line.startswith(("mine.", "chat.")):
            printed.append(line)

    for command in commands:
        words = shlex.split(command)
        assert cli.main([*words, *SMALLER[words[0]].split()]) == 0

        shown = capsys.readouterr().out.splitlines()
        if words[0] == "train":
            assert shown[0] == printed[0]
            path = re.fullmatch(
                r"model: (\S+); load it with .*from_pretrained\(\"\1\"\)", shown[-1]
            )
            assert AutoModelForCausalLM.from_pretrained(path[1]).num_parameters() > 0

            result = RunFolder(Path("runs/last")).result
            measure = "accuracy" if "chat.jsonl" in command else "reward"
            assert (result["measure"], "gain" in result) == (measure, True)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["reasoning_gym.md", "export.md"])
def test_a_whole_page_runs_as_printed(page, tmp_path, monkeypatch, capsys):
    block = (DOCS / page).read_text().split("```console\n")[1].split("```")[0]
    commands = re.findall(r"^\$ mesotron (.*)", block, re.MULTILINE)
    monkeypatch.chdir(tmp_path)

    for command in commands:
        capsys.readouterr()
        assert cli.main(shlex.split(command)) == 0

        if command.startswith("export"):
            assert capsys.readouterr().out.strip() in block

    if page == "reasoning_gym.md":
        rows = RunFolder(Path("runs/gym")).rows("metrics")
        assert {row["curriculum/level"] for row in rows} == {0.0}
        assert rows[-1]["reward/part/scorer"] > rows[0]["reward/part/scorer"]
    else:
        assert "tiny (before)" in capsys.readouterr().out
        assert "200 held-out problems" in Path("runs/lora/export/README.md").read_text()

"""Every example runs as a user would run it, and learns."""

import json
import re
import runpy
from pathlib import Path

import pytest

from mesotron import cli

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(capsys):
    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


# An example's own libraries may warn its user; ours must not, see test_integrations.
pytestmark = pytest.mark.filterwarnings("default")


def numbers(pattern: str, text: str) -> list[float]:
    match = re.search(pattern, text)
    assert match, text
    return [float(group) for group in match.groups()]


def test_every_example_is_tested():
    tested = set()
    for name in globals():
        if name.startswith("test_"):
            tested.add(name.removeprefix("test_"))

    tested |= {words.split()[0] for words, *_ in LEARNING}
    files = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]

    assert {path.stem for path in files} <= tested


@pytest.mark.slow
def test_quickstart(monkeypatch, tmp_path, capsys):
    """The notebook's code cells in order, with fewer steps; `%pip` is the notebook's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
    cells = []
    for c in notebook["cells"]:
        if c["cell_type"] == "code":
            cells.append("".join(c["source"]))

    names: dict[str, object] = {}
    for cell in cells:
        if not cell.startswith("%"):
            exec(cell.replace("STEPS = 40", "STEPS = 2"), names)

    assert "runs/notebook" in capsys.readouterr().out
    assert len(names["rows"]) == 2
    assert (tmp_path / "runs" / "notebook" / "report.html").exists()


def test_own_reward(tmp_path, capsys):
    names = runpy.run_path(str(EXAMPLES / "own_reward.py"))
    texts = ["7 + 5 = 12\n\\boxed{12}", "\\boxed{11}", "12"]
    assert names["score"](texts, answer=[12, 12, 12]) == [1.0, 0.0, 0.0]

    names["main"](tmp_path, steps=1, held_out=2)
    printed = capsys.readouterr().out
    assert "not sound" not in printed
    assert "step 1/1" in printed
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_a_run_with_the_calculator(tmp_path, capsys):
    """The second command of the example's docstring, on a model of two steps."""
    path = EXAMPLES / "calculator.py"
    runpy.run_path(str(path))["main"](tmp_path / "out", steps=2)

    words = f"train --model {tmp_path}/out/model --data {tmp_path}/out/data".split()
    words += ["--tools", f"{path}:calculate", "--steps", "1", "--batch", "2", "--group", "2"]
    words += ["--max-tokens", "16", "--task.num-eval", "2", "--out", str(tmp_path / "run")]

    assert cli.main(words) == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert "tools/turns" in row
    assert "step 1/1" in capsys.readouterr().out


@pytest.mark.slow
def test_ppo_snake(capsys):
    runpy.run_path(str(EXAMPLES / "ppo_snake.py"))["main"](timesteps=20_480, games=16)
    text = capsys.readouterr().out
    first, last = numbers(r"fruit from ([\d.]+) to ([\d.]+)", text)
    assert last > first
    assert "greedy" in text


@pytest.mark.slow
def test_vla_blocks(tmp_path, capsys):
    names = runpy.run_path(str(EXAMPLES / "vla_blocks.py"))
    names["main"](tmp_path, episodes=6, steps=2, scenes=2)

    text = capsys.readouterr().out
    assert (tmp_path / "run" / "result.json").exists()
    assert "camera" in text


def test_calculator(tmp_path):
    from transformers import AutoTokenizer
    from trl.chat_template_utils import parse_response

    names = runpy.run_path(str(EXAMPLES / "calculator.py"))
    assert names["calculate"]("12 * 70") == "840"

    names["main"](tmp_path, steps=1)
    assert len((tmp_path / "data" / "test.jsonl").read_text().splitlines()) == 200

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer.encode("<|assistant|>")
    ids = tokenizer.encode("[12 * 70]<|im_end|>")
    (call,) = parse_response(tokenizer, ids, prefix=prompt)["tool_calls"]

    assert call["function"] == {"name": "calculate", "arguments": {"expression": "12 * 70"}}


def test_plain_loop(example):
    text = example("plain_loop")
    assert "resumed run equals the one left alone: True" in text
    assert numbers(r"step 100  loss ([\d.]+)", text)[0] < 0.1


LOSS = r"loss from ([\d.]+) to ([\d.]+)"
REWARD = r"reward from ([\d.]+) to ([\d.]+)"
LEARNING = [
    ("hf_trainer", LOSS, lambda first, last: last < 0.8 * first),
    ("lightning_module", LOSS, lambda first, last: last < 0.5 * first),
    ("peft_lora", r"(?s)step  0  loss ([\d.]+).*step 40  loss ([\d.]+)", float.__gt__),
    ("trl_grpo", REWARD, float.__lt__),
    ("sb3_cartpole", REWARD, float.__lt__),
    ("sb3_snake --timesteps 24576", r"a game from ([\d.]+) to ([\d.]+)", float.__lt__),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "pattern", "has_learned"), LEARNING)
def test_an_example_learns(words, pattern, has_learned, example, monkeypatch):
    monkeypatch.setattr("sys.argv", words.split())
    first, last = numbers(pattern, example(words.split()[0]))
    assert has_learned(first, last)


@pytest.mark.slow
def test_train_snake_purejaxrl(example, monkeypatch, tmp_path):
    words = "--width 3 --height=3 --num_envs 8 --num-steps 8 --num-minibatches 2 --update_epochs 1 "
    words += "--total-timesteps 256 --d-model 8 --num-heads 1 --num-layers 1 --eval-episodes 4 "
    words += f"--optim muon --muon-lr 0.03 --anneal_lr=False --save-dir {tmp_path} --run-name tiny"
    monkeypatch.setattr("sys.argv", ["train_snake_purejaxrl.py", *words.split()])
    fruit, most = numbers(r"greedy\s+([\d.]+) fruit of (\d+)", example("train_snake_purejaxrl"))

    assert 0 <= fruit <= most == 8
    assert (tmp_path / "tiny" / "game.gif").exists()

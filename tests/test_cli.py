"""The command line: help without heavy imports, one line for a mistake, quiet exits."""

import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from unittest.mock import Mock

import pytest

import mesotron as package
from mesotron import cli
from mesotron.cli import parse
from mesotron.config import (
    CompareConfig,
    ModelConfig,
    RewardConfig,
    TaskConfig,
    TrainConfig,
    aliases,
)
from mesotron.config.base import Config, flags_of, setting
from mesotron.config.flags import COMMON, suggest_flag
from mesotron.config.types import Count
from mesotron.runs import RunFolder

IMPORTS = """
import socket, sys, mesotron, mesotron.runs
from mesotron.cli import main
def refuse(*_): raise AssertionError("network")
socket.socket.connect = socket.create_connection = refuse
heavy = {"torch", "jax", "transformers", "trl", "datasets", "matplotlib"}
dir(mesotron)
codes = []
for args in sys.argv[1:]:
    try:
        codes.append(main(args.split()))
    except SystemExit:  # help
        codes.append("numpy" in sys.modules)
from mesotron.config import SftConfig, TrainConfig
from mesotron.rlvr.train import check
check(TrainConfig()), check(SftConfig())
import mesotron.report.command
print(codes, heavy & set(sys.modules))
"""


def test_parsing_checking_and_reading_import_nothing_heavy(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    lines = [
        "--version",
        "train --x",
        "train --steps=0",
        "watch log.jsonl",
        "optim spectrum --help",
    ]
    lines += ["eval nope", "eval tiny --task.levels 9", "eval runs/last", "eval --temperature inf"]
    lines += ["plan qwen15_gsm8k_v2 --gpu h100 --budget 45"]
    command = [sys.executable, "-c", IMPORTS, *lines]

    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    last = done.stdout.splitlines()[-1]
    assert last == "[0, 2, 2, 0, False, 2, 2, 2, 2, 0] set()", done.stderr
    assert "45 dollars buy" in done.stdout


def test_every_public_name_loads():
    for name in package.__all__:
        if name != "jax" or find_spec("jax"):
            assert getattr(package, name) is not None
        assert name in dir(package)

    with pytest.raises(AttributeError, match="nope"):
        package.nope  # noqa: B018


def test_overview_lists_every_command(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    listing = capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mesotron {package.__version__}\n"
    listed = set(re.findall(r"^  mesotron (\w+(?: \w+)?)  ", listing, re.MULTILINE))
    assert listed == cli.COMMANDS.keys() - {"compare sweep"}  # in the help of compare


@pytest.mark.parametrize(("old", "new"), aliases.COMMANDS.items())
def test_an_old_command_runs_with_a_note(old, new, capsys):
    with pytest.raises(SystemExit):
        cli.main([*old.split(), "--help"])

    output, errors = capsys.readouterr()
    assert f"usage: mesotron {new} " in output
    assert f"{old} is now called {new}" in errors


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_and_a_target(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        cli.main([*name.split(), "--help-all"])

    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert shown.startswith(f"usage: mesotron {name}")

    command = cli.COMMANDS[name]
    assert callable(cli.load(command.target))

    for flag, one in flags_of(command.config_type).items():
        assert (one.path.upper() if one.is_positional else flag) in shown


@pytest.mark.parametrize("name", ["train", "plan", "sft"])
def test_help_is_short_and_names_the_flags_that_people_use(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--data", "--help"])  # a flag beside --help needs no value

    shown = capsys.readouterr().out
    assert (stop.value.code, shown.count("\n") <= 45) == (0, True)

    used = ["model", "data", "optim", "lr", "steps", "batch", "max-tokens", "lora", "budget"]
    used += ["gpu", "seed", "out"] + ["reward", "group", "vllm", "guard"] * (name != "sft")
    assert re.findall(r"^  --([a-z-]+)", shown, re.MULTILINE) == [x for x in COMMON if x in used]
    assert "--help-all" in shown


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--batch-size", "--batch"),
        ("--num_generations", "--group"),
        ("--output_dir", "--out"),
        ("--optim.learning-rate", "--lr"),
        ("--objectve.name", "--objective.name"),
        ("--kl", "--objective.beta"),
        ("--modle", "--model"),
    ],
)
def test_a_wrong_flag_is_answered_by_its_meaning(flag, meant, capsys):
    assert cli.main(["train", flag, "8"]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err
    assert suggest_flag("--xyzzy", TrainConfig) == ""


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ("optim spectrom", "did you mean spectrum"),
        ("vla trian", "did you mean train"),
        ("optim spectrum --shape 0 4", "--shape 0 4"),
        ("optim spectrum muno", "muno"),
        ("optim spectrum --plot a.gif", ".png"),
        ("optim spectrum --out /absent/dir/a.json", "/absent/dir/a.json"),
        ("optim route", "MODEL"),
        ("optim route a b", "'b'"),
        ("ppo snake --gif=3", "--gif"),
        ("export tiny", "tiny"),
        ("train arth", "did you mean arith"),
        ("train --lr 1e-3x", "--lr '1e-3x' is not a number"),
        ("train --steps=1e3", "--steps '1e3' is not a whole number"),
        ("train --optim.cutoff half", "'half' is not a number or one of aligned, noise"),
        ("train --data.weights a b --seed 1", "--data.weights 'a b' is not"),
        ("train --trl --steps 3", "--trl needs a value"),
        ("train --guard", "--guard needs a value: one of off, warn"),
        ("eval ~no_such_user/run", "~no_such_user/run"),
        ("train --data= --model tiny", "--data needs a value"),
        ("train --task.data mine.jsonl", "--model"),
        ("sft --reward format", "unknown flag --reward;"),
        ("compare --task.num-eval 5", "--set task.num-eval=VALUE"),
        ("compare sweep arith --task.num_eval 5", "--space task.num-eval=VALUE"),
        ("train --steps 99999999999999999999", "--steps 99999999999999999999"),
        ("train --model tiny --task file --data a\x1b[2Jb", "\\x1b[2Jb"),  # shown, not obeyed
    ],
)
def test_a_mistake_gets_one_line(args, names, capsys):
    assert cli.main(args.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "\x1b" in err) == ("", 1, False)
    assert err.startswith("mesotron: ")
    assert names in err


def test_cuda_without_a_driver_is_refused_before_anything_is_imported(monkeypatch, capsys):
    monkeypatch.setattr("ctypes.CDLL", Mock(side_effect=OSError))
    monkeypatch.setattr("pathlib.Path.exists", lambda path: False)
    monkeypatch.setattr(cli, "load", Mock(return_value=Mock(return_value=0)))

    for args in ("train", "eval tiny", "vla train"):
        assert cli.main([*args.split(), "--device", "cuda"]) == 2
        assert "--device cuda" in capsys.readouterr().err

    assert cli.main(["plan", "--device", "cuda"]) == 0  # for another machine


def test_exits(monkeypatch, capsys):
    def run(error: BaseException) -> int:
        monkeypatch.setattr(cli, "load", lambda target: Mock(side_effect=error))
        return cli.main(["optim", "spectrum"])

    assert run(KeyboardInterrupt("run it again")) == 130
    assert "run it again" in capsys.readouterr().err

    for bug in (ValueError("from another package"), OSError("of a library"), KeyError("bug")):
        with pytest.raises(type(bug)):  # a bug keeps its traceback
            run(bug)


def test_a_terminal_without_unicode_gets_question_marks(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["optim", "spectrum", "muon"]) == 0
    assert b"?" in terminal.buffer.getvalue()
    assert terminal.line_buffering  # lines reach a log at once


def test_a_closed_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mesotron", "--help"]

    done = subprocess.run(
        command,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )

    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@dataclass(frozen=True, kw_only=True)
class Inner(Config, prefix="optim."):
    """A section."""

    name: str = "pion"
    fused: bool = True


@dataclass(frozen=True, kw_only=True)
class Outer(Config):
    """All kinds of fields."""

    things: tuple[str, ...] = setting(("a",), positional=True)
    rate: float = 0.1
    fast_mode: bool = False
    size: Count | None = None
    optim: Inner = Inner()


def read(args: str) -> Outer:
    return parse(Outer, args.split(), "mesotron outer")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("", Outer()),
        (
            "x y --rate -0.5 --fast-mode --size=3",
            Outer(
                things=("x", "y"),
                rate=-0.5,
                fast_mode=True,
                size=3,
            ),
        ),
        ("--fast_mode x", Outer(fast_mode=True, things=("x",))),
        ("--fast-mode --no-fast-mode", Outer()),
        (
            "--fast-mode=True --rate 1 x",
            Outer(
                fast_mode=True,
                rate=1.0,
                things=("x",),
            ),
        ),
        ("--fast-mode false", Outer()),
        ("--things p q --rate 1", Outer(things=("p", "q"), rate=1.0)),
        ("--optim.name muon --no-optim.fused", Outer(optim=Inner(name="muon", fused=False))),
        ("--optim.no-fused", Outer(optim=Inner(fused=False))),
    ],
)
def test_spellings_of_flags(args, expected):
    assert read(args) == expected


def test_toml_gives_defaults_and_flags_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('things = ["p", "q"]\nrate = 2\nfast-mode = true\n[optim]\nname = "muon"\n')
    assert read(f"--config {file}") == Outer(
        things=("p", "q"), rate=2.0, fast_mode=True, optim=Inner(name="muon")
    )

    won = read(f"z --config={file} --rate 3 --no-fast-mode")
    assert (won.things, won.rate, won.fast_mode, won.optim.name) == (("z",), 3.0, False, "muon")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("step = 1", "did you mean steps"),
        ("[optim]\nsize = 1", "size"),
        ("[rollout]\nfast = 1", "fast"),
        ("steps = 0", "--steps 0"),
        ("steps =", "TOML"),
        ("# größer\nsteps = 2\n".encode("latin-1"), "TOML"),
        ("steps = " + "[" * 2000 + "]" * 2000, "TOML"),
        ("steps = 1" + "0" * 5000, "TOML"),
        ("steps = 1" + "0" * 400, "--steps"),
        ('[reward]\nparts = ["a\\u0000b"]', "NUL"),
        # Short names do not overrule others.
        ("lr = 1e-5\n[optim]\nlr = 1e-4", "optim.lr twice"),
        ("[data]\nfile = 'mine.jsonl'", "did you mean data.files"),
        ("rollout = 5\nbatch = 4", "rollout = 5"),
        ("task = 1", "name = 1"),
        ("[recipe]", "recipe"),
    ],
)
def test_a_wrong_toml_file_is_refused(tmp_path, text, names, capsys):
    file = tmp_path / "run.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main(["train", str(file)]) == 2

    error = capsys.readouterr().err
    assert names in error
    assert error.count("\n") == 1


MISSING = [
    ("train", "trl"),
    ("train --report-to wandb", "wandb"),
    ("train --model.lora 2", "peft"),
    ("sft", "datasets"),
    ("eval tiny", "transformers"),
    ("eval tiny", "torch"),
    ("plan --calibrate", "trl"),
    ("compare arith", "trl"),
    ("compare snake", "jax"),
    ("optim route tiny", "transformers"),
    ("compare sweep arith --space optim.lr=1e-5..1e-3", "optuna"),
    ("ppo snake", "jumanji"),
    ("ppo snake --wandb", "wandb"),  # an old name of --report-to wandb
    ("vla train", "transformers"),
    ("vla eval", "safetensors"),
    ("vla demos --lerobot out", "pyarrow"),
    ("optim spectrum muon --plot a.png", "matplotlib"),
]


@pytest.mark.parametrize(("words", "package"), MISSING)
def test_a_missing_package_is_one_sentence_before_anything_is_made(
    tmp_path, monkeypatch, capsys, words, package
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert cli.main(words.split()) == 2

    output, errors = capsys.readouterr()
    assert (output, errors.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])
    assert package in errors
    assert "pip install" in errors


BAD_CONFIGS = [
    "[]",
    "{",
    "[" * 100_000,
    '{"reward": []}',
    '{"watch": []}',
    '{"rollout": {"engine": []}}',
    '{"optim": {"lr": 1' + "0" * 400 + "}}",
    '{"seed": 4294967296}',
    '{"out": "a\\u0000b"}',
]


@pytest.mark.parametrize("text", BAD_CONFIGS)
def test_a_damaged_config_is_one_sentence_in_every_command(tmp_path, capsys, text):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text(text)
    (run / "env.json").write_text("[]")

    for command in ("train --resume", "sft --resume", "eval", "report", "ppo snake --resume"):
        assert cli.main([*command.split(), str(run)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_list_that_is_given_twice_is_joined():
    words = "--model smollm2 --set steps=5 --optims adamw --set=seed=3 --optims muon"
    config = cli.parse(CompareConfig, words.split())
    assert config.set == ("model.name=smollm2", "steps=5", "seed=3")
    assert config.optims == ("adamw", "muon")

    train = cli.parse(TrainConfig, ["--reward", "sparse", "--reward.parts=near"])
    assert train.reward.parts == ("sparse", "near")


def test_a_reward_may_be_named_again_to_evaluate_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(completions, **_):\n    return [1.0]\n")
    (tmp_path / "mine.jsonl").write_text('{"question": "2 + 3?", "answer": 5}\n')
    own = TrainConfig(
        model=ModelConfig(name="tiny"),
        task=TaskConfig(data=("mine.jsonl",)),
        reward=RewardConfig(parts=("mine.py:score",)),
    )
    run = RunFolder.create(tmp_path / "run", own, {"device": "cpu"})

    command = cli.COMMANDS["eval"]
    words = [str(run.path), "--reward", "mine.py:score"]
    made = parse(command.config_type, words, "mesotron eval", command.presets)
    assert made.reward == ("mine.py:score",)

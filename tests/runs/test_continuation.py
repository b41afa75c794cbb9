"""Flags beside --resume: a run's own settings, what may be given anew, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesotron import cli
from mesotron.cli import parse
from mesotron.config import SftConfig, SnakeConfig, TrainConfig, VlaTrainConfig
from mesotron.recipes import make_recipe
from mesotron.rlvr.train import resume_plan
from mesotron.runs import RunFolder
from mesotron.runs.continuation import continued_settings, settings_to_resume

# Of every command that continues runs: settings that are neither its defaults nor all of one type.
BEGUN = {
    "train": replace(make_recipe("arith_mgrpo"), steps=7, out=Path("made"), price=2.0, gpu="a10"),
    "sft": SftConfig(steps=7, loose=0.5, threads=3),
    "vla train": VlaTrainConfig(steps=7, guard="stop", where=0.5),
    "ppo snake": SnakeConfig(num_envs=16, gif=False, sweep=("lr=1,2",), save_freq=2),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def begin(name: str) -> RunFolder:
    begun = BEGUN[name]
    if isinstance(begun, VlaTrainConfig):  # which it resolves, to be continued from anywhere
        begun = replace(begun, demos=Path("demos").resolve())
    return RunFolder.create(Path("made"), begun, {})


def read(name: str, words: str):
    """The settings that words beside --resume lead to."""
    command = cli.COMMANDS[name]
    asked = parse(command.config_type, ["--resume", "made", *words.split()], name, command.presets)
    return continued_settings(asked, RunFolder(Path("made")))


def refusal(name: str, words: str, capsys) -> str:
    assert cli.main([*name.split(), "--resume", "made", *words.split()]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("name", BEGUN)
def test_without_another_flag_a_run_has_its_own_settings(name):
    run = begin(name)
    kept = replace(BEGUN[name], resume=Path("made"))
    if isinstance(kept, VlaTrainConfig):
        kept = replace(kept, demos=Path("demos").resolve())
    assert read(name, "") == kept
    asked = settings_to_resume(type(BEGUN[name]), Path("made"))
    assert continued_settings(asked, run) == kept


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train", "--steps 7"),
        ("train", "arith_mgrpo --steps 7 --out ./made"),
        ("sft", "--loose 0.5 --task.name arith"),
        ("vla train", "demos --steps 7 --where 0.5"),
        ("ppo snake", "--num-envs 16 --sweep lr=1,2 --no-gif"),
    ],
)
def test_a_flag_may_repeat_what_the_run_has(name, words):
    begin(name)
    assert read(name, words) == read(name, "")


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        # The command's own default is a change too, where the run has something else.
        ("train", f"--steps {TrainConfig().steps}", "made began with --steps 7 and goes on with"),
        (
            "train",
            "--steps 9",
            "leave --steps 9 out, or start a new run (from its weights: -",
        ),
        (
            "train",
            "arith",
            "began with recipe arith_mgrpo and goes on with its own",
        ),
        ("train", "--optim.rank 3", "began without --optim.rank and goes on"),
        ("train", "--reward.parts sparse format", "leave --reward.parts sparse format out"),
        ("train", "--guard rollback", "made began with --guard warn"),
        ("sft", "--optim.lr 0.1", "made began with --optim.lr 0.0003 and goes on"),
        ("vla train", "--steps 1500", "made began with --steps 7 and goes on"),
        ("vla train", "others", "leave demos others out, or start a new run"),
        ("ppo snake", "--num-envs 2048", "start a new run (from its weights: --pretrained-model"),
        ("ppo snake", "--use-muon", "began with --no-use-muon and goes on"),
    ],
)
def test_a_flag_that_would_change_nothing_is_refused(name, words, sentence, capsys):
    begin(name)
    assert sentence in refusal(name, words, capsys)
    assert not RunFolder(Path("made")).rows("metrics")


def test_a_checkpoint_names_the_run_to_continue(capsys):
    place = begin("train").checkpoints / "checkpoint-3"
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert cli.main(["train", "--resume", str(place)]) == 2
    assert "newest one: give --resume made\n" in capsys.readouterr().err


def test_a_file_of_flags_is_held_to_the_same(capsys):
    begin("train")
    Path("run.toml").write_text("steps = 7\nthreads = 2\n[optim]\nmomentum = 0.5\n")
    assert "began with --optim.momentum 0.95" in refusal("train", "--config run.toml", capsys)
    Path("run.toml").write_text("steps = 7\nthreads = 2\n")
    assert read("train", "--config run.toml").threads == 2


@pytest.mark.parametrize(
    ("name", "words", "changed"),
    [
        ("train", "--budget 9 --device cpu --report-to wandb",
         {"budget": 9.0, "device": "cpu", "report_to": ("wandb",)}),
        ("sft", "--time-limit 2h --threads 1", {"time_limit": "2h", "threads": 1}),
        ("vla train", "--guard off --workers 2", {"guard": "off", "workers": 2}),
        ("ppo snake", "--guard stop --gif --save-freq 0",
         {"guard": "stop", "gif": True, "save_freq": 0}),
    ],
)  # fmt: skip
def test_what_is_not_the_run_itself_may_be_given_anew(name, words, changed):
    begin(name)
    assert read(name, words) == replace(read(name, ""), **changed)


@pytest.mark.parametrize(
    ("words", "price", "gpu"),
    [
        ("", 2.0, "a10"),
        ("--gpu h100", None, "h100"),  # the old price was of another machine
        ("--gpu h100 --price 2", 2.0, "h100"),  # and yet it may be the same
        ("--price 3", 3.0, "a10"),
    ],
)
def test_a_new_machine_has_no_old_price(words, price, gpu):
    begin("train")
    command = cli.COMMANDS["train"]
    words = ["--resume", "made", *words.split()]
    config = resume_plan(parse(TrainConfig, words, "train", command.presets)).config
    assert (config.price, config.gpu) == (price, gpu)


@pytest.mark.parametrize(("name", "flag"), [("train", "threads"), ("vla train", "workers")])
def test_numbers_given_anew_are_checked(name, flag, capsys):
    begin(name)
    assert f"--{flag} 0 must be at least 1" in refusal(name, f"--{flag} 0", capsys)


def test_a_run_of_another_command_is_refused(capsys):
    begin("sft")
    assert "unknown key" in refusal("train", "", capsys)
    assert cli.main(["train", "--resume"]) == 2
    assert "--resume" in capsys.readouterr().err


def test_a_plan_is_not_of_the_rest_of_a_run(capsys):
    begin("train")
    assert "--resume made" in refusal("plan", "", capsys)

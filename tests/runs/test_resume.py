"""Flags beside --resume: a run's own settings, what may change, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesotron import cli
from mesotron.cli import parse
from mesotron.config import SftConfig, SnakeConfig, TrainConfig, VlaTrainConfig
from mesotron.recipes import make_recipe
from mesotron.rlvr.train import resume_plan
from mesotron.runs import RunFolder
from mesotron.runs.resume import plan_new, resumed_settings, settings_to_resume

# For every command that resumes runs: settings that are not its defaults, of several types.
STARTED = {
    "train": replace(
        make_recipe("arith_mgrpo"),
        steps=7,
        out=Path("made"),
        price=2.0,
        gpu="a10",
    ),
    "sft": SftConfig(steps=7, loose=0.5, threads=3),
    "vla train": VlaTrainConfig(
        steps=7,
        guard="stop",
        where=0.5,
        demos=Path("/demos"),
    ),
    "ppo snake": SnakeConfig(
        num_envs=16,
        gif=False,
        sweep=("lr=1,2",),
        save_freq=2,
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def start(name: str) -> RunFolder:
    return RunFolder.create(Path("made"), STARTED[name], {})


def read(name: str, args: str):
    command = cli.COMMANDS[name]
    given = parse(command.config_type, ["--resume", "made", *args.split()], name, command.presets)
    return resumed_settings(given, RunFolder(Path("made")))


def refusal(name: str, args: str, capsys) -> str:
    assert cli.main([*name.split(), "--resume", "made", *args.split()]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1

    return lines[0]


@pytest.mark.parametrize(
    ("name", "repeated", "args", "changed"),
    [
        (
            "train",
            "arith_mgrpo --steps 7 --out ./made",
            "--budget 9 --device cpu --report-to wandb",
            {
                "budget": 9.0,
                "device": "cpu",
                "report_to": ("wandb",),
            },
        ),
        (
            "sft",
            "--loose 0.5 --task arith",
            "--time-limit 2h --threads 1",
            {"time_limit": "2h", "threads": 1},
        ),
        (
            "vla train",
            "/demos --steps 7 --where 0.5",
            "--guard off --workers 2",
            {"guard": "off", "workers": 2},
        ),
        (
            "ppo snake",
            "--num-envs 16 --sweep lr=1,2 --no-gif",
            "--guard stop --gif --save-freq 0",
            {"guard": "stop", "gif": True, "save_freq": 0},
        ),
    ],
)
def test_flags_may_repeat_settings_and_change_limits_and_places(name, repeated, args, changed):
    run = start(name)
    kept = replace(STARTED[name], resume=Path("made"))
    assert read(name, "") == read(name, repeated) == kept
    assert resumed_settings(settings_to_resume(type(kept), Path("made")), run) == kept
    assert read(name, args) == replace(kept, **changed)


@pytest.mark.parametrize(
    ("name", "args", "names"),
    [
        # The command's own default is a change too, where the run has something else.
        ("train", f"--optim.lr {TrainConfig().optim.lr}", "--lr"),
        ("train", "--steps 5", "--steps 5"),  # more are accepted
        ("train", "arith", "recipe arith_mgrpo"),
        ("train", "--optim.rank 3", "without --optim.rank"),
        ("sft", "--lr 0.1", "--lr 8e-05"),
        ("vla train", "others", "demos others"),
        ("ppo snake", "--num-envs 2048", "--pretrained-model"),
        ("ppo snake", "--use-muon", "--optim muon"),
        ("train", "--threads 0", "--threads 0"),
        ("plan", "", "--resume"),
    ],
)
def test_a_flag_that_cannot_take_effect_is_refused(name, args, names, capsys):
    start(name if name in STARTED else "train")
    assert names in refusal(name, args, capsys)
    assert not RunFolder(Path("made")).rows("metrics")


def test_paths_of_no_run_of_this_command(capsys):
    place = start("train").checkpoints / "checkpoint-3"
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')

    assert cli.main(["train", "--resume", str(place)]) == 2
    assert "--resume made\n" in capsys.readouterr().err
    assert "mesotron train --resume made" in refusal("sft", "", capsys)


def test_a_toml_file_is_held_to_the_same(capsys):
    start("train")
    Path("run.toml").write_text("steps = 7\nthreads = 2\n[optim]\nmomentum = 0.5\n")
    assert "--optim.momentum 0.95" in refusal("train", "--config run.toml", capsys)
    Path("run.toml").write_text("steps = 7\nthreads = 2\n")

    assert read("train", "--config run.toml").threads == 2


def test_a_new_machine_has_no_old_price():
    start("train")
    for flags, price, gpu in (
        ("", 2.0, "a10"),
        ("--gpu h100", None, "h100"),  # the old price was for another machine
        ("--gpu h100 --price 2", 2.0, "h100"),
        ("--price 3", 3.0, "a10"),
    ):
        args = ["--resume", "made", *flags.split()]
        given = parse(TrainConfig, args, "train", cli.COMMANDS["train"].presets)
        config = resume_plan(given).config

        assert (config.price, config.gpu) == (price, gpu)


def test_only_the_main_process_minds_an_existing_folder(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not empty"):
        plan_new(TrainConfig(), tmp_path)

    monkeypatch.setenv("RANK", "1")
    assert plan_new(TrainConfig(), tmp_path).path == tmp_path

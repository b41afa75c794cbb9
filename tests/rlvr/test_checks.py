"""What is refused before anything heavy is imported, and before a folder is made."""

import subprocess
import sys
from dataclasses import replace

import pytest

from mesotron import cli
from mesotron.config import ObjectiveConfig, RewardConfig, RolloutConfig, TrainConfig
from mesotron.rlvr.checks import check_parts
from mesotron.runs.plan import begin

RESAMPLE = ("--objective.dynamic-sampling", "resample", "--objective.dynamic-oversample")


def test_the_folder_that_the_main_process_made_is_no_obstacle_to_the_others(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not empty"):
        begin(TrainConfig(), tmp_path)
    monkeypatch.setenv("RANK", "1")
    assert begin(TrainConfig(), tmp_path).path == tmp_path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--optim.name", "muon", "--optim.cutoff", "noise"], "is Pion's"),
        (["--optim.clip", "all", "--optim.max-grad-norm", "0"], "has no norm to clip to"),
        (["--optim.name", "pion", "--optim.promote", "9"], "promote=9 must lie between"),
        (["--optim.name", "pion", "--optim.cutoff", "0.9"], "cutoff=0.9 must be"),
        (["--optim.momentum", "1"], "--optim.momentum 1 must be"),
        (["--optim.weight-decay", "-1"], "--optim.weight-decay -1 must be"),
        (["--optim.aux-lr", "-1"], "--optim.aux-lr -1 must be"),
        (["--optim.warmup", "10"], "--optim.warmup 10 is a share of the steps: give a number from"),
        (["--optim.warmup", "nan"], "--optim.warmup nan is a share"),
        (["--optim.rank", "0"], "--optim.rank 0 must be at least 1"),
        (["--optim.scale", "-2"], "scale=-2.0 must be"),
        (["--objective.name", "cispo", "--objective.epsilon", "0.2"], "cispo has no clip width"),
        (["--rollout.prompts", "3", "--rollout.updates", "7"], "cannot be shared by 7 updates"),
        (["--task.num-train", "9"], "9 training problems are fewer than the 16 prompts of one"),
        (
            [*RESAMPLE, "2.6", "--task.num-train", "40"],
            "the 42 prompts that --objective.dynamic-ov",
        ),
        ([*RESAMPLE, "1000"], "dynamic_oversample = 1000 would sample 1000 prompts at once"),
        (["--reward.parts", "two_parts"], "did you mean two_part"),
        (["--reward.near-unit", "5"], "--reward.near-unit 5 is for near, which the reward"),
        (["--reward.overlong-buffer", "8"], "add overlong to --reward.parts"),
        (["--task.levels", "9"], "no level 9"),
        (["--task.name", "file", "--task.path", "no.jsonl"], "there is no file or folder no.jsonl"),
        (["--optim.lr", "nan"], "--optim.lr nan must be at least 0"),
        (["--optim.lr", "inf"], "--optim.lr inf must be a finite number"),
        (["--optim.weight-decay", "inf"], "--optim.weight-decay inf must be"),
        (["--optim.aux-lr", "inf"], "--optim.aux-lr inf must be"),
        (["--rollout.temperature", "inf"], "--rollout.temperature inf must be"),
        (["--reward.timeout", "0"], "--reward.timeout 0 must be"),
        (["--reward.timeout", "nan"], "--reward.timeout nan must be"),
        (["--model.name", "nope"], "there is no model 'nope'"),
        (["--model.lora", "4", "--model.lora-alpha", "0"], "--model.lora-alpha 0 must be above 0"),
        (
            ["--task.name", "sums", "--task.num-eval", "700"],
            "were asked for: lower --task.num-eval",
        ),
    ],
)
def test_a_wrong_setting_is_refused_before_torch_is_imported(words, told, capsys, monkeypatch):
    """In this process: the trainer's module must not be reached."""
    monkeypatch.setitem(sys.modules, "mesotron.rlvr.session", None)
    assert cli.main(["train", *words]) == 2
    assert told in capsys.readouterr().err


def test_prompts_cannot_be_added_where_groups_span_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    rollout = RolloutConfig(prompts=3, generations=4)
    check_parts(TrainConfig(rollout=rollout))
    more = ObjectiveConfig(dynamic_sampling="resample", dynamic_oversample=2)
    with pytest.raises(ValueError, match="needs whole groups on each process, which has 6 compl"):
        check_parts(TrainConfig(rollout=rollout, objective=more))


@pytest.mark.parametrize("name", ["vote", "mgrpo", "corewarding", "grpo"])
def test_a_reward_that_votes_leave_idle_is_told(name, caplog):
    config = TrainConfig(objective=ObjectiveConfig(name=name))
    check_parts(config)
    assert not caplog.records
    check_parts(replace(config, reward=RewardConfig(parts=("two_part", "near"))))
    said = f"{name} trains on its votes alone: the reward two_part + near is logged"
    assert (said in caplog.text) == (name != "grpo")


def test_the_checks_load_no_torch():
    code = (
        "import sys\nfrom mesotron.config import SftConfig, TrainConfig\n"
        "from mesotron.rlvr import sft, train\n"
        "train.check(TrainConfig())\nsft.check(SftConfig())\n"
        "print({'torch', 'trl', 'transformers', 'datasets', 'jax'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "words",
    [["nope"], ["tiny", "--task.levels", "9"], ["runs/last"], ["tiny", "--temperature", "inf"]],
)
def test_an_evaluation_that_cannot_be_is_refused_before_torch_is_imported(words, tmp_path):
    code = (
        "import sys\nfrom mesotron import cli\ncode = cli.main(['eval', *sys.argv[1:]])\n"
        "print(code, {'torch', 'transformers', 'datasets'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "2 set()\n", done.stderr

"""`mesotron ppo snake` as a user runs it: folder, flags, resume, games at the end."""

import importlib.util
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jumanji")
jax = pytest.importorskip("jax")
from mesotron.arguments import parse  # noqa: E402
from mesotron.config import SnakeConfig  # noqa: E402
from mesotron.ppo import training  # noqa: E402
from mesotron.ppo.draw import draw_board, draw_game  # noqa: E402
from mesotron.ppo.training import next_chunk, open_run, train_snake  # noqa: E402
from mesotron.runs import RunFolder  # noqa: E402
from mesotron.runs.continuation import settings_to_resume  # noqa: E402
from mesotron.runs.folder import plain  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

TINY = SnakeConfig(
    width=3,
    height=3,
    num_envs=8,
    num_steps=8,
    num_minibatches=2,
    update_epochs=1,
    total_timesteps=6 * 64,
    d_model=8,
    num_heads=1,
    mlp_ratio=1,
    chunk=2,
    eval_episodes=4,
    num_seeds=2,
    use_muon=True,
    gif=False,
)


def load_example():
    path = Path(__file__).parents[2] / "examples" / "train_snake_purejaxrl.py"
    spec = importlib.util.spec_from_file_location("train_snake_purejaxrl", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_documented_command_is_understood_in_both_spellings():
    arguments = load_example().Arguments
    words = ["--use-muon", "--muon-lr", "0.03", "--aux-adam-lr", "0.0003", "--d-model", "128",
             "--num-layers", "4", "--num-heads", "8", "--total-timesteps", "20000000"]  # fmt: skip
    hyphens = parse(arguments, words, "x")
    underscores = parse(arguments, ["--" + w[2:].replace("-", "_") if w.startswith("--") else w
                                    for w in words], "x")  # fmt: skip
    assert hyphens == underscores
    assert (hyphens.rule, hyphens.muon_lr, hyphens.num_envs) == ("muon", 0.03, 2048)
    assert hyphens.num_updates == 77
    hyphens.check()


def test_every_flag_of_the_interface_is_there():
    flags = """
    width height max-steps apple-reward death-penalty step-penalty num-envs num-steps
    total-timesteps update-epochs num-minibatches lr gamma gae-lambda clip-eps ent-coef vf-coef
    max-grad-norm anneal-lr use-muon muon-lr aux-adam-lr muon-momentum muon-nesterov d-model
    num-layers num-heads dropout use-cnn cnn-features cnn-mode wandb wandb-project wandb-entity
    run-name save-dir save-freq eval-freq eval-episodes seed pretrained-model kl-coef"""
    assert set(flags.replace("-", "_").split()) <= set(SnakeConfig.__dataclass_fields__)


def test_a_config_survives_its_folder(tmp_path):
    config = replace(TINY, pretrained_model=Path("runs/a"), sweep=("lr=1,2",), optim="muon")
    RunFolder.create(tmp_path / "run", config, {})
    resumed = replace(settings_to_resume(SnakeConfig, tmp_path / "run"), chunk=5)
    _, found = open_run(resumed)
    assert found == replace(config, resume=tmp_path / "run", chunk=5)
    with pytest.raises(ValueError, match="chunk=0 must be at least 1"):
        open_run(replace(resumed, chunk=0))


def test_a_config_of_another_version_is_refused_in_a_sentence(tmp_path):
    RunFolder.create(tmp_path / "run", {**plain(TINY), "colour": 3}, {})
    with pytest.raises(ValueError, match=r"config\.json has 'colour', which this version"):
        open_run(replace(TINY, resume=tmp_path / "run"))


def test_chunks_meet_every_due_update():
    config = replace(TINY, chunk=10, eval_freq=4, save_freq=6, total_timesteps=64 * 15)
    done, stops = 0, []
    while done < config.num_updates:
        done += next_chunk(config, done)
        stops.append(done)
    assert stops == [4, 6, 8, 12, 15]


def test_a_game_is_drawn(tmp_path):
    from PIL import Image

    cells = np.zeros((3, 9, 6), np.float32)
    cells[:, 4, [0, 1, 4]] = 1
    cells[:, 7, 3] = 1
    draw_game(cells, TINY, tmp_path / "game.gif")
    with Image.open(tmp_path / "game.gif") as image:
        assert image.size == (72, 72)
    board = draw_board(cells[0], TINY)
    assert tuple(board[36, 36]) != tuple(board[60, 36]) != tuple(board[12, 12])


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Runs of one config share what was compiled, as they would in one process of a sweep."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0.0)):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before):
        jax.config.update(name, value)


@pytest.mark.slow
def test_signals_save_and_the_run_goes_on_to_the_same_end(tmp_path, monkeypatch, capsys):
    one = replace(TINY, save_dir=tmp_path, num_seeds=1)
    train_snake(replace(one, run_name="whole"))
    capsys.readouterr()
    ask = replace(one, run_name="asked")
    write_chunk = training.write_chunk
    for number, done in ((signal.SIGTERM, 2), (signal.SIGINT, 4)):

        def write_and_be_asked(*words, number=number):
            write_chunk(*words)
            os.kill(os.getpid(), number)

        monkeypatch.setattr(training, "write_chunk", write_and_be_asked)
        assert train_snake(ask) == 0
        assert f"stopped at update {done} of 6; go on with" in capsys.readouterr().out
        assert (tmp_path / "asked" / "checkpoints" / f"checkpoint-{done}").is_dir()
        ask = settings_to_resume(SnakeConfig, tmp_path / "asked")
    monkeypatch.undo()
    assert train_snake(ask) == 0
    a, b = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "asked")
    for one, other in zip(a.rows("metrics"), b.rows("metrics"), strict=True):
        for name in one:
            assert name.startswith("time/") or one[name] == other[name], name
    assert a.result["greedy_games"] == b.result["greedy_games"]


@pytest.mark.slow
def test_the_guard_ends_a_run_that_has_broken(tmp_path, capsys):
    """A rate at which weights are no longer numbers: saved, told, exit code 0."""
    wild = replace(TINY, save_dir=tmp_path, run_name="wild", num_seeds=1, chunk=1)
    wild = replace(wild, muon_lr=1e38, aux_adam_lr=1e38, guard="stop")
    assert train_snake(wild) == 0
    said = capsys.readouterr().out
    folder = RunFolder(tmp_path / "wild")
    events = folder.rows("events")
    assert (events[-1]["detector"], events[-1]["severity"]) == ("nonfinite", "stop")
    last = folder.rows("metrics")[-1]["step"]
    assert last < wild.num_updates
    assert f"stopped by the watch (nonfinite) at update {last} of 6; go on with" in said
    assert (folder.checkpoints / f"checkpoint-{last}").is_dir()
    assert folder.result is None


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_end(tmp_path, capsys):
    whole = replace(TINY, save_dir=tmp_path, run_name="whole", eval_freq=6)
    train_snake(whole)
    said = capsys.readouterr().out
    assert "fruit of 8" in said
    # The same run with checkpoints; what lies behind the fourth update is then taken away.
    cut = replace(whole, run_name="cut", save_freq=4)
    train_snake(cut)
    folder = tmp_path / "cut"
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    (folder / "checkpoints" / "checkpoint-6" / "manifest.json").unlink()
    train_snake(replace(settings_to_resume(SnakeConfig, folder), chunk=2))
    a, b = RunFolder(tmp_path / "whole"), RunFolder(folder)
    for one, other in zip(a.rows("metrics"), b.rows("metrics"), strict=True):
        for name in one:
            assert name.startswith("time/") or one[name] == other[name], name
    keys = ("greedy_fruit_each", "sampled_fruit_each", "greedy_won")
    assert {k: a.result[k] for k in keys} == {k: b.result[k] for k in keys}
    last = a.rows("samples")[-1]
    assert last["step"] == 6
    assert a.result["greedy_fruit"] == pytest.approx(last["greedy_fruit"])
    rows = (folder / "runs.jsonl").read_text().splitlines()
    assert len(rows) == 6 * 2
    assert a.result["baselines"]["maximum"] == 8
    assert (folder / "curves.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_new_run_may_start_from_another_ones_weights(tmp_path):
    first = replace(TINY, save_dir=tmp_path, run_name="first", num_seeds=1)
    train_snake(first)
    train_snake(replace(first, run_name="second", pretrained_model=tmp_path / "first", kl_coef=1.0))
    rows = RunFolder(tmp_path / "second").rows("metrics")
    assert rows[0]["policy/kl_pretrained"] < 0.01
    assert "policy/kl_pretrained" not in RunFolder(tmp_path / "first").rows("metrics")[0]

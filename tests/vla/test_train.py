"""Runs of behaviour cloning: exact resume, the watch, what is refused, evaluation elsewhere."""

import json
import os
import signal
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mesotron.config import (
    DemosConfig,
    PartsOptimConfig,
    PolicyConfig,
    VlaEvalConfig,
    VlaTrainConfig,
    WorldConfig,
)
from mesotron.runs import RunFolder
from mesotron.runs.continuation import settings_to_resume
from mesotron.vla import command, finish, session
from mesotron.vla.checkpoint import load_policy
from mesotron.vla.demos import load_demos, make_demos
from mesotron.vla.demos.lerobot_export import export_lerobot
from mesotron.vla.draws import Draws
from mesotron.vla.training import Tables, Trainer, rate_factor, uses_bfloat16, uses_graph

STEPS = 8


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """A few demonstrations with pictures of 8 pixels."""
    path = tmp_path_factory.mktemp("demos") / "blocks"
    world = WorldConfig(name="blocks", pixels=8)
    make_demos(DemosConfig(world=world, out=path, episodes=4, starts=8, workers=1), say=None)
    return path


def make_config(demos, out) -> VlaTrainConfig:
    return VlaTrainConfig(
        demos=demos,
        policy=PolicyConfig(size="ci", chunk=6, head="flow"),
        optim=PartsOptimConfig(action="pion"),
        steps=STEPS,
        batch=8,
        out=out,
        log_every=1,
        probe_every=4,
        save_every=3,
        episodes=0,
        device="cpu",
    )


@pytest.fixture
def config(demos, tmp_path):
    return make_config(demos, tmp_path / "run")


def weights(path) -> dict[str, torch.Tensor]:
    return load_file(path / "checkpoints" / f"checkpoint-{STEPS}" / "policy.safetensors")


def without_time(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def assert_same_run(a, b) -> None:
    first, second = weights(a), weights(b)
    assert all(torch.equal(first[name], second[name]) for name in first)
    rows = [without_time(RunFolder(path).rows("metrics")) for path in (a, b)]
    assert rows[0] == rows[1]


@pytest.fixture(scope="module")
def left_alone(demos, tmp_path_factory):
    """A run that nothing has happened to."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert session.train(make_config(demos, path)) == 0
    return path


def interrupt(monkeypatch, at: int, how) -> None:
    """Let something happen in a run's step."""
    advance = Trainer.advance

    def interrupted(self):
        found = advance(self)
        if self.step == at:
            how()
        return found

    monkeypatch.setattr(Trainer, "advance", interrupted)


def test_ctrl_c_saves_and_the_resumed_run_ends_alike(config, left_alone, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt(patch, at=4, how=lambda: os.kill(os.getpid(), signal.SIGINT))
        assert session.train(config) == 0
    assert config.out is not None
    assert f"--resume {config.out}" in capsys.readouterr().out
    assert RunFolder(config.out).result is None
    assert session.train(settings_to_resume(VlaTrainConfig, config.out)) == 0
    assert_same_run(left_alone, config.out)


def test_a_killed_run_goes_on_from_its_last_checkpoint(config, left_alone, monkeypatch):
    def die() -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        interrupt(patch, at=5, how=die)
        with pytest.raises(RuntimeError, match="killed"):
            session.train(config)
    assert config.out is not None
    assert [row["step"] for row in RunFolder(config.out).rows("metrics")] == [1, 2, 3, 4]
    assert session.train(settings_to_resume(VlaTrainConfig, config.out)) == 0
    assert_same_run(left_alone, config.out)
    finished = "has finished its 8 steps; evaluate it with mesotron vla eval"
    with pytest.raises(ValueError, match=finished):
        session.train(settings_to_resume(VlaTrainConfig, config.out))


def test_a_row_tells_of_every_part(left_alone):
    rows = RunFolder(left_alone).rows("metrics")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    names = {"loss", "loss/action", "grad_norm", "grad_norm/auxiliary", "learning_rate",
             "update_rms/vision", "update_rms/action", "optim/action/pion/dead_blocks",
             "time/step"}  # fmt: skip
    assert names <= set(rows[0])
    probes = [row["step"] for row in rows if "gradient/action/snr" in row]
    assert probes == [1, 5]  # measured before the steps 1 and 5
    assert rows[-1]["learning_rate"] == pytest.approx(PartsOptimConfig().lr / STEPS)


def test_seeds_give_other_runs(config, left_alone, tmp_path):
    session.train(replace(config, out=tmp_path / "other", seed=1))
    one, other = weights(left_alone), weights(tmp_path / "other")
    assert not torch.equal(one["action.queries"], other["action.queries"])


def test_where_is_learned_only_when_asked(config, tmp_path, capsys):
    session.train(replace(config, where=0.5, out=tmp_path / "told", steps=2))
    row = RunFolder(tmp_path / "told").rows("metrics")[0]
    assert row["loss"] == pytest.approx(row["loss/action"] + 0.5 * row["loss/where"], rel=1e-5)
    assert "auxiliary loss" in (tmp_path / "told" / "report.md").read_text()
    assert "auxiliary loss" in " ".join(capsys.readouterr().out.split())


def test_the_guard_stops_a_run_that_is_not_finite(config, demos, monkeypatch, capsys):
    broken = load_demos(demos)
    broken.action = np.full_like(broken.action, np.nan)
    monkeypatch.setattr(session, "load_demos", lambda path, pixels: broken)
    assert session.train(replace(config, guard="stop", steps=200)) == 0
    assert config.out is not None
    events = RunFolder(config.out).rows("events")
    assert events[0]["detector"] == "nonfinite"
    assert RunFolder(config.out).rows("metrics")[-1]["step"] < 50
    assert "stopped and saved" in capsys.readouterr().out


def test_a_machine_without_a_simulator_says_how_to_evaluate(config, monkeypatch, capsys):
    monkeypatch.setattr(finish, "find_spec", lambda name: None)
    session.train(replace(config, steps=1, episodes=2))
    assert config.out is not None
    words = " ".join(capsys.readouterr().out.split())
    assert f"no mujoco; evaluate with mesotron vla eval {config.out}" in words


def test_evaluation_of_a_run_that_was_trained_elsewhere(left_alone, capsys, tmp_path):
    found = tmp_path / "eval"
    settings = VlaEvalConfig(run=left_alone, episodes=1, workers=1, perturb=("light", "wording"),
                             gifs=1, out=found, device="cpu")  # fmt: skip
    assert command.run_eval(settings) == 0
    result = json.loads((found / "evaluation.json").read_text())
    assert list(result) == ["success", "wrong instruction", "expert", "light", "wording"]
    assert result["expert"]["success"]["value"] == 1
    assert result["success"]["success"]["high"] > 0  # an interval, even at no success
    assert len(list((found / "gifs").glob("*.gif"))) == 2
    assert "red-cube" in capsys.readouterr().out


@pytest.mark.parametrize(("own", "given", "looks"), [(2, None, 2), (2, 3, 3), (None, None, 4)])
def test_a_policy_looks_again_as_often_as_in_its_run(config, monkeypatch, own, given, looks):
    from mesotron.vla import measure

    session.train(replace(config, steps=1, execute=own))
    asked = []

    def play(*args, execute, **kwargs):
        asked.append(execute)
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure", play)
    assert config.out is not None
    with pytest.raises(KeyboardInterrupt):
        command.run_eval(VlaEvalConfig(run=config.out, execute=given, device="cpu"))
    assert asked == [looks]


def test_the_own_world_by_its_name_keeps_its_tasks(left_alone):
    saved = load_policy(left_alone)
    assert saved.world is not None
    saved = saved._replace(world=replace(saved.world, tasks=("red-cube",)))
    assert command.choose_world(saved, saved.world.name) == saved.world
    assert command.choose_world(saved, None) == saved.world


def test_a_policy_of_recordings_is_told_where_to_play(config, tmp_path, capsys):
    world = WorldConfig(name="blocks", pixels=8)
    recorded = DemosConfig(world=world, out=tmp_path / "d", episodes=2, starts=0, workers=1)
    make_demos(recorded, say=None)
    export_lerobot(load_demos(recorded.out), tmp_path / "lerobot")
    session.train(replace(config, demos=tmp_path / "lerobot", steps=1, episodes=1))
    assert "--world NAME" in capsys.readouterr().out
    one = VlaEvalConfig(run=config.out or tmp_path, episodes=1, workers=1, device="cpu")
    for words, name in {
        "--world MODULE:CLASS": None,
        "no world 'bloks'": "bloks",
        r"cameras \(\), and the policy was trained with \('front',\)": "blocks_state",
    }.items():
        with pytest.raises(ValueError, match=words):
            command.run_eval(replace(one, world=name))
    assert command.run_eval(replace(one, world="blocks")) == 0
    result = json.loads((one.run / "eval" / "evaluation.json").read_text())
    assert result["expert"]["success"]["value"] == 1
    assert result["success"]["world"]["pixels"] == 8


def test_what_cannot_be_meant_is_one_sentence(config, demos, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    wrong = {
        "--steps 0 must be at least 1": replace(config, steps=0),
        "--optim.warmup 2 is a share": replace(config, optim=replace(config.optim, warmup=2)),
        "--dtype bfloat16 needs a GPU": replace(config, dtype="bfloat16"),
        "is not empty": replace(config, out=tmp_path / "full"),
        "mesotron vla demos": replace(config, demos=tmp_path / "none"),
        "lora 4 is for pretrained towers": replace(config, policy=PolicyConfig(lora=4)),
        "freeze-towers is for": replace(config, policy=PolicyConfig(freeze_towers=True)),
        "promote 0 is a strength of Pion": replace(config, optim=PartsOptimConfig(promote=0)),
        "cutoff noise is": replace(config, optim=PartsOptimConfig(cutoff="noise")),
    }
    for words, settings in wrong.items():
        with pytest.raises(ValueError, match=words):
            command.run_train(settings)
    assert config.out is not None
    assert not config.out.exists()


def test_a_recordings_images_are_kept_below_a_size(config, demos, monkeypatch):
    """LIBERO's 256 pixels would else fill the memory."""
    asked = []

    def load(path, pixels):
        asked.append(pixels)
        return load_demos(path, pixels)

    monkeypatch.setattr(session, "load_demos", load)
    assert session.train(replace(config, steps=1, pixels=64)) == 0
    assert asked == [64]
    with pytest.raises(ValueError, match="--pixels 4 must be at least 8"):
        session.train(replace(config, pixels=4))


@pytest.mark.parametrize(("action", "head"), [("pion", "flow"), ("adamw", "l1")])
def test_the_step_that_is_recorded_is_the_plain_step(config, demos, action, head):
    """Rows, rates and noise from tables on the device, by a step that is counted there."""
    policy = replace(config.policy, head=head)
    optim = PartsOptimConfig(action=action, schedule="cosine", warmup=0.3)
    config = replace(config, policy=policy, optim=optim)
    cpu, loaded = torch.device("cpu"), load_demos(demos)
    plain, tabled = Trainer(config, loaded, cpu), Trainer(config, loaded, cpu)
    tabled._tables = Tables(config, tabled.order, tabled._rates, cpu)
    tabled._replay = tabled._step_by_tables  # type: ignore[assignment]
    begun = {name: p.detach().clone() for name, p in plain.policy.named_parameters()}
    plain.step = tabled.step = 2  # as after a checkpoint
    for _ in range(3):
        first, second = plain.advance(), tabled.advance()
        for name, value in first.items():
            assert second[name].item() == pytest.approx(value.item(), rel=1e-5), name
    groups = zip(plain.optimizer.param_groups, tabled.optimizer.param_groups, strict=True)
    for one, other in groups:
        assert one["lr"] == other["lr"]
        assert one["step"] == other["step"] == 5
    for (name, p), q in zip(
        plain.policy.named_parameters(), tabled.policy.parameters(), strict=True
    ):
        # AdamW's first steps make elements without a gradient as large as all others.
        gap, moved = (p - q).norm().item(), (p - begun[name]).norm().item()
        assert gap <= 1e-2 * moved, name


def test_a_step_is_recorded_on_a_gpu_alone(config, demos):
    cpu = torch.device("cpu")
    frames = Trainer(config, load_demos(demos), cpu).frames
    assert not uses_graph(config, frames)
    with pytest.raises(ValueError, match="the images are not on a GPU: leave it out"):
        Trainer(replace(config, graph=True), load_demos(demos), cpu)
    frames.device = torch.device("cuda")
    frames._images = None
    assert uses_graph(config, frames)
    exact = replace(config, optim=PartsOptimConfig(action="low_rank"))
    assert not uses_graph(exact, frames)
    assert not uses_graph(replace(config, policy=PolicyConfig(vision_tower="vit")), frames)
    with pytest.raises(ValueError, match="low_rank's SVD cannot be recorded"):
        uses_graph(replace(exact, graph=True), frames)


def test_draws_are_uniform_normal_and_independent():
    keys = [Draws(torch.tensor([key])) for key in (5, 6)]
    one, other = (draws.uniform((20_000,)) for draws in keys)
    assert 0 < one.min() < 1e-3
    assert 1 - 1e-3 < one.max() < 1
    assert one.std().item() == pytest.approx(12**-0.5, abs=0.003)
    normal = keys[0].normal((20_000,))
    assert normal.mean().item() == pytest.approx(0, abs=0.03)
    assert normal.std().item() == pytest.approx(1, abs=0.02)
    assert (normal**4).mean().item() == pytest.approx(3, abs=0.25)
    for a, b in ((one, other), (one[1:], one[:-1]), (normal, one), (normal[1:], normal[:-1])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.03


def test_recordings_without_positions_cannot_teach_where(config, demos):
    bare = load_demos(demos)
    bare.where = None
    with pytest.raises(ValueError, match="--where 1 needs demonstrations that say where"):
        Trainer(replace(config, where=1.0), bare, torch.device("cpu"))


def test_rates_rise_and_fall_as_said():
    shape = PartsOptimConfig(schedule="cosine", warmup=0.2)
    found = [rate_factor(shape, k, 10) for k in range(10)]
    assert found[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert all(a > b for a, b in pairwise(found[2:]))
    assert rate_factor(PartsOptimConfig(schedule="constant"), 9, 10) == 1
    assert not uses_bfloat16("auto", torch.device("cpu"))

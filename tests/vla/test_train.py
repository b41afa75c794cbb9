"""Runs of behavior cloning: exact resume, the guard, refusals, evaluation, learning."""

import json
import os
import signal
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

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
from mesotron.runs.checkpoints import damage
from mesotron.runs.resume import settings_to_resume
from mesotron.vla import evaluation, session
from mesotron.vla.checkpoint import load_policy
from mesotron.vla.demos import load_demos, make_demos, write_demos
from mesotron.vla.evaluation import SUCCESS, WRONG, choose_world, measure
from mesotron.vla.lerobot import export_lerobot
from mesotron.vla.policy import make_act
from mesotron.vla.training import Trainer, lr_factor, uses_bfloat16, uses_graph

STEPS = 8
CPU = torch.device("cpu")
WORLD = WorldConfig(name="blocks", pixels=8)


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    path = tmp_path_factory.mktemp("demos") / "blocks"
    write_demos(
        DemosConfig(
            world=WORLD,
            out=path,
            episodes=4,
            starts=8,
            workers=1,
        ),
        log=None,
    )

    return path


def make_config(demos, out) -> VlaTrainConfig:
    policy = PolicyConfig(size="ci", chunk=6, head="flow")
    optim = PartsOptimConfig(action="pion")
    every = {"log_every": 1, "probe_every": 4, "save_every": 3}

    options = {
        "steps": STEPS,
        "batch": 8,
        "episodes": 0,
        "device": "cpu",
        **every,
    }
    return VlaTrainConfig(
        demos=demos,
        policy=policy,
        optim=optim,
        out=out,
        **options,
    )


@pytest.fixture
def config(demos, tmp_path):
    return make_config(demos, tmp_path / "run")


@pytest.fixture(scope="module")
def reference(demos, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert session.train(make_config(demos, path)) == 0
    return path


def weights(path) -> dict[str, torch.Tensor]:
    return load_file(path / "checkpoints" / f"checkpoint-{STEPS}" / "policy.safetensors")


def assert_same_run(a, b) -> None:
    first = weights(a)
    second = weights(b)
    assert all(torch.equal(first[name], second[name]) for name in first)

    rows = [RunFolder(path).rows("metrics") for path in (a, b)]
    for one, two in zip(*rows, strict=True):
        assert one | {"time/step": 0} == two | {"time/step": 0}


@pytest.mark.parametrize("how", ["ctrl-c", "killed"])
def test_interrupted_run_resumes_exactly(config, reference, monkeypatch, capsys, how):
    advance = Trainer.advance

    def interrupted(self):
        metrics = advance(self)
        if self.step == 5 and how == "killed":
            raise RuntimeError("killed")

        if self.step == 4 and how == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)

        return metrics

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", interrupted)
        if how == "ctrl-c":
            assert session.train(config) == 0
            assert f"--resume {config.out}" in capsys.readouterr().out
        else:
            with pytest.raises(RuntimeError, match="killed"):
                session.train(config)

    assert [row["step"] for row in RunFolder(config.out).rows("metrics")] == [1, 2, 3, 4]
    assert RunFolder(config.out).result is None
    assert session.train(settings_to_resume(VlaTrainConfig, config.out)) == 0

    assert_same_run(reference, config.out)
    with pytest.raises(ValueError, match="mesotron vla eval"):
        session.train(settings_to_resume(VlaTrainConfig, config.out))


def test_metrics_cover_every_part(reference):
    rows = RunFolder(reference).rows("metrics")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))

    names = {
        "loss",
        "loss/action",
        "grad_norm",
        "grad_norm/auxiliary",
        "learning_rate",
        "update_rms/vision",
        "update_rms/action",
        "optim/action/pion/dead_blocks",
        "time/step",
    }

    assert names <= set(rows[0])
    assert [row["step"] for row in rows if "gradient/action/snr" in row] == [1, 5]
    assert rows[-1]["learning_rate"] == pytest.approx(PartsOptimConfig().lr / STEPS)


def test_seed_and_auxiliary_loss(config, reference, tmp_path, demos):
    session.train(replace(config, where=0.5, seed=1))
    assert not torch.equal(
        weights(reference)["action.queries"], weights(config.out)["action.queries"]
    )

    row = RunFolder(config.out).rows("metrics")[0]
    assert row["loss"] == pytest.approx(row["loss/action"] + 0.5 * row["loss/where"], rel=1e-5)
    assert "auxiliary loss" in (config.out / "report.md").read_text()

    recordings = replace(load_demos(demos), where=None)
    with pytest.raises(ValueError, match="--where"):
        Trainer(replace(config, where=1.0), recordings, CPU)


def test_guard_stops_a_run_that_is_not_finite(config, demos, monkeypatch):
    broken = load_demos(demos)
    broken.action = np.full_like(broken.action, np.nan)
    monkeypatch.setattr(session, "load_demos", lambda path, pixels: broken)

    assert session.train(replace(config, guard="stop", steps=200)) == 0
    run = RunFolder(config.out)
    assert run.rows("events")[0]["detector"] == "nonfinite"
    assert run.rows("metrics")[-1]["step"] < 50
    assert run.result is None


def test_evaluation_of_a_run(reference, capsys, tmp_path):
    settings = VlaEvalConfig(
        run=reference,
        episodes=1,
        workers=1,
        perturb=("light", "wording"),
        gifs=1,
        out=tmp_path / "eval",
        device="cpu",
    )

    assert evaluation.run(settings) == 0
    result = json.loads((tmp_path / "eval" / "evaluation.json").read_text())
    assert list(result) == ["success", "wrong instruction", "expert", "light", "wording"]
    assert result["expert"]["success"]["value"] == 1
    assert result["success"]["success"]["high"] > 0
    assert len(list((tmp_path / "eval" / "gifs").glob("*.gif"))) == 2
    assert "red-cube" in capsys.readouterr().out

    saved = load_policy(reference)
    saved = saved._replace(world=replace(saved.world, tasks=("red-cube",)))
    assert choose_world(saved, "blocks") == choose_world(saved, None) == saved.world


def test_evaluation_after_a_run_without_simulator(config, reference, monkeypatch, capsys):
    monkeypatch.setattr(session, "find_spec", lambda name: None)  # no simulator
    session.train(
        replace(
            config,
            steps=1,
            execute=2,
            episodes=2,
        )
    )

    assert f"mesotron vla eval {config.out}" in capsys.readouterr().out
    path = config.out / "checkpoints" / "checkpoint-1"
    assert (
        evaluation.run(
            VlaEvalConfig(
                run=path,
                episodes=1,
                workers=1,
                device="cpu",
            )
        )
        == 0
    )

    assert (config.out / "eval" / "evaluation.json").is_file()
    assert damage(path) is None  # no file was added to the checkpoint

    seen = []

    def stop(*args, execute, **kwargs):
        seen.append(execute)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "measure", stop)
    for run, given in ((config.out, None), (config.out, 3), (reference, None)):
        with pytest.raises(KeyboardInterrupt):
            evaluation.run(
                VlaEvalConfig(
                    run=run,
                    execute=given,
                    device="cpu",
                )
            )

    assert seen == [2, 3, 4]


def test_policy_of_recordings_needs_a_world(config, reference, tmp_path, capsys):
    world = WorldConfig(name="blocks_state")
    plan = DemosConfig(
        world=world,
        out=tmp_path / "d",
        episodes=2,
        starts=2,
        workers=1,
    )

    export_lerobot(make_demos(plan, log=None), tmp_path / "lerobot")
    session.train(
        replace(
            config,
            demos=tmp_path / "lerobot",
            steps=1,
            batch=4,
            episodes=1,
        )
    )

    assert "--world NAME" in capsys.readouterr().out
    evaluate = VlaEvalConfig(
        run=config.out,
        episodes=1,
        workers=1,
        device="cpu",
    )
    for changes, keyword in (
        ({}, "--world"),
        ({"world": "bloks"}, "bloks"),
        ({"world": "blocks"}, "cameras"),
        ({"perturb": ("wording", "light")}, "--perturb light"),  # it has no camera
    ):
        with pytest.raises(ValueError, match=keyword):
            evaluation.run(replace(evaluate, **changes))

    assert evaluation.run(replace(evaluate, world="blocks_state", perturb=("wording",))) == 0
    result = json.loads((config.out / "eval" / "evaluation.json").read_text())
    assert result["expert"]["success"]["value"] == 1

    images = load_policy(reference)._replace(world=None)
    assert choose_world(images, "blocks").pixels == 8


def test_graphs_and_bfloat16_are_for_gpus(config, demos):
    for changes, flag in (({"dtype": "bfloat16"}, "--dtype"), ({"graph": True}, "--graph")):
        with pytest.raises(ValueError, match=flag):
            session.train(replace(config, **changes))
        assert not config.out.exists()

    assert not uses_bfloat16("auto", CPU)
    on_cpu = Trainer(config, load_demos(demos), CPU).frames
    on_gpu = SimpleNamespace(device=torch.device("cuda"), is_on_device=on_cpu.is_on_device)
    tower = replace(config, policy=PolicyConfig(vision_tower="vit"))
    exact = replace(config, optim=PartsOptimConfig(action="low_rank"))
    cases = (config, on_cpu), (config, on_gpu), (exact, on_gpu), (tower, on_gpu)

    assert [uses_graph(*case) for case in cases] == [False, True, False, False]
    with pytest.raises(ValueError, match="low_rank"):
        uses_graph(replace(exact, graph=True), on_gpu)


@pytest.mark.parametrize(("action", "head"), [("pion", "flow"), ("adamw", "l1")])
def test_step_from_tables_equals_the_eager_step(config, demos, action, head):
    policy = replace(config.policy, head=head)
    optim = PartsOptimConfig(
        action=action,
        schedule="cosine",
        warmup=0.3,
    )

    config = replace(config, policy=policy, optim=optim)
    loaded = load_demos(demos)
    eager = Trainer(config, loaded, CPU)
    tabled = Trainer(config, loaded, CPU)
    tabled._make_tables()
    tabled._replay = tabled._step_from_tables  # type: ignore[assignment]
    start = {name: p.detach().clone() for name, p in eager.policy.named_parameters()}
    eager.step = tabled.step = 2  # as after a checkpoint

    for _ in range(3):
        first = eager.advance()
        second = tabled.advance()
        for name, value in first.items():
            assert second[name].item() == pytest.approx(value.item(), rel=1e-5), name

    for one, two in zip(eager.optimizer.param_groups, tabled.optimizer.param_groups, strict=True):
        assert one["lr"] == two["lr"]
        assert one["step"] == two["step"] == 5

    others = dict(tabled.policy.named_parameters())
    for name, p in eager.policy.named_parameters():
        # AdamW's first steps move elements without a gradient as far as all others.
        gap = (p - others[name]).norm().item()
        moved = (p - start[name]).norm().item()
        assert gap <= 1e-2 * moved, name


def test_learning_rate_schedule():
    config = PartsOptimConfig(schedule="cosine", warmup=0.2)
    factors = [lr_factor(config, k, 10) for k in range(10)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert all(a > b for a, b in pairwise(factors[2:]))
    assert lr_factor(PartsOptimConfig(schedule="constant"), 9, 10) == 1


MUON = PartsOptimConfig(action="muon", lr=1e-2, aux_lr=3e-3)
LEARNING = VlaTrainConfig(
    policy=PolicyConfig(size="ci", chunk=8),
    optim=MUON,
    steps=800,
    batch=64,
    probe_every=0,
    device="cpu",
)
# The instruction is redundant there; AdamW is faster.
FROM_STATE = replace(LEARNING, optim=replace(MUON, language="adamw", lr=2e-2), steps=200)
TEN_OBJECTS = replace(LEARNING, policy=PolicyConfig(size="ci", patch=8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "episodes", "starts", "config", "success"),
    [
        ("blocks_state", 160, 0, FROM_STATE, 0.6),
        ("blocks", 200, 2000, LEARNING, 0.9),
        ("object10", 100, 8000, TEN_OBJECTS, 0.5),
    ],
)
def test_learns(world, episodes, starts, config, success, tmp_path):
    # Chance is 0.05 with ten objects; ten seeds are in benchmarks/vla/README.md.
    settings = WorldConfig(name=world, pixels=64 if world == "object10" else 24)
    plan = DemosConfig(
        world=settings,
        out=tmp_path / "d",
        episodes=episodes,
        starts=starts,
    )

    demos = make_demos(plan, log=None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of a sum depend on them

    try:
        trainer = Trainer(config, demos, CPU)
        act = make_act(trainer.policy)
        untrained = measure(
            act,
            settings,
            episodes=2,
            execute=5,
            controls=False,
        )

        while trainer.step < config.steps:
            trainer.advance()

        num = 5 if world == "object10" else 25
        trained = measure(
            act,
            settings,
            episodes=num,
            execute=5,
            controls=bool(starts),
        )
    finally:
        torch.set_num_threads(threads)

    assert untrained[SUCCESS].success == 0
    assert trained[SUCCESS].success >= success
    assert WRONG not in trained or trained[WRONG].success <= 0.1

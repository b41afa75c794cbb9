"""The commands `mesotron vla demos` and `vla eval`; `session` is `vla train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.config import DemosConfig, VlaEvalConfig, WorldConfig
from mesotron.runs.extras import require
from mesotron.runs.trust import check_trusted, code_names

if TYPE_CHECKING:
    from mesotron.vla.checkpoint import Saved


def run_demos(config: DemosConfig) -> int:
    from mesotron.vla.demos import load_shards, render_demos, write_demos

    if config.lerobot is not None:
        require("lerobot", what="--lerobot")
    if config.render is not None:
        render_demos(config)
    else:
        write_demos(config)
    if config.lerobot is not None:
        from mesotron.vla.lerobot import export_lerobot

        dropped = export_lerobot(load_shards(config.out), config.lerobot)
        print(f"{config.lerobot}: LeRobotDataset v3.0 without the {dropped:,} single frames")
    return 0


def run_eval(config: VlaEvalConfig) -> int:
    from mesotron.optim.device import choose_device
    from mesotron.runs.console import SafeConsole
    from mesotron.runs.files import write_json
    from mesotron.vla import checkpoint, evaluation
    from mesotron.vla.interface import EVAL_SEED, VALIDATION_SEED
    from mesotron.vla.policy import make_act

    device = choose_device(config.device, config.threads)
    saved = checkpoint.load_policy(config.run, device)
    chunk = saved.policy.config.chunk
    results = evaluation.measure(
        make_act(saved.policy, device),
        choose_world(saved, config.world, config.trust),
        episodes=config.episodes,
        execute=config.execute or saved.execute or evaluation.default_execute(chunk),
        workers=config.workers,
        controls=config.controls,
        perturb=config.perturb,
        first_seed=VALIDATION_SEED if config.validation else EVAL_SEED,
        gifs=config.gifs,
    )
    console = SafeConsole()
    console.print(f"{saved.policy.describe()}, step {saved.step}", highlight=False)
    console.print(evaluation.as_table(results))
    out = config.out or config.run / "eval"
    out.mkdir(parents=True, exist_ok=True)
    columns = {name: column.to_json() for name, column in results.items()}
    write_json(out / "evaluation.json", columns)
    if config.gifs:
        evaluation.write_gifs(results[evaluation.SUCCESS], out / "gifs")
    console.print(f"written to {out}", soft_wrap=True, markup=False)
    return 0


def choose_world(saved: Saved, name: str | None, trust: bool = False) -> WorldConfig:
    """The world of a policy's demonstrations, or another one by name if the policy fits it."""
    if saved.world is not None and name in (None, saved.world.name):
        check_trusted(code_names(saved.world), saved.path, trust or name is not None)
        return saved.world  # with its own tasks
    if name is None:
        raise ValueError(f"{saved.path} is from recordings without a world: give --world NAME")
    from mesotron.vla.worlds import build_world

    body = saved.policy.body
    images = {"pixels": body.pixels, "wrist": "wrist" in body.cameras} if body.cameras else {}
    config = WorldConfig(name=name, **images)
    world = build_world(config)
    for field in ("cameras", "state_dim", "action_dim"):
        needed, given = getattr(body, field), getattr(world, field)
        if needed != given:
            raise ValueError(f"--world {name} has {field} {given}, but the policy has {needed}")
    return config

"""The commands `mesotron vla train` and `mesotron vla eval`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mesotron.config import VlaEvalConfig, VlaTrainConfig, WorldConfig

if TYPE_CHECKING:
    from mesotron.vla.checkpoint import Saved


def run_train(config: VlaTrainConfig) -> int:
    """Train, or go on training; returns the exit code."""
    check_installed()
    from mesotron.vla.session import train

    return train(config)


def run_eval(config: VlaEvalConfig) -> int:
    """Measure a policy, print its table and write it as JSON; returns the exit code."""
    check_installed()
    from rich.console import Console

    from mesotron.optim.device import choose_device
    from mesotron.vla import checkpoint, measure
    from mesotron.vla.acting import make_act
    from mesotron.vla.gifs import write_gifs
    from mesotron.vla.interface import EVAL_SEED, VALIDATION_SEED

    device = choose_device(config.device, config.threads)
    saved = checkpoint.load_policy(config.run, device)
    found = measure.measure(
        make_act(saved.policy, device),
        choose_world(saved, config.world),
        episodes=config.episodes,
        execute=config.execute
        or saved.execute
        or measure.default_execute(saved.policy.config.chunk),
        workers=config.workers,
        controls=config.controls,
        perturb=config.perturb,
        first_seed=VALIDATION_SEED if config.validation else EVAL_SEED,
        gifs=config.gifs,
    )
    console = Console()
    console.print(f"{checkpoint.describe(saved.policy)}, step {saved.step}", highlight=False)
    console.print(measure.as_table(found))
    write_result(config.out or config.run / "eval", measure.as_json(found))
    if config.gifs:
        write_gifs(found[measure.SUCCESS], (config.out or config.run / "eval") / "gifs")
    console.print(f"written to {config.out or config.run / 'eval'}", soft_wrap=True, markup=False)
    return 0


def choose_world(saved: Saved, name: str | None) -> WorldConfig:
    """The world of a policy's demonstrations, or one by name as that policy would see it.

    Raises:
        ValueError: there is none, or the policy does not fit it, in one sentence.
    """
    if saved.world is not None and name in (None, saved.world.name):
        return saved.world  # with its own tasks
    if name is None:
        raise ValueError(
            f"{saved.path} was trained on recordings, which know no world: say where to play, "
            "as by --world object10 or --world MODULE:CLASS for one of your own"
        )
    from mesotron.vla.worlds import build_world

    body = saved.policy.body
    seen = {"pixels": body.pixels, "wrist": "wrist" in body.cameras} if body.cameras else {}
    config = WorldConfig(name=name, **seen)
    world = build_world(config)
    wanted = {"cameras": body.cameras, "state": body.state_dim, "action": body.action_dim}
    there = {"cameras": world.cameras, "state": world.state_dim, "action": world.action_dim}
    for what, own in wanted.items():
        if there[what] != own:
            raise ValueError(
                f"the world {name} has {what} {there[what]}, and the policy was trained with {own}:"
                " play it where its demonstrations come from"
            )
    return config


def write_result(folder: Path, result: dict) -> None:
    """Write evaluation.json into a folder, made if need be."""
    from mesotron.runs.lines import write_json

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "evaluation.json", result)


def check_installed() -> None:
    """Say what to install instead of failing at an import."""
    for name in ("safetensors", "transformers"):
        if find_spec(name) is None:
            raise ValueError(f"mesotron vla needs {name}: pip install 'mesotron[vla]'")

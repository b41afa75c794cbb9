"""The `mesotron` command: parse, then import, then run.

A command is one line in COMMANDS. Nothing heavy (torch, jax, numpy, matplotlib) is imported before
the words are understood, so help and mistakes answer at once.
"""

import io
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from mesotron import __version__, config
from mesotron.arguments import Presets, UsageError, hint, parse
from mesotron.recipes import describe_recipes, make_plan, make_recipe
from mesotron.rlvr.run_defaults import describe_defaults, eval_defaults


class Command(NamedTuple):
    """A config and the `module:function` that turns it into an exit code, imported when run."""

    config_type: type
    target: str
    presets: Presets | None = None

    @property
    def summary(self) -> str:
        return (self.config_type.__doc__ or "").splitlines()[0]


COMMANDS = {
    "train": Command(
        config.TrainConfig, "mesotron.recipes.command:run", Presets(make_recipe, describe_recipes)
    ),
    "plan": Command(
        config.PlanConfig, "mesotron.rlvr.cost.estimate:run", Presets(make_plan, describe_recipes)
    ),
    "sft": Command(config.SftConfig, "mesotron.rlvr.sft:run"),
    "eval": Command(
        config.EvalConfig,
        "mesotron.rlvr.evaluation.command:run",
        Presets(eval_defaults, describe_defaults),
    ),
    "watch": Command(config.WatchConfig, "mesotron.watch.command:run"),
    "compare": Command(config.CompareConfig, "mesotron.compare.command:run"),
    "sweep": Command(config.SweepConfig, "mesotron.compare.sweep:run"),
    "report": Command(config.ReportConfig, "mesotron.report.command:run"),
    "ppo snake": Command(config.SnakeConfig, "mesotron.ppo:run"),
    "vla demos": Command(config.DemosConfig, "mesotron.vla.demos.command:run"),
    "vla train": Command(config.VlaTrainConfig, "mesotron.vla.command:run_train"),
    "vla eval": Command(config.VlaEvalConfig, "mesotron.vla.command:run_eval"),
    "spectrum": Command(config.SpectrumConfig, "mesotron.spectral.spectrum:run"),
    "route": Command(config.RouteConfig, "mesotron.optim.routing.command:run"),
}
# Former commands that now run from a clone of the repository.
MOVED = {
    "bench": "python -m benchmarks.optim_step",
    "bench optim": "python -m benchmarks.optim_step",
    "bench train": "python -m benchmarks.training",
    "bench snake": "python -m benchmarks.ppo.snake",
    "bench ppo": "python -m benchmarks.ppo.speed",
    "bundle": "python -m benchmarks.offline",
}


def main(words: list[str] | None = None) -> int:
    """Run one command.

    Args:
        words: the command line without the program's name; `sys.argv[1:]` if None.

    Returns:
        The exit code: 0; 1 if the reader closed the pipe; 2 for input that cannot be used;
        130 after Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without sigma shows a question mark; a log file gets each line when it is said.
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        code = dispatch(sys.argv[1:] if words is None else words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:  # a command may have added how to go on
        return complain("; ".join(["interrupted", *map(str, stop.args)]), code=130)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno is None:  # not the system's: libraries raise it for anything
            raise
        return complain(f"{error.filename or 'system'}: {error.strerror}")
    except ValueError as error:
        if not raised_by_us(error):
            raise
        return complain(str(error))


def dispatch(words: list[str]) -> int:
    """Find the command that the first words name, read the rest, run it."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"mesotron {__version__}")
        return 0
    moved = MOVED.get(" ".join(words[:2])) or MOVED.get(words[0])
    if moved:
        raise UsageError(f"{words[0]!r} has moved: in a clone of the repository run `{moved}`")
    name, rest = split_name(words)
    if name in COMMANDS:
        command = COMMANDS[name]
        settings = parse(command.config_type, rest, f"mesotron {name}", command.presets)
        return load(command.target)(settings)
    print(overview(group=name))
    return 0


def split_name(words: list[str]) -> tuple[str, list[str]]:
    """Split `bench optim --repeats 3` into a command or group name and the rest."""
    first, rest = words[0], words[1:]
    if first in COMMANDS:
        return first, rest
    members = [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]
    if not members:
        heads = list(dict.fromkeys(name.split()[0] for name in COMMANDS))
        kind = "flag" if first.startswith("-") else "command"
        raise UsageError(
            f"unknown {kind} {first!r}{hint(first, heads)}; commands: {', '.join(heads)}"
        )
    if not rest or rest[0] in ("-h", "--help"):
        return first, []
    if rest[0] not in members:
        close = hint(rest[0], members)
        raise UsageError(
            f"unknown command '{first} {rest[0]}'{close}; {first} has: {', '.join(members)}"
        )
    return f"{first} {rest[0]}", rest[1:]


def load(target: str) -> Callable[[Any], int]:
    """Import `module:function`."""
    module, function = target.split(":")
    return getattr(import_module(module), function)


def overview(group: str = "") -> str:
    """The list of commands, or of one group's commands."""
    shown = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, shown))
    lines = [f"  mesotron {name:<{width}}  {command.summary}" for name, command in shown.items()]
    if not group:
        lines.append(f"  mesotron {'--version':<{width}}  Print the version.")
    title = "usage: mesotron COMMAND [OPTIONS]   (mesotron COMMAND --help tells more)"
    return "\n".join([title, "", *lines])


def raised_by_us(error: BaseException) -> bool:
    """Whether this package raised it: then its text is a sentence meant for the user."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return bool(trace) and trace.tb_frame.f_globals.get("__name__", "").startswith("mesotron.")


def complain(sentence: str, code: int = 2) -> int:
    """Print one line on stderr and return the exit code."""
    print(f"mesotron: {' '.join(sentence.split())}", file=sys.stderr)
    return code

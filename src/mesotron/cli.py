"""The `mesotron` command: parse, then import, then run.

A command is one line in COMMANDS. tyro parses its arguments into a config; recipes, runs to resume
and TOML files give the defaults. Nothing heavy (torch, jax, numpy, matplotlib) is imported before
that, so help and mistakes answer at once.
"""

import io
import os
import re
import sys
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from pkgutil import resolve_name as load
from typing import Annotated, Any, NamedTuple, TypeVar, get_origin, get_type_hints

import tyro

from mesotron import __version__, config
from mesotron.config.base import (
    describe_type,
    flags_of,
    from_plain,
    rename_flags,
    suggest,
    unchecked,
    validate,
)
from mesotron.config.flags import as_typed, expand_flags, expand_table, short_help, suggest_flag
from mesotron.config.train import LanguageRunConfig
from mesotron.recipes import describe_recipes, fit_optim, make_plan, make_recipe
from mesotron.runs.extras import has_gpu_driver, require
from mesotron.runs.files import printable
from mesotron.runs.process import mark_start
from mesotron.runs.resume import eval_defaults, settings_to_resume
from mesotron.runs.trust import code_names, search_working_folder

C = TypeVar("C")
# None is said by leaving a flag out. Help is in docstrings: comments need not be searched for it.
CONFIG = (tyro.conf.DisallowNone, tyro.conf.HelptextFromCommentsOff)


class UsageError(ValueError):
    """A command line that cannot be used; the text is one sentence for the user."""


class Presets(NamedTuple):
    """Defaults by the value of the positional field, such as recipes."""

    make: Callable[[str], Any]  # raises ValueError for an unknown name
    describe: Callable[[], str]  # a paragraph for the help
    for_data: str = ""  # the preset of a command line that gives --data and none by name


class Command(NamedTuple):
    """A config and the `module:function` that turns it into an exit code, imported when run; the
    extra whose packages it always needs."""

    config_type: type
    target: str
    presets: Presets | None = None
    extra: str = ""

    @property
    def summary(self) -> str:
        return (self.config_type.__doc__ or "").splitlines()[0]


RECIPE = Presets(make_recipe, describe_recipes, "own")
PLAN = Presets(make_plan, describe_recipes, "own")
RUN = Presets(eval_defaults, lambda: "The task and length of a run are its own by default.")
COMMANDS = {
    "train": Command(config.TrainConfig, "mesotron.recipes:run", RECIPE, "rlvr"),
    "plan": Command(config.PlanConfig, "mesotron.rlvr.plan.cost:run", PLAN),
    "sft": Command(config.SftConfig, "mesotron.rlvr.train:run", None, "rlvr"),
    "eval": Command(config.EvalConfig, "mesotron.evaluate.command:run", RUN, "rlvr"),
    "chat": Command(config.ChatConfig, "mesotron.serve.chat:run", None, "rlvr"),
    "export": Command(config.ExportConfig, "mesotron.serve.export:run", None, "rlvr"),
    "watch": Command(config.WatchConfig, "mesotron.watch.command:run"),
    "compare": Command(config.CompareConfig, "mesotron.compare.tournament:run"),
    "reward check": Command(config.RewardCheckConfig, "mesotron.rewards.check:run", None, "rlvr"),
    "sweep": Command(config.SweepConfig, "mesotron.compare.sweep:run", None, "sweep"),
    "report": Command(config.ReportConfig, "mesotron.report.command:run"),
    "ppo snake": Command(config.SnakeConfig, "mesotron.ppo:run", None, "ppo"),
    "vla demos": Command(config.DemosConfig, "mesotron.vla.demos:run"),
    "vla train": Command(config.VlaTrainConfig, "mesotron.vla.session:train", None, "vla"),
    "vla eval": Command(config.VlaEvalConfig, "mesotron.vla.evaluation:run", None, "vla"),
    "spectrum": Command(config.SpectrumConfig, "mesotron.spectral.spectrum:run"),
    "route": Command(config.RouteConfig, "mesotron.optim.routing.command:run"),
    "doctor": Command(config.DoctorConfig, "mesotron.runs.doctor:run"),
}


# Optional package -> the extra that installs it.
EXTRAS = {
    "torch": "rlvr",
    "transformers": "rlvr",
    "trl": "rlvr",
    "matplotlib": "plot",
}


def main(args: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0; 1 if the reader closed the pipe; 2 for unusable
    input; 130 after Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without sigma shows a question mark; a log file gets each line at once.
        sys.stdout.reconfigure(errors="replace", line_buffering=True)

    if args is None:
        mark_start()
        args = sys.argv[1:]

    try:
        code = dispatch(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:  # a command may have added how to continue
        return fail("; ".join(["interrupted", *map(str, stop.args)]), code=130)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return fail(f"this needs {error.name}: pip install 'mesotron[{EXTRAS[error.name]}]'")
    except OSError as error:
        if error.errno is None:  # not the system's: libraries raise it for anything
            raise
        return fail(f"{error.filename or 'system'}: {error.strerror}")
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop"):  # as pathlib says it up to Python 3.12
            raise
        return fail(str(error))
    except ValueError as error:
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next

        # Only the text of this package's own errors is meant for the user.
        if not trace or not trace.tb_frame.f_globals.get("__name__", "").startswith("mesotron."):
            raise

        return fail(as_typed(str(error), args))


def dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview())
        return 0

    if args[0] == "--version":
        print(f"mesotron {__version__}")
        return 0

    for path in (word.rpartition("=")[2] for word in args):
        if path.startswith("~") and " " not in path and os.path.expanduser(path) == path:
            raise UsageError(f"{path}: there is no such user's home folder; write the path out")

    name, rest = split_name(args)
    if name not in COMMANDS:
        print(overview(group=name))
        return 0

    command = COMMANDS[name]
    settings = parse(command.config_type, rest, f"mesotron {name}", command.presets)

    if command.extra:
        require(command.extra, what=f"mesotron {name}")

    if getattr(settings, "device", "") == "cuda" and name != "plan" and not has_gpu_driver():
        raise UsageError("--device cuda: this machine has no GPU driver; use --device cpu")

    return load(command.target)(settings)


def split_name(args: list[str]) -> tuple[str, list[str]]:
    """Split `vla train --steps 3` into the name of a command or group, and the rest."""
    first = args[0]
    rest = args[1:]
    if first in COMMANDS:
        return first, rest

    known = [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]
    if known and (not rest or rest[0] in ("-h", "--help")):
        return first, []
    if known and rest[0] in known:
        return f"{first} {rest[0]}", rest[1:]

    word = rest[0] if known else first
    known = known or list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    kind = "flag" if word.startswith("-") else "command"
    raise UsageError(f"unknown {kind} {word!r}{suggest(word, known)}; known: {', '.join(known)}")


def overview(group: str = "") -> str:
    shown = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, shown))

    lines = [f"  mesotron {name:<{width}}  {command.summary}" for name, command in shown.items()]
    if not group:
        lines.append(f"  mesotron {'--version':<{width}}  Print the version.")

    title = "usage: mesotron COMMAND [OPTIONS]   (mesotron COMMAND --help for details)"
    return "\n".join([title, "", *lines])


def fail(message: str, code: int = 2) -> int:
    print(f"mesotron: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


def parse(
    config_type: type[C], args: list[str], prog: str = "mesotron", presets: Presets | None = None
) -> C:
    """Parse the arguments of a command.

    Flags win over a TOML file (`--config FILE`), which wins over the defaults: those of the preset
    named by the positional field, or with `--resume RUN` the settings of that run.
    """
    if args and args[0].endswith(".toml") and issubclass(config_type, LanguageRunConfig):
        args = ["--config", *args]

    wants_help = bool({"-h", "--help", "--help-all"}.intersection(args))
    wants_all = "--help-all" in args or not issubclass(config_type, LanguageRunConfig)

    args = [arg for arg in args if arg not in ("-h", "--help", "--help-all")]
    while wants_help and args and re.match("-[^=]*$", args[-1]):  # `--data --help`
        args = args[:-1]

    args = normalize(config_type, expand_flags(config_type, args))
    arguments = arguments_type(config_type)
    with unchecked():  # only the final config is checked
        given = arguments() if wants_help and presets and not args else None
        if given is None and (presets or not wants_help):
            given = run_tyro(arguments, args, prog)

        default = given and defaults_of(config_type, args, given, presets)
        if wants_help and not wants_all:
            print(common_help(config_type, prog, default or config_type(), presets))
            raise SystemExit(0)

        if wants_help:
            about = f"{config_type.__doc__}\n\n{presets.describe()}" if presets else None
            run_tyro(
                arguments,
                ["--help"],
                prog,
                default,
                about,
            )

        if default is not None:
            # Options of TRL add to those of the defaults; the last of a name counts.
            own = {text.partition("=")[0]: text for text in getattr(given, "trl", ())}
            given = run_tyro(arguments, args, prog, default)
            if own:
                held = {text.partition("=")[0]: text for text in default.trl}
                given = replace(given, trl=tuple((held | own).values()))

        made = make(config_type, given)

    return validate(made)


def common_help(config_type: Any, prog: str, default: Any, presets: Presets | None) -> str:
    """The flags that people use; `--help-all` has the rest."""
    more = f"All {len(flags_of(config_type))} flags, by section: {prog} --help-all"
    usage = f"usage: {prog}{' [RECIPE | FILE.toml]' if presets else ' [FILE.toml]'} [FLAGS]"
    example = f"  {prog} --model M --data mine.jsonl{' --reward mine.py:score' if presets else ''}"
    recipes = [presets.describe(), ""] if presets else []
    flags = short_help(config_type, default)

    return "\n".join([usage, "", config_type.__doc__, "", example, "", flags, "", *recipes, more])


def normalize(config_type: type, args: list[str]) -> list[str]:
    """Rewrite spellings that tyro does not know: old flags, `--no-optim.fused`, `--gif=False`, and
    the positional field given by its name."""
    flags = flags_of(config_type)
    positional = []
    options = []

    rest = rename_flags(config_type, args)
    while rest:
        arg = rest.pop(0)
        name, equals, text = arg.partition("=")
        flag = name.replace("_", "-") if name.startswith("--") else name
        positive = flag.replace("--no-", "--", 1)

        item, kind = flags.get(flag) or flags.get(positive) or (None, None)
        if kind in (bool, bool | None):
            on = flag == positive
            if on and not equals and rest and rest[0].lower() in ("true", "false"):
                equals = "="
                text = rest.pop(0)

            if equals and text.lower() not in ("true", "false"):
                raise UsageError(f"{flag} {text!r} is not valid: expected true or false")

            on = text.lower() == "true" if equals else on
            section, dot, leaf = positive.removeprefix("--").rpartition(".")
            options.append(positive if on else f"--{section}{dot}no-{leaf}")
        elif item is not None and item.metadata.get("positional") and flag == positive:
            positional += [text] if equals else []
            while not equals and rest and not rest[0].startswith("--"):
                positional.append(rest.pop(0))
        else:
            options.append(arg)

    return positional + options


@cache
def arguments_type(config_type: Any) -> Any:
    """The config as tyro gets it: the positional field marked, and `--config` added."""
    hints = get_type_hints(config_type)
    types: dict[str, Any] = {}

    members: dict[str, Any] = {"__doc__": config_type.__doc__, "__module__": __name__}
    for item in fields(config_type):
        if item.metadata.get("positional"):
            shown = tyro.conf.arg(metavar=item.name.upper())
            types[item.name] = Annotated[hints[item.name], tyro.conf.Positional, shown]
            members[item.name] = field(default=item.default)

    about = tyro.conf.arg(help="TOML file with other defaults; flags win over it.")
    types["config"], members["config"] = Annotated[Path | None, about], None
    members["__annotations__"] = types
    made = type(config_type.__name__, (config_type,), members)

    return dataclass(frozen=True, kw_only=True)(made)


def make(kind: type[C], values: Any) -> C:
    shared: Any = {item.name for item in fields(kind)} & {item.name for item in fields(values)}  # type: ignore
    return kind(**{name: getattr(values, name) for name in shared})


def defaults_of(config_type: Any, args: list[str], given: Any, presets: Presets | None) -> Any:
    """The config that flags change: a resumed run's, or the preset's, under a TOML file."""
    table: dict[str, Any] = {}
    if given.config is not None:
        try:
            table = tomllib.loads(given.config.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # beyond syntax: depth, digits, encoding
            raise UsageError(f"{given.config} is not valid TOML: {error}") from error

        table = expand_table(config_type, table, str(given.config))

    base: Any = None
    if getattr(given, "resume", None) is not None:
        base = settings_to_resume(config_type, given.resume)
    elif presets is not None:
        item = next(item for item in fields(config_type) if item.metadata.get("positional"))
        name = getattr(given, item.name)
        name = table.get(item.name, name) if name == item.default else name
        if not isinstance(name, str):
            raise UsageError(f"{given.config}: {item.name} = {name!r:.80} is not a name")

        task = table.get("task")
        has_data = given.task.data or (isinstance(task, dict) and task.get("data"))
        base = presets.make(presets.for_data if name == item.default and has_data else name)

    made: Any = from_plain(config_type, table, str(given.config), base) if table else base
    if getattr(given, "resume", None) is None and getattr(base, "recipe", "") == "own":
        typed = {arg.partition("=")[0] for arg in args}
        theirs = table.get("optim", {})
        name = given.optim.name if "--optim.name" in typed else theirs.get("name")
        lr = given.optim.lr if "--optim.lr" in typed else theirs.get("lr")
        lora = given.model.lora or made.model.lora
        base = replace(base, optim=fit_optim(base.optim, name, lr, lora))  # a rate for its rule
        made = from_plain(config_type, table, str(given.config), base)

    # Code that the command line or the user's file names is the user's own.
    saved = code_names(base) if base is not None else []
    own = {*code_names(given)}.union(set(code_names(made)).difference(saved) if table else ())
    if own:
        search_working_folder()

    return replace(made, trust=True) if saved and own.issuperset(saved) else made


def run_tyro(
    arguments: Any, args: list[str], prog: str, default: Any = None, about: str | None = None
) -> Any:
    """Parse with tyro; its error boxes become one sentence."""
    options = {} if default is None else {"default": make(arguments, default)}
    with redirect_stderr(io.StringIO()) as box:
        try:
            made, unknown = tyro.cli(
                arguments,
                args=args,
                prog=prog,
                description=about,
                return_unknown_args=True,
                config=CONFIG,
                **options,
            )
        except SystemExit as stop:
            if not stop.code:
                raise  # help

            # The message is in a box, up to the first rule.
            lines = [line.strip("│ ") for line in box.getvalue().splitlines()[1:-1]]
            message = " ".join(lines).partition("───")[0].partition("Got errors:")[0]
            message = explain(" ".join(message.split()).rstrip("."), args, arguments)
            raise UsageError(f"{message}; see {prog} --help") from None

    for arg in unknown:
        name = arg.partition("=")[0]
        problem = f"unexpected argument {arg!r}"
        if name.startswith("-"):
            problem = f"unknown flag {name}{suggest_flag(name, arguments)}"

        raise UsageError(f"{problem}; see {prog} --help")

    return made


def explain(message: str, args: list[str], arguments: Any) -> str:
    """tyro's message about the value of a flag, by that value and what belongs there."""
    if missing := re.match(r"Missing from (.+?): ([A-Z]+)", message):
        return f"{missing[1]} needs {missing[2]}"

    found = re.search(r"(?:Error parsing |argument ')(--[\w.-]+)", message)
    flag = found[1] if found else ""
    _, kind = flags_of(arguments).get(flag, (None, None))
    places = [i for i, arg in enumerate(args) if arg.partition("=")[0].replace("_", "-") == flag]
    if kind is None or not places:
        return message

    _, equals, text = args[places[-1]].partition("=")
    after = takewhile(lambda arg: not arg.startswith("--"), args[places[-1] + 1 :])
    values = [text] if equals else list(after)
    if not values:
        return f"{flag} needs a value: {describe_type(kind)}"

    if get_origin(kind) is not tuple:
        values = values[:1]

    return f"{flag} {' '.join(values)!r} is not {describe_type(kind)}"

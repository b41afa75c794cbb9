"""The `mesotron` command: parse, then import, then run.

A command is one line in COMMANDS. tyro parses its arguments into a config; recipes, runs to resume
and TOML files give the defaults. Nothing heavy (torch, jax, numpy, matplotlib) is imported before
that, so help and mistakes answer at once.
"""

import io
import os
import re
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import MISSING, Field, fields, replace
from functools import partial
from inspect import cleandoc
from pathlib import Path
from pkgutil import resolve_name as load
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import tyro

from mesotron import __version__, config
from mesotron.config import aliases
from mesotron.config.base import (
    Config,
    describe_type,
    flags_of,
    from_plain,
    help_text,
    suggest,
    unchecked,
    validate,
)
from mesotron.config.flags import read_table, short_help
from mesotron.config.train import LanguageRunConfig
from mesotron.config.words import Words, sort_words
from mesotron.models.messages import is_panic
from mesotron.recipes import adapt, describe_recipes, make_plan, make_recipe
from mesotron.runs.deadline import Deadline
from mesotron.runs.extras import has_gpu_driver, require
from mesotron.runs.files import printable
from mesotron.runs.own_code import is_our_own
from mesotron.runs.process import (
    SharedFailure,
    ignore_launcher,
    is_main,
    mark_start,
    num_processes,
    tell_launcher,
)
from mesotron.runs.resume import eval_defaults, settings_to_resume
from mesotron.runs.trust import code_names, names_code, search_working_folder

C = TypeVar("C")
LAST_WORD = 2.0  # seconds that the other processes leave the main one to say what failed


class UsageError(ValueError):
    """A command line that cannot be used; the text is one sentence for the user."""


# Commands


class Presets(NamedTuple):
    """Defaults by the value of the positional field, such as recipes."""

    make: Callable[[str], Any]  # raises ValueError for an unknown name
    describe: Callable[[bool], str]  # a paragraph for the help, or for all of it
    for_data: str = ""  # the preset of a command line that gives --data and none by name
    adapt: Callable[[Any, Collection[str]], Any] | None = None  # to the settings that are chosen


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


RECIPE = Presets(make_recipe, describe_recipes, "own", adapt)
PLAN = Presets(make_plan, describe_recipes, "own", adapt)
RUN = Presets(eval_defaults, lambda _: "The task and length of a run are its own by default.")
COMMANDS = {
    "train": Command(config.TrainConfig, "mesotron.recipes.command:run", RECIPE, "rlvr"),
    "plan": Command(config.PlanConfig, "mesotron.rlvr.plan.cost:run", PLAN),
    "sft": Command(config.SftConfig, "mesotron.rlvr.train:run", None, "rlvr"),
    "eval": Command(config.EvalConfig, "mesotron.evaluate.command:run", RUN, "rlvr"),
    "chat": Command(config.ChatConfig, "mesotron.serve.chat:run", None, "rlvr"),
    "export": Command(config.ExportConfig, "mesotron.serve.export:run", None, "rlvr"),
    "watch": Command(config.WatchConfig, "mesotron.watch.command:run"),
    "report": Command(config.ReportConfig, "mesotron.report.command:run"),
    "check": Command(config.RewardCheckConfig, "mesotron.rewards.check:run", None, "rlvr"),
    "compare": Command(config.CompareConfig, "mesotron.compare.tournament:run"),
    "compare sweep": Command(config.SweepConfig, "mesotron.compare.sweep:run", None, "sweep"),
    "mcp": Command(config.McpConfig, "mesotron.agents.server:run", None, "mcp"),
    "doctor": Command(config.DoctorConfig, "mesotron.runs.doctor:run"),
    "ppo snake": Command(config.SnakeConfig, "mesotron.ppo:run", None, "ppo"),
    "vla demos": Command(config.DemosConfig, "mesotron.vla.demos:run"),
    "vla train": Command(config.VlaTrainConfig, "mesotron.vla.session:train", None, "vla"),
    "vla eval": Command(config.VlaEvalConfig, "mesotron.vla.evaluation:run", None, "vla"),
    "optim route": Command(config.RouteConfig, "mesotron.optim.routing.command:run"),
    "optim spectrum": Command(config.SpectrumConfig, "mesotron.spectral.spectrum:run"),
}
GROUPS = {
    "ppo": "Games with PPO in JAX",
    "vla": "Robot policies",
    "optim": "Optimizers",
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
        code = main(sys.argv[1:])
        leave_threads(code)
        return code

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
    except BaseException as error:
        if isinstance(error, SharedFailure) and num_processes() > 1:
            ignore_launcher()
            if not is_main():
                time.sleep(LAST_WORD)
                return 2

        message = message_for_user(error)
        if message is None:
            raise
        return fail(message)


def leave_threads(code: int) -> None:
    """After a limit, end without the threads that a reward has left running: Python would wait for
    them."""
    if Deadline.any_passed and threading.active_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def message_for_user(error: BaseException) -> str | None:
    """What the user can do about an error; None for a bug, which keeps its traceback."""
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"this needs {error.name}: pip install 'mesotron[{EXTRAS[error.name]}]'"

    if isinstance(error, OSError) and error.errno is not None:  # else a library's own use of it
        return f"{error.filename or 'system'}: {error.strerror}"

    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):
        return str(error)  # as pathlib says it up to Python 3.12

    if isinstance(error, ValueError) and is_our_own(error):
        return str(error)

    if is_panic(error):  # while a text is split into tokens
        return f"the tokenizer failed ({error}): correct the model's tokenizer.json"

    return None


def fail(message: str, code: int = 2) -> int:
    sentence = f"mesotron: {printable(' '.join(message.split()))}"
    print(sentence, file=sys.stderr)
    tell_launcher(sentence)
    return code


def dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview())
        return 0

    if args[0] == "--version":
        print(f"mesotron {__version__}")
        return 0

    check_home_folders(args)
    args = rename_command(args)
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


def check_home_folders(args: Sequence[str]) -> None:
    for path in (word.rpartition("=")[2] for word in args):
        if path.startswith("~") and " " not in path and os.path.expanduser(path) == path:
            raise UsageError(f"{path}: there is no such user's home folder; write the path out")


def rename_command(args: list[str]) -> list[str]:
    """Replace the old name of a command, with a note."""
    for old, new in aliases.COMMANDS.items():
        words = old.split()
        if args[: len(words)] == words:
            print(f"mesotron: {old} is now called {new}", file=sys.stderr)
            return [*new.split(), *args[len(words) :]]

    return args


def split_name(args: list[str]) -> tuple[str, list[str]]:
    """Split `vla train --steps 3` into the name of a command or group, and the rest."""
    args = rename_command(args)
    first = args[0]
    rest = args[1:]
    if rest and f"{first} {rest[0]}" in COMMANDS:
        return f"{first} {rest[0]}", rest[1:]
    if first in COMMANDS:
        return first, rest

    known = [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]
    if known and (not rest or rest[0] in ("-h", "--help")):
        return first, []

    word = rest[0] if known else first
    known = known or list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    kind = "flag" if word.startswith("-") else "command"
    raise UsageError(f"unknown {kind} {word!r}{suggest(word, known)}; known: {', '.join(known)}")


# Help


def overview(group: str = "") -> str:
    """The commands: those for language models first, then the groups."""
    width = max(map(len, COMMANDS))
    sections: dict[str, list[str]] = {}

    for name, command in COMMANDS.items():
        first = name.split()[0]
        is_inside = name != first and first in COMMANDS  # its help names it
        if first.startswith(group) and not is_inside:
            line = f"  mesotron {name:<{width}}  {command.summary}"
            sections.setdefault(GROUPS.get(first, "Language models"), []).append(line)

    lines = ["usage: mesotron COMMAND [OPTIONS]   (mesotron COMMAND --help for details)"]
    for title, commands in sections.items():
        lines += ["", f"{title}:", *commands]

    if not group:
        lines += ["", f"  mesotron {'--version':<{width}}  Print the version."]

    return "\n".join(lines)


HELP = {"-h", "--help", "--help-all"}


def show_help(
    config_type: Any, args: Sequence[str], prog: str, presets: Presets | None = None
) -> None:
    """Print the help of a command; flags beside --help change the defaults that it shows."""
    default = find_default(config_type, args, prog, presets)
    if "--help-all" in args or not issubclass(config_type, LanguageRunConfig):
        about = cleandoc(config_type.__doc__)
        if presets:
            about += f"\n\n{presets.describe(True)}"

        run_tyro(config_type, ["--help"], prog, default, about)

    print(common_help(config_type, prog, default or config_type(), presets))


def find_default(
    config_type: Any, args: Sequence[str], prog: str, presets: Presets | None
) -> Any | None:
    given = [word for word in args if word not in HELP]
    while given and re.match("-[^=]*$", given[-1]):  # `--data --help`
        given.pop()

    if not given and not presets:
        return None

    with unchecked():
        return read_config(config_type, given, prog, presets)


def common_help(config_type: Any, prog: str, default: Any, presets: Presets | None) -> str:
    """The flags that people use; `--help-all` has the rest."""
    usage = f"usage: {prog}{' [RECIPE | FILE.toml]' if presets else ' [FILE.toml]'} [FLAGS]"
    example = f"  {prog} --model M --data mine.jsonl{' --reward mine.py:score' if presets else ''}"
    lines = [usage, "", config_type.__doc__, "", example, "", short_help(config_type, default), ""]
    if presets:
        lines += [presets.describe(False), ""]

    rest = "all recipes" if presets else "by section"
    lines.append(f"All {len(flags_of(config_type))} flags, {rest}: {prog} --help-all")
    return "\n".join(lines)


# Parsing


def parse(
    config_type: type[C],
    args: Sequence[str],
    prog: str = "mesotron",
    presets: Presets | None = None,
) -> C:
    """Parse the arguments of a command.

    Flags win over a TOML file (`--config FILE`), which wins over the defaults: those of the preset
    named by the positional field, or with `--resume RUN` the settings of that run.
    """
    if args and args[0].endswith(".toml") and issubclass(config_type, LanguageRunConfig):
        args = ["--config", *args]

    if HELP.intersection(args):
        show_help(config_type, args, prog, presets)
        raise SystemExit(0)

    with unchecked():  # only the final config is checked
        made = read_config(config_type, args, prog, presets)

    return validate(made)


def read_config(
    config_type: Any,
    args: Sequence[str],
    prog: str,
    presets: Presets | None,
) -> Any:
    """Sort the words, find the defaults that they name, and let tyro read the values."""
    words = sort_words(config_type, args)
    file = words.take("--config")
    table = read_toml(config_type, file)

    base = base_of(config_type, words, table, presets)
    default = base
    if table:
        default = from_plain(config_type, table, str(file), base)

    is_vouched_for = names_own_code(config_type, words, base, default)
    if default is not None:
        add_trl_defaults(words, default)

    made = run_tyro(config_type, list(words), prog, default)
    if presets and presets.adapt and "--resume" not in words.flags:
        made = presets.adapt(made, chosen_settings(config_type, words, table))

    has_trust = any(item.name == "trust" for item in fields(config_type))
    if is_vouched_for and has_trust:  # an evaluation has none: it runs what is named, and no more
        return replace(made, trust=True)

    return made


def read_toml(config_type: Any, path: str | None) -> dict[str, Any]:
    if path is None:
        return {}

    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # beyond syntax: depth, digits, encoding
        raise UsageError(f"{path} is not valid TOML: {error}") from error

    return read_table(config_type, table, path)


def base_of(
    config_type: Any, words: Words, table: Mapping[str, Any], presets: Presets | None
) -> Any | None:
    """The settings of the run to resume, or of the preset; None if there is neither."""
    if "--resume" in words.flags:
        return settings_to_resume(config_type, Path(words.flags["--resume"][0]))
    if presets is None:
        return None

    item = next(item for item in fields(config_type) if item.metadata.get("positional"))
    name = table.get(item.name, item.default)
    if words.positional:
        name = words.positional[0]
    if not isinstance(name, str):
        raise UsageError(f"{item.name} = {name!r:.80} is not a name")

    if name == item.default and presets.for_data and gives_own_data(words, table):
        name = presets.for_data

    return presets.make(name)


def gives_own_data(words: Words, table: Mapping[str, Any]) -> bool:
    """Whether problems come from the user: data that no task reads, or environments."""
    task = table.get("task", {})
    if "--env" in words.flags or task.get("env"):
        return True

    name = task.get("name", config.TaskConfig.name)
    data = task.get("data", ())

    if "--task" in words.flags:
        (name,) = words.flags["--task"]
    if "--data" in words.flags:
        data = words.flags["--data"]

    return config.TaskConfig(name=name, data=tuple(data)).has_own_data


def chosen_settings(config_type: Any, words: Words, table: Mapping[str, Any]) -> set[str]:
    """Dotted names of what the command line or the TOML file sets."""
    flags = flags_of(config_type)
    chosen = {flags[flag].path for flag in words.typed}

    for section, values in table.items():
        if isinstance(values, Mapping):
            chosen |= {f"{section}.{name}" for name in values}

    return chosen


def add_trl_defaults(words: Words, default: Any) -> None:
    """Options of TRL add to those of the defaults; the last of a name counts."""
    if "--trl" in words.flags:
        texts = [*default.trl, *words.flags["--trl"]]
        options = {text.partition("=")[0]: text for text in texts}
        words.flags["--trl"] = list(options.values())


def names_own_code(config_type: Any, words: Words, base: Any | None, default: Any | None) -> bool:
    """Whether the code that a run to resume names is named by the user again, who so trusts it.

    What the command line or the user's file names is the user's own: the working folder is searched
    for it.
    """
    saved = [] if base is None else code_names(base)
    own = set()
    if default is not base:
        own |= set(code_names(default)).difference(saved)

    for flag, setting in flags_of(config_type).items():
        if setting.field.metadata.get("is_code"):
            own |= set(filter(names_code, words.flags.get(flag, [])))

    if own:
        search_working_folder()

    return bool(saved) and own.issuperset(saved)


# tyro

REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.struct_rule
def describe_config(
    info: tyro.constructors.StructTypeInfo,
) -> tyro.constructors.StructConstructorSpec | None:
    """A config as tyro sees it: fields with their flags and help, and where each is typed."""
    kind = info.type
    if not (isinstance(kind, type) and issubclass(kind, Config)):
        return None

    hints = get_type_hints(kind)
    values = info.default if isinstance(info.default, kind) else None
    specs = []

    for item in fields(kind):  # type: ignore[arg-type]
        default = item.default if values is None else getattr(values, item.name)
        spec = tyro.constructors.StructFieldSpec(
            name=item.name,
            type=annotate(hints[item.name], item),
            default=tyro.MISSING_NONPROP if default is MISSING else default,
            helptext=partial(help_text, kind, item.name),
        )
        specs.append(spec)

    if kind.prefix:
        return tyro.constructors.StructConstructorSpec(kind, tuple(specs))

    def without_file(config: Path | None, **values: Any) -> Any:
        return kind(**values)

    return tyro.constructors.StructConstructorSpec(without_file, (*specs, FILE))


FILE = tyro.constructors.StructFieldSpec(
    name="config",
    type=Path | None,  # type: ignore[arg-type]
    default=None,
    helptext="TOML file with other defaults; flags win over it.",
)


def annotate(kind: Any, item: Field[Any]) -> Any:
    """The type of a field, with where it stands on a command line."""
    if item.metadata.get("positional"):
        shown = tyro.conf.arg(metavar=item.name.upper())
        return Annotated[kind, tyro.conf.Positional, shown]
    if flag := item.metadata.get("flag"):
        return Annotated[kind, tyro.conf.arg(name=flag, prefix_name=False)]

    return kind


def run_tyro(
    config_type: Any, args: list[str], prog: str, default: Any = None, about: str = ""
) -> Any:
    """Parse with tyro; its error boxes become one sentence."""
    with redirect_stderr(io.StringIO()) as box:
        try:
            made, unknown = tyro.cli(
                config_type,
                args=args,
                prog=prog,
                description=about,
                default=tyro.MISSING_NONPROP if default is None else default,
                return_unknown_args=True,
                config=[tyro.conf.DisallowNone],  # None is said by leaving a flag out
                registry=REGISTRY,
            )
        except SystemExit as stop:
            if not stop.code:
                raise  # help
            raise UsageError(f"{explain(box.getvalue(), args, config_type)}; see --help") from None

    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; see {prog} --help")

    return made


def explain(box: str, args: Sequence[str], config_type: Any) -> str:
    """The message in tyro's box: by the value of the flag that is wrong and what belongs there."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:-1]]
    message = " ".join(" ".join(lines).split())
    message = message.partition("───")[0].partition("Got errors:")[0].strip().rstrip(".")

    if missing := re.match(r"Missing from (.+?): ([A-Z]+)", message):
        return f"{missing[1]} needs {missing[2]}"

    match = re.search(r"(?:Error parsing |argument ')(--[\w.-]+)", message)
    setting = flags_of(config_type).get(match[1]) if match else None
    if setting is None:
        return message

    place = next(k for k, word in enumerate(args) if word.partition("=")[0] == setting.flag)
    _, equals, text = args[place].partition("=")
    values = [text] if equals else []
    for word in args[place + 1 :] if not equals else ():
        if word.startswith("--"):
            break
        values.append(word)

    return f"{setting.flag} {' '.join(values)!r} is not {describe_type(setting.kind)}"

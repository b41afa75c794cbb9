"""Words of a command line to a config dataclass; whatever is wrong with them becomes one sentence.

tyro converts the values and writes the help. Its error boxes are not used: the words are first cut
into flags and their values by the types of the fields, so that an error can name the flag, the
value and the way out.
"""

import difflib
import io
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from mesotron.config.aliases import rename_flags
from mesotron.flags import Flag, choices, describe_type, flags_of, required
from mesotron.runs.continuation import settings_to_resume

Config = TypeVar("Config")

# A flag left out is how "not given" is said, so no flag offers the word None.
MARKERS = (tyro.conf.DisallowNone,)


class UsageError(ValueError):
    """Words that cannot be understood; the text is one sentence for the user."""


@dataclass(frozen=True)
class Presets:
    """Whole configs by the name in a positional field, such as recipes: defaults of the flags."""

    make: Callable[[str], Any]
    """The config of a name; raises ValueError if there is none."""
    describe: Callable[[], str]
    """All names with what they are, for the help."""


def parse(
    config_type: type[Config], words: list[str], prog: str, presets: Presets | None = None
) -> Config:
    """Read the words after a command's name.

    Args:
        config_type: a config dataclass.
        words: such as `["--steps", "5"]`; `--config file.toml` gives defaults that flags win over.
        prog: the command as typed, for help and errors.
        presets: configs by the value of the positional field; file and flags win over them.

    Returns:
        A filled `config_type`.

    Raises:
        UsageError: one sentence naming the value and the way out.
        SystemExit: with code 0, after printing help.

    Example:
        >>> from mesotron.config import SpectrumConfig
        >>> parse(SpectrumConfig, ["muon", "--shape", "64", "256"], "mesotron spectrum").shape
        (64, 256)
    """
    words = rename_flags(config_type, words)
    flags = flags_of(config_type)
    if "-h" in words or "--help" in words:
        first = [word for word in words[:1] if not looks_like_flag(word)]
        named = place_unnamed(first, {}, flags, prog) if presets else {}
        print_help(config_type, prog, preset_of(presets, config_type, named), presets)
    words, path = take_config_path(words)
    given = read_toml(path, flags, config_type) if path else {}
    # A flag replaces the file's whole value, so a list in the file is not added to.
    given |= cut(words, flags, prog)
    return convert(config_type, flags, given, prog, defaults_of(presets, config_type, given))


def defaults_of(
    presets: Presets | None, config_type: Any, given: dict[str, list[str]]
) -> Any | None:
    """What flags that are not given mean: a run's own settings if one is continued, else those of
    the preset."""
    if given.get("resume"):
        return settings_to_resume(config_type, Path(given["resume"][0]))
    return preset_of(presets, config_type, given)


def preset_of(presets: Presets | None, config_type: Any, given: dict[str, list[str]]) -> Any | None:
    """The config that the positional field names, by its default if it is not given."""
    if presets is None:
        return None
    field = next(item for item in fields(config_type) if item.metadata.get("positional"))
    return presets.make((given.get(field.name) or [str(field.default)])[0])


def take_config_path(words: list[str]) -> tuple[list[str], Path | None]:
    """Split `--config FILE` off the words."""
    if sum(word.partition("=")[0] == "--config" for word in words) > 1:
        raise UsageError("--config is given more than once: put all settings into one file")
    for place, word in enumerate(words):
        if word.startswith("--config="):
            return words[:place] + words[place + 1 :], Path(word.removeprefix("--config="))
        if word == "--config":
            if place + 1 == len(words):
                raise UsageError("--config needs a TOML file, as in --config run.toml")
            return words[:place] + words[place + 2 :], Path(words[place + 1])
    return words, None


def read_toml(path: Path, flags: dict[str, Flag], config_type: type) -> dict[str, list[str]]:
    """A sparse TOML file as flags: keys are field names, tables are nested configs."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    given: dict[str, list[str]] = {}
    for key, value in flatten(table):
        renamed = rename_flags(config_type, [f"--{key}={value}"])
        if renamed != [f"--{key}={value}"]:
            key, value = "rollout.fast", renamed == ["--rollout.fast"]
        if key not in flags:
            known = ", ".join(sorted(flags))
            raise UsageError(f"{path} has an unknown key {key!r}{hint(key, flags)}; known: {known}")
        given[key] = as_words(flags[key], value)
    return given


def flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables under dotted names."""
    for key, value in table.items():
        name = prefix + key.replace("_", "-")
        if isinstance(value, dict):
            yield from flatten(value, prefix=f"{name}.")
        else:
            yield name, value


def as_words(flag: Flag, value: Any) -> list[str]:
    """A TOML value as the words that would follow its flag."""
    if flag.num_values == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{flag.name} = {value!r}: expected true or false")
        return ["true" if value else "false"]
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def cut(words: list[str], flags: dict[str, Flag], prog: str) -> dict[str, list[str]]:
    """Cut the words into flag -> values; words that no flag takes go to the positional field."""
    given: dict[str, list[str]] = {}
    unnamed: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not looks_like_flag(word):
            unnamed.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        flag, values = find_flag(word, name.replace("_", "-"), flags, prog)
        if equals:
            values = [value]
        elif flag.num_values != 0:
            values = take_values(flag, rest)
        elif values == ["true"] and rest and rest[0].lower() in ("true", "false"):
            values = [rest.pop(0)]  # sweeps write switches so: --name=False, --name False
        given[flag.name] = [v.lower() for v in values] if flag.num_values == 0 else values
    return given | place_unnamed(unnamed, given, flags, prog)


def place_unnamed(
    unnamed: list[str], given: dict[str, list[str]], flags: dict[str, Flag], prog: str
) -> dict[str, list[str]]:
    """Give the words that no flag took to the positional field."""
    target = next((flag for flag in flags.values() if flag.positional), None)
    room = 0 if target is None or target.name in given else target.num_values
    if room is not None and len(unnamed) > room:
        raise UsageError(f"unexpected argument {unnamed[room]!r}; see {prog} --help")
    return {target.name: unnamed} if target and unnamed else {}


def looks_like_flag(word: str) -> bool:
    """True for `--name` and `-n`, false for negative numbers and a lone dash."""
    return word.startswith("-") and not word.lstrip("-")[:1].isdigit() and word not in ("-", "-.")


def find_flag(word: str, name: str, flags: dict[str, Flag], prog: str) -> tuple[Flag, list[str]]:
    """The flag of that name and, for a switch, its value: `--no-name` turns it off."""
    if word.startswith("--"):
        if name in flags:
            return flags[name], ["true"]
        positive = name.removeprefix("no-")
        if positive in flags and flags[positive].num_values == 0:
            return flags[positive], ["false"]
    dashed = [f"--{known}" for known in flags]
    typed = word.partition("=")[0]
    raise UsageError(f"unknown flag {typed}{hint(typed, dashed)}; see {prog} --help")


def take_values(flag: Flag, rest: list[str]) -> list[str]:
    """Take from `rest` as many words as the flag wants, up to the next flag."""
    values: list[str] = []
    while rest and len(values) != flag.num_values and not looks_like_flag(rest[0]):
        values.append(rest.pop(0))
    return values


def convert(
    config_type: type[Config],
    flags: dict[str, Flag],
    given: dict[str, list[str]],
    prog: str,
    preset: Config | None = None,
) -> Config:
    """Let tyro turn the words into typed values; if it cannot, say which flag is at fault."""
    for name, values in given.items():
        if not accepts(flags[name], values):
            raise UsageError(describe_bad_value(flags[name], values, prog))
    words = [word for name, values in given.items() for word in spell(flags[name], values)]
    try:
        return run_tyro(config_type, words, preset)
    except SystemExit:
        # Every value is good by itself, so what is left is a field without a default.
        missing = next(name for name in required(config_type) if name not in given)
        raise UsageError(f"{missing.upper()} is missing; see {prog} --help") from None


def accepts(flag: Flag, values: list[str]) -> bool:
    """Whether the values alone fit the flag's type."""
    if flag.num_values == 0:
        return values in (["true"], ["false"])
    if not values or len(values) != (flag.num_values or len(values)):
        return False
    try:
        run_tyro(flag.type, values)
    except SystemExit:
        return False
    return True


def run_tyro(target: Any, words: list[str], preset: Any | None = None) -> Any:
    """tyro without a word on the console; raises SystemExit on any error."""
    defaults = {} if preset is None else {"default": preset}
    # Its own console_outputs=False still prints the box of a value that cannot be converted.
    with redirect_stderr(io.StringIO()):
        return tyro.cli(target, args=words, config=MARKERS, **defaults)


def spell(flag: Flag, values: list[str]) -> list[str]:
    """The words tyro expects for a flag."""
    if flag.num_values == 0:
        return [f"--{flag.name}" if values == ["true"] else f"--no-{flag.name}"]
    return [f"--{flag.name}", *values]


def describe_bad_value(flag: Flag, values: list[str], prog: str) -> str:
    """One sentence on a value that does not fit."""
    expected = describe_type(flag.type)
    if not values:
        return f"--{flag.name} needs {expected}; see {prog} --help"
    bad = next((word for word in values if not fits_one(flag, word)), " ".join(values))
    close = hint(bad, choices(flag.type))
    return f"--{flag.name} {bad!r} is not valid{close}: expected {expected}; see {prog} --help"


def fits_one(flag: Flag, word: str) -> bool:
    """Whether one word fits the type of a single item of the flag."""
    try:
        run_tyro(flag.item_type, [word])
    except SystemExit:
        return False
    return True


def hint(word: str, known: Iterable[str]) -> str:
    """` (did you mean x?)` for a close name, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def print_help(
    config_type: type, prog: str, preset: Any | None = None, presets: Presets | None = None
) -> None:
    """tyro's help for a command, with its positional field in the usage line."""
    shown = hide_empty_defaults(config_type, preset)
    about = f"{config_type.__doc__}\n\nA TOML file may give other defaults: --config FILE."
    if presets is not None:
        about += f"\n\n{presets.describe()}"
    usage = f"{prog} {positional_usage(config_type)}".strip()
    tyro.cli(shown, prog=usage, args=["--help"], description=about, config=MARKERS)


def hide_empty_defaults(config_type: Any, preset: Any | None = None) -> type:
    """The config with nothing in the place of `(default: None)`: its help says what happens.

    Configs inside it are treated alike; with a preset its values are the defaults shown.
    """
    hints = get_type_hints(config_type)
    silent = tyro.conf.arg(help_behavior_hint="")
    types: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for item in fields(config_type):
        default = item.default if preset is None else getattr(preset, item.name)
        if is_dataclass(hints[item.name]) and default is not MISSING:
            types[item.name] = hide_empty_defaults(hints[item.name], default)
            defaults[item.name] = types[item.name]()
        elif default in (None, ()):
            types[item.name], defaults[item.name] = Annotated[hints[item.name], silent], default
        elif preset is not None:
            types[item.name], defaults[item.name] = hints[item.name], default
    members = {"__annotations__": types, "__doc__": config_type.__doc__, **defaults}
    copy = type(config_type.__name__, (config_type,), members)
    return dataclass(frozen=True, kw_only=True)(copy)


def positional_usage(config_type: type) -> str:
    """The positional field as usage lines write it: `MODEL`, or `[FILTERS ...]` with a default."""
    for flag in flags_of(config_type).values():
        if flag.positional:
            shown = flag.name.upper() + (" ..." if flag.num_values is None else "")
            return shown if flag.name in required(config_type) else f"[{shown}]"
    return ""

"""The names people type, from flags.toml: short flags, and what other libraries call a setting."""

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from mesotron.config.base import flags_of, rename_flags, suggest


class Short(NamedTuple):
    setting: str  # the setting it stands for
    value: str
    about: str


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SHORT = {name: Short(*values) for name, values in _TABLES["short"].items()}
ALSO_SHORT: dict[str, str] = _TABLES["also_short"]
SYNONYMS: dict[str, str] = _TABLES["synonyms"]
# Lists that cannot be empty.
_NOT_EMPTY = {"--trl": "KEY=VALUE, such as top_k=20"}
_NOT_EMPTY |= dict.fromkeys(("--data", "--task.data"), "a file, a folder or a hub name")
_MEANT = {word: name for name, words in SYNONYMS.items() for word in words.split()}
# The settings, and the flags, that the short ones stand for.
_TARGETS = {name: one.setting for name, one in SHORT.items()} | ALSO_SHORT
_LONG = {f"--{name}": f"--{path.replace('_', '-')}" for name, path in _TARGETS.items()}


def short_flags(config_type: Any) -> dict[str, str]:
    """Short flags of a command and the flags they stand for. A field of the same name is one."""
    flags = flags_of(config_type)
    return {short: flag for short, flag in _LONG.items() if flag in flags and short not in flags}


def as_typed(message: str, args: Sequence[str]) -> str:
    """A message that names flags as they were typed."""
    typed = {arg.partition("=")[0].replace("_", "-") for arg in args}
    for short in typed & _LONG.keys() - _LONG.values():
        message = re.sub(rf"{re.escape(_LONG[short])}(?![\w.-])", short, message)
    return message


def expand_flags(config_type: Any, args: Sequence[str]) -> list[str]:
    """Replace short flags by those of the settings. Commands that start other runs, with settings
    NAME=VALUE of theirs, get the short flags as such settings."""
    short = short_flags(config_type)
    flags = flags_of(config_type)
    passed_on = next((flag for flag in ("--set", "--space") if flag in flags), None)
    expanded: list[str] = []
    settings: list[str] = []
    lists: dict[str, list[str]] = {}  # of which tyro would keep the last only
    rest = list(args)

    def values_of(text: str, equals: str) -> list[str]:
        values = [text] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        return values

    while rest:
        arg = rest.pop(0)
        name, equals, text = arg.partition("=")
        flag = name.replace("_", "-")
        key = flag.removeprefix("--")
        target = _TARGETS.get(key)
        value = text if equals else "".join(rest[:1])
        has_no_value = not value or (not equals and value.startswith("-"))
        if has_no_value and flag in _NOT_EMPTY and (passed_on or flag in short or flag in flags):
            raise ValueError(f"{flag} needs a value: {_NOT_EMPTY[flag]}")

        long = short.get(flag, flag)
        if long in flags and is_list(flags[long][1]):
            lists.setdefault(long, []).extend(values_of(text, equals))
        elif flag in short:
            expanded.append(short[flag] + equals + text)
            if key == "vllm" and has_no_value:
                expanded.append("colocate")
        elif passed_on and name.startswith("--") and target and flag not in flags:
            settings.append(f"{target}={','.join(values_of(text, equals)) or 'colocate'}")
        elif flag.startswith("--trl.") and "--trl" in flags:
            if not equals:  # a switch needs no value
                text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            lists.setdefault("--trl", []).append(f"{key[4:].replace('-', '_')}={text}")
        else:
            expanded.append(arg)

    if settings and passed_on:  # before the settings given by name, which win
        lists[passed_on] = settings + lists.get(passed_on, [])

    return [*expanded, *(word for flag, values in lists.items() for word in (flag, *values))]


def is_list(kind: Any) -> bool:
    """Whether it is tuple[X, ...], or that or None."""
    return any(get_args(one)[-1:] == (...,) for one in (kind, *get_args(kind)))


def expand_setting(config_type: Any, name: str) -> str:
    """The setting that a name such as lr or batch stands for; other names as they are."""
    flag = short_flags(config_type).get(f"--{name.replace('_', '-')}")
    return name if flag is None else flag.removeprefix("--").replace("-", "_")


def read_setting(config_type: Any, item: str) -> tuple[str, str]:
    """The full name, and the text, of a setting NAME=VALUE; ValueError if there is none."""
    name, equals, text = item.partition("=")
    if not equals:
        raise ValueError(f"{item!r} must look like NAME=VALUE, such as steps=20")

    name = expand_setting(config_type, name.strip())
    (flag,) = rename_flags(config_type, [f"--{name}={text}"])

    flag, equals, text = flag.partition("=")
    if not equals:  # an old name of a switch
        flag, text = flag.replace("--no-", "--", 1), str(not flag.startswith("--no-")).lower()

    flag = flag.replace("_", "-")
    known = flags_of(config_type)
    if flag not in known and not ("--trl" in known and flag.startswith("--trl.")):
        raise ValueError(f"{item!r}: there is no such setting{suggest_flag(flag, config_type)}")

    return flag[2:].replace("-", "_"), text


def expand_table(config_type: Any, table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A TOML table with short names, such as lr = 1e-5, in their sections."""
    made = {key: dict(one) if isinstance(one, Mapping) else one for key, one in table.items()}
    found: dict[str, Any] = {}

    if isinstance(own := made.get("trl"), Mapping):
        texts = {k: x if isinstance(x, str) else json.dumps(x) for k, x in own.items()}
        made["trl"] = [f"{key}={text}" for key, text in texts.items()]

    for key in list(made):
        if key == "data" and isinstance(made[key], Mapping):
            found |= {f"data.{name}": value for name, value in made.pop(key).items()}
        elif not isinstance(made[key], Mapping) and expand_setting(config_type, key) != key:
            found[key] = made.pop(key)

    for key, value in found.items():
        path = "task.data" if key == "data.files" else expand_setting(config_type, key)
        if path == key:
            hint = suggest(key[5:], ("files", "columns", "weights"))
            raise ValueError(f"{source}: [data] has an unknown key {key[5:]!r}{hint}")

        section, _, name = path.rpartition(".")
        target = made.setdefault(section, {})
        if not isinstance(target, dict):
            raise ValueError(f"{source}: {section} = {target!r:.80} must be a table, [{section}]")
        if name in (known.replace("-", "_") for known in target):
            raise ValueError(f"{source} sets {path} twice, once as {key}: keep one of them")

        target[name] = value

    return made


def suggest_flag(word: str, config_type: Any) -> str:
    """` (did you mean --batch?)` for a flag of the same meaning or a close name."""
    flags = flags_of(config_type)
    short = short_flags(config_type)
    known = [*short, *flags]
    name = word.lstrip("-").replace("_", "-").lower()
    leaf = name.rpartition(".")[2]
    meant = [f"--{_MEANT[name]}"] if name in _MEANT else []
    meant += difflib.get_close_matches(f"--{name}", known, n=1, cutoff=0.85)
    meant += [f"--{_MEANT[leaf]}"] if leaf in _MEANT else []
    meant += [flag for flag in known if re.split(r"[.]|--", flag)[-1] == leaf]

    if name not in SHORT:  # else a flag of other commands
        meant += difflib.get_close_matches(f"--{name}", known, n=1, cutoff=0.7)

    passed_on = (f"{flag} {name}=VALUE" for flag in ("--set", "--space") if flag in flags)
    choice = next((flag for flag in meant if flag in known), None) or next(passed_on, None)

    return f" (did you mean {choice}?)" if choice else ""


def short_help(config_type: Any, default: Any) -> str:
    """The common flags of a command, with the values of `default`."""
    short = short_flags(config_type)
    flags = flags_of(config_type)

    lines = []
    for name, one in SHORT.items():
        flag = short.get(f"--{name}", f"--{name}")
        if flag in flags:
            value = default
            for part in flag.removeprefix("--").split("."):
                value = getattr(value, part.replace("-", "_"))

            shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            given = f" [{shown}]" if value not in (None, (), "") else ""
            lines.append(f"  {f'--{name} {one.value}':<20} {one.about}{given}")

    return "\n".join(lines)

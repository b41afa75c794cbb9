"""The one pass over the words of a command line before tyro reads them.

    mesotron train arith --gif=false --batch 8 --data a --data b --trl.top_k 20

becomes the positional words and, by today's flags, the words of each:

    arith  --no-gif  --batch=8  --data a b  --trl top_k=20

It knows old names, both spellings of switches, lists that are given twice, and the flags that a
command passes on to the runs it starts. Values are tyro's business.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesotron.config.aliases import SETTINGS, upgrade_names
from mesotron.config.base import Setting, describe_type, flags_of
from mesotron.config.flags import PASSED_ON, describe_unknown, find_setting, passed_on_by
from mesotron.config.train import TrainConfig

# The TOML file that every command reads defaults from.
FILE = Setting("config", "--config", field(default=None), Path)  # type: ignore[arg-type]
# Numbers that a run can find by itself, and the switches for that.
AUTO = {
    "optim.lr": "lr_auto",
    "steps": "steps_auto",
}


@dataclass
class Option:
    """A flag as it is typed, and the words behind it. Those that are not its own are positional."""

    flag: str
    words: list[str]
    has_equals: bool = False

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--")

    def take(self, count: int) -> list[str]:
        """The words that are values; after FLAG=VALUE there is one."""
        count = 1 if self.has_equals else count
        values = self.words[:count]
        self.words = self.words[count:]
        return values

    def take_all(self) -> list[str]:
        return self.take(len(self.words))


@dataclass
class Words:
    """A command line, sorted."""

    positional: list[str] = field(default_factory=list)
    flags: dict[str, list[str]] = field(default_factory=dict)
    switches: dict[str, bool] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        yield from self.positional
        for flag, on in self.switches.items():
            yield flag if on else negative(flag)

        for flag, values in self.flags.items():
            if len(values) == 1:
                yield f"{flag}={values[0]}"
            else:
                yield flag
                yield from values

    def take(self, flag: str) -> str | None:
        """The value of a flag, which is no longer among the words."""
        return self.flags.pop(flag, [None])[0]

    @property
    def typed(self) -> set[str]:
        return {*self.flags, *self.switches}


def negative(flag: str) -> str:
    """--gif becomes --no-gif, and --optim.fused --optim.no-fused, as tyro spells it."""
    section, dot, leaf = flag.removeprefix("--").rpartition(".")
    return f"--{section}{dot}no-{leaf}"


def sort_words(config_type: Any, args: Sequence[str]) -> Words:
    """Sort the words of a command line; ValueError for a flag that there is not."""
    first = next((k for k, word in enumerate(args) if word.startswith("--")), len(args))
    words = Words(positional=list(args[:first]))
    old: dict[str, Any] = {}
    passed_on: list[str] = []

    for option in split_options(args[first:]):
        if not (
            add_setting(config_type, option, words)
            or add_old(option, old)
            or add_trl(config_type, option, words)
            or add_passed_on(config_type, option, passed_on)
        ):
            raise ValueError(describe_unknown(option.flag, config_type))

        words.positional += option.words

    add_upgraded(config_type, old, words)
    if passed_on:  # before the settings given by name, which win
        starter = passed_on_by(config_type) or ""
        words.flags[starter] = passed_on + words.flags.get(starter, [])

    return words


def split_options(args: Sequence[str]) -> list[Option]:
    """Each flag with the words up to the next flag."""
    options: list[Option] = []
    for word in args:
        if word.startswith("--"):
            name, equals, text = word.partition("=")
            options.append(Option(name, [text] if equals else [], bool(equals)))
        else:
            options[-1].words.append(word)

    return options


def add_setting(config_type: Any, option: Option, words: Words) -> bool:
    """Whether the option is a setting of the command, by its flag or its place in the config."""
    setting = FILE if option.name == "config" else find_setting(config_type, option.name)
    positive = find_setting(config_type, re.sub(r"(^|\.)no-", r"\1", option.name.replace("_", "-")))

    if option.words[:1] == ["auto"] and setting is not None and setting.path in AUTO:
        return add_auto(setting, option, config_type, words)

    if setting is None and positive is not None and positive.is_switch:
        words.switches[positive.flag] = False
        return True
    if setting is None:
        return False

    if setting.is_switch:
        words.switches[setting.flag] = switch_value(option)
    elif setting.is_positional:
        words.positional += option.take_all()
    elif setting.is_list:
        words.flags.setdefault(setting.flag, []).extend(values_of(option, setting))
    else:
        words.flags[setting.flag] = values_of(option, setting)

    return True


def add_auto(setting: Setting, option: Option, config_type: Any, words: Words) -> bool:
    """The switch that the word auto in place of a number stands for."""
    switch = find_setting(config_type, AUTO[setting.path])
    if switch is None:
        raise ValueError(f"{setting.flag} auto is for mesotron train and plan: give a number")

    option.take(1)
    words.switches[switch.flag] = True
    return True


def switch_value(option: Option) -> bool:
    has_word = option.words and option.words[0].lower() in ("true", "false")
    if option.has_equals and not has_word:
        text = option.words[0]
        raise ValueError(f"{option.flag} {text!r} is not valid: expected true or false")

    if has_word:
        return option.take(1)[0].lower() == "true"

    return True


def values_of(option: Option, setting: Setting) -> list[str]:
    if setting.is_list:
        values = option.take_all()
    else:
        values = option.take(count_values(setting.kind))

    if not values and (bare := setting.field.metadata.get("bare")):
        return [bare]

    example = setting.field.metadata.get("example")
    if example and not any(values):
        raise ValueError(f"{option.flag} needs a value: {example}")
    if not values and not setting.is_list:
        raise ValueError(f"{option.flag} needs a value: {describe_type(setting.kind)}")

    return values


def count_values(kind: Any) -> int:
    """How many words a value takes: two for a pair, otherwise one."""
    if getattr(kind, "__origin__", None) is tuple:
        return len(kind.__args__)

    return 1


def add_old(option: Option, old: dict[str, Any]) -> bool:
    """Whether the option is an old name; `old` collects them as plain values."""
    name = option.name.replace("-", "_")
    positive = name.replace("no_", "", 1)
    if name in SETTINGS:
        texts = option.take_all()
        old[name] = plain_value(texts)
        return True
    if positive in SETTINGS and name.startswith("no_"):
        old[positive] = False
        return True

    return False


def plain_value(texts: Sequence[str]) -> Any:
    if not texts:
        return True
    if len(texts) > 1:
        return list(texts)

    switches = {"true": True, "false": False}
    return switches.get(texts[0].lower(), texts[0])


def add_upgraded(config_type: Any, old: dict[str, Any], words: Words) -> None:
    """Add what the old names stand for; flags of today's names win."""
    for name, value in upgrade_names(old).items():
        setting = find_setting(config_type, name)
        if setting is None:
            flag = "--" + next(iter(old)).replace("_", "-")
            raise ValueError(describe_unknown(flag, config_type))

        if setting.is_switch:
            words.switches.setdefault(setting.flag, value)
        else:
            values = value if isinstance(value, list) else [value]
            words.flags.setdefault(setting.flag, [str(one) for one in values])


def add_trl(config_type: Any, option: Option, words: Words) -> bool:
    """Whether the option is --trl.KEY VALUE, which is short for --trl KEY=VALUE."""
    if not option.name.startswith("trl.") or "--trl" not in flags_of(config_type):
        return False

    key = option.name.removeprefix("trl.").replace("-", "_")
    text = "".join(option.take(1)) or "true"
    words.flags.setdefault("--trl", []).append(f"{key}={text}")
    return True


def add_passed_on(config_type: Any, option: Option, passed_on: list[str]) -> bool:
    """Whether the option is one of mesotron train that this command passes on to its runs."""
    setting = find_setting(TrainConfig, option.name)
    if passed_on_by(config_type) is None or setting is None:
        return False
    if setting.flag.removeprefix("--") not in PASSED_ON:
        return False

    passed_on.append(f"{setting.path}={','.join(values_of(option, setting))}")
    return True

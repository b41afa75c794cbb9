"""The engine behind every config: bounds, validation, plain values and old names.

A config is a frozen, keyword-only dataclass derived from `Config`. The string under a field is its
help text. Bounds are declared with `setting`; what depends on several fields goes into
`check_fields`. Both run whenever a config is made, so the command line, TOML files, Python and
resumed runs share them. The standard library only.
"""

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

C = TypeVar("C")

ENGINES = {
    "generate": False,
    "graph": True,
    "fused": True,
}  # old values of rollout.engine
Alias = tuple[str, Callable[[Any], Any]]  # new field, old value to new value
# Config class -> old field -> alias. A switch is on if any of its old fields is.
ALIASES: dict[str, dict[str, Alias]] = {
    "RolloutConfig": {
        "engine": ("fast", lambda engine: _choose("rollout.engine", engine, ENGINES)),
        "share_prompts": ("fast", bool),
        "record": ("fast", bool),
    },
}

SPELLINGS = {"--guard.precision": "--watch.precision"}  # other names of flags

_OPERATORS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}
MAX_INTEGER = 2**63  # what arrays and random generators take
MAX_SEED = 2**32 - 1  # NumPy's
_checking: ContextVar[bool] = ContextVar("checking", default=True)


def setting(
    default: Any = MISSING,
    *,
    on_resume: bool = False,
    positional: bool = False,
    is_code: bool = False,
    **bounds: float,
) -> Any:
    """A config field with bounds; None, which means "not given", always passes. `on_resume`:
    `--resume` accepts another value. `positional`: the flag's name may be left out. `is_code`: a
    value such as MODULE:NAME or command:PROGRAM acts. `bounds`: any of ge, gt, le and lt."""
    metadata = {
        "bounds": bounds,
        "overridable_on_resume": on_resume,
        "positional": positional,
        "is_code": is_code,
    }
    return field(default=default, metadata=metadata)


class Config:
    """Base of every config: checks its values when it is made. A section of other configs names the
    prefix of its flags, as in `prefix="optim."`."""

    prefix: ClassVar[str] = ""

    def __init_subclass__(cls, prefix: str | None = None) -> None:
        if prefix is not None:
            cls.prefix = prefix

    def __post_init__(self) -> None:
        if not _checking.get():
            return

        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            bounds = item.metadata.get("bounds", {})
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, str | Path) and "\0" in str(one):
                    raise ValueError(f"--{self.prefix}{item.name} {one!r} has a NUL character")
                if isinstance(one, bool) or not isinstance(one, int | float):
                    continue
                if isinstance(one, int) and abs(one) >= MAX_INTEGER:
                    raise ValueError(f"--{self.prefix}{item.name} {one!s:.24} must be below 2**63")

                if not math.isfinite(one):
                    self.refuse(item.name, "must be a finite number")

                if not all(_OPERATORS[key][0](one, limit) for key, limit in bounds.items()):
                    limits = [f"{_OPERATORS[key][1]} {limit:g}" for key, limit in bounds.items()]
                    self.refuse(item.name, f"must be {' and '.join(limits)}")

        self.check_fields()

    def check_fields(self) -> None:
        """Refuse values that contradict each other; overridden where there are any."""

    def refuse(self, name: str, why: str) -> None:
        """Raise a ValueError on one field, such as "--optim.rank 4 needs --optim.name muon"."""
        raise ValueError(f"{spell(self.prefix + name, getattr(self, name))} {why}")

    def refuse_unless(self, condition: bool, why: str, *names: str) -> None:
        """Refuse fields that have another value than their default where it has no effect."""
        for item in fields(self):  # type: ignore[arg-type]
            changed = item.name in names and getattr(self, item.name) != item.default
            if changed and not condition:
                self.refuse(item.name, why)


@contextmanager
def unchecked() -> Iterator[None]:
    """Make configs without checks while a whole is put together; then call `validate`."""
    token = _checking.set(False)
    try:
        yield
    finally:
        _checking.reset(token)


def validate(config: C) -> C:
    """Check a config that was made `unchecked`, sections first."""
    for item in fields(config):  # type: ignore[arg-type]
        if is_dataclass(value := getattr(config, item.name)):
            validate(value)

    config.__post_init__()  # type: ignore[attr-defined]
    return config


def from_plain(
    config_type: type[C], values: Mapping[str, Any], source: str = "config", base: C | None = None
) -> C:
    """Build a config from plain values; `base` gives the fields left out."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{source} holds a {type(values).__name__} where settings belong")

    hints = get_type_hints(config_type)
    names = {item.name for item in fields(config_type)}  # type: ignore[arg-type]
    made = {} if base is None else {name: getattr(base, name) for name in names}
    aliases = ALIASES.get(config_type.__name__, {})
    plain = {key.replace("-", "_"): value for key, value in values.items()}

    renamed = {key: value for key, value in plain.items() if key not in aliases}
    for old in plain.keys() & aliases:
        new, convert = aliases[old]
        if isinstance(plain[old], list | dict):
            raise ValueError(f"{source}: {old} = {plain[old]!r:.80} is not a value of it")
        renamed[new] = renamed.get(new, False) or convert(plain[old])

    for name, value in renamed.items():
        if name not in names:
            raise ValueError(f"{source} has an unknown key {name!r}{suggest(name, names)}")

        try:
            made[name] = _convert(hints[name], value, source, made.get(name))
        except (TypeError, OverflowError):
            kind = describe_type(hints[name])
            raise ValueError(f"{source}: {name} = {value!r:.80} is not {kind}") from None

    return config_type(**made)


def _convert(kind: Any, value: Any, source: str, base: Any = None) -> Any:
    if get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            try:
                return _convert(one, value, source, base)
            except TypeError:
                continue

        raise TypeError

    if is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, Mapping):
            return from_plain(kind, value, source, base)
    elif get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
    elif get_origin(kind) is tuple:
        values = value if isinstance(value, list | tuple) else [value]
        kinds = get_args(kind)
        kinds = (kinds[0],) * len(values) if Ellipsis in kinds else kinds
        if len(kinds) == len(values):
            return tuple(_convert(one, x, source) for one, x in zip(kinds, values, strict=True))
    elif kind is Path and isinstance(value, str | Path):
        return Path(value)
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif kind is NoneType and value is None:
        return None
    elif kind not in (bool, int, str, float, Path, NoneType) or type(value) is kind:
        return value  # lists and dictionaries of records that are no configs

    raise TypeError


def to_plain(value: object) -> Any:
    """A config as JSON holds it: dataclasses become dictionaries, tuples lists, paths strings."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]

    return str(value) if isinstance(value, Path) else value


def flags_of(config_type: Any, prefix: str = "--") -> dict[str, tuple[Field[Any], Any]]:
    """Every flag of a config with its field and type; sections give dotted names."""
    hints = get_type_hints(config_type)
    flags: dict[str, tuple[Field[Any], Any]] = {}
    for item in fields(config_type):
        name = prefix + item.name.replace("_", "-")
        if is_dataclass(hints[item.name]):
            flags |= flags_of(hints[item.name], f"{name}.")
        else:
            flags[name] = item, hints[item.name]

    return flags


def _choose(name: str, value: Any, choices: Mapping[Any, Any]) -> Any:
    if value not in choices:
        raise ValueError(f"--{name} {value} must be one of {', '.join(map(str, choices))}")
    return choices[value]


def rename_flags(config_type: type, args: list[str]) -> list[str]:
    """Replace old flags; a switch that several of them became comes last."""
    old_flags = _old_flags(config_type)
    switches: dict[str, bool] = {}
    kept: list[str] = []

    rest = list(args)
    while rest:
        arg = rest.pop(0)
        name, equals, text = arg.partition("=")
        arg = SPELLINGS.get(name, name) + equals + text
        flag = name.replace("_", "-")

        positive = flag.replace("--no-", "--", 1)
        if positive not in old_flags:
            kept.append(arg)
            continue

        new, convert = old_flags[positive]
        value: Any = positive == flag
        if value and (equals or (rest and not rest[0].startswith("-"))):
            text = text if equals else rest.pop(0)
            value = {"true": True, "false": False}.get(text.lower(), text)

        switches[new] = switches.get(new, False) or bool(convert(value))

    return kept + [new if on else new.replace("--", "--no-", 1) for new, on in switches.items()]


def _old_flags(config_type: type, prefix: str = "--") -> dict[str, Alias]:
    flags: dict[str, Alias] = {}
    for old, (new, convert) in ALIASES.get(config_type.__name__, {}).items():
        flags[prefix + old.replace("_", "-")] = prefix + new, convert

    for name, kind in get_type_hints(config_type).items():
        if is_dataclass(kind) and isinstance(kind, type):
            flags |= _old_flags(kind, f"{prefix}{name}.")

    return flags


def spell(name: str, value: Any) -> str:
    """A setting as it is typed: `--rollout.prompts 8`, `--no-rollout.fast`."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"

    if isinstance(value, tuple):
        value = " ".join(map(str, value))

    text = f"{value:g}" if isinstance(value, float) else value
    return f"--{flag}" if text in (None, "") else f"--{flag} {text}"


def suggest(word: str, known: Iterable[str]) -> str:
    """` (did you mean x?)` for a close name, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def describe_type(kind: Any) -> str:
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
        Path: "a path",
    }
    if get_origin(kind) is tuple:
        items = get_args(kind)
        count = "a list" if Ellipsis in items else f"a list of {len(items)}"
        return f"{count}, each {describe_type(items[0])}"

    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if kind in names:
        return names[kind]

    return " or ".join(describe_type(one) for one in get_args(kind) if one is not NoneType)

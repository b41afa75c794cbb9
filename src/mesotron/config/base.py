"""What every config has: bounds, checks, plain values, and the flags that set its fields.

A config is a frozen, keyword-only dataclass derived from `Config`. The string under a field is its
help text. Bounds are in the types of `types`; what depends on several fields goes into
`check_fields`. Both run whenever a config is made, so the command line, TOML files, Python and
resumed runs share them. The standard library only.
"""

import ast
import difflib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mesotron.config.aliases import REMOVED, Removed, upgrade
from mesotron.config.types import Bounds

C = TypeVar("C")

MAX_INTEGER = 2**63  # what arrays and random generators take
_checking: ContextVar[bool] = ContextVar("checking", default=True)


# Fields


def setting(
    default: Any = MISSING,
    *,
    flag: str | None = None,
    positional: bool = False,
    on_resume: bool = False,
    is_code: bool = False,
    bare: str | None = None,
    example: str | None = None,
) -> Any:
    """A field of a config.

    Args:
        default: its value if none is given.
        flag: its name on the command line, without dashes (unset: section.field).
        positional: the name of the flag may be left out.
        on_resume: `--resume` accepts another value.
        is_code: a value such as MODULE:NAME or command:PROGRAM is run.
        bare: the value of its flag alone.
        example: what its flag needs, for a list that must not be empty.
    """
    metadata = {
        "flag": flag,
        "positional": positional,
        "overridable_on_resume": on_resume,
        "is_code": is_code,
        "bare": bare,
        "example": example,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """One field of a config or of its sections."""

    path: str  # its place in configs, TOML files and run folders, such as rollout.prompts
    flag: str  # how it is typed, such as --batch
    field: Field[Any]
    kind: Any  # its type

    @property
    def is_switch(self) -> bool:
        return self.kind in (bool, bool | None)

    @property
    def is_list(self) -> bool:
        """Whether it is tuple[X, ...], or that or None."""
        return any(get_args(kind)[-1:] == (...,) for kind in (self.kind, *get_args(self.kind)))

    @property
    def is_positional(self) -> bool:
        return bool(self.field.metadata.get("positional"))


def flag_of(item: Field[Any], prefix: str = "") -> str:
    name = item.metadata.get("flag") or prefix + item.name
    return "--" + name.replace("_", "-")


def flags_of(config_type: Any, prefix: str = "") -> dict[str, Setting]:
    """Every flag of a config; sections give dotted names."""
    hints = get_type_hints(config_type)
    flags: dict[str, Setting] = {}

    for item in fields(config_type):
        kind = hints[item.name]
        path = prefix + item.name
        if is_dataclass(kind):
            flags |= flags_of(kind, f"{path}.")
        else:
            flag = flag_of(item, prefix)
            flags[flag] = Setting(path, flag, item, kind)

    return flags


def removed_from(config_type: Any, prefix: str = "") -> dict[str, Removed]:
    """The settings of a config and its sections that became constants, by their places."""
    gone = {}
    for kind in config_type.__mro__:
        for name, removed in REMOVED.get(kind.__name__, {}).items():
            gone[prefix + name] = removed

    for name, kind in get_type_hints(config_type).items():
        if is_dataclass(kind):
            gone |= removed_from(kind, f"{prefix}{name}.")

    return gone


def without_removed(config_type: Any, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Values without those of constants, which a file may name but not change."""
    gone = removed_from(config_type)
    for name, value in values.items():
        if name in gone and value != gone[name].value:
            instead = gone[name].instead
            raise ValueError(f"{source}: {name} = {value!r:.80} is no longer a setting: {instead}")

    return {name: value for name, value in values.items() if name not in gone}


@cache
def help_text(config_type: Any, name: str) -> str | None:
    """The string under a field, as one paragraph."""
    for kind in config_type.__mro__:
        if name not in vars(kind).get("__annotations__", {}):
            continue

        body = ast.parse(dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
        for statement, below in pairwise(body):
            is_field = (
                isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == name
            )
            if is_field and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                return " ".join(str(below.value.value).split())

    return None


def spell(name: str, value: Any) -> str:
    """A setting as it is typed: `--batch 8`, `--no-rollout.fast`."""
    flag = "--" + name.removeprefix("--").replace("_", "-")
    if isinstance(value, bool):
        if value:
            return flag

        return flag.replace("--", "--no-", 1)

    if isinstance(value, tuple):
        value = " ".join(map(str, value))

    text = f"{value:g}" if isinstance(value, float) else value
    return flag if text in (None, "") else f"{flag} {text}"


@cache
def bounds_of(config_type: Any) -> dict[str, Bounds]:
    """The bounds of each field that has any. None, which means "not given", always passes."""
    hints = get_type_hints(config_type, include_extras=True)
    bounds = {name: find_bounds(kind) for name, kind in hints.items()}
    return {name: one for name, one in bounds.items() if one is not None}


def find_bounds(kind: Any) -> Bounds | None:
    """The bounds in a type such as Count, Count | None or tuple[Count, ...]."""
    for one in getattr(kind, "__metadata__", ()):
        if isinstance(one, Bounds):
            return one

    inside = [find_bounds(part) for part in get_args(kind)]
    return next((one for one in inside if one is not None), None)


# Configs


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
            for one in value if isinstance(value, tuple) else (value,):
                self._check_value(item, one)

        self.check_fields()

    def _check_value(self, item: Field[Any], value: Any) -> None:
        flag = flag_of(item, self.prefix)
        if isinstance(value, str | Path) and "\0" in str(value):
            raise ValueError(f"{flag} {value!r} has a NUL character")

        if isinstance(value, bool) or not isinstance(value, int | float):
            return

        if isinstance(value, int) and abs(value) >= MAX_INTEGER:
            raise ValueError(f"{flag} {value!s:.24} must be below 2**63")
        if not math.isfinite(value):
            self.refuse(item.name, "must be a finite number")

        bounds = bounds_of(type(self)).get(item.name)
        if bounds is not None and value not in bounds:
            self.refuse(item.name, f"must be {bounds}")

    def check_fields(self) -> None:
        """Refuse values that contradict each other; overridden where there are any."""

    def refuse(self, name: str, why: str) -> None:
        """Raise a ValueError on one field, such as "--optim.rank 4 needs --optim muon"."""
        item = next(item for item in fields(self) if item.name == name)  # type: ignore[arg-type]
        raise ValueError(f"{spell(flag_of(item, self.prefix), getattr(self, name))} {why}")

    def refuse_unless(self, condition: bool, why: str, *names: str) -> None:
        """Refuse fields that have another value than their default where it has no effect."""
        if condition:
            return

        for item in fields(self):  # type: ignore[arg-type]
            if item.name in names and getattr(self, item.name) != item.default:
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


# Plain values, as JSON and TOML hold them


def to_plain(value: object) -> Any:
    """A config as JSON holds it: dataclasses become dictionaries, tuples lists, paths strings."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]

    return str(value) if isinstance(value, Path) else value


def from_plain(
    config_type: type[C], values: Mapping[str, Any], source: str = "config", base: C | None = None
) -> C:
    """Build a config from plain values, old names included; `base` gives the fields left out."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{source} holds a {type(values).__name__} where settings belong")

    hints = get_type_hints(config_type)
    names = {item.name for item in fields(config_type)}  # type: ignore[arg-type]

    if base is None:
        made = {}
    else:
        made = {name: getattr(base, name) for name in names}

    plain = {key.replace("-", "_"): value for key, value in upgrade(values).items()}
    for name, value in without_removed(config_type, plain, source).items():
        if name not in names:
            raise ValueError(f"{source} has an unknown key {name!r}{suggest(name, names)}")

        try:
            made[name] = _convert(hints[name], value, source, made.get(name))
        except (TypeError, OverflowError):
            kind = describe_type(hints[name])
            raise ValueError(f"{source}: {name} = {value!r:.80} is not {kind}") from None

    return config_type(**made)


def _convert(kind: Any, value: Any, source: str, base: Any = None) -> Any:
    """A plain value as a field's type; TypeError if it does not fit."""
    if get_origin(kind) in (Union, UnionType):
        return _convert_union(kind, value, source, base)

    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise TypeError
        return from_plain(kind, value, source, base)

    if get_origin(kind) is tuple:
        return _convert_tuple(kind, value, source)

    return _convert_scalar(kind, value)


def _convert_union(kind: Any, value: Any, source: str, base: Any) -> Any:
    for one in get_args(kind):
        try:
            return _convert(one, value, source, base)
        except TypeError:
            continue

    raise TypeError


def _convert_tuple(kind: Any, value: Any, source: str) -> tuple[Any, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    kinds = get_args(kind)
    if Ellipsis in kinds:
        kinds = (kinds[0],) * len(values)
    if len(kinds) != len(values):
        raise TypeError

    return tuple(_convert(one, item, source) for one, item in zip(kinds, values, strict=True))


def _convert_scalar(kind: Any, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is float and type(value) in (int, float):
        return float(value)

    if get_origin(kind) is Literal:
        fits = value in get_args(kind)
    elif kind in (bool, int, str, float, Path, NoneType):
        fits = type(value) is kind
    else:
        fits = True  # lists and dictionaries of records

    if not fits:
        raise TypeError
    return value


# Words for messages


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
    if kind in names:
        return names[kind]

    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"

    if get_origin(kind) is tuple:
        items = get_args(kind)
        count = "a list" if Ellipsis in items else f"a list of {len(items)}"
        return f"{count}, each {describe_type(items[0])}"

    return " or ".join(describe_type(one) for one in get_args(kind) if one is not NoneType)

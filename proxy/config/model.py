"""Base of a class of options made from its annotations: text in, typed and read-only values out.

msgspec checks types and bounds. pydantic could do all of this, but would take a sixth of the
proxy's memory for as long as it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Never, get_args, get_origin, get_type_hints

import msgspec

from proxy.config.secrets import SecretStr
from proxy.config.values import ByteSize

_YES = frozenset({"1", "on", "t", "true", "y", "yes"})
_NO = frozenset({"0", "off", "f", "false", "n", "no"})
_CHECKED: dict[Any, Any] = {ByteSize: int}
"""The type by which msgspec checks a value of this kind. Of a tuple it checks only the length,
since `Before` has converted the members."""


@dataclass(frozen=True, slots=True)
class Before:
    """Converts a value before its type is checked; raises ValueError with the reason."""

    change: Callable[[object], object]


@dataclass(frozen=True, slots=True)
class After:
    """Checks a value of the right type, or None; raises ValueError with the reason."""

    check: Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One option: `kind` is its type without None, `hint` is what msgspec checks."""

    kind: Any
    hint: Any
    is_optional: bool
    default: Any
    is_required: bool
    metadata: tuple[Any, ...]


class OptionError(ValueError):
    """One option is wrong, or two contradict each other: then `pair` has both names."""

    def __init__(self, name: str, reason: str, pair: tuple[str, str] | None = None) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason, self.pair = name, reason, pair


class Model:
    """Base of a class whose annotations are options. All values are valid and never change."""

    model_fields: ClassVar[dict[str, FieldInfo]]
    topics: ClassVar[tuple[str, ...]] = ()
    """The groups of options, in the order in which help and documentation show them."""

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        cls.model_fields = {
            name: _field(hint, vars(cls).get(name, ...))
            for name, hint in hints.items()
            if get_origin(hint) is not ClassVar
        }

    def __init__(self, **given: object) -> None:
        """Raises OptionError for the first wrong option, in the order of declaration."""
        for name, field in self.model_fields.items():
            if name in given:
                self.__dict__[name] = _valid(name, field, given.pop(name))
            elif field.is_required:
                raise OptionError(name, "it is not given")
            else:
                self.__dict__[name] = field.default
        for name in given:
            raise OptionError(name, "there is no such option")
        self.check()

    def check(self) -> None:
        """Raise OptionError if values contradict each other."""

    def __setattr__(self, name: str, value: object) -> Never:
        raise AttributeError(f"{name}: options do not change")

    def __eq__(self, other: object) -> bool:
        """Whether every option has the same value."""
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]


def _field(hint: Any, default: Any) -> FieldInfo:
    kind, metadata = _unwrapped(hint)
    members = [member for member in get_args(kind) if member is not NoneType]
    is_optional = NoneType in get_args(kind)
    if is_optional:
        kind, inner = _unwrapped(members[0])
        metadata = inner + metadata
    checked = _CHECKED.get(kind, tuple if get_origin(kind) is tuple else kind)
    bounds = [item for item in metadata if isinstance(item, msgspec.Meta)]
    hint = Annotated[(checked, *bounds)] if bounds else checked
    return FieldInfo(kind, hint, is_optional, default, default is ..., metadata)


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(hint) is not Annotated:
        return hint, ()
    kind, *metadata = get_args(hint)
    return kind, tuple(metadata)


def _valid(name: str, field: FieldInfo, value: object) -> object:
    """The option's value; raises OptionError, with the reason of its `Before` or `After`."""
    try:
        for change in (item.change for item in field.metadata if isinstance(item, Before)):
            value = change(value)
        made = None if value is None and field.is_optional else _made(field, value)
        for check in (item.check for item in field.metadata if isinstance(item, After)):
            check(made)
    except ValueError as error:
        raise OptionError(name, str(error)) from error
    return made


def _made(field: FieldInfo, value: object) -> object:
    """The value in its type and within its bounds; raises a ValueError without text.

    The caller then writes the message, from the option's allowed values.
    """
    try:
        made = _TEXTS[field.kind](value) if field.kind in _TEXTS else value
        checked = msgspec.convert(made, field.hint)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        raise ValueError from error
    if isinstance(checked, float) and not math.isfinite(checked):
        raise ValueError
    return made if isinstance(made, ByteSize) else checked


def _bool(value: object) -> object:
    text = str(value).lower()
    return True if text in _YES else False if text in _NO else value


def _number(kind: type[int | float]) -> Callable[[Any], object]:
    """Converter of text in ASCII digits to a number; leaves other values unchanged."""
    return lambda value: kind(value.encode("ascii")) if isinstance(value, str) else value


_TEXTS: dict[Any, Callable[[Any], object]] = {
    bool: _bool,
    int: _number(int),
    float: _number(float),
    Path: Path,
    ByteSize: ByteSize.parse,
    SecretStr: SecretStr,
}

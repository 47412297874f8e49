"""Flags of an experiment, made from the dataclass of its options.

A flag is a field made by `flag`: its name on the command line is the field's, less the unit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from replayer.arguments import names, positive

Options = TypeVar("Options")
UNSET = argparse.SUPPRESS
"""As `shown`: the command line has no default, and the field's own stands."""


@dataclass(frozen=True, slots=True)
class Flag:
    """What of a field argparse has to know; `shown`: its default as text, None as it is."""

    read: Callable[[str], Any]
    text: str
    name: str | None
    shown: Any
    more: dict[str, Any]


def flag(
    read: Callable[[str], Any],
    text: str,
    default: Any = MISSING,
    *,
    name: str | None = None,
    shown: Any = None,
    **more: Any,
) -> Any:
    """Make a field that is a flag, positional where `name` is empty; `more` is argparse's."""
    return field(default=default, metadata={"flag": Flag(read, text, name, shown, more)})


def declare(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Declare the flags of a dataclass, in the order of its fields.

    A default of None, or of nothing, is not shown: the text says what holds then.
    """
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    for one in fields(options):
        found: Flag | None = one.metadata.get("flag")
        if found is not None:
            _declare(parser, one.name, one.default, found)


def _declare(parser: argparse.ArgumentParser, field_name: str, default: Any, found: Flag) -> None:
    more = {"type": found.read, "help": found.text, **found.more}
    shown = default if found.shown is None else found.shown
    if shown is None or shown == ():
        shown = UNSET
    if found.name == "":
        given = {} if shown is MISSING else {"default": shown, "nargs": "?"}
        parser.add_argument(field_name, **{**given, **more})
        return
    name = found.name or field_name.removesuffix("_s").replace("_", "-")
    if "choices" not in more:
        more.setdefault("metavar", name.replace("-", "_").upper())
    text = ",".join(map(str, shown)) if isinstance(shown, tuple) and shown else shown
    parser.add_argument(f"--{name}", dest=field_name, default=text, **more)


def read(options: type[Options], given: argparse.Namespace, **usual: Any) -> Options:
    """Make the options of what was given; `usual`: other defaults of flags without one."""
    found = usual | vars(given)
    known: tuple[Any, ...] = fields(options)  # type: ignore[arg-type]
    return options(**{one.name: found[one.name] for one in known if one.name in found})


def numbers(text: str) -> tuple[float, ...]:
    """Read numbers > 0 joined by commas."""
    values = tuple(positive(part) for part in names(text))
    if not values:
        raise argparse.ArgumentTypeError("must be numbers > 0, comma separated")
    return values


def named(option: str, given: tuple[str, ...], known: Any, wrong: type[Exception]) -> None:
    """Raise `wrong` in one line for a name that is not known."""
    unknown = [name for name in given if name not in known]
    if unknown:
        raise wrong(f"--{option}: must be of {', '.join(known)}, not {unknown[0]}")

"""Plugins of other processes as the configuration names them, or as they name themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta

from planner.core.pipeline import Remote
from planner.core.types import Stage
from proxy.config.model import After, Before, Model, OptionError
from proxy.config.secrets import SecretStr, is_loopback, secret_text, sendable
from proxy.config.sources import Option, allowed_of, options

MOST_PLUGINS = 16
TICK_SHARE = 10
"""Most of a tick that a call may take: each stage may wait once, and whether it lives is asked."""
BUILTIN = "builtin_"
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _name(value: str) -> None:
    if not _NAME.fullmatch(value) or value.startswith(BUILTIN):
        raise ValueError(f"not a name: letters, digits, . _ -, at most 64, not {BUILTIN} first")


def _address(value: str) -> None:
    found = _ADDRESS.fullmatch(value)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise ValueError("it is not of the form HOST:PORT")


class PluginSpec(Model):
    """A plugin: when it is asked, where it is, and how long it may take."""

    name: Annotated[str, After(_name), Option("", "", allowed="a name")]
    stage: Annotated[Literal["predict", "propose", "reconcile", "constrain"], Option("", "")]
    address: Annotated[str, After(_address), Option("", "", allowed="HOST:PORT")]
    priority: Annotated[Annotated[int, Meta(ge=0, le=10**6)], Option("", "")] = 50
    interval_seconds: Annotated[Annotated[float, Meta(ge=0, le=1e6)], Option("", "")] = 0.0
    hold_policy: Annotated[Literal["accept_when_idle", "hold_last"], Option("", "")] = (
        "accept_when_idle"
    )
    deadline_seconds: Annotated[Annotated[float, Meta(gt=0, le=1e6)], Option("", "")] = 1.0
    token: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(sendable),
        Option("", "", allowed="text, or @FILE that holds it"),
    ] = None

    def check(self) -> None:
        """What it is called with is not encrypted."""
        host = self.address.rpartition(":")[0]
        if not is_loopback(host) and self.token is None:
            raise OptionError("token", f"{self.address} is not loopback, so it is needed")

    @property
    def remote(self) -> Remote:
        """What the pipeline goes by."""
        return Remote(
            self.name,
            Stage(self.stage),
            self.priority,
            self.interval_seconds,
            self.hold_policy == "hold_last",
        )


def plugin_of(table: Mapping[str, Any], tick_s: float) -> PluginSpec:
    """The plugin of a table. Raises ValueError, of one line. `tick_s`: most that a tick may take.

    Values are not shown: one of them may be a token.
    """
    name = str(table.get("name", "without a name"))[:64]
    if unknown := sorted(table.keys() - PluginSpec.model_fields.keys()):
        known = ", ".join(PluginSpec.model_fields)
        raise ValueError(f"{name!r} has an unknown key {unknown[0][:64]!r}; there are {known}")
    try:
        found = PluginSpec(**table)
    except OptionError as error:
        allowed = [allowed_of(f, o) for key, f, o in options(PluginSpec) if key == error.name]
        reason = "; ".join([*([error.reason] if error.reason else []), *allowed])
        raise ValueError(f"{name!r}, {error.name}: {reason}") from error
    most_s = tick_s / TICK_SHARE
    if found.deadline_seconds > most_s:
        text = f"at most {most_s:g}, a tenth of tick_max_duration_seconds"
        raise ValueError(f"{name!r}, deadline_seconds: {text}")
    return found


def tables_of(value: object) -> object:
    """The tables of an option: a list of them, or as JSON; their values are checked later."""
    try:
        tables = orjson.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError("it is not JSON") from error
    tables = (tables,) if isinstance(tables, Mapping) else tables
    if not isinstance(tables, list | tuple) or not all(isinstance(t, Mapping) for t in tables):
        raise ValueError("it is no list of tables")
    if len(tables) > MOST_PLUGINS:
        raise ValueError(f"at most {MOST_PLUGINS}")
    return tuple(tables)


def plugins_of(tables: tuple[Mapping[str, Any], ...], tick_s: float) -> list[PluginSpec]:
    """The plugins of an option. Raises OptionError."""
    try:
        found = [plugin_of(table, tick_s) for table in tables]
    except ValueError as error:
        raise OptionError("plugin", str(error)) from error
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise OptionError("plugin", f"{twice!r} is given twice")
    return found

"""The file of `--thermal`: options of thermal control, and an operator's own policy.

A policy is a class with the methods of the founding document on thermal batching
(`get_max_running_seqs`, `select_victims`, `on_temp_reading`). An installed package declares it in
the entry point group `cache_proxy.thermal_policies`; the file names it by the key `policy`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from proxy.config.regular_files import read_regular
from proxy.config.sources import ConfigError
from proxy.core.thermal.controller import Controller
from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.options import ThermalOptions, from_mapping
from proxy.core.thermal.policy import MISTAKES, OperatorPolicy

POLICIES = "cache_proxy.thermal_policies"
POLICY_METHODS = ("get_max_running_seqs", "select_victims", "on_temp_reading")
FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ThermalPlan:
    """The contents of the file; `make_policy`: an operator's own policy, one per instance."""

    options: ThermalOptions
    make_policy: Callable[[], OperatorPolicy] | None = None

    def control(self) -> FleetControl:
        """Control of a fleet by this plan."""
        options = self.options
        return FleetControl(
            lambda policy: Controller(options, policy), self.make_policy, options.victims
        )


def read_plan(path: Path) -> ThermalPlan:
    """Read the file; raises ConfigError, in one line, for whatever is wrong with it."""
    try:
        given = tomllib.loads(read_regular(path, FILE_BYTES).decode("utf-8"))
        name = given.pop("policy", None)
        options = from_mapping(given)
    except OSError as error:
        raise ConfigError(f"thermal = {path}: {error.strerror or error}") from error
    except ValueError as error:  # of TOML, of UTF-8, or of a value
        raise ConfigError(f"thermal = {path}: {error}") from error
    return ThermalPlan(options, None if name is None else _policy(path, name))


def _policy(path: Path, name: object) -> Callable[[], OperatorPolicy]:
    """The class of an operator's policy; each call of it makes one."""
    from importlib.metadata import entry_points  # a megabyte that no other start needs

    known = {point.name: point for point in entry_points(group=POLICIES)}
    if not isinstance(name, str) or name not in known:
        there = ", ".join(sorted(known)) or "none is installed"
        raise ConfigError(f"thermal = {path}: policy {name!r} is not known; {POLICIES}: {there}")
    try:
        made = known[name].load()
        one = made()
    except (ImportError, *MISTAKES) as error:
        raise ConfigError(
            f"thermal = {path}: policy {name!r} cannot be made: {type(error).__name__}: {error}"
        ) from error
    lacking = [method for method in POLICY_METHODS if not callable(getattr(one, method, None))]
    if lacking:
        raise ConfigError(f"thermal = {path}: policy {name!r} has no {', '.join(lacking)}")
    policy: Callable[[], OperatorPolicy] = made
    return policy

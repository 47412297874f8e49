"""Several deployments in one configuration: a table for each, over what they have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.config.load import DEPLOYMENT, Given, Loaded, document_of, load
from planner.config.options import PlannerOptions
from proxy.config.sources import ConfigError
from proxy.config.values import USERINFO

MOST_DEPLOYMENTS = 16
MOST_WEIGHT = 1e6
IN_COMMON = ("max_gpu_budget", "advisory")
"""Options that all deployments share."""
FILES = ("state_file", "audit_log", "report_file", "decision_file")
"""Files of which each deployment has one; where they are given in common, its name comes first."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A fleet with its proxies, targets and scaler. `name` is empty where it is the only one.

    `weight`: what one of its requests counts beside one of another deployment.
    """

    name: str
    options: PlannerOptions
    weight: float = 1.0


def load_all(given: Mapping[str, Any]) -> tuple[list[Deployment], tuple[str, ...]]:
    """The deployments of parsed arguments, and warnings. Raises ConfigError, of one line."""
    document, origin = document_of(given)
    if DEPLOYMENT not in document:
        loaded = load(given)
        return [Deployment("", loaded.options)], loaded.warnings
    tables, common = document[DEPLOYMENT], dict(document)
    del common[DEPLOYMENT]
    is_list = isinstance(tables, list) and all(isinstance(one, dict) for one in tables)
    if not is_list or not 0 < len(tables) <= MOST_DEPLOYMENTS:
        raise ConfigError(f"{DEPLOYMENT} in {origin}: 1 to {MOST_DEPLOYMENTS} tables")
    found: list[Deployment] = []
    warnings: list[str] = []
    for at, table in enumerate(tables):
        name, weight = _name(table, origin), _weight(table, origin)
        loaded = _loaded(at, table, common, origin, given)
        found.append(Deployment(name, loaded.options, weight))
        warnings += loaded.warnings
    _check(found, origin)
    return found, tuple(dict.fromkeys(warnings))


def _name(table: Mapping[str, Any], origin: str) -> str:
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        text = "letters, digits, . _ -, at most 63"
        raise ConfigError(f"name of a {DEPLOYMENT} in {origin} = {str(name)[:64]!r}: {text}")
    return name


def _weight(table: Mapping[str, Any], origin: str) -> float:
    weight = table.get("weight", 1.0)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 < weight <= MOST_WEIGHT:
        where = f"{DEPLOYMENT} {table['name']} in {origin}"
        text = f"a number, > 0, <= {MOST_WEIGHT:g}"
        raise ConfigError(f"weight of {where} = {str(weight)[:64]!r}: {text}")
    return float(weight)


def _loaded(
    at: int, table: Mapping[str, Any], common: Mapping[str, Any], origin: str, given: Any
) -> Loaded:
    """The options of the table at a place."""
    name = table["name"]
    where = f"{DEPLOYMENT} {name} in {origin}"
    if shared := next((key for key in IN_COMMON if key in table), ""):
        raise ConfigError(f"{shared} in {where}: it is of all deployments, so it stands above them")
    found = Given()
    found.take(common, origin)
    found.take({k: v for k, v in table.items() if k not in ("name", "weight")}, where)
    found.flags(given)
    fields = PlannerOptions.model_fields
    for key in FILES:
        path = found.values.get(key, fields[key].default)
        if path not in (None, "none", "") and found.origins.get(key) != where:
            path = Path(path)
            found.set(key, str(path.with_name(f"{name}.{path.name}")), f"made for {where}")
    if found.origins.get("control") != where:
        host, _, port = str(found.values.get("control", fields["control"].default)).rpartition(":")
        if port.isdecimal() and int(port):
            found.set("control", f"{host}:{int(port) + at}", f"made for {where}")
    try:
        return found.loaded()
    except ConfigError as error:
        raise ConfigError(f"{DEPLOYMENT} {name}: {error}") from error


def _check(found: Sequence[Deployment], origin: str) -> None:
    """That none has what is of another one, and that all floors fit together."""
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(f"{DEPLOYMENT} {twice} in {origin}: it is given twice")
    owners: dict[tuple[str, str], str] = {}
    for one in found:
        for what in _own(one):
            owner = owners.setdefault(what, one.name)
            if owner != one.name:
                text = f"{what[0]} {what[1]} is that of {owner}, too"
                raise ConfigError(f"{DEPLOYMENT} {one.name} in {origin}: {text}")
    most = found[0].options.max_gpu_budget
    least = sum(one.options.min_endpoint * one.options.gpus_per_replica for one in found)
    if 0 <= most < least:
        text = f"min_endpoint and gpus_per_replica of all deployments need {least} at least"
        raise ConfigError(f"max_gpu_budget = {most}: {text}")


def _own(one: Deployment) -> list[tuple[str, str]]:
    """What no other deployment may have."""
    options = one.options
    own = [("proxy", USERINFO.sub("***@", url)) for url in options.proxies]
    files = ((key, getattr(options, key)) for key in FILES)
    own += [(key, str(path)) for key, path in files if path is not None]
    if options.control_address[1]:
        own.append(("control", options.control))
    if options.scaler == "exec":
        command = " ".join(options.scaler_command)
        own.append(("scaler_command", f"{command} with match {options.match}"))
    if options.scaler == "kubernetes":
        space = options.kubernetes_namespace or ""
        own.append(("kubernetes_object", f"{space}/{options.kubernetes_object or ''}"))
    return own

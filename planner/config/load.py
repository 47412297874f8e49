"""Load the planner's options: flags over the configuration, which is TOML, JSON or JSON inline.

Payloads of Dynamo's planner load: other names of a key mean the same, and keys without a meaning
here are named in one warning.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from planner.config.options import PlannerOptions
from planner.core.propose.static import Aim
from planner.core.rules import Strategy
from proxy.config.model import OptionError
from proxy.config.regular_files import read_regular
from proxy.config.secrets import SecretStr
from proxy.config.sources import ConfigError, add_flag, allowed_of, flag_of, grouped, options
from proxy.config.values import USERINFO, value_text

ALIASES = {
    "metric_pulling_prometheus_endpoint": "prometheus",
    "ttft": "ttft_ms",
    "itl": "itl_ms",
    "throughput_adjustment_interval": "throughput_adjustment_interval_seconds",
    "load_adjustment_interval": "load_adjustment_interval_seconds",
    "predictor": "load_predictor",
}
"""Other names of keys, and the tables that Dynamo puts keys in."""
TABLES = ("scheduling",)
"""Tables whose keys are options of the same name."""
PLUGIN = "plugin"
"""The option whose values are tables."""
DEPLOYMENT = "deployment"
"""The tables of several deployments; no option."""
WITHOUT_MEANING = frozenset(
    {
        *(
            "environment",
            "namespace",
            "backend",
            "no_operation",
        ),
        *("prefill_engine_num_gpu", "decode_engine_num_gpu", "pre_deployment_sweeping_mode"),
        *("scale_interval_seconds", "min_gpu_budget", "live_dashboard_port", "write_gzip_log"),
        *("max_num_fpm_samples", "fpm_sample_bucket_size", "enable_power_awareness"),
        *(
            "throughput_metrics_source",
            "output_dir",
            "control_api_port",
            "global_planner_namespace",
        ),
        *("total_gpu_power_limit", "prophet_window_size"),
        *("kalman_q_level", "kalman_q_trend", "kalman_r", "kalman_min_points", "plugins"),
        *("model_name", "prefill_min_endpoint", "decode_min_endpoint"),
    }
)
"""Keys of Dynamo's PlannerConfig that have no effect here."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Valid options, and warnings, each of one line."""

    options: PlannerOptions
    warnings: tuple[str, ...]


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration and a flag per option."""
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="file of options (.toml, or .json), or a JSON object",
    )
    for topic, members in grouped(PlannerOptions).items():
        group = parser.add_argument_group(topic)
        for member in members:
            add_flag(group, *member)


class Given:
    """Values of options as they were given, and where: what is taken later wins."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.unused: list[str] = []
        """Keys without a meaning here."""

    def take(self, document: Mapping[str, Any], origin: str) -> None:
        """The keys of a configuration. Raises ConfigError."""
        for key, value in _flat(document, origin):
            name = ALIASES.get(key, key)
            if name in PlannerOptions.model_fields:
                self.set(name, value if name == PLUGIN else _text(value), origin)
            elif key in WITHOUT_MEANING:
                self.unused.append(key)
            else:
                raise ConfigError(f"unknown key {key!r} in {origin}{_closest(key)}")

    def flags(self, given: Mapping[str, Any]) -> None:
        """The flags of a command line."""
        for name in PlannerOptions.model_fields:
            if name in given:
                self.set(name, value_text(given[name]), f"flag {flag_of(name)}")

    def set(self, name: str, value: Any, origin: str) -> None:
        """One option."""
        self.values[name], self.origins[name] = value, origin

    def loaded(self) -> Loaded:
        """The options. Raises ConfigError, of one line."""
        try:
            found = PlannerOptions(**_with_none(self.values))
        except OptionError as error:
            raise ConfigError(_explained(error, self.values, self.origins)) from error
        return Loaded(found, _warnings(found, self.unused))


def load(given: Mapping[str, Any]) -> Loaded:
    """The options of parsed arguments. Raises ConfigError, of one line."""
    found = Given()
    document, origin = document_of(given)
    if DEPLOYMENT in document:
        raise ConfigError(f"{origin} has several deployments: only run and validate take them")
    found.take(document, origin)
    found.flags(given)
    return found.loaded()


def document_of(given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The configuration that parsed arguments name, and how to call it. Raises ConfigError."""
    config = given.get("config")
    if config is None:
        return {}, ""
    origin = "the JSON object" if config.lstrip().startswith("{") else f"file {config}"
    document = _document(config, origin)
    if not isinstance(document, dict):
        raise ConfigError(f"{origin}: not an object of options")
    return document, origin


def _document(config: str, origin: str) -> Any:
    try:
        if config.lstrip().startswith("{"):
            return orjson.loads(config)
        raw = read_regular(Path(config))
        return orjson.loads(raw) if config.endswith(".json") else tomllib.loads(raw.decode())
    except OSError as error:
        raise ConfigError(f"{origin}: cannot read it: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        kind = "TOML" if config.endswith(".toml") else "JSON"
        text = str(error).partition("\n")[0][:120]
        raise ConfigError(f"{origin}: not valid {kind}: {text}") from error


def _flat(document: Mapping[str, Any], origin: str) -> list[tuple[str, Any]]:
    """Its keys, and those of the tables that only group them."""
    found = []
    for key, value in document.items():
        if key in TABLES and isinstance(value, dict):
            found += list(value.items())
        elif isinstance(value, dict) and key not in (*WITHOUT_MEANING, PLUGIN):
            raise ConfigError(f"{key!r} in {origin}: a table, but options are single values")
        else:
            found.append((key, value))
    return found


def _text(value: Any) -> Any:
    return [value_text(one) for one in value] if isinstance(value, list) else value_text(value)


def _with_none(values: Mapping[str, Any]) -> dict[str, Any]:
    fields = PlannerOptions.model_fields
    unset = ("none", "")
    return {k: None if fields[k].is_optional and v in unset else v for k, v in values.items()}


def _closest(word: str) -> str:
    close = difflib.get_close_matches(word, [*PlannerOptions.model_fields, *ALIASES], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _explained(error: OptionError, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    name = error.name
    option = next(option for key, _, option in options(PlannerOptions) if key == name)
    field = PlannerOptions.model_fields[name]
    reason = f": {error.reason}" if error.reason else ""
    allowed = allowed_of(field, option)
    if name not in values:
        shown = "" if field.is_required else f" = {value_text(field.default)} (default)"
    elif field.kind is SecretStr or name == PLUGIN:  # a plugin may have a token
        shown = f" ({origins[name]})"
    else:
        shown = f" = {USERINFO.sub('***@', repr(values[name]))[:100]} ({origins[name]})"
    return f"{name}{shown}{reason}; allowed: {allowed}"


def _warnings(found: PlannerOptions, unused: Sequence[str]) -> tuple[str, ...]:
    warnings = []
    if unused:
        warnings.append(f"keys without a meaning here: {', '.join(sorted(unused))}")
    if found.aim is not Aim.SLA:
        text = "the prediction and the targets of time have no effect"
        warnings.append(f"optimization_target {found.aim}: {text}")
    if found.scale_down_rule == "sensitivity":
        warnings.append("scale_down_rule sensitivity may go down and up for ever near the targets")
    is_asked = found.load_predictor != "kalman" or found.load_predictor_warmup_trace is not None
    if is_asked and found.rules.strategy is Strategy.RESERVE:
        warnings.append("load_predictor: the strategy reserve asks none; founding does")
    return tuple(warnings)

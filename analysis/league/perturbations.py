"""Perturbed fleets and loads, to test how robust a policy is.

A perturbation changes load rules and fleet after the scale was found, so rates stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from analysis.league.fleet import EngineFleet, slower
from proxy.core.thermal.controller import Controller
from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.options import ThermalOptions
from proxy.core.thermal.policy import OperatorPolicy
from replayer.engine.heat import FirstOrderPlant, Plant, PlantOptions
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import LoadRules
from replayer.virtual.requests import HeatOptions, Loss

Perturbation = Callable[[LoadRules, EngineFleet], tuple[LoadRules, EngineFleet]]
SLOW, LINK, QUARTER, BURST = 2.0, 10.0, 4, 10.0
ESTIMATE = 0.3
COLD_THROUGHPUT, COLD_TRANSFER_S = 5_000.0, 2.0
DOWN_S = 30.0
"""From an engine's death to the first answer of the next one."""
WARM_CELSIUS = 70.0
"""The air of the hot engine: of its 12 degrees to the target, 10 are drawn without any work."""


def none(rules: LoadRules, fleet: EngineFleet) -> tuple[LoadRules, EngineFleet]:
    """Change nothing."""
    return rules, fleet


def slow_engine(rules: LoadRules, fleet: EngineFleet) -> tuple[LoadRules, EngineFleet]:
    """Halve the speed of the first engine."""
    first, *others = fleet.engines
    return rules, replace(fleet, engines=(slower(first, SLOW), *others))


def slow_links(rules: LoadRules, fleet: EngineFleet) -> tuple[LoadRules, EngineFleet]:
    """Make KV transfers take ten times as long."""

    def linked(one: EngineOptions) -> EngineOptions:
        t = one.transfer
        return replace(one, transfer=replace(t, x0=t.x0 * LINK, bandwidth=t.bandwidth / LINK))

    return rules, replace(fleet, engines=tuple(map(linked, fleet.engines)))


def small_kv(rules: LoadRules, fleet: EngineFleet) -> tuple[LoadRules, EngineFleet]:
    """Leave a quarter of the KV memory, but room for the longest request."""

    def shrunk(one: EngineOptions) -> EngineOptions:
        least = -(-fleet.longest_tokens // one.block_size) + 1
        blocks = max(min(least, one.num_blocks), one.num_blocks // QUARTER)
        return replace(one, num_blocks=blocks, max_model_len=blocks * one.block_size)

    return rules, replace(fleet, engines=tuple(map(shrunk, fleet.engines)))


def estimate_high(rules: LoadRules, fleet: EngineFleet) -> tuple[LoadRules, EngineFleet]:
    """Make the proxy estimate prompts 30 % too long."""
    return rules, replace(fleet, estimate_factor=1.0 + ESTIMATE)


def estimate_low(rules: LoadRules, fleet: EngineFleet) -> tuple[LoadRules, EngineFleet]:
    """Make the proxy estimate prompts 30 % too short."""
    return rules, replace(fleet, estimate_factor=1.0 - ESTIMATE)


def bursty(rules: LoadRules, fleet: EngineFleet) -> tuple[LoadRules, EngineFleet]:
    """Give the gaps between session starts ten times their variance."""
    return replace(rules, burst=BURST), fleet


def cold(rules: LoadRules, fleet: EngineFleet) -> tuple[LoadRules, EngineFleet]:
    """Set the proxy's options for engines and links four times slower than they are."""
    options = {"prefill_throughput": COLD_THROUGHPUT, "kv_transfer_time_s": COLD_TRANSFER_S}
    return rules, replace(fleet, options={**fleet.options, **options})


def losses(rules: LoadRules, fleet: EngineFleet) -> tuple[LoadRules, EngineFleet]:
    """Kill each engine once, one after the other; its successor has an empty cache."""
    apart_s = rules.horizon_s / (len(fleet.engines) + 1)
    at_s = [apart_s * (number + 1) for number in range(len(fleet.engines))]
    down_s = min(DOWN_S, apart_s / 2)
    lost = tuple(Loss(number, one, one + down_s) for number, one in enumerate(at_s))
    return rules, replace(fleet, losses=lost)


def hot_engine(rules: LoadRules, fleet: EngineFleet) -> tuple[LoadRules, EngineFleet]:
    """Blow warm air at the first engine; thermal control holds it at its target."""
    return rules, replace(fleet, heat=HeatOptions(_control, _plant))


def _control() -> FleetControl:
    return FleetControl(_controller)


def _controller(policy: OperatorPolicy | None) -> Controller:
    return Controller(ThermalOptions(), policy)


def _plant(name: str) -> Plant:
    return FirstOrderPlant(PlantOptions(ambient_celsius=WARM_CELSIUS) if name == "e0" else None)


PERTURBATIONS: dict[str, Perturbation] = {
    "none": none,
    "slow-engine": slow_engine,
    "slow-links": slow_links,
    "small-kv": small_kv,
    "estimate-high": estimate_high,
    "estimate-low": estimate_low,
    "bursty": bursty,
    "cold": cold,
    "losses": losses,
    "hot-engine": hot_engine,
}

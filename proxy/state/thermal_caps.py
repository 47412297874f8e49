"""Caps of engines that have the plugin vllm-thermal, kept in step with thermal control.

The gate keeps a cap at the proxy, which stops what is yet to come. The plugin keeps it within the
engine, which stops running requests too, in its next step. A cap is set for TTL_S and renewed, so
that an engine whose proxy is gone has its own again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Protocol

from proxy.core.known.fleet_state import FleetState
from proxy.core.thermal.fleet_control import EMERGENCY, FleetControl
from proxy.fleet.thermal_plugin import CapSet
from proxy.net.timeouts import Clock
from proxy.protocol.errors import DEFECTS

LOOK_S = 0.25
TTL_S, RENEW_S = 60.0, 20.0
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0
"""Pauses after a failure; in an emergency always the first."""
_log = logging.getLogger(__name__)


class SetsCap(Protocol):
    """The interface to the plugins, see `ThermalPlugins`."""

    async def set_cap(
        self, instance: str, cap: int | None, victim: str | None = None, ttl_s: float | None = None
    ) -> CapSet:
        """Set the cap of an instance, None for its own; an error is in the result."""


@dataclass(slots=True)
class _Known:
    """The `cap` sent to an engine, None: its own; `pause_s`: 0 unless the last try failed."""

    cap: int | None = None
    told_s: float = -math.inf
    pause_s: float = 0.0
    again_s: float = -math.inf
    is_asked: bool = False


class EngineCaps:
    """The caps of all instances that have the plugin; one request at a time to each."""

    def __init__(
        self, plugins: SetsCap, known: FleetState, control: FleetControl, clock: Clock
    ) -> None:
        self._plugins, self._fleet, self._heat = plugins, known.fleet, known.heat
        self._control, self._clock = control, clock
        self._known: dict[str, _Known] = {}
        self._is_leaving = False

    def leave(self) -> None:
        """Tell no engine anything more: another process has taken over, and counts all streams."""
        self._is_leaving = True

    async def run(self) -> None:
        """Keep the caps until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for name, cap in self._due():
                    group.create_task(self._set(name, cap), name=f"cap of {name}")
                await asyncio.sleep(LOOK_S)

    def _due(self) -> list[tuple[str, int | None]]:
        """The caps that have to be set now."""
        if self._is_leaving:
            return []
        now_s, fleet = self._clock.now_s(), self._fleet
        names = [m.instance.name for m in fleet.members() if m.instance.has_thermal_plugin]
        self._known = {name: self._known.get(name) or _Known() for name in names}
        due: list[tuple[str, int | None]] = []
        for name, known in self._known.items():
            cap = self._heat.of(name).cap
            is_old = cap is not None and now_s >= known.told_s + RENEW_S
            if known.pause_s and cap == known.cap and not is_old:
                # What could not be set is not wanted any more.
                known.pause_s = 0.0
                self._control.actuated(name, now_s, has_failed=False)
            if known.is_asked or now_s < known.again_s or not (cap != known.cap or is_old):
                continue
            known.is_asked = True
            due.append((name, cap))
        return due

    async def _set(self, name: str, cap: int | None) -> None:
        known = self._known[name]
        try:
            result = await self._plugins.set_cap(name, cap, ttl_s=None if cap is None else TTL_S)
        except DEFECTS:  # nothing that an engine answers may end the periodic tasks
            if not known.pause_s:
                _log.exception("instance %s: its cap could not be set", name)
            result = CapSet(error=f"{name}: its answer could not be read")
        finally:
            known.is_asked = False
        now_s, has_failed = self._clock.now_s(), result.error is not None
        self._control.actuated(name, now_s, has_failed=has_failed)
        if not has_failed:
            if known.pause_s:
                _log.warning("instance %s: its engine accepts caps again", name)
            known.cap, known.told_s, known.pause_s = cap, now_s, 0.0
            return
        if not known.pause_s:
            _log.warning(
                "the engine's cap could not be set; only the proxy enforces it: %s",
                result.error,
            )
        is_urgent = self._control.state(name) == EMERGENCY
        grown_s = FIRST_PAUSE_S if is_urgent or not known.pause_s else 2.0 * known.pause_s
        known.pause_s = min(MOST_PAUSE_S, grown_s)
        known.again_s = now_s + known.pause_s

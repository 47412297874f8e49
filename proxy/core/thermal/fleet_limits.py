"""The limits of hot instances, by name, for gate, fleet and placement.

Heat belongs to an address rather than to a process, so limits outlive a restart of the instance.
They end when control says so, or with the instance's removal.
"""

from __future__ import annotations

from proxy.core.thermal.readings import COOL, HeatLimits


class HeatByInstance:
    """Limits by instance name. Only what is limited is kept, so nothing costs while all is cool."""

    def __init__(self) -> None:
        self._limits: dict[str, HeatLimits] = {}

    @property
    def is_cool(self) -> bool:
        """Whether no instance is limited."""
        return not self._limits

    def of(self, name: str) -> HeatLimits:
        """The limits of an instance; COOL where it has none."""
        return self._limits.get(name, COOL)

    def limit(self, name: str, limits: HeatLimits) -> bool:
        """Set an instance's limits; whether they differ from before."""
        before = self.of(name)
        if limits == COOL:
            self._limits.pop(name, None)
        else:
            self._limits[name] = limits
        return limits != before

    def forget(self, name: str) -> None:
        """The instance was removed."""
        self._limits.pop(name, None)

    def takes_none(self, name: str) -> bool:
        """Whether an instance is to take no request, as long as there is another."""
        return self.of(name).is_drained

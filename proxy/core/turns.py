"""Whose turn is next among those who wait for one model: bands, tenants in them, their entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

PATIENCE = 8
"""How often a band that has somebody waiting is passed over in a row."""


class Priority(IntEnum):
    """The three bands."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(slots=True, eq=False)
class Entry:
    """One request that waits. `tokens`: of its prompt, what it costs its tenant."""

    model: str
    tenant: str
    priority: Priority
    tokens: int
    size_bytes: int
    queued_s: float = 0.0
    is_waiting: bool = field(default=False, init=False)


class Flow:
    """One tenant in one band of one model: its entries in order, and its turn's start tag."""

    __slots__ = ("entries", "tag")

    def __init__(self, tag: float) -> None:
        self.entries: dict[Entry, None] = {}
        self.tag = tag

    def next(self, now_s: float, patience_s: float) -> Entry:
        oldest = next(iter(self.entries))
        return oldest if now_s - oldest.queued_s <= patience_s else next(reversed(self.entries))


class Band:
    """The tenants of one priority of one model.

    `left` keeps the tags of those who left with more than their share until the others caught up:
    to come again must not be cheaper than to stay.
    """

    __slots__ = ("flows", "left", "now_tag", "passed_over")

    def __init__(self) -> None:
        self.flows: dict[str, Flow] = {}
        self.left: dict[str, float] = {}
        self.now_tag = 0.0
        self.passed_over = 0

    def add(self, entry: Entry) -> None:
        flow = self.flows.get(entry.tenant)
        if flow is None:
            tag = max(self.now_tag, self.left.pop(entry.tenant, 0.0))
            flow = self.flows[entry.tenant] = Flow(tag)
        flow.entries[entry] = None

    def remove(self, entry: Entry) -> None:
        flow = self.flows[entry.tenant]
        del flow.entries[entry]
        if not flow.entries:
            del self.flows[entry.tenant]
            if flow.tag > self.now_tag:
                self.left[entry.tenant] = flow.tag
        if not self.flows:
            self.left.clear()
            self.now_tag, self.passed_over = 0.0, 0

    def charge(self, entry: Entry, weight: float) -> None:
        """Before `remove`: the tenant's next turn is due after this one's cost."""
        flow = self.flows[entry.tenant]
        self.now_tag = max(self.now_tag, flow.tag)
        flow.tag += max(1, entry.tokens) / weight
        for tenant in [t for t, tag in self.left.items() if tag <= self.now_tag]:
            del self.left[tenant]

    def next(self, now_s: float, patience_s: float) -> Entry:
        flow = min(self.flows.values(), key=lambda f: f.tag)
        return flow.next(now_s, patience_s)


class Lane:
    """The bands of one model: who waits for other instances does not hold these up."""

    __slots__ = ("bands",)

    def __init__(self) -> None:
        self.bands = tuple(Band() for _ in Priority)

    @property
    def is_empty(self) -> bool:
        return not any(band.flows for band in self.bands)

    def next(self, now_s: float, patience_s: float) -> Entry:
        waiting = [band for band in self.bands if band.flows]
        passed = [band for band in waiting if band.passed_over >= PATIENCE]
        return (passed or waiting)[0].next(now_s, patience_s)

    def charge(self, entry: Entry, weight: float) -> None:
        for band in self.bands[entry.priority + 1 :]:
            band.passed_over += bool(band.flows)
        band = self.bands[entry.priority]
        band.passed_over = 0
        band.charge(entry, weight)

"""The wait queue: entries, their order between tenants and priorities, and its drain rate."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from proxy.core.types import RejectReason

PATIENCE = 8
"""A waiting band goes first after this many entries of higher bands in a row."""


class Priority(IntEnum):
    """Priority of a request; each has a band of its own."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(slots=True, eq=False)
class Entry:
    """One waiting request. `tokens`: of its prompt, charged to its tenant."""

    model: str
    tenant: str
    priority: Priority
    tokens: int
    size_bytes: int
    queued_s: float = 0.0
    is_waiting: bool = field(default=False, init=False)


class TenantQueue:
    """The entries of one tenant in one band of one model, oldest first; `tag`: its start tag.

    Start tags are those of start-time fair queueing: the tenant with the lowest is next.
    """

    __slots__ = ("entries", "tag")

    def __init__(self, tag: float) -> None:
        self.entries: dict[Entry, None] = {}
        self.tag = tag

    def next(self, now_s: float, lifo_after_s: float) -> Entry:
        oldest = next(iter(self.entries))
        return oldest if now_s - oldest.queued_s <= lifo_after_s else next(reversed(self.entries))


class Band:
    """The tenants of one priority of one model, served in the order of their start tags.

    `left` keeps the tags of tenants without entries that are ahead of their share, until the others
    have caught up: a tenant must not gain by leaving and coming back.
    """

    __slots__ = ("flows", "left", "now_tag", "passed_over")

    def __init__(self) -> None:
        self.flows: dict[str, TenantQueue] = {}
        self.left: dict[str, float] = {}
        self.now_tag = 0.0
        self.passed_over = 0

    def add(self, entry: Entry) -> None:
        flow = self.flows.get(entry.tenant)
        if flow is None:
            tag = max(self.now_tag, self.left.pop(entry.tenant, 0.0))
            flow = self.flows[entry.tenant] = TenantQueue(tag)
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
        """Advance the tenant's tag by the entry's tokens over its weight; call before `remove`."""
        flow = self.flows[entry.tenant]
        self.now_tag = max(self.now_tag, flow.tag)
        flow.tag += max(1, entry.tokens) / weight
        for tenant in [t for t, tag in self.left.items() if tag <= self.now_tag]:
            del self.left[tenant]

    def next(self, now_s: float, lifo_after_s: float) -> Entry:
        flow = min(self.flows.values(), key=lambda f: f.tag)
        return flow.next(now_s, lifo_after_s)


class ModelQueue:
    """The bands of one model; each model has its own queue, so that none blocks another."""

    __slots__ = ("bands",)

    def __init__(self) -> None:
        self.bands = tuple(Band() for _ in Priority)

    @property
    def is_empty(self) -> bool:
        return not any(band.flows for band in self.bands)

    def next(self, now_s: float, lifo_after_s: float) -> Entry:
        waiting = [band for band in self.bands if band.flows]
        passed = [band for band in waiting if band.passed_over >= PATIENCE]
        return (passed or waiting)[0].next(now_s, lifo_after_s)

    def charge(self, entry: Entry, weight: float) -> None:
        for band in self.bands[entry.priority + 1 :]:
            band.passed_over += bool(band.flows)
        band = self.bands[entry.priority]
        band.passed_over = 0
        band.charge(entry, weight)


CAUTION = 3.0
"""Factor on the predicted wait behind others when a request's wait is compared with the limit.

With a smaller factor, a lasting overload fills the queue until it serves the newest first: then the
oldest requests are refused at the end of their wait instead of at once.
"""
RATE_MEMORY_S = 10.0
"""Time constant of the drain rate: an admission of this age weighs 1/e."""
PRIOR_S = 1.0
"""The assumed rate weighs as much as one second of observation."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the wait queue: requests (0: no queue), bytes of their bodies, seconds of each."""

    requests: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Offer:
    """Result of `offer`: why the entry was refused (None: accepted), and what it displaced."""

    refused: RejectReason | None = None
    displaced: Entry | None = None


TAKEN = Offer()
FULL = Offer(RejectReason.QUEUE_FULL)
TOO_LATE = Offer(RejectReason.QUEUE_DEADLINE)


class DrainRate:
    """Prompt tokens per second that leave the queue for an instance, while it is not empty."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    def began(self, now_s: float) -> None:
        """The queue is no longer empty: start to measure."""
        self._since_s = now_s

    def ended(self) -> None:
        """The queue is empty: stop measuring."""
        self._since_s = None

    def served(self, tokens: int, now_s: float) -> None:
        """An entry was admitted."""
        passed_s = self._passed_s(now_s)
        kept = math.exp(-passed_s / RATE_MEMORY_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + passed_s
        self._since_s = now_s

    def tps(self, prior_tps: float, now_s: float) -> float:
        """The rate; the fewer seconds were observed, the nearer it is to `prior_tps`."""
        passed_s = self._passed_s(now_s)
        return (self._tokens + prior_tps * PRIOR_S) / (self._seconds + PRIOR_S + passed_s)

    def _passed_s(self, now_s: float) -> float:
        # Never negative, even if the clock goes back: a negative time would make a weight over 1.
        return max(0.0, now_s - self._since_s) if self._since_s is not None else 0.0


class _Group:
    """The entries of one tenant in one band, over all models."""

    __slots__ = ("entries", "tokens")

    def __init__(self) -> None:
        self.entries: dict[Entry, None] = {}
        self.tokens = 0


class WaitQueue:
    """The waiting requests of all models and their order. `weights`: of tenants, 1 if not named."""

    def __init__(self, limits: QueueLimits, weights: Mapping[str, float] | None = None) -> None:
        self.limits = limits
        self.bytes = 0
        self.tokens = 0
        self._weights = weights or {}
        self._count = 0
        self._lanes: dict[str, ModelQueue] = {}
        self._held: tuple[dict[str, _Group], ...] = tuple({} for _ in Priority)
        self._rate = DrainRate()

    def __len__(self) -> int:
        return self._count

    def has(self, model: str) -> bool:
        """Whether requests for this model wait."""
        return model in self._lanes

    def weight(self, tenant: str) -> float:
        """A tenant's share relative to the other tenants' shares."""
        return self._weights.get(tenant, 1.0)

    def drain_tps(self, prior_tps: float, now_s: float) -> float:
        """Drain rate in prompt tokens per second, see `DrainRate.tps`."""
        return self._rate.tps(prior_tps, now_s)

    def wait_s(self, entry: Entry, soonest_s: float, prior_tps: float, now_s: float) -> float:
        """Predicted wait of a new entry: until an instance is free, plus the entries before it."""
        return soonest_s + self._ahead_tokens(entry) / self.drain_tps(prior_tps, now_s)

    def offer(self, entry: Entry, soonest_s: float, prior_tps: float, now_s: float) -> Offer:
        """Add an entry, unless it would wait too long or the queue is full.

        `soonest_s`: until an instance is predicted to be free; `prior_tps`: prompt tokens per
        second that the instances are assumed to take in.
        """
        if not self.limits.requests:
            return FULL
        behind_s = self.wait_s(entry, 0.0, prior_tps, now_s)
        if soonest_s + CAUTION * behind_s > self.limits.seconds:
            return TOO_LATE
        displaced = None
        if not self._fits(entry):
            displaced = self._displaced_by(entry)
            if displaced is None:
                return FULL
            self.leave(displaced)
        self._add(entry, now_s)
        return TAKEN if displaced is None else Offer(None, displaced)

    def next(self, blocked: Container[str], now_s: float) -> Entry | None:
        """The entry to try next, of a model that is not `blocked`; it stays in until `served`."""
        for model, lane in self._lanes.items():
            if model not in blocked:
                return lane.next(now_s, self.limits.seconds / 2)
        return None

    def served(self, entry: Entry, now_s: float) -> None:
        """An entry was admitted: charge its tenant, remove it, and move its model to the end."""
        lane = self._lanes[entry.model]
        lane.charge(entry, self.weight(entry.tenant))
        self._rate.served(entry.tokens, now_s)
        self.leave(entry)
        if entry.model in self._lanes:
            self._lanes[entry.model] = self._lanes.pop(entry.model)

    def leave(self, entry: Entry) -> bool:
        """Remove an entry without charging its tenant; False if it was no longer waiting."""
        if not entry.is_waiting:
            return False
        entry.is_waiting = False
        lane = self._lanes[entry.model]
        lane.bands[entry.priority].remove(entry)
        if lane.is_empty:
            del self._lanes[entry.model]
        groups = self._held[entry.priority]
        group = groups[entry.tenant]
        del group.entries[entry]
        group.tokens -= entry.tokens
        if not group.entries:
            del groups[entry.tenant]
        self._count -= 1
        self.bytes -= entry.size_bytes
        self.tokens -= entry.tokens
        if not self._count:
            self._rate.ended()
        return True

    def entries(self) -> list[Entry]:
        """All waiting entries."""
        return [e for groups in self._held for group in groups.values() for e in group.entries]

    def _add(self, entry: Entry, now_s: float) -> None:
        if not self._count:
            self._rate.began(now_s)
        entry.queued_s, entry.is_waiting = now_s, True
        self._lanes.setdefault(entry.model, ModelQueue()).bands[entry.priority].add(entry)
        group = self._held[entry.priority].setdefault(entry.tenant, _Group())
        group.entries[entry] = None
        group.tokens += entry.tokens
        self._count += 1
        self.bytes += entry.size_bytes
        self.tokens += entry.tokens

    def _fits(self, entry: Entry, leaving: Entry | None = None) -> bool:
        freed = leaving.size_bytes if leaving else 0
        count = self._count - (leaving is not None)
        held_bytes = self.bytes - freed + entry.size_bytes
        return count < self.limits.requests and held_bytes <= self.limits.bytes

    def _ahead_tokens(self, entry: Entry) -> float:
        """Tokens served before a new entry: all of higher bands, and by shares of its own band."""
        above = sum(g.tokens for band in self._held[: entry.priority] for g in band.values())
        beside = self._held[entry.priority]
        own = beside[entry.tenant].tokens if entry.tenant in beside else 0
        weight = self.weight(entry.tenant)
        others = sum(self.weight(t) for t in beside if t != entry.tenant)
        first = own * (others + weight) / weight
        return above + min(first, sum(g.tokens for g in beside.values()))

    def _displaced_by(self, entry: Entry) -> Entry | None:
        """The entry to displace for a new one, or None.

        It is the newest of the tenant with the most entries per weight, in the lowest band that is
        not above the new entry's; in the same band only if the new entry's tenant would still have
        fewer.
        """
        for priority in reversed(Priority):
            groups = self._held[priority]
            if priority < entry.priority or not groups:
                continue
            tenant = max(groups, key=lambda t: len(groups[t].entries) / self.weight(t))
            most = len(groups[tenant].entries) / self.weight(tenant)
            newest = next(reversed(groups[tenant].entries))
            own = len(groups[entry.tenant].entries) if entry.tenant in groups else 0
            is_due = priority > entry.priority or (own + 1) / self.weight(entry.tenant) < most
            return newest if is_due and self._fits(entry, newest) else None
        return None

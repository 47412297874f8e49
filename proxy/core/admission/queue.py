"""The wait queue: entries, their order between tenants and priorities, and its drain rate."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from proxy.core.types import RejectReason

PATIENCE = 8
"""A waiting band goes first after this many entries of higher bands in a row."""
LEAST_TOKENS = 256
"""A request is charged for as many tokens at least: whatever its prompt, it takes a place in an
engine's batch for as long as its answer is."""


class Priority(IntEnum):
    """Priority of a request; each has a band of its own."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(slots=True, eq=False)
class Entry:
    """One waiting request.

    `lane`: its model, or another name for what is served together. `tokens`: what an engine
    computes of its prompt, for which others wait. `charged`: what its tenant pays for it.
    """

    lane: str
    tenant: str
    priority: Priority
    tokens: int
    size_bytes: int
    charged: int = 0
    queued_s: float = 0.0
    promised_s: float = field(default=0.0, init=False)
    """The wait that was predicted when it came."""
    is_waiting: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """What a tenant pays is never less than what others wait for."""
        self.charged = max(self.tokens, self.charged)


class Shares:
    """Start tags of tenants, as of start-time fair queueing: the one with the lowest is next.

    `left` keeps the tags of tenants that wait no more and are ahead of their share, until the
    others have caught up. So a tenant does not gain by leaving and returning.
    """

    __slots__ = ("_now_tag", "left", "tags")

    def __init__(self) -> None:
        self.tags: dict[str, float] = {}
        self.left: dict[str, float] = {}
        self._now_tag = 0.0

    def enter(self, tenant: str) -> None:
        """A tenant waits, if it did not yet."""
        if tenant not in self.tags:
            self.tags[tenant] = max(self._now_tag, self.left.pop(tenant, 0.0))

    def leave(self, tenant: str) -> None:
        """A tenant waits no more."""
        tag = self.tags.pop(tenant)
        if tag > self._now_tag:
            self.left[tenant] = tag
        if not self.tags:
            self.left.clear()
            self._now_tag = 0.0

    def charge(self, entry: Entry, weight: float) -> None:
        """Advance the tenant's tag by what it pays over its weight; call before `leave`."""
        tag = self.tags[entry.tenant]
        self._now_tag = max(self._now_tag, tag)
        self.tags[entry.tenant] = tag + max(LEAST_TOKENS, entry.charged) / weight
        for tenant in [t for t, tag in self.left.items() if tag <= self._now_tag]:
            del self.left[tenant]


class Band:
    """The entries of one priority of one lane by tenant, oldest first."""

    __slots__ = ("flows", "passed_over", "shares")

    def __init__(self) -> None:
        self.flows: dict[str, dict[Entry, None]] = {}
        self.shares = Shares()
        self.passed_over = 0

    def add(self, entry: Entry) -> None:
        self.shares.enter(entry.tenant)
        self.flows.setdefault(entry.tenant, {})[entry] = None

    def remove(self, entry: Entry) -> None:
        flow = self.flows[entry.tenant]
        del flow[entry]
        if not flow:
            del self.flows[entry.tenant]
            self.shares.leave(entry.tenant)
        if not self.flows:
            self.passed_over = 0

    def next(self, now_s: float, lifo_after_s: float) -> Entry:
        tags = self.shares.tags
        flow = self.flows[min(tags, key=tags.__getitem__)]
        oldest = next(iter(flow))
        return oldest if now_s - oldest.queued_s <= lifo_after_s else next(reversed(flow))


class Lane:
    """The waiting requests of one name, in bands of priority; no lane blocks another."""

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
        band.shares.charge(entry, weight)

    def lowest_tag(self, tags: Mapping[str, float]) -> float:
        """The lowest tag of a tenant that waits here."""
        return min([tags[tenant] for band in self.bands for tenant in band.flows])


CAUTION = 3.0
"""Factor on the predicted wait behind others when a request's wait is compared with the limit.

With a smaller factor, a lasting overload fills the queue until it serves the newest first. Then the
oldest requests are refused at the end of their wait, not at once.
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
    """Result of `offer`: the reason of a refusal (None: accepted), and the displaced entries."""

    refused: RejectReason | None
    displaced: list[Entry]


FULL = Offer(RejectReason.QUEUE_FULL, [])
TOO_LATE = Offer(RejectReason.QUEUE_DEADLINE, [])


class DrainRate:
    """Prompt tokens per second that leave the queue for an instance, while it is not empty."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    def began(self, now_s: float) -> None:
        """Start to measure: the queue is no longer empty."""
        self._since_s = now_s

    def ended(self) -> None:
        """Stop measuring: the queue is empty."""
        self._since_s = None

    def served(self, tokens: int, now_s: float) -> None:
        """Count an admitted entry."""
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
    """The entries of one tenant in one band, over all lanes."""

    __slots__ = ("bytes", "entries", "tokens")

    def __init__(self) -> None:
        self.entries: dict[Entry, None] = {}
        self.tokens = self.bytes = 0


class WaitQueue:
    """The waiting requests of all lanes and their order. `weights`: of tenants, 1 if not named.

    The lane of the tenant that is behind its share is next: a tenant that names many models has no
    turn for each of them. Lanes of equal ones take turns. Within its lane another may go first,
    since lanes may have instances of their own: what a tenant had there counts there.
    """

    def __init__(self, limits: QueueLimits, weights: Mapping[str, float] | None = None) -> None:
        self.limits = limits
        self.bytes = 0
        self.tokens = 0
        self._weights = weights or {}
        self._count = 0
        self._lanes: dict[str, Lane] = {}
        self._held: tuple[dict[str, _Group], ...] = tuple({} for _ in Priority)
        self._shares = Shares()
        self._rate = DrainRate()

    def __len__(self) -> int:
        return self._count

    def has(self, lane: str) -> bool:
        """Whether requests wait in this lane."""
        return lane in self._lanes

    def weight(self, tenant: str) -> float:
        """A tenant's share relative to the other tenants' shares."""
        return self._weights.get(tenant, 1.0)

    def oldest(self) -> Entry | None:
        """The entry that has waited for longest."""
        groups = [group for held in self._held for group in held.values()]
        firsts = [next(iter(group.entries)) for group in groups]
        return min(firsts, key=lambda entry: entry.queued_s, default=None)

    def drain_tps(self, prior_tps: float, now_s: float) -> float:
        """Drain rate in prompt tokens per second, see `DrainRate.tps`."""
        return self._rate.tps(prior_tps, now_s)

    def wait_s(self, entry: Entry, soonest_s: float, prior_tps: float, now_s: float) -> float:
        """Predicted wait of a new entry: until an instance is free, plus the entries before it."""
        before = self.tokens_before(entry.tenant, entry.priority)
        return soonest_s + before / self.drain_tps(prior_tps, now_s)

    def offer(
        self,
        entry: Entry,
        soonest_s: float,
        prior_tps: float,
        now_s: float,
        most_s: float | None = None,
    ) -> Offer:
        """Add an entry, unless it would wait too long or the queue is full.

        `soonest_s`: until an instance is predicted to be free; `prior_tps`: prompt tokens per
        second that the instances are assumed to take in. `most_s`: the longest wait, if it is not
        the queue's own.
        """
        if not self.limits.requests:
            return FULL
        behind_s = self.wait_s(entry, 0.0, prior_tps, now_s)
        if soonest_s + CAUTION * behind_s > (self.limits.seconds if most_s is None else most_s):
            return TOO_LATE
        entry.promised_s = soonest_s + behind_s
        displaced: list[Entry] = []
        if not self._fits(entry):
            displaced = self._displaced_by(entry)
            if not displaced:
                return FULL
            for leaving in displaced:
                self.leave(leaving)
        self._add(entry, now_s)
        return Offer(None, displaced)

    def next(self, blocked: Container[str], now_s: float) -> Entry | None:
        """The entry to try next, of a lane that is not `blocked`; it stays in until `served`."""
        lanes = [lane for name, lane in self._lanes.items() if name not in blocked]
        if not lanes:
            return None
        lane = lanes[0]
        if len(lanes) > 1 and len(self._shares.tags) > 1:
            tags = self._shares.tags
            lane = min(lanes, key=lambda one: one.lowest_tag(tags))
        return lane.next(now_s, self.limits.seconds / 2)

    def served(self, entry: Entry, now_s: float) -> None:
        """Admit an entry: charge its tenant, remove it, and move its lane to the end."""
        lane = self._lanes[entry.lane]
        weight = self.weight(entry.tenant)
        lane.charge(entry, weight)
        self._shares.charge(entry, weight)
        self._rate.served(entry.charged, now_s)
        self.leave(entry)
        if entry.lane in self._lanes:
            self._lanes[entry.lane] = self._lanes.pop(entry.lane)

    def leave(self, entry: Entry) -> bool:
        """Remove an entry without charging its tenant; False if it was no longer waiting."""
        if not entry.is_waiting:
            return False
        entry.is_waiting = False
        self._take_out(entry)
        groups = self._held[entry.priority]
        group = groups[entry.tenant]
        del group.entries[entry]
        group.tokens -= entry.tokens
        group.bytes -= entry.size_bytes
        if not group.entries:
            del groups[entry.tenant]
            if not any(entry.tenant in held for held in self._held):
                self._shares.leave(entry.tenant)
        self._count -= 1
        self.bytes -= entry.size_bytes
        self.tokens -= entry.tokens
        if not self._count:
            self._rate.ended()
        return True

    def move(self, entry: Entry, lane: str) -> None:
        """Move an entry to another lane, behind those of its tenant."""
        self._take_out(entry)
        entry.lane = lane
        self._put_in(entry)

    def _take_out(self, entry: Entry) -> None:
        lane = self._lanes[entry.lane]
        lane.bands[entry.priority].remove(entry)
        if lane.is_empty:
            del self._lanes[entry.lane]

    def _put_in(self, entry: Entry) -> None:
        self._lanes.setdefault(entry.lane, Lane()).bands[entry.priority].add(entry)

    def entries(self) -> list[Entry]:
        """All waiting entries."""
        return [e for groups in self._held for group in groups.values() for e in group.entries]

    def _add(self, entry: Entry, now_s: float) -> None:
        if not self._count:
            self._rate.began(now_s)
        entry.queued_s, entry.is_waiting = now_s, True
        self._put_in(entry)
        self._shares.enter(entry.tenant)
        group = self._held[entry.priority].setdefault(entry.tenant, _Group())
        group.entries[entry] = None
        group.tokens += entry.tokens
        group.bytes += entry.size_bytes
        self._count += 1
        self.bytes += entry.size_bytes
        self.tokens += entry.tokens

    def _fits(self, entry: Entry, left: int = 0, left_bytes: int = 0) -> bool:
        """Whether there is room for the entry once so many others, of so many bytes, have left."""
        held_bytes = self.bytes - left_bytes + entry.size_bytes
        return self._count - left < self.limits.requests and held_bytes <= self.limits.bytes

    def tokens_before(self, tenant: str, priority: Priority) -> float:
        """Tokens served before a new entry of a tenant.

        Of its own band by shares; of higher bands as many as PATIENCE lets go first.
        """
        above = [g for band in self._held[:priority] for g in band.values()]
        beside = self._held[priority]
        own = beside.get(tenant) or _Group()
        weight = self.weight(tenant)
        others = sum(self.weight(t) for t in beside if t != tenant)
        turns = (others + weight) / weight
        count = min(len(own.entries) * turns, sum(len(g.entries) for g in beside.values()))
        tokens = min(own.tokens * turns, sum(g.tokens for g in beside.values()))
        above_count = sum(len(g.entries) for g in above)
        if not above_count:
            return tokens
        part = min(1.0, PATIENCE * (count + 1) / above_count)
        return tokens + part * sum(g.tokens for g in above)

    def _share(self, count: int, size_bytes: int, tenant: str) -> float:
        """A tenant's share of the queue's places or bytes, the larger one, per weight."""
        most_bytes = max(1, self.limits.bytes)
        part = max(count / self.limits.requests, size_bytes / most_bytes)
        return part / self.weight(tenant)

    def _displaced_by(self, entry: Entry) -> list[Entry]:
        """The entries to displace for a new one; none if that would not make enough room.

        First the newest of the new entry's own tenant in bands below it. Then, one by one, the
        newest in the lowest band of the tenant with the largest share. It stops when that share is
        at most the own tenant's with the new entry. Bands are no matter between tenants: a client
        says itself which it is in.
        """
        leaving: list[Entry] = []
        left_bytes = 0
        own = self._newest_first(entry.tenant)
        while not self._fits(entry, len(leaving), left_bytes):
            lowest = next(own, None)
            if lowest is None or lowest.priority <= entry.priority:
                break
            leaving.append(lowest)
            left_bytes += lowest.size_bytes
        shares = self._holdings()
        count, size_bytes = shares.pop(entry.tenant, (0, 0))
        count += 1 - len(leaving)
        size_bytes += entry.size_bytes - left_bytes
        own_share = self._share(count, size_bytes, entry.tenant)
        newest = {tenant: self._newest_first(tenant) for tenant in shares}
        while not self._fits(entry, len(leaving), left_bytes):
            found = [
                (self._share(held[0], held[1], tenant), tenant) for tenant, held in shares.items()
            ]
            most, tenant = max(found) if found else (0.0, "")
            if most <= own_share:
                return []
            leaving.append(next(newest[tenant]))
            left_bytes += leaving[-1].size_bytes
            count, size_bytes = shares[tenant]
            shares[tenant] = count - 1, size_bytes - leaving[-1].size_bytes
        return leaving

    def _holdings(self) -> dict[str, tuple[int, int]]:
        """Entries and bytes of each tenant, over all bands."""
        found: dict[str, tuple[int, int]] = {}
        for groups in self._held:
            for tenant, group in groups.items():
                count, size_bytes = found.get(tenant, (0, 0))
                found[tenant] = count + len(group.entries), size_bytes + group.bytes
        return found

    def _newest_first(self, tenant: str) -> Iterator[Entry]:
        """A tenant's entries, the lowest band first, the newest of each first."""
        for groups in reversed(self._held):
            if tenant in groups:
                yield from reversed(groups[tenant].entries)

"""Several replicas of the proxy over one fleet of engine models, and the bus between them.

Each replica has its own router, wait queue and budget of retries. Every tick it tells the others
what has changed on its side, and reads what they told (`proxy.core.sharing`). Replicas tick one
after the other, evenly spread. The bus takes no time and loses nothing unless it has faults.
Whatever is drawn is drawn by hash: equal runs are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from proxy.core.routing.router import Router
from proxy.core.sharing.apply import Others
from proxy.core.sharing.batch import Batch
from proxy.core.sharing.journal import Journal
from replayer.virtual.arrivals import Planned
from replayer.virtual.requests import ReplicaOptions


@dataclass(frozen=True, slots=True)
class BusFaults:
    """Parts of the deliveries that are lost, come twice, and come late by up to `delay_s`.

    Of two that are late by different times, the later one may come first.
    """

    lost: float = 0.0
    doubled: float = 0.0
    delay_s: float = 0.0
    seed: int = 0

    def delays_s(self, batch: Batch, reader: str) -> list[float]:
        """Draw after how many seconds a reader gets a batch: each time that it does."""
        if self._drawn("lost", batch, reader) < self.lost:
            return []
        times = 2 if self._drawn("doubled", batch, reader) < self.doubled else 1
        return [self.delay_s * self._drawn(f"late {n}", batch, reader) for n in range(times)]

    def _drawn(self, what: str, batch: Batch, reader: str) -> float:
        text = f"{what} {batch.writer} {batch.number} {reader}"
        return xxhash.xxh3_64_intdigest(text.encode(), self.seed) / 2**64


class MemoryBus:
    """Batches on their way to each reader, its own included."""

    def __init__(self, readers: Sequence[str], faults: BusFaults | None = None) -> None:
        self.faults = BusFaults() if faults is None else faults
        self._waiting: dict[str, list[tuple[float, Batch]]] = {name: [] for name in readers}

    def write(self, batch: Batch, now_s: float) -> None:
        """Send a batch to every reader."""
        for reader, waiting in self._waiting.items():
            waiting += [(now_s + late, batch) for late in self.faults.delays_s(batch, reader)]

    def read(self, reader: str, now_s: float) -> list[Batch]:
        """What has arrived for a reader since it read last, in the order of arrival."""
        waiting = sorted(self._waiting[reader], key=lambda one: one[0])
        self._waiting[reader] = [one for one in waiting if one[0] > now_s]
        return [batch for at_s, batch in waiting if at_s <= now_s]


class Replica:
    """One replica's part in the exchange over a bus."""

    def __init__(self, name: str, router: Router, bus: MemoryBus) -> None:
        known = router.known
        self.journal = Journal(known.fleet.states, name)
        self.others = Others(known, name)
        router.share(self.journal)
        self._name, self._bus = name, bus

    def tick(self, now_s: float) -> None:
        """Tell what is new here, hear what is new elsewhere, forget who is silent."""
        batch = self.journal.batch(now_s)
        if batch is not None:
            self._bus.write(batch, now_s)
        for heard in self._bus.read(self._name, now_s):
            self.others.apply(heard, now_s)
        self.others.expire(now_s)


class Replicas:
    """The exchange between the routers of a run, if they share; and which one gets a request."""

    def __init__(self, options: ReplicaOptions, routers: Sequence[Router]) -> None:
        self._options, self._count = options, len(routers)
        self._replicas: list[Replica] = []
        if options.tick_s is not None and len(routers) > 1:
            names = [str(number) for number in range(len(routers))]
            bus = MemoryBus(names)
            self._replicas = [Replica(*one, bus) for one in zip(names, routers, strict=True)]

    @property
    def starts_s(self) -> list[float]:
        """When each replica ticks first; none ticks where nothing is shared."""
        tick_s = self._options.tick_s or 0.0
        return [tick_s * number / self._count for number in range(len(self._replicas))]

    def tick(self, number: int, now_s: float) -> float:
        """A replica's turn; returns when its next one is."""
        self._replicas[number].tick(now_s)
        return now_s + (self._options.tick_s or 0.0)

    def place(self, planned: Planned, index: int) -> int:
        """The number of the replica that a request comes to."""
        whose = planned.session_id
        if self._options.balance == "random":
            whose = f"{index} {whose}"
        return xxhash.xxh3_64_intdigest(whose.encode()) % self._count

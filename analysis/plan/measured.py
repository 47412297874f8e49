"""What a run leaves: a record per request, and the figures that follow from all of them.

Two judges make them: Dynamo's replay (`bench.planner`), and our fleet in virtual time. The modules
`measured`, `clairvoyant` and `score` need no package, as they run in the replay's environment too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from replayer.loads.load import Load

BIN_S = 10.0
"""Bins of arrival time. A bin is out of the SLO below BIN_RATIO of requests that keep it."""
BIN_RATIO = 0.90
AFTER_RISE_S = 600.0
STATIC, CLAIRVOYANT, UNWARNED = "static", "clairvoyant", "unwarned"


@dataclass(frozen=True, slots=True)
class Record:
    """One request. `ttft_s` None: it did not complete. `itl_s` None: it has one token."""

    arrival_s: float
    ttft_s: float | None
    itl_s: float | None
    last_token_s: float | None
    input_tokens: int
    reused_tokens: int
    output_tokens: int
    engine: int

    def keeps_ttft(self, load: Load) -> bool:
        """Whether the first token came in time."""
        return self.ttft_s is not None and self.ttft_s <= load.slo_ttft_s

    def keeps_itl(self, load: Load) -> bool:
        """Whether the others did, in the mean of the request."""
        return self.ttft_s is not None and (self.itl_s is None or self.itl_s <= load.slo_itl_s)

    def keeps_slo(self, load: Load) -> bool:
        """Whether both are so."""
        return self.keeps_ttft(load) and self.keeps_itl(load)


@dataclass(frozen=True, slots=True)
class Drain:
    """A moment at which engines were told to finish and go."""

    at_s: float
    engines: Collection[int]

    def meets(self, record: Record) -> bool:
        """Whether a request was on one of those engines then."""
        if record.engine not in self.engines or record.arrival_s > self.at_s:
            return False
        return record.last_token_s is None or self.at_s < record.last_token_s


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a run says of its fleet: GPU time from order to removal."""

    gpu_s: float
    duration_s: float
    started: int
    drains: Sequence[Drain]
    changes: int
    """Of the replicas wanted."""
    broken: int = 0
    """Requests that an instance left unfinished when it went."""
    lost_tokens: int = 0
    """What the prefix caches of those that went had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One rule with one setting, on one load. Ratios are of all requests of the load.

    `settings`: JSON. `is_best`: of the clairvoyant's schedules the cheapest that attains its
    target. `on_drain`: requests on an engine when it began to drain; `lost_on_drain`: those of them
    that missed the SLO.
    """

    load: str
    seed: int
    startup_s: float
    policy: str
    settings: str = "{}"
    requests: int
    attainment_ratio: float
    ttft_ratio: float
    itl_ratio: float
    gpu_h: float
    duration_s: float
    out_s: float
    out_after_rises_s: float
    changes: int
    started: int
    on_drain: int
    lost_on_drain: int
    broken: int = 0
    """Requests that a scale-down has cut."""
    lost_tokens: int = 0
    """Cached tokens that went with instances; 0 where the judge does not tell."""
    is_best: bool = False

    @property
    def replicas(self) -> float:
        """The mean number of engines that were paid for."""
        return self.gpu_h * 3600 / self.duration_s

    @property
    def good_per_gpu_h(self) -> float:
        """Requests that kept the SLO, per GPU hour."""
        return self.attainment_ratio * self.requests / self.gpu_h


@dataclass(frozen=True, slots=True)
class Played:
    """A run with its requests, and since when so many engines served."""

    run: Run
    records: Sequence[Record]
    ready: Sequence[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Name:
    """What a run is called."""

    policy: str
    settings: str
    startup_s: float


def measured(name: Name, load: Load, records: Sequence[Record], fleet: Fleet) -> Run:
    """The figures of a run."""
    n = len(load.requests)
    out_s = out_of_slo(load, records)
    moved = [one for one in records if any(drain.meets(one) for drain in fleet.drains)]
    return Run(
        load=load.name,
        seed=load.seed,
        startup_s=name.startup_s,
        policy=name.policy,
        settings=name.settings,
        requests=n,
        attainment_ratio=sum(one.keeps_slo(load) for one in records) / n,
        ttft_ratio=sum(one.keeps_ttft(load) for one in records) / n,
        itl_ratio=sum(one.keeps_itl(load) for one in records) / n,
        gpu_h=fleet.gpu_s / 3600,
        duration_s=fleet.duration_s,
        out_s=BIN_S * len(out_s),
        out_after_rises_s=sum(BIN_S * _after(out_s, rise_s) for rise_s in load.rises_s),
        changes=fleet.changes,
        started=fleet.started,
        on_drain=len(moved),
        lost_on_drain=sum(not one.keeps_slo(load) for one in moved),
        broken=fleet.broken,
        lost_tokens=fleet.lost_tokens,
    )


def out_of_slo(load: Load, records: Sequence[Record]) -> list[float]:
    """Beginnings of the bins in which too few requests keep the SLO."""
    arrived: dict[int, int] = {}
    kept: dict[int, int] = {}
    for one in records:
        at = int(one.arrival_s / BIN_S)
        arrived[at] = arrived.get(at, 0) + 1
        kept[at] = kept.get(at, 0) + one.keeps_slo(load)
    return [BIN_S * at for at in sorted(arrived) if kept[at] < BIN_RATIO * arrived[at]]


def _after(out_s: Sequence[float], rise_s: float) -> int:
    return sum(rise_s <= at_s < rise_s + AFTER_RISE_S for at_s in out_s)

"""What a run leaves: a record per request, and the figures that follow from all of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench.planner.loads.load import Load

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

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Record:
        """Read a row of Dynamo's report."""
        is_completed = row["terminal_status"] == "completed"
        return cls(
            arrival_s=row["arrival_time_ms"] / 1000,
            ttft_s=_seconds(row["ttft_ms"]) if is_completed else None,
            itl_s=_seconds(row["itl_ms"]),
            last_token_s=_seconds(row["last_token_ms"]),
            input_tokens=row["input_length"],
            reused_tokens=row["reused_input_tokens"],
            output_tokens=row["output_length"],
            engine=row["decode_worker_idx"],
        )

    def keeps_ttft(self, load: Load) -> bool:
        """Whether the first token came in time."""
        return self.ttft_s is not None and self.ttft_s <= load.slo_ttft_s

    def keeps_itl(self, load: Load) -> bool:
        """Whether the others did, in the mean of the request."""
        return self.ttft_s is not None and (self.itl_s is None or self.itl_s <= load.slo_itl_s)

    def keeps_slo(self, load: Load) -> bool:
        """Whether both are so."""
        return self.keeps_ttft(load) and self.keeps_itl(load)


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000


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
    """What Dynamo's report says of the fleet: GPU time from order to removal."""

    gpu_s: float
    duration_s: float
    started: int
    drains: Sequence[Drain]
    changes: int
    """Of the replicas wanted."""

    @classmethod
    def of(cls, summary: Mapping[str, Any], operations: Sequence[Any], changes: int) -> Fleet:
        """Read the summary and the operations on engines."""
        drains = [
            Drain(one["at_ms"] / 1000, frozenset(_engines(one, "worker_draining")))
            for one in operations
        ]
        return cls(
            gpu_s=summary["decode_worker_seconds"],
            duration_s=summary["duration_ms"] / 1000,
            started=sum(len(_engines(one, "worker_starting")) for one in operations),
            drains=[drain for drain in drains if drain.engines],
            changes=changes,
        )


def _engines(operation: Mapping[str, Any], transition: str) -> list[int]:
    steps = operation["transitions"]
    return [step["worker_id"] for step in steps if step["transition"] == transition]


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
class Name:
    """What a run is called."""

    policy: str
    settings: Mapping[str, Any]
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
        settings=json.dumps(dict(name.settings), sort_keys=True),
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


@dataclass(frozen=True, slots=True)
class Result:
    """Runs, and what was left out with the reason."""

    runs: list[Run]
    left_out: dict[str, str]

    @classmethod
    def load(cls, paths: Sequence[Path]) -> Result:
        """Read result files, taken together; raises ValueError for another file."""
        together = cls([], {})
        for path in paths:
            try:
                document = json.loads(path.read_text("utf-8"))
                together.runs.extend(run_of(row) for row in document["runs"])
                together.left_out.update(document["left_out"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: not a result of bench-planner: {error}") from None
        ran = {run.policy for run in together.runs} | {run.load for run in together.runs}
        return replace(
            together,
            left_out={name: why for name, why in together.left_out.items() if name not in ran},
        )

    def save(self, path: Path) -> None:
        """Write a result file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"runs": [asdict(run) for run in self.runs], "left_out": self.left_out}
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def run_of(row: Mapping[str, Any]) -> Run:
    """Read a run as `asdict` wrote it."""
    return Run(**{field.name: row[field.name] for field in fields(Run)})

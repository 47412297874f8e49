"""Small loads, records and runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from analysis.plan.measured import Record, Run
from replayer.loads.load import Load, Request

RUN = Run(
    load="step",
    seed=1,
    startup_s=120.0,
    policy="rule",
    requests=100,
    attainment_ratio=0.9,
    ttft_ratio=0.95,
    itl_ratio=0.92,
    gpu_h=2.0,
    duration_s=3600.0,
    out_s=30.0,
    out_after_rises_s=10.0,
    changes=4,
    started=2,
    on_drain=3,
    lost_on_drain=1,
)


def run(policy: str, gpu_h: float, attainment_ratio: float, **rest: Any) -> Run:
    return replace(RUN, policy=policy, gpu_h=gpu_h, attainment_ratio=attainment_ratio, **rest)


def load(*arrivals_s: float, **rest: Any) -> Load:
    requests = [Request(at_s, 1000, 100, range(2)) for at_s in arrivals_s]
    return Load(name="step", seed=1, requests=requests, **{"end_s": 120.0, **rest})


def record(arrival_s: float, ttft_s: float | None = 0.5, engine: int = 0) -> Record:
    return Record(arrival_s, ttft_s, 0.03, arrival_s + 5.0, 1000, 0, 100, engine)

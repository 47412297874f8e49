"""A run through real sockets compared with its prediction in virtual time.

The prediction has the same load, policy and fleet, and engine constants fitted to the run's log.
Both are in engine time. The time that sockets, proxy process and client add is fitted too, by two
constants each before the decision and before an engine's queue (`IntakeCost`). In a scaled run that
time, measured in engine seconds, is larger by the scale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from analysis.check.fit import JITTER, NAMES, Constants, Fit, constants_of, fit, line, with_unseen
from analysis.check.logs import CheckSample, RunLog, read_run_log, samples_of
from analysis.measures import METRICS, in_target_time, percentile, spread
from analysis.runs import RunError
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from replayer.engine.costs import IntakeCost
from replayer.engine.types import EngineOptions
from replayer.virtual.fleet import simulate
from replayer.virtual.legs import run_legs
from replayer.virtual.recorded import Recorded, read_recorded
from replayer.virtual.requests import VirtualOptions, VirtualRow, VirtualRun

PERCENTS = (50, 90)
BOUND = ("ttft_s",)
"""Times whose percentiles must be within the bound of the prediction."""
TIMES = ("ttft_s", "tpot_s", "e2e_s")
CLASSES = ("WARM", "MEDIUM", "HEAVY_COLO", "HEAVY_P2P")


@dataclass(frozen=True, slots=True)
class Compared:
    """One quantity, realised and predicted (low to high); times in engine seconds."""

    name: str
    realised: float
    predicted: float
    low: float
    high: float

    @property
    def ratio(self) -> float | None:
        """Predicted over realised; None if the realised value is 0."""
        return self.predicted / self.realised if self.realised else None

    def within(self, bound: float) -> bool:
        """Whether the realised value is within the bound of the prediction."""
        return abs(self.realised - self.predicted) <= bound * self.predicted


@dataclass(frozen=True, slots=True)
class Check:
    """The results of a check; constants are in engine seconds.

    `as_placed` compares TTFT with a model that gets the run's own placements and sending times, so
    its deviation is the engine model's. A larger deviation in `times` is due to other decisions.
    `lag`: how late the client sent, in real seconds. A large lag means that the machine was too
    busy, so engines and proxy were late as well.
    """

    requests: int
    policy: str
    times: tuple[Compared, ...]
    as_placed: tuple[Compared, ...]
    counts: tuple[Compared, ...]
    ks_ratio: float
    ks_as_placed: float
    fitted: Fit
    true: Constants
    proxy: IntakeCost
    time_scale: float
    lag: Mapping[str, Any]

    def within(self, bound: float) -> bool:
        """Whether TTFT at p50 and at p90 is within the bound of the prediction."""
        return all(one.within(bound) for one in self.times if one.name.startswith(BOUND))

    def document(self, bound: float) -> dict[str, Any]:
        """Return all figures for JSON."""
        return {
            "within": self.within(bound),
            "bound_ratio": bound,
            "requests": self.requests,
            "policy": self.policy,
            "time_scale": self.time_scale,
            "times": _rows(self.times),
            "as_placed": _rows(self.as_placed),
            "counts": _rows(self.counts),
            "ttft_ks": {"predicted": self.ks_ratio, "as_placed": self.ks_as_placed},
            "constants": {
                name: {
                    "fitted": getattr(self.fitted.constants, name),
                    "true": getattr(self.true, name),
                    "seen": name in self.fitted.seen,
                }
                for name in NAMES
            },
            "proxy": {"fixed_s": self.proxy.fixed_s, "per_token_s": self.proxy.per_token_s},
            "fit_spread": self.fitted.spread,
            "schedule_lag_s": self.lag,
        }


def check_run(folder: Path) -> Check:
    """Fit a run's constants, repeat it in virtual time, compare; raises RunError or TraceError."""
    recorded = read_recorded(folder)
    log = read_run_log(folder, recorded)
    names = instance_names(recorded)
    samples = samples_of(recorded, log, names)
    sizes = engine_sizes(recorded)
    fitted = with_unseen(fit(samples, sizes), sizes)
    proxy = IntakeCost(*line(log.overheads()))
    model = FittedModel(fitted, proxy, engines_of(fitted.constants, sizes))
    fleets = [engines_of(fitted.constants.scaled(by), sizes) for by in JITTER]
    runs = [predict(recorded, log, fleet, proxy) for fleet in fleets]
    return compared(recorded, log, samples, model, runs)


def engines_of(constants: Constants, sizes: Sequence[EngineOptions]) -> list[EngineOptions]:
    """Return engines of these sizes with these constants."""
    return [constants.engine(one) for one in sizes]


@dataclass(frozen=True, slots=True)
class FittedModel:
    """The fit and the engines made with it, in seconds of the run's clock."""

    fit: Fit
    proxy: IntakeCost
    engines: Sequence[EngineOptions]


def instance_names(recorded: Recorded) -> list[str]:
    """Return the instances' names, in the order of the engines; raises RunError."""
    given = [str(one) for one in recorded.proxy.get("instances", [])]
    names = [one.partition("=")[0] for one in given]
    if len(names) != len(recorded.engines):
        raise RunError(f"run.json: {len(names)} instances for {len(recorded.engines)} engines")
    return names


def engine_sizes(recorded: Recorded) -> list[EngineOptions]:
    """Return the run's engines in seconds of its clock, with blocks of the trace's size."""
    block, scale = recorded.block_tokens, recorded.time_scale
    sizes = []
    for one in recorded.engines:
        own = one.engine()
        blocks = own.num_blocks * own.block_size // block
        here = constants_of(own).scaled(1 / scale).engine(own)
        sizes.append(
            replace(
                here,
                block_size=block,
                num_blocks=blocks,
                max_model_len=min(own.max_model_len, blocks * block),
                abort_timeout_s=own.abort_timeout_s / scale,
                receive_grace_s=own.receive_grace_s / scale,
            )
        )
    return sizes


def predict(
    recorded: Recorded, log: RunLog, engines: Sequence[EngineOptions], proxy: IntakeCost
) -> VirtualRun:
    """Run the load through the real router in virtual time, in seconds of the run's clock."""
    limits = recorded.timeouts()
    options = VirtualOptions(
        engines=tuple(engines),
        block_tokens=recorded.block_tokens,
        timeout_s=limits["ttft_timeout"],
        prefill_timeout_s=limits["prefill_timeout"],
        transfer_timeout_s=limits["transfer_timeout"],
        scrape_interval_s=limits["scrape_interval"],
        proxy=proxy,
    )
    return simulate(recorded.planned(log.seen()), Router(FleetState(recorded.config())), options)


def compared(
    recorded: Recorded,
    log: RunLog,
    samples: Sequence[CheckSample],
    model: FittedModel,
    runs: Sequence[VirtualRun],
) -> Check:
    """Compare realised and predicted figures; raises RunError if a prediction fails requests."""
    scale = recorded.time_scale
    failed = max(sum(row.outcome != "ok" for row in run.rows) for run in runs)
    if failed:
        raise RunError(f"the prediction fails {failed} of {len(log.client)} requests")
    rows = in_target_time(list(log.client.values()), scale)
    real = {tag: [v for row in rows for v in METRICS[tag].samples(row)] for tag in TIMES}
    found = {
        tag: [_scaled([getattr(row, tag) for row in run.rows], scale) for run in runs]
        for tag in TIMES
    }
    placed = _scaled(as_placed(samples, model), scale)
    return Check(
        requests=len(rows),
        policy=str(recorded.proxy.get("offload_policy")),
        times=tuple(c for tag in TIMES for c in _percentiles(tag, real[tag], found[tag])),
        as_placed=tuple(_percentiles("ttft_s", real["ttft_s"], [placed])),
        counts=tuple(_counts(log.proxy, [run.rows for run in runs])),
        ks_ratio=median(ks_distance(real["ttft_s"], one) for one in found["ttft_s"]),
        ks_as_placed=ks_distance(real["ttft_s"], placed),
        fitted=replace(model.fit, constants=model.fit.constants.scaled(scale)),
        true=constants_of(recorded.engines[0].engine()),
        proxy=IntakeCost(model.proxy.fixed_s * scale, model.proxy.per_token_s * scale),
        time_scale=scale,
        lag=spread(lag for row in rows for lag in METRICS["schedule_lag_s"].samples(row)),
    )


def as_placed(samples: Sequence[CheckSample], model: FittedModel) -> list[float]:
    """Predict TTFTs for the run's own placements and sending times, in seconds of its clock."""
    ended = run_legs([one.leg for one in samples], model.engines)
    sent: dict[str | None, float] = {}
    found = []
    for sample, leg in zip(samples, ended, strict=True):
        if sample.kind == "prefill":
            sent[sample.leg.sends] = sample.leg.sent_s
        elif leg.first_token_s is not None:
            # In `samples` a prefill leg comes right before the leg that fetches from it.
            begun_s = sent.get(sample.leg.fetches, sample.leg.sent_s)
            tokens = sample.leg.prompt_tokens
            found.append(leg.first_token_s - begun_s + model.proxy.delay_s(tokens))
    return found


def ks_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples."""
    a, b = np.sort(one), np.sort(other)
    at = np.concatenate([a, b])
    below_a = np.searchsorted(a, at, side="right") / len(a)
    below_b = np.searchsorted(b, at, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def _percentiles(
    name: str, real: Sequence[float], found: Sequence[Sequence[float]]
) -> list[Compared]:
    ordered, runs = sorted(real), [sorted(one) for one in found]
    return [
        _compared(f"{name} p{p}", percentile(ordered, p), [percentile(one, p) for one in runs])
        for p in PERCENTS
    ]


def _counts(
    real: Mapping[str, Mapping[str, Any]], found: Sequence[Sequence[VirtualRow]]
) -> list[Compared]:
    rows = list(real.values())
    of_real = Counter(row["route_class"] for row in rows)
    realised = {name: of_real[name] for name in CLASSES} | {
        "cached tokens": sum(row.get("cached_tokens") or 0 for row in rows),
        "offloads": sum(row["prefill_instance"] is not None for row in rows),
        "fallbacks": sum(row["fallback"] is not None for row in rows),
    }
    runs = [_predicted_counts(one) for one in found]
    return [_compared(name, count, [one[name] for one in runs]) for name, count in realised.items()]


def _predicted_counts(rows: Sequence[VirtualRow]) -> dict[str, int]:
    classes = Counter(row.route_class for row in rows)
    return {name: classes[name] for name in CLASSES} | {
        "cached tokens": sum(row.cached_tokens + row.external_tokens for row in rows),
        "offloads": sum(row.prefill is not None for row in rows),
        "fallbacks": sum(row.fallback is not None for row in rows),
    }


def _compared(name: str, realised: float, found: Sequence[float]) -> Compared:
    return Compared(name, realised, median(found), min(found), max(found))


def _scaled(values: Sequence[float | None], scale: float) -> list[float]:
    return [value * scale for value in values if value is not None]


def _rows(values: Sequence[Compared]) -> list[dict[str, Any]]:
    return [asdict(one) | {"ratio": one.ratio} for one in values]

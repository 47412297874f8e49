"""A request log in virtual time, under the policy that ran and under another one.

Engines are fitted to the log's own times (`analysis.check.fit`). Both policies get the same load,
engines and perturbed constants, so the change between them holds less of the model's error than
either figure. Intervals are of a bootstrap over sessions and over the perturbed runs. The policy
that ran is compared with the log: where virtual time does not reproduce its TTFT, no verdict holds.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.bench.stats import change
from analysis.check.fit import JITTER, Constants, Fit, fit, guess, line, with_unseen
from analysis.check.intervals import Values, interval, percentiles, shares
from analysis.check.logged import EARLY, LoggedLoad, LoggedRequest, Record
from analysis.check.logs import CheckSample
from analysis.measures import percentile
from analysis.rivals.registry import RIVALS
from analysis.runs import RunError
from proxy.core.known.fleet_state import FleetState
from proxy.core.latency.slo import Slo
from proxy.core.routing.router import Router
from proxy.core.types import RouterConfig
from replayer.engine.costs import IntakeCost
from replayer.engine.types import EngineOptions
from replayer.virtual.fleet import simulate
from replayer.virtual.legs import run_legs
from replayer.virtual.recorded import router_config
from replayer.virtual.requests import VirtualOptions, VirtualRow, WayNoise, keeps_slo

FIT_REQUESTS = 150
"""Requests to which the engines are fitted: a fit repeats them a thousand times."""
LATE_REQUESTS = 2000
"""Requests of which it is told how much later than modelled their first tokens came."""
FACTORS = JITTER[:5]
BOUND = 0.1
"""A verdict holds if TTFT p50 and p90 of the policy that ran are so near to those of the log."""
TIMES = (("ttft_s", 50), ("ttft_s", 90), ("tpot_s", 50), ("e2e_s", 90))
SLO = Slo()
USUAL = RouterConfig(prefill_throughput=20_000.0)
"""The defaults of the proxy's options."""
TTFT_TIMEOUT_S = 300.0
"""The default of `--ttft-timeout`; the clients wait as long."""
CUT = 100
"""One in so many of the latest first tokens, and of the earliest, is not counted."""
WRONG_TOKENS, WRONG_RATIO = 64, 0.1
"""A leg with a modelled hit that is off by more of either is not fitted to."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: by the log, of the policy that ran, of the other, and the change between them.

    `change` is relative; of shares (goodput) it is the difference. `low` and `high` bound it.
    """

    name: str
    logged: float
    ran: float
    other: float
    change: float
    low: float
    high: float

    @property
    def off(self) -> float:
        """How far virtual time is from the log, under the policy that ran; relative."""
        return change(self.ran, self.logged)


@dataclass(frozen=True, slots=True)
class Fleet:
    """What serves the load: a policy, so many instances, the proxy's options and their file."""

    policy: str
    instances: int
    options: RouterConfig = USUAL
    file: str = ""

    @classmethod
    def of(cls, policy: str, instances: int, path: Path | None) -> Fleet:
        """Read the options; those that the file lacks are the defaults. Raises RunError."""
        if path is None:
            return cls(policy, instances)
        return cls(policy, instances, _options(read_options(path), path), path.name)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The result. `unserved`: requests that the other policy's runs do not serve, in the mean.

    `offloads`: by the log, of the policy that ran, of the other.
    """

    ran: Fleet
    asked: Fleet
    requests: int
    judged: int
    sessions: int
    left_out: int
    figures: tuple[Figure, ...]
    offloads: tuple[float, float, float]
    unserved: float
    fitted: Fit
    kv_tokens: int

    @property
    def trusted(self) -> bool:
        """Whether virtual time reproduces the log under the policy that ran."""
        return all(abs(one.off) <= BOUND for one in self.figures[:2])

    def document(self) -> dict[str, Any]:
        """Return all figures for JSON."""
        given = asdict(self)
        fit = given.pop("fitted")
        return given | {
            "trusted": self.trusted,
            "bound_ratio": BOUND,
            "figures": [_finite(asdict(one) | {"off": one.off}) for one in self.figures],
            "offloads": dict(zip(("logged", "ran", "other"), self.offloads, strict=True)),
            "constants": fit["constants"],
            "seen": sorted(self.fitted.seen),
        }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace what JSON does not have: None stands for infinite."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def read_options(path: Path) -> dict[str, Any]:
    """Read the proxy's options, as `--print-config` writes them; raises RunError."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RunError(f"{path}: must be TOML, as --print-config writes it ({error})") from None


def _options(given: Mapping[str, Any], path: Path) -> RouterConfig:
    try:
        found = router_config({"prefill_throughput": USUAL.prefill_throughput, **given})
        FleetState(found)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise RunError(f"{path}: must be the proxy's options ({error})") from None
    return replace(found, shadow_policy=None)


def size_of(load: LoggedLoad, kv_tokens: int | None) -> EngineOptions:
    """Return an engine as large as was said; by default as `engine-sim`, or for two requests."""
    preset, block = EngineOptions(), load.block_tokens
    turns = [one.planned.turn for one in load.requests]
    longest = max(turn.prompt_tokens + turn.output_tokens for turn in turns) + 2 * block
    if kv_tokens is not None and kv_tokens < longest:
        raise RunError(f"--kv-tokens: must be {longest:,} at least, as a request of the log is")
    tokens = kv_tokens or max(preset.num_blocks * preset.block_size, 2 * longest)
    blocks = tokens // block
    return replace(preset, block_size=block, num_blocks=blocks, max_model_len=blocks * block)


def fitted(load: LoggedLoad, size: EngineOptions) -> Fit:
    """Fit the engines to the middle of the log; raises RunError."""
    sizes = [size] * len(load.names)
    places = load.middle(FIT_REQUESTS)
    samples = load.samples(places)
    if not any(one.first_s for one in samples):
        raise RunError(f"no stream is among the {FIT_REQUESTS} requests in the middle of the log")
    return with_unseen(fit(_with_true_hits(load, places, guess(samples), size), sizes), sizes)


def _with_true_hits(
    load: LoggedLoad, places: range, constants: Constants, size: EngineOptions
) -> list[CheckSample]:
    """Take the time from legs for which the model has other hits than the log."""
    samples, engine = load.samples(places), constants.engine(size)
    ended = run_legs([one.leg for one in samples], [engine] * len(load.names))
    rows = iter([load.requests[at].record for at in places])
    found = []
    for sample, leg in zip(samples, ended, strict=True):
        row = None if sample.kind in ("prefill", EARLY) else next(rows)
        if row is not None and sample.kind == "first" and _is_wrong(row, leg.local_hit_tokens):
            found.append(replace(sample, first_s=None))
        else:
            found.append(sample)
    return found


def lateness(load: LoggedLoad, found: Fit, size: EngineOptions) -> WayNoise:
    """Return how much later first tokens came than the model has them, in the mean.

    The fit follows most requests. Sockets and a busy machine only ever add to some.
    """
    samples = _with_true_hits(load, load.middle(LATE_REQUESTS), found.constants, size)
    engines = [found.constants.engine(size)] * len(load.names)
    ended = run_legs([one.leg for one in samples], engines)
    late_s = sorted(
        one.first_s - (leg.first_token_s - one.leg.sent_s)
        for one, leg in zip(samples, ended, strict=True)
        if one.kind == "first" and one.first_s and leg.first_token_s
    )
    cut = len(late_s) // CUT
    kept = late_s[cut : len(late_s) - cut]
    return WayNoise(max(0.0, statistics.fmean(kept)) if kept else 0.0)


def _is_wrong(row: Record, hit_tokens: int) -> bool:
    told: int = row["hit_tokens"] if row["cached_tokens"] is None else row["cached_tokens"]
    new_tokens: int = row["prompt_tokens"] - told
    return abs(told - hit_tokens) > max(WRONG_TOKENS, WRONG_RATIO * new_tokens)


def compare(
    load: LoggedLoad,
    as_it_was: Fleet,
    asked: Fleet,
    engine: tuple[Fit, EngineOptions],
    progress: Callable[[int, int], None],
) -> WhatIf:
    """Run both policies on the load, and compare them with each other and with the log."""
    found, size = engine
    proxy = IntakeCost(*line(load.overheads(load.middle(FIT_REQUESTS))))
    way = lateness(load, found, size)
    runs: dict[Fleet, list[list[VirtualRow]]] = {as_it_was: [], asked: []}
    tasks = [(fleet, factor) for fleet in runs for factor in FACTORS]
    for done, (fleet, factor) in enumerate(tasks, start=1):
        engines = (found.constants.scaled(factor).engine(size),) * fleet.instances
        runs[fleet].append(_run(load, fleet, engines, (proxy, way)))
        progress(done, len(tasks))
    ran, other = runs[as_it_was], runs[asked]
    moved = sum(one.record["prefill_instance"] is not None for one in load.requests)
    return WhatIf(
        ran=as_it_was,
        asked=asked,
        requests=len(load.requests),
        judged=sum(one.ttft_s is not None for one in load.requests),
        sessions=len({one.planned.session_id for one in load.requests}),
        left_out=load.left_out,
        figures=tuple(_figures(load.requests, ran, other)),
        offloads=(moved, _mean(ran, _is_offloaded), _mean(other, _is_offloaded)),
        unserved=_mean(other, lambda row: row.outcome != "ok"),
        fitted=found,
        kv_tokens=size.num_blocks * size.block_size,
    )


def _run(
    load: LoggedLoad,
    fleet: Fleet,
    engines: tuple[EngineOptions, ...],
    delays: tuple[IntakeCost, WayNoise],
) -> list[VirtualRow]:
    rival, engine = RIVALS[fleet.policy], engines[0]
    decide = rival.make(engine.num_blocks * engine.block_size)
    config = replace(fleet.options, **rival.options)
    options = VirtualOptions(
        engines=engines,
        block_tokens=load.block_tokens,
        timeout_s=TTFT_TIMEOUT_S,
        ttft_timeout_s=TTFT_TIMEOUT_S,
        proxy=delays[0],
        way=delays[1],
    )
    router = Router(FleetState(config), decide=decide)
    planned = [one.planned for one in load.requests]
    return simulate(planned, router, options, [] if decide is None else [decide]).rows


def _mean(runs: Sequence[Sequence[VirtualRow]], counts: Callable[[VirtualRow], bool]) -> float:
    """Return how many requests of a run count, in the mean."""
    return sum(counts(row) for rows in runs for row in rows) / len(runs)


def _is_offloaded(row: VirtualRow) -> bool:
    return row.prefill is not None


def _figures(
    requests: Sequence[LoggedRequest],
    ran: Sequence[Sequence[VirtualRow]],
    other: Sequence[Sequence[VirtualRow]],
) -> Iterator[Figure]:
    """Yield the figures, those of TTFT first."""
    names = {one.planned.session_id: one for one in requests}
    number = {name: at for at, name in enumerate(names)}
    sessions = np.array([number[one.planned.session_id] for one in requests])
    for tag, percent in TIMES:
        at = [place for place, one in enumerate(requests) if getattr(one, tag) is not None]
        if not at:
            continue
        logged = percentile(sorted(getattr(requests[place], tag) for place in at), percent)
        pair = [percentiles(_times(rows, tag, at), percent, sessions[at]) for rows in (ran, other)]
        yield _figure(f"{tag} p{percent}", logged, pair, change)
    at = [place for place, one in enumerate(requests) if one.ttft_s is not None]
    good = [_is_good(requests[place]) for place in at]
    pair = [
        shares(
            np.array([[keeps_slo(row[place], SLO) for place in at] for row in rows]), sessions[at]
        )
        for rows in (ran, other)
    ]
    yield _figure("goodput", sum(good) / len(good), pair, lambda mine, base: mine - base)


def _figure(
    name: str, logged: float, pair: Sequence[Values], change: Callable[[float, float], float]
) -> Figure:
    ran, other = pair
    changes = np.array([change(mine, base) for mine, base in zip(other, ran, strict=True)])
    low, high = interval(changes[1:])
    return Figure(name, logged, float(ran[0]), float(other[0]), float(changes[0]), low, high)


def _times(runs: Sequence[Sequence[VirtualRow]], tag: str, at: Sequence[int]) -> Values:
    """Return a time of these requests in each run; one that was not served is infinitely late."""
    found = [[getattr(rows[place], tag) for place in at] for rows in runs]
    return np.array([[math.inf if one is None else one for one in row] for row in found])


def _is_good(one: LoggedRequest) -> bool:
    turn, ttft_s = one.planned.turn, one.ttft_s
    assert ttft_s is not None
    return SLO.keeps_ttft(ttft_s, turn.new_tokens) and SLO.keeps_tpot(one.tpot_s)

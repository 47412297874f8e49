"""What the figures should be, and whether they are: medians of paired ratios, with their spread.

A pair is two windows of one round. Nothing here fails a run: the table says what was met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.cost.result import Result
from bench.measuring.looplag import quantile_bound_s
from bench.measuring.window import Window

OURS, DIRECT = "ours", "direct"
RUST_ROUTERS = ("sglang-router-rr", "sglang-router-cache", "vllm-router-rr", "vllm-router-cache")
VLLM_ROUTERS = ("vllm-router-rr", "vllm-router-cache")
MB = 1e6
FULL_TABLE = 100_000
Value = Callable[[Result, Window], float | None]


@dataclass(frozen=True, slots=True)
class Samples:
    """The values of one figure, what they are relative to, and whether neighbours were at work."""

    values: Sequence[float]
    against: str = ""
    is_noisy: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """One figure that is asked for: its number in the list, and the most it may be."""

    number: int
    what: str
    limit: float
    samples: Callable[[Result], Samples]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and its figure; `middle` is None when the run has nothing to say on it."""

    target: Target
    samples: Samples

    @property
    def middle(self) -> float | None:
        """The median."""
        return median(self.samples.values) if self.samples.values else None

    @property
    def is_met(self) -> bool | None:
        """Whether the median keeps the limit; None: not measured."""
        return None if self.middle is None else self.middle <= self.target.limit


def verdicts(result: Result) -> list[Verdict]:
    """Every target, with what the run says on it."""
    return [Verdict(target, target.samples(result)) for target in TARGETS]


def cpu(result: Result, window: Window) -> float | None:
    """CPU time per request or event."""
    del result
    return window.cpu_per_unit_s


def lag_p99(result: Result, window: Window) -> float | None:
    """How late the latest hundredth of all events was."""
    del result
    return window.lag_p99_s


def added_ttft(result: Result, window: Window) -> float | None:
    """Time to the first event beyond what it takes without any proxy, in the same round."""
    direct = _window(result, DIRECT, window.scenario, window.round)
    if direct is None or direct.ttft_p50_s is None or window.ttft_p50_s is None:
        return None
    return max(0.0, window.ttft_p50_s - direct.ttft_p50_s)


def against(scenario: str, value: Value, *peers: str) -> Callable[[Result], Samples]:
    """Ours as a multiple of the best of these peers: the one whose median is the lowest."""

    def samples(result: Result) -> Samples:
        middles = {
            peer: median(values)
            for peer in peers
            if (values := list(_values(result, peer, scenario, value)))
        }
        if not middles:
            return Samples([])
        best = min(middles, key=middles.__getitem__)
        pairs = list(_pairs(result, scenario, best))
        calm = [pair for pair in pairs if not any(w.is_noisy for w in pair)]
        ratios = list(_ratios(result, calm or pairs, value))
        return Samples(ratios, best, is_noisy=not calm)

    return samples


def _values(result: Result, peer: str, scenario: str, value: Value) -> Iterator[float]:
    for window in result.of(peer, scenario):
        found = value(result, window)
        if found is not None:
            yield found


def _pairs(result: Result, scenario: str, peer: str) -> Iterator[tuple[Window, Window]]:
    for turn in range(1, result.rounds + 1):
        one = _window(result, OURS, scenario, turn)
        other = _window(result, peer, scenario, turn)
        if one is not None and other is not None:
            yield one, other


def _ratios(
    result: Result, pairs: Sequence[tuple[Window, Window]], value: Value
) -> Iterator[float]:
    for one, other in pairs:
        mine, theirs = value(result, one), value(result, other)
        if mine is not None and theirs:
            yield mine / theirs


def _window(result: Result, peer: str, scenario: str, turn: int) -> Window | None:
    """A peer's valid window in one round."""
    for window in result.windows:
        if (window.peer, window.scenario, window.round) == (peer, scenario, turn):
            return window if window.counts else None
    return None


def _pss(result: Result) -> Samples:
    windows = result.of(OURS, "paced-c512")
    return Samples([w.pss_bytes / MB for w in windows if w.pss_bytes is not None])


def _session_table(result: Result) -> Samples:
    table = result.session_table
    if table is None:
        return Samples([])
    is_full = table.sessions >= FULL_TABLE
    return Samples([table.pss_bytes / MB] if is_full else [], "" if is_full else "too few sessions")


def _loop_lag(scenario: str) -> Callable[[Result], Samples]:
    def samples(result: Result) -> Samples:
        windows = result.of(OURS, scenario)
        bound_s = quantile_bound_s([w.loop_lag for w in windows], 0.99)
        return Samples([] if bound_s is None else [bound_s * 1e3])

    return samples


TARGETS = (
    Target(1, "CPU per event, 512 streams", 1.25, against("paced-c512", cpu, "haproxy")),
    Target(1, "CPU per event, 512 streams", 0.9, against("paced-c512", cpu, *RUST_ROUTERS)),
    Target(2, "CPU per plain request", 0.85, against("plain-c32", cpu, *RUST_ROUTERS)),
    Target(3, "added TTFT p50, 1 connection", 1.0, against("ttft-c1", added_ttft, *VLLM_ROUTERS)),
    Target(4, "CPU per 400 kB request", 0.6, against("body400k-c8", cpu, "vllm-router-rr")),
    Target(4, "CPU per 400 kB request", 0.12, against("body400k-c8", cpu, "vllm-router-cache")),
    Target(5, "PSS with 512 streams", 60, _pss, "MB"),
    Target(5, "PSS with 100,000 sessions", 200, _session_table, "MB"),
    Target(6, "event lag p99, 512 streams", 2.0, against("paced-c512", lag_p99, "haproxy")),
    Target(7, "loop lag p99, 4 MB bodies (bucket)", 5, _loop_lag("giant"), "ms"),
    Target(8, "loop lag p99, nested bodies (bucket)", 5, _loop_lag("nested"), "ms"),
)

"""The scale of a league: its saturation rate, and the KV for a working set that fits or not.

Saturation is the highest rate of session starts at which the baseline keeps up. That is, at the
horizon it has done at least 95 % of the work of a fleet that serves every request exactly at the
SLO. Work is new tokens plus output tokens. The rate is found by bisection on its logarithm, on a
seed that no row of the league uses.

Regimes: `fits`, fleet KV 1.5 times the working set at load 1.0; `exceeds`, the working set at load
0.8 is 1.3 times the fleet's KV. Each has a saturation rate of its own. Below load 0.8 the working
set of `exceeds` is smaller (every row has its ratio). With the same excess at half the load, a
fleet could not take twice that load. Where it cannot exceed the KV even so, as the longest prompt
alone needs much of an engine's, the scale says so.

Every row says how far its policy kept up and how large its working set was. `cell_doubt` holds the
baseline's against what a cell claims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from analysis.league.capacity.setting import CapacityOptions, Setting
from analysis.league.fleet import Scale
from analysis.league.profiles import H100, PROFILES, Profile, left_out
from analysis.league.simulate import run_policy, work_done_ratio, working_set_tokens
from analysis.rivals.registry import BASELINE
from replayer.arguments import InputError
from replayer.virtual.arrivals import LoadRules, plan
from replayer.virtual.load import Source
from replayer.virtual.requests import VirtualRun

KEEP_UP_RATIO = 0.95
FITS_FACTOR, EXCEEDS_FACTOR, EXCEEDS_LOAD = 1.5, 1.3, 0.8
AMPLE_TOKENS = 1e9
ROOM_FACTOR = 1.25
"""An engine has KV for at least this many times the longest request."""
PREFILL_TPS = 20_000.0
DECODE_TPS = 25_000.0
SCALE_SEED = 7919
USUAL_HORIZON_S, LEAST_HORIZON_S = 900.0, 30.0
MOST_REQUESTS = 32_000
"""A default horizon is cut so that a run has at most so many requests."""
ALONE_TPOT_S = 0.015
WHOLE_UNITS = 8.0
"""A horizon is so many times as long as a session alone, as far as requests allow."""
MOST_COPIES = 150
"""And so that no request of a short trace comes more often."""
PRECISION = 1.05
SPAN, SPAN_OF_EXCEEDS = 32.0, 8.0
"""The search begins with rates from high / SPAN to high: the prefill bound, or the rate of
`fits`."""
RAISE = 2.0
"""Factor on `high` while the baseline keeps up even at it, as with very short horizons."""
ROUNDS = 6
NEAR_ONE = 0.1
"""A load this near 1.0 may be a little above or below what the baseline keeps up with."""
LEAST_DONE_RATIO, LEAST_DONE_RATIO_AT_ONE = 0.9, 0.75
"""The share of its work that the baseline does by the horizon at a load below 1.0, and at it."""
MOST_GOODPUT_RATIO = 0.95
"""The baseline's goodput at load 1.0 or above is no higher: there it is late at times."""
OFF_FACTOR = 1.25
"""A cell may offer so many times more work than its load says, or less: sessions differ."""


class ScaleError(InputError):
    """A trace without a saturation rate; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A trace and a fleet whose saturation rate and KV are searched for, and who is told of it."""

    source: Source
    instances: int
    rules: LoadRules
    timeout_s: float
    profile: Profile = H100
    say: Callable[[str], None] = lambda _what: None

    def run(self, rate: float, kv_tokens: float) -> tuple[VirtualRun, float]:
        """Run the baseline at a rate; also returns the share of the work done by the horizon."""
        rules = LoadRules(
            rate, self.rules.horizon_s, SCALE_SEED, self.rules.think_cap_s, slo=self.rules.slo
        )
        planned = plan(self.source, rules)
        fleet = self.profile.fleet(self.source, self.instances, kv_tokens, self.timeout_s)
        run = run_policy(
            BASELINE, planned, fleet, self.source.block_tokens, until_s=rules.horizon_s
        )
        return run, work_done_ratio(run.rows, planned, rules.horizon_s)

    def prefill_bound(self) -> float:
        """Return the rate at which prefill alone would occupy all engines."""
        new_tokens = sum(t.new_tokens for unit in self.source.units for t in unit)
        return self.instances * PREFILL_TPS * len(self.source.units) / new_tokens

    def usual_horizon_s(self) -> float:
        """Return a horizon for a trace of this length, where none is given.

        Counted at the rate that no engine can keep up with; a run has fewer requests.
        """
        turns = [turn for unit in self.source.units for turn in unit]
        work_s = sum(t.new_tokens / PREFILL_TPS + t.output_tokens / DECODE_TPS for t in turns)
        per_s = self.instances * len(turns) / work_s
        copied_s = MOST_COPIES * len(turns) / per_s
        pauses_s = sum(min(turn.delay_s, self.rules.think_cap_s) for turn in turns)
        alone_s = work_s + ALONE_TPOT_S * sum(turn.output_tokens for turn in turns) + pauses_s
        whole_s = WHOLE_UNITS * alone_s / len(self.source.units)
        least_s = max(LEAST_HORIZON_S, copied_s, whole_s)
        return min(USUAL_HORIZON_S, MOST_REQUESTS / per_s, least_s)

    def keeps_up(self, rate: float, kv_tokens: float) -> bool:
        """Whether the baseline keeps up at a rate."""
        _run, done_ratio = self.run(rate, kv_tokens)
        self.say(
            f"at {rate:.3g} session starts per second {BASELINE} does {done_ratio:.0%} of the work"
        )
        return done_ratio >= KEEP_UP_RATIO

    def saturation(self, kv_tokens: float, high: float, span: float) -> float:
        """Find the highest rate at which the baseline keeps up, from high / span on.

        The span moves up while the baseline keeps up at its upper end, and down while it does not
        at its lower end. Raises ScaleError where not even one session per horizon is served.
        """
        low, kept, failed = high / span, False, False
        while True:
            for _ in range(math.ceil(math.log2(math.log(high / low) / math.log(PRECISION)))):
                rate = (low * high) ** 0.5
                if self.keeps_up(rate, kv_tokens):
                    low, kept = rate, True
                else:
                    high, failed = rate, True
            if not failed:
                low, high = high, RAISE * high
            elif kept or self.keeps_up(low, kv_tokens):
                return low
            elif high * self.rules.horizon_s < 1.0:
                raise ScaleError(
                    f"{BASELINE} keeps up at no rate of session starts: a longer --horizon or "
                    f"--timeout may help (now {self.rules.horizon_s:g} and {self.timeout_s:g} s)"
                )
            else:
                low, high = low / span, low

    def working_set(self, rate: float, kv_tokens: float) -> float:
        """Return the tokens of the contexts of all active sessions."""
        run, _kept = self.run(rate, kv_tokens)
        return working_set_tokens(run.rows, self.rules.horizon_s)

    def with_room(self, kv_tokens: float) -> float:
        """Return KV tokens per engine, raised if needed to hold the longest request."""
        return max(kv_tokens, ROOM_FACTOR * self.source.longest_tokens)


def fits(bench: Bench) -> Scale:
    """Return the scale of a fleet with 1.5 times the KV of the working set at load 1.0."""
    rate = bench.saturation(AMPLE_TOKENS, bench.prefill_bound(), SPAN)
    wanted = bench.working_set(rate, AMPLE_TOKENS)
    kv_tokens = bench.with_room(FITS_FACTOR * wanted / bench.instances)
    return Scale("fits", kv_tokens, rate, wanted)


def find_setting(options: CapacityOptions, tell: Callable[[str], None]) -> Setting:
    """Read the trace and find the scale; `tell` is told what is done without rows."""
    options.check()
    source = options.load()
    if source.left_out.requests:
        tell(left_out(source.left_out))
    profile = PROFILES[options.profile]
    rules = LoadRules(1.0, options.horizon_s or 0.0, think_cap_s=options.think_cap_s)
    bench = Bench(source, options.instances, rules, options.timeout_s, profile, tell)
    if options.horizon_s is None:
        rules = replace(rules, horizon_s=bench.usual_horizon_s())
        bench = replace(bench, rules=rules)
    scale = options.given
    if scale is None:
        tell(f"looking for the load that {options.instances} engines take")
        scale = fits(bench)
    tell(f"load 1.0 is {scale.rate:.3g} session starts per second; {rules.horizon_s:.3g} s each")
    fleet = profile.fleet(
        source, options.instances, scale.kv_tokens, options.timeout_s, rules.horizon_s
    )
    return Setting(source, scale, replace(rules, rate=scale.rate), fleet)


def exceeds(bench: Bench) -> Scale:
    """Return the scale of a fleet whose KV the working set exceeds by 30 % at load 0.8.

    Less KV lowers the saturation rate and with it the working set, so KV is lowered in rounds.
    """
    scale = fits(bench)
    rate, kv_tokens = scale.rate, scale.kv_tokens
    for _ in range(ROUNDS):
        wanted = bench.working_set(EXCEEDS_LOAD * rate, kv_tokens)
        lower = bench.with_room(wanted / EXCEEDS_FACTOR / bench.instances)
        if lower >= kv_tokens:
            break
        kv_tokens = lower
        rate = bench.saturation(kv_tokens, scale.rate, SPAN_OF_EXCEEDS)
    made = Scale("exceeds", kv_tokens, rate, bench.working_set(rate, kv_tokens))
    wanted = bench.working_set(EXCEEDS_LOAD * rate, kv_tokens)
    return replace(made, doubt=_exceeding_doubt(bench, kv_tokens, wanted))


def _exceeding_doubt(bench: Bench, kv_tokens: float, wanted: float) -> str:
    """Say why a working set of `wanted` tokens does not exceed the fleet's KV; empty if it does."""
    ratio = wanted / (bench.instances * kv_tokens)
    if ratio > 1.0:
        return ""
    longest = bench.source.longest_tokens
    why = f": an engine needs room for the longest request, {longest:,} tokens"
    return (
        f"the working set is {ratio:.2f} of the fleet's KV at load {EXCEEDS_LOAD:g}, it does not "
        f"exceed it{why if kv_tokens <= bench.with_room(0.0) else ''}"
    )


REGIMES: dict[str, Callable[[Bench], Scale]] = {"fits": fits, "exceeds": exceeds}


def scale_work_tokens(source: Source, rules: LoadRules) -> int:
    """Return the work that a rate offers within the horizon, on the seed of the search."""
    return sum(one.turn.work_tokens for one in plan(source, replace(rules, seed=SCALE_SEED)))


def cell_doubt(
    regime: str, load: float, rows: Sequence[dict[str, Any]], scale_tokens: float
) -> str:
    """Say what speaks against a cell's load or regime by its rows; empty if nothing does.

    `scale_tokens`: the work that load 1.0 offers. Load 1.0 is where the baseline just keeps up:
    below it does, above it does not. Without rows of the baseline the policy that keeps up best
    takes its place.
    """
    offered = fmean(row["work_tokens"] for row in rows) / max(1.0, load * scale_tokens)
    if not 1.0 / OFF_FACTOR <= offered <= OFF_FACTOR:
        return f"the requests of these seeds are {offered:.2f} times the work of this load"
    done = _means(rows, "work_done_ratio")
    best = BASELINE if BASELINE in done else max(done, key=lambda policy: done[policy])
    least = LEAST_DONE_RATIO if load < 1.0 - NEAR_ONE else LEAST_DONE_RATIO_AT_ONE
    if load <= 1.0 + NEAR_ONE and done[best] < least:
        return f"{best} has done {done[best]:.0%} of its work at the horizon: the load is higher"
    goodput = _means(rows, "goodput_ratio")[best]
    if load >= 1.0 and best == BASELINE and goodput > MOST_GOODPUT_RATIO:
        return f"{best} has a goodput of {goodput:.0%}: the load is lower"
    held = _means(rows, "working_set_ratio")[best]
    if regime == "exceeds" and load >= EXCEEDS_LOAD and held <= 1.0:
        return f"the working set is {held:.2f} of the fleet's KV"
    return ""


def _means(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """Return the mean of a figure by policy."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row["policy"], []).append(row[name])
    return {policy: fmean(found) for policy, found in values.items()}

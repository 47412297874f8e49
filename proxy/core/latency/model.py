"""Online model of prefill, decode step and KV transfer times, and of each instance's queue.

Four lines, each of two non-negative coefficients, with the options' values as prior observations:

    prefill_s  = a1 * new + a4 * new * (context + new / 2)      per instance
    step_s     = a0 + a3 * kv_tokens                            per instance
    way_s      = w0 + w1 * prompt_tokens                        of the fleet
    transfer_s = x0 + tokens * s_per_token                      per pair; the fleet's if unseen

The first two are lines of an instance's `Times`, which are a part of its state and leave with it.
`Latency` has the fleet's lines, with which a new instance begins, and those of the pairs.

The way is what a request takes until the engine may begin with it (network, HTTP, tokenisation)
and a first token until it is here. It passes while the prompts before are computed, so it only
shows where they are not.

A prefill beside running streams also takes one decode step per chunk of the step's token budget. It
takes half a step more if no prefill is before it, since it waits for the running step. These steps
belong to the streams. Each line learns what the others leave unexplained of a measured time, with
less weight the more they explain. Prompts computed in one step are learned as one, and all of them
once their answers have told how much of them was cached (`Measured`). Each line keeps its recent
ratios of measured to predicted time. An instance keeps them for queue and computation together.
Their quantiles bound when a leg is late (`*_bound_s`). `busy_until_s` is when an instance will have
computed all prefills reserved on it. Every prefill that ends corrects it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from proxy.core.latency.pace import (
    FIRST_STEP,
    FleetPace,
    Lately,
    Line,
    Pace,
    Transfers,
    both_lately,
    faded,
)
from proxy.core.latency.regression import (
    PRIOR_WEIGHT,
    WINDOW,
    JointRegression,
    OnlineRegression,
    Residuals,
)

TYPICAL_PREFILL_TOKENS: Final = 8192.0
ATTENTION_SHARE: Final = 0.06
"""Quadratic part of a prefill of TYPICAL_PREFILL_TOKENS, for an 8B model on an H100. Without it the
first prompts of 100k tokens would be predicted to take half of their real time."""
THROUGHPUT_WEIGHT: Final = 1.0
SHARE_WEIGHT: Final = 0.25
"""Weights of the option and of that share, in observations: a few answers say more."""
STEP_PRIOR_S: Final = 0.010
"""Decode step assumed at first: an 8B model on an H100 takes 6 to 12 ms."""
TYPICAL_KV_TOKENS: Final = 100_000.0
SAME_STEP_RATIO: Final = 0.3
"""A prefill that took less than this part of its prediction shared a step with the one before."""
TYPICAL_TRANSFER_TOKENS: Final = 30_000.0
"""The default transfer time of 0.5 s was measured with prompts of about this length."""
TRANSFER_FIXED_SHARE: Final = 0.1
LEAST_TRANSFER_S: Final = 0.001
"""A shorter option is taken for this: a line is learned in units of its prior, which 0 is not."""
PAIRS_MAX: Final = 4096
Reserved = tuple[int, float, float, float]
"""A reserved prefill: its key, its work and the part of it that is counted as busy, since when."""
CALIBRATION_QUANTILES = (0.1, 0.5, 0.9)
SHORTEST_S = 1e-9
LATE: Final = 0.95
"""A leg is late beyond this quantile of the recent ratios of measured to predicted time."""
MOVED: Final = 0.05
"""Relative change of the fleet's line after which the instances' lines get it as their prior."""
PREFILL_POINTS = (
    (TYPICAL_PREFILL_TOKENS, TYPICAL_PREFILL_TOKENS**2 / 2),
    (TYPICAL_PREFILL_TOKENS, 8 * TYPICAL_PREFILL_TOKENS**2),
)
STEP_POINT = 1.0, TYPICAL_KV_TOKENS
OUTPUT_PRIOR_TOKENS: Final = 300.0
"""Tokens of an answer assumed at first."""
WAY_PRIOR_S: Final = 0.005
"""Way assumed at first: a proxy, an HTTP server and a tokenizer on one network."""
WAY_PRIOR_S_PER_TOKEN = 1e-7
WAY_PRIOR_WEIGHT: Final = 0.0005
WAY_SLOPE_WEIGHT: Final = 0.004
"""Weights of these guesses: nearly nothing. But where no prompt has a cached token, way and prefill
cannot be told apart, and a value far from its guess is not used."""


def _moved(now: tuple[float, float], last: tuple[float, float], point: tuple[float, float]) -> bool:
    (p, q), (last_p, last_q), (f, g) = now, last, point
    at, was = p * f + q * g, last_p * f + last_q * g
    return abs(at - was) > MOVED * was


class Measured:
    """The measured time of a prefill, or of several that were computed in one step.

    `seconds`: of all of them. `open`: how many have not told yet what was computed
    (`Latency.told`); `expected`: new tokens as predicted, `new` and `pairs` as told.
    `prompt_tokens`: of the first. `saw_way`: the time began with the request's sending, as no
    prefill was before it. `step_s`: decode step of the streams beside it, 0 without.
    """

    __slots__ = (
        "expected",
        "new",
        "open",
        "pairs",
        "prompt_tokens",
        "saw_way",
        "seconds",
        "step_s",
        "times",
    )

    def __init__(
        self,
        times: Times,
        seconds: float,
        step_s: float,
        prompt_tokens: int,
        expected: int,
        *,
        saw_way: bool,
    ) -> None:
        self.times, self.seconds, self.step_s = times, seconds, step_s
        self.prompt_tokens, self.expected, self.saw_way = prompt_tokens, expected, saw_way
        self.open, self.new, self.pairs = 1, 0, 0.0


def _prefill_line(throughput: float) -> OnlineRegression:
    """The line of prefills before anything was seen; `throughput`: tokens per second."""
    x, share = TYPICAL_PREFILL_TOKENS, ATTENTION_SHARE
    a1, a4 = (1 - share) / throughput, share / throughput / (x / 2)
    points = (x, x * x / 2, PRIOR_WEIGHT), (x, x * 2 * x, SHARE_WEIGHT)
    return OnlineRegression(a1, a4, points, shape=(x, x * 2 * x))


def _first_tokens(throughput: float) -> JointRegression:
    """The fleet's first tokens before any was seen: way and prefill."""
    x, line = TYPICAL_PREFILL_TOKENS, _prefill_line(throughput)
    return JointRegression(
        (WAY_PRIOR_S, WAY_PRIOR_S_PER_TOKEN, line.p, line.q),
        (
            ((0.0, 0.0, x, x * x / 2), THROUGHPUT_WEIGHT),
            ((0.0, 0.0, x, x * 2 * x), SHARE_WEIGHT),
            ((1.0, 0.0, 0.0, 0.0), WAY_PRIOR_WEIGHT),
            ((0.0, 8 * x, 0.0, 0.0), WAY_SLOPE_WEIGHT),
        ),
    )


def _step_line() -> OnlineRegression:
    """The line of decode steps before anything was seen."""
    return OnlineRegression(
        STEP_PRIOR_S, 0.0, ((1.0, TYPICAL_KV_TOKENS, PRIOR_WEIGHT), (1.0, 0.0, PRIOR_WEIGHT))
    )


class Calibration:
    """Recent errors of TTFT predictions, by the request's size and whether it queued.

    `by`: ratios of predicted to measured TTFT, by route class, and whether prompts were before it.
    """

    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by: dict[tuple[str, bool], Residuals] = {}

    def observe(
        self, route_class: str, predicted_s: float, seconds: float, *, queued: bool
    ) -> None:
        """A first token came after `seconds`."""
        if seconds > 0.0:
            self.by.setdefault((route_class, queued), Residuals()).add(predicted_s / seconds)


class Times:
    """One instance's lines, and the prefills reserved on it. Seconds.

    `ready`: recent ratios of measured to predicted time, of queue and computation together.
    `computed_tokens`: of all prompts so far.
    """

    __slots__ = (
        "_foreign_turn_s",
        "_last",
        "_pace",
        "_shares",
        "_turn_s",
        "budget",
        "busy_until_s",
        "calibration",
        "computed_tokens",
        "foreign",
        "pending",
        "prefill",
        "ready",
        "recent",
        "recent_at_s",
        "recent_s",
        "step",
    )

    def __init__(self, prefill_throughput: float, max_batched_tokens: int) -> None:
        self.budget = max_batched_tokens
        self.prefill, self.step = _prefill_line(prefill_throughput), _step_line()
        self.ready = Residuals()
        self.calibration = Calibration()
        self.computed_tokens = 0
        self.busy_until_s = 0.0
        self.pending: dict[int, float] = {}
        self._shares: dict[int, tuple[float, float]] = {}
        """Of each pending prefill the part that is counted as busy time, and since when."""
        self.recent = 0.0
        self.recent_s = 0.0
        self.recent_at_s = 0.0
        self.foreign: Lately | None = None
        """Prefills that other replicas had here lately; None where nothing is shared."""
        self._foreign_turn_s = -math.inf
        self._turn_s = 0.0
        self._last: Measured | None = None
        self._pace: Pace | None = None

    def pace(self) -> Pace:
        """What is known at this moment; the same object until something changes."""
        found = self._pace
        if found is None:
            prefill, step = self.prefill, self.step
            recent = self.recent, self.recent_s, self.recent_at_s
            if self.foreign is not None:
                recent = both_lately(recent, self.foreign)
            found = self._pace = Pace(
                self.budget,
                (prefill.p, prefill.q),
                (step.p, step.q),
                self.busy_until_s,
                recent,
                is_pending=bool(self.pending),
            )
        return found

    def changed(self) -> None:
        """A line has changed."""
        self._pace = None

    def measured(
        self, prompt_tokens: int, new: int, seconds: float, step_s: float, *, saw_way: bool
    ) -> Measured | None:
        """A prefill of `new` tokens, as predicted, took `seconds` beside decode steps of `step_s`.

        None where it shared a step with one that has been learned already.
        """
        last = self._last
        if last is not None and not saw_way:
            alone_s = self.pace().alone_s(new, prompt_tokens - new)
            quick_s = SAME_STEP_RATIO * (alone_s + step_s)
            if seconds < quick_s and new <= -last.expected % self.budget:
                if not last.open:
                    return None
                last.seconds += seconds
                last.expected += new
                last.open += 1
                return last
        last = self._last = Measured(self, seconds, step_s, prompt_tokens, new, saw_way=saw_way)
        return last

    def reserve_prefill(
        self,
        key: int,
        work_s: float,
        now_s: float,
        share_s: float | None = None,
        way_s: float = 0.0,
    ) -> None:
        """Reserve a prefill that ends `work_s` after the one before; `key` is its request's.

        `share_s`: the part of `work_s` in which the instance can compute no other prefill. It does
        not begin before `way_s` has passed.
        """
        self._pace = None
        share_s = work_s if share_s is None else share_s
        self.pending[key], self._shares[key] = work_s, (share_s, now_s)
        self.busy_until_s = max(now_s + way_s, self.busy_until_s) + work_s
        kept = faded(self.recent_at_s, now_s)
        self.recent_s = self.recent_s * kept + share_s
        self.recent = self.recent * kept + 1.0
        self.recent_at_s = now_s

    def end_prefill(self, key: int, now_s: float) -> float | None:
        """Remove a reservation; returns when its prefill began, None if it had not begun."""
        if key not in self.pending:
            return None
        self._pace = None
        share_s, since_s = self._shares.pop(key)
        if (over_s := share_s - max(0.0, now_s - since_s)) > 0.0:
            # The engine refused it, or the client left: what it never computed kept it busy for no
            # time. One request of a size that no engine serves would count for minutes.
            over_s *= faded(since_s, self.recent_at_s)
            self.recent_s = max(0.0, self.recent_s - over_s)
        # The engine serves in order of arrival: only the first has begun.
        was_first = next(iter(self.pending)) == key
        work_s = self.pending.pop(key)
        if was_first:
            self.busy_until_s = now_s + sum(self.pending.values())
            begun_s, self._turn_s = self._turn_s, now_s
            if self.foreign is not None and self._foreign_turn_s > since_s:
                return None  # behind another replica's its begin is known to a tick or two only
            return begun_s
        self.busy_until_s = max(now_s, self.busy_until_s - work_s)
        if self.foreign is not None:
            self._overtook(since_s, now_s)
        return None

    def _overtook(self, since_s: float, now_s: float) -> None:
        """An own prefill has ended; foreign ones before it have too, as will be heard later."""
        if not any(key > 0 and self._shares[key][1] <= since_s for key in self.pending):
            self._turn_s = now_s

    def reserve_foreign(self, reserved: Sequence[Reserved]) -> None:
        """Reserve prefills of other replicas, in their places by age; their keys are negative."""
        if not reserved:
            return
        self._pace = None
        for key, work_s, share_s, since_s in reserved:
            self.pending[key], self._shares[key] = work_s, (share_s, since_s)
            self.busy_until_s = max(since_s, self.busy_until_s) + work_s
        self.pending = {
            each: self.pending[each] for each in sorted(self.pending, key=self._since_s)
        }

    def _since_s(self, key: int) -> float:
        return self._shares[key][1]

    def end_foreign(self, key: int, now_s: float) -> None:
        """Remove another replica's reservation: it has ended by now, at the last turn if after it.

        See `know_turn`, which comes first.
        """
        if key not in self.pending:
            return
        self._pace = None
        was_first = next(iter(self.pending)) == key
        work_s, since_s = self.pending.pop(key), self._shares.pop(key)[1]
        if was_first:
            turn_s = max(self._turn_s, self._foreign_turn_s)
            ended_s = turn_s if turn_s > since_s else now_s
            self.busy_until_s = ended_s + sum(self.pending.values())
        else:
            self.busy_until_s = max(now_s, self.busy_until_s - work_s)

    def know_turn(self, turn_s: float) -> None:
        """A prefill of another replica has ended then, and the next one has begun."""
        self._foreign_turn_s = max(self._foreign_turn_s, turn_s)

    @property
    def turn_s(self) -> float:
        """When the last own prefill ended that was the first in order."""
        return self._turn_s

    def own_pending(self) -> list[Reserved]:
        """The reservations of this process alone."""
        found: list[Reserved] = []
        for key, work_s in self.pending.items():
            if key > 0:
                share_s, since_s = self._shares[key]
                found.append((key, work_s, share_s, since_s))
        return found

    def share(self, foreign: Lately | None) -> None:
        """What other replicas computed here lately, from now on."""
        self.foreign, self._pace = foreign, None

    def spent_s(self, key: int, now_s: float) -> float:
        """The most that a pending prefill can have kept the instance busy; 0 if none is pending."""
        share_s, since_s = self._shares.get(key, (0.0, now_s))
        return min(share_s, max(0.0, now_s - since_s))


class TimesByName(ABC):
    """Access to the times in the instances' states (core.accounts), and to nothing else there."""

    @abstractmethod
    def times_of(self, name: str) -> Times | None:
        """The times of an instance; None where it has none yet, or is not there."""

    @abstractmethod
    def keep_times(self, name: str, times: Times) -> None:
        """An instance's first times; of one that is not there nothing is kept."""

    @abstractmethod
    def all_times(self) -> list[Times]:
        """The lines of all instances that have some."""

    @abstractmethod
    def is_kept(self, name: str) -> bool:
        """Whether what is learned of an instance is kept: it is there, and was not dropped."""


class Latency:
    """The learned times of a fleet, over the states of its instances. Times in seconds."""

    def __init__(
        self,
        prefill_throughput: float,
        transfer_time_s: float,
        max_batched_tokens: int,
        by_name: TimesByName,
    ) -> None:
        self._prefill_throughput = prefill_throughput
        self._by_name = by_name
        self.budget = max_batched_tokens
        self._first_tokens, self._any_step = _first_tokens(prefill_throughput), _step_line()
        self.output_tokens = OUTPUT_PRIOR_TOKENS
        self._shared_prefill = self._first_tokens.c[2], self._first_tokens.c[3]
        self._shared_step = self._any_step.p, self._any_step.q
        transfer_time_s = max(transfer_time_s, LEAST_TRANSFER_S)
        fixed = TRANSFER_FIXED_SHARE * transfer_time_s
        slope = (transfer_time_s - fixed) / TYPICAL_TRANSFER_TOKENS
        self._prior = (fixed, slope)
        self._any_pair = self._transfer_line(fixed, slope)
        self._pairs: OrderedDict[tuple[str, str], OnlineRegression] = OrderedDict()
        self._note_transfers({})
        self._ttft = Residuals()
        self.calibration = Calibration()
        typical_s = TYPICAL_PREFILL_TOKENS / prefill_throughput
        self._work = (PRIOR_WEIGHT * typical_s, PRIOR_WEIGHT * typical_s**2)

    @staticmethod
    def _transfer_line(fixed: float, slope: float) -> OnlineRegression:
        return OnlineRegression(
            fixed,
            slope,
            ((1.0, TYPICAL_TRANSFER_TOKENS, PRIOR_WEIGHT), (1.0, 1000.0, PRIOR_WEIGHT)),
        )

    def of(self, name: str) -> Times:
        """One instance's learned times; a new instance begins with the fleet's."""
        times = self._by_name.times_of(name)
        return self._begun(name) if times is None else times

    def _begun(self, name: str) -> Times:
        """Times of a new instance: those of the fleet."""
        times = Times(self._prefill_throughput, self.budget)
        times.prefill.toward(*self._shared_prefill)
        times.step.toward(*self._shared_step)
        times.changed()
        self._by_name.keep_times(name, times)
        return times

    def fleet(self, prompt_tokens: int) -> FleetPace:
        """What is known of the fleet at this moment, for a decision."""
        way_s, alone_s = self.way_s(prompt_tokens), self.fleet_prefill_s(prompt_tokens)
        return FleetPace(way_s, alone_s, self.rest_s(), self.output_tokens, self._transfers)

    def drop_pairs(self, name: str) -> None:
        """An instance's state was dropped: drop the times of its pairs as well."""
        pairs = self._transfers.pairs.copy()
        for pair in [pair for pair in self._pairs if name in pair]:
            del self._pairs[pair], pairs[pair]
        self._note_transfers(pairs)

    def legacy(self, name: str) -> list[list[float]]:
        """The instance's learned lines, for `adopt` in another process."""
        times = self.of(name)
        return [times.prefill.legacy(), times.step.legacy()]

    def adopt(self, name: str, legacy: Sequence[Sequence[float]]) -> None:
        """Start from another process's `legacy`; ValueError if its form is wrong."""
        prefill, step = legacy
        times = self.of(name)
        times.prefill.adopt(prefill)
        times.step.adopt(step)
        times.changed()

    def prefill_tps(self, name: str) -> float:
        """Learned prefill throughput for a prompt of typical length without cached tokens."""
        x = TYPICAL_PREFILL_TOKENS
        return x / max(self.of(name).prefill.at(x, x * x / 2), SHORTEST_S)

    def prefill_s(self, name: str, new: int, context: int, streams: int, kv_tokens: int) -> float:
        """See `Times.prefill_s`."""
        return self.of(name).pace().prefill_s(new, context, streams, kv_tokens)

    def fleet_prefill_s(self, tokens: int) -> float:
        """Time to compute a prompt of which nothing is cached on an idle instance, fleet-wide."""
        p, q = self._shared_prefill
        return tokens * (p + q * 0.5 * tokens)

    def step_s(self, name: str, kv_tokens: int) -> float:
        """Duration of a decode step over this much KV."""
        return self.of(name).pace().step_s(kv_tokens)

    def transfer_s(self, p: str, d: str, tokens: int) -> float:
        """Time to move the KV of `tokens` from P to D, D's first step included."""
        return self._transfers.seconds(p, d, tokens)

    def transfer_tps(self, p: str) -> float | None:
        """Tokens per second of the quickest link from P that was measured; None without one."""
        slopes = [line.q for pair, line in self._pairs.items() if pair[0] == p and line.q > 0.0]
        return 1.0 / min(slopes) if slopes else None

    def prefill_bound_s(self, name: str, predicted_s: float) -> float:
        """Time after which a prefill leg predicted to take `predicted_s` (with queue) is late.

        The prediction times the 95th percentile of this instance's recent ratios.
        """
        found = self._by_name.times_of(name)
        residuals = found.ready if found else Residuals()
        return residuals.bound_s(predicted_s, LATE)

    def transfer_bound_s(self, p: str, d: str, predicted_s: float) -> float:
        """Time after which a transfer is late: `predicted_s` times the pair's 95th percentile."""
        line = self._pairs.get((p, d), self._any_pair)
        return line.residuals.bound_s(predicted_s, LATE)

    def ttft_bound_s(self, predicted_s: float) -> float:
        """Time after which a first token is late, by the 95th percentile of the whole fleet."""
        return self._ttft.bound_s(predicted_s, LATE)

    def wait_s(self, name: str, now_s: float) -> float:
        """Seconds until an instance has computed all prefills reserved on it."""
        found = self._by_name.times_of(name)
        return found.pace().wait_s(now_s) if found else 0.0

    def reserve_prefill(
        self,
        times: Times,
        key: int,
        work_s: float,
        now_s: float,
        share_s: float | None = None,
        way_s: float = 0.0,
    ) -> None:
        """Reserve a prefill on an instance; see `Times.reserve_prefill`."""
        times.reserve_prefill(key, work_s, now_s, share_s, way_s)

    def end_prefill(self, times: Times, key: int, now_s: float) -> float | None:
        """Remove a reservation, see `Times.end_prefill`; `rest_s` learns what it can have taken."""
        spent_s = times.spent_s(key, now_s)
        if spent_s > 0.0:
            (a, b), keep = self._work, 1.0 - 1.0 / WINDOW
            self._work = keep * a + spent_s, keep * b + spent_s * spent_s
        return times.end_prefill(key, now_s)

    def rest_s(self) -> float:
        """Mean residual service time of a prefill that a new request finds running, fleet-wide.

        E[S^2] / 2 E[S] of the last prefills (queueing theory). Times an instance's busy ratio it is
        the expected wait of the next request there.
        """
        seconds, squares = self._work
        return squares / (2.0 * seconds)

    def observe_output(self, tokens: int) -> None:
        """A whole answer had this many tokens: `output_tokens` is their recent mean."""
        self.output_tokens += (tokens - self.output_tokens) / WINDOW

    def way_s(self, prompt_tokens: int) -> float:
        """Time that a prompt is on its way to an engine, and its first token back."""
        c = self._first_tokens.c
        return c[0] + c[1] * prompt_tokens

    def way(self) -> Line:
        """The coefficients of `way_s`: w0, w1."""
        c = self._first_tokens.c
        return c[0], c[1]

    def observe_ttft(self, predicted_s: float, seconds: float) -> None:
        """A first token came `seconds` after its decision."""
        self._ttft.observe(predicted_s, seconds)

    def told(self, seen: Measured, new: int, context: int) -> None:
        """A prompt of `seen` had `new` tokens to compute after `context` cached ones.

        Once all of them have been told, prefill and way are learned.
        """
        seen.new += new
        seen.pairs += new * (context + new / 2)
        seen.open -= 1
        if seen.open or not seen.new:
            return
        times, fleet = seen.times, self._first_tokens
        steps = math.ceil(seen.new / self.budget) + (FIRST_STEP if seen.saw_way else 0.0)
        steps_s = steps * seen.step_s
        way = (1.0, float(seen.prompt_tokens)) if seen.saw_way else (0.0, 0.0)
        fleet.learn((*way, float(seen.new), seen.pairs), seen.seconds, steps_s)
        way_s = self.way_s(seen.prompt_tokens) if seen.saw_way else 0.0
        times.prefill.observe(seen.new, seen.pairs, seen.seconds, way_s + steps_s)
        times.changed()
        learned = fleet.c[2], fleet.c[3]
        if not any(learned):
            return  # short prompts only, in no time: nothing that others could begin with
        if any(_moved(learned, self._shared_prefill, point) for point in PREFILL_POINTS):
            self._shared_prefill = shared = learned
            for each in self._by_name.all_times():
                each.prefill.toward(*shared)
                each.changed()

    def observe_step(self, times: Times, kv_tokens: int, seconds: float) -> None:
        """A stream's mean time per token beside this much KV."""
        fleet = self._any_step
        fleet.learn(1.0, kv_tokens, seconds, 0.0)
        times.step.observe(1.0, kv_tokens, seconds)
        times.changed()
        if _moved((fleet.p, fleet.q), self._shared_step, STEP_POINT):
            self._shared_step = shared = fleet.p, fleet.q
            for each in self._by_name.all_times():
                each.step.toward(*shared)
                each.changed()

    def observe_transfer(self, p: str, d: str, tokens: int, seconds: float) -> None:
        """A transfer took `seconds`, from sending the decode leg to its first token."""
        self._any_pair.observe(1.0, tokens, seconds)
        pairs = self._transfers.pairs
        # A pair of one that has left would stay.
        if self._by_name.is_kept(p) and self._by_name.is_kept(d):
            line = self._pairs.pop((p, d), None) or self._transfer_line(*self._prior)
            line.observe(1.0, tokens, seconds)
            self._pairs[p, d] = line
            pairs = pairs | {(p, d): (line.p, line.q)}
            if len(self._pairs) > PAIRS_MAX:
                del pairs[self._pairs.popitem(last=False)[0]]
        self._note_transfers(pairs)

    def _note_transfers(self, pairs: dict[tuple[str, str], Line]) -> None:
        """Begin a new value: a decision may still be kept with the last one."""
        self._transfers = Transfers((self._any_pair.p, self._any_pair.q), pairs)

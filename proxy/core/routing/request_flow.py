"""The life of one placed request, as a pure state machine: events in, actions out.

A driver performs the actions and reports what happened as events. There are two drivers: the proxy
(`proxy/request`), which sends legs to instances, and the virtual fleet (`replayer/virtual`), which
sends them to engine models. So both have the same hedges, fall-backs, retries and time limits.

`STEPS` says which event may come in which state, and which states may follow. An event that is not
in it is a fault of the driver and raises IllegalStepError. The flow calls the router, which keeps
lease, sessions, prefixes and learned times in step; a driver calls the flow only.

    PLACED ──▶ COMPUTING ─────────────────────────▶ ANSWERED ──▶ STREAMING ──▶ ENDED
       │         ▲   ▲ └──▶ PAUSED ──▶ (COMPUTING)      ▲
       ▼         │   │                                  │
    PREFILLING ──┼───┼──▶ FETCHING ─────────────────────┤
       │ ▲       │                                      │
       ▼ │       │                                      │
    HEDGED ──────┴──────────────────────────────────────┘
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, auto

from proxy.core.fleet.health import Change
from proxy.core.fleet.retries import (
    MAX_RETRIES,
    Budget,
    Next,
    after_failure,
    backoff_s,
    fallback_reason,
    is_innocent,
    may_repeat,
)
from proxy.core.routing import time_limits
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import FailureKind, Fallback, Instance, Reject, RequestFacts

REPEAT_LEAST_S = 1.0
"""What a repeated attempt may take when the first ones have used up the time."""


class State(IntEnum):
    """Where a request is."""

    PLACED = auto()
    PREFILLING = auto()
    """P computes the prompt; D waits."""
    HEDGED = auto()
    """P computes and is late; D computes as well."""
    FETCHING = auto()
    """P has answered; D was asked to pull its KV and to decode."""
    COMPUTING = auto()
    """D computes the prompt and decodes."""
    PAUSED = auto()
    """An attempt has failed; the next one begins after a pause."""
    ANSWERED = auto()
    """D's answer has begun, and is good so far."""
    STREAMING = auto()
    """The prompt's KV is on D, output flows."""
    FAILED = auto()
    """No attempt is left."""
    ENDED = auto()
    """Everything that was charged is taken back."""


class Event(IntEnum):
    """What a driver reports; a method of RequestFlow for each."""

    BEGIN = auto()
    PREFILL_LATE = auto()
    PREFILL_ANSWERED = auto()
    PREFILL_FAILED = auto()
    HEDGE_ANSWERED = auto()
    HEDGE_FAILED = auto()
    DECODE_ANSWERED = auto()
    DECODE_FAILED = auto()
    PAUSE_OVER = auto()
    FIRST_TOKEN = auto()
    END = auto()


_S, _E = State, Event
_RETRIED = frozenset({_S.COMPUTING, _S.PAUSED, _S.FAILED})
STEPS: dict[tuple[State, Event], frozenset[State]] = {
    (_S.PLACED, _E.BEGIN): frozenset({_S.COMPUTING, _S.PREFILLING}),
    (_S.PREFILLING, _E.PREFILL_LATE): frozenset({_S.PREFILLING, _S.HEDGED}),
    (_S.PREFILLING, _E.PREFILL_ANSWERED): frozenset({_S.FETCHING}),
    (_S.PREFILLING, _E.PREFILL_FAILED): frozenset({_S.COMPUTING}),
    (_S.HEDGED, _E.PREFILL_ANSWERED): frozenset({_S.FETCHING}),
    (_S.HEDGED, _E.PREFILL_FAILED): frozenset({_S.COMPUTING}),
    (_S.HEDGED, _E.HEDGE_ANSWERED): frozenset({_S.ANSWERED}),
    (_S.HEDGED, _E.HEDGE_FAILED): frozenset({_S.PREFILLING}),
    (_S.FETCHING, _E.DECODE_ANSWERED): frozenset({_S.ANSWERED}),
    (_S.FETCHING, _E.DECODE_FAILED): _RETRIED,
    (_S.COMPUTING, _E.DECODE_ANSWERED): frozenset({_S.ANSWERED}),
    (_S.COMPUTING, _E.DECODE_FAILED): _RETRIED,
    (_S.PAUSED, _E.PAUSE_OVER): _RETRIED,
    (_S.ANSWERED, _E.FIRST_TOKEN): frozenset({_S.STREAMING}),
    **{(state, _E.END): frozenset({_S.ENDED}) for state in State},
}
"""END may come in any state: the client left, the time is up, or the answer has ended."""


class IllegalStepError(Exception):
    """A driver reported an event that cannot come in the flow's state."""


@dataclass(slots=True, init=False)
class LegLimit:
    """How long a leg may take to its first event: `seconds`, or up to `cap_s` without another.

    `option`: the command line option that holds the cap, without `--` and `-timeout`. Where
    `seconds` is less than `cap_s`, the limit counts only while another instance could be asked.
    """

    option: str
    seconds: float
    cap_s: float

    def __init__(self, option: str, seconds: float, cap_s: float) -> None:
        self.option, self.seconds, self.cap_s = option, seconds, cap_s

    @property
    def kind(self) -> FailureKind:
        """How a leg has failed that met this limit."""
        return FailureKind.LATE if self.seconds < self.cap_s else FailureKind.TIMEOUT


@dataclass(frozen=True, slots=True)
class LegCaps:
    """The options that cap legs, seconds: `--ttft-`, `--prefill-` and `--transfer-timeout`."""

    ttft_s: float
    prefill_s: float
    transfer_s: float


class LegFailure:
    """How a leg failed. `busy_s`: how long an engine that is at capacity asked to be left alone."""

    __slots__ = ("busy_s", "detail", "kind")

    def __init__(self, kind: FailureKind, detail: str = "", busy_s: float = 1.0) -> None:
        self.kind, self.detail, self.busy_s = kind, detail, busy_s


@dataclass(slots=True)
class SendPrefill:
    """Ask P to compute the prompt and keep its KV. It is late at `hedge_at_s` (inf: never)."""

    instance: Instance
    limit: LegLimit
    hedge_at_s: float


@dataclass(slots=True, init=False)
class SendDecode:
    """Ask D; with `fetch_from` it pulls that instance's KV, without it computes the prompt.

    `is_repeat`: another attempt may have reached an engine under the request's own id.
    """

    instance: Instance
    fetch_from: Instance | None
    limit: LegLimit
    is_repeat: bool

    def __init__(
        self, instance: Instance, fetch_from: Instance | None, limit: LegLimit, *, is_repeat: bool
    ) -> None:
        self.instance, self.fetch_from = instance, fetch_from
        self.limit, self.is_repeat = limit, is_repeat


@dataclass(slots=True)
class SendHedge:
    """Ask D to compute the prompt beside P, whose leg goes on."""

    instance: Instance
    limit: LegLimit


@dataclass(slots=True)
class AwaitHedge:
    """P's leg has failed: what D computes already is now the decode leg."""


@dataclass(slots=True)
class CancelHedge:
    """P has answered first: end what D computes."""


@dataclass(slots=True)
class CancelPrefill:
    """D has answered first: end P's leg."""


@dataclass(slots=True)
class Pause:
    """Wait, then report PAUSE_OVER."""

    seconds: float


@dataclass(slots=True)
class GiveUp:
    """Nothing is left to try: the client gets the last failure."""


@dataclass(slots=True)
class FellBack:
    """The offload has ended, D computes; for counters, and to forget what P said of itself."""

    why: Fallback
    prefill: Instance | None


@dataclass(slots=True)
class HedgeEnded:
    """A hedge is over; `winner`: "peer" (P), "local" (D), or "none" where D's attempt failed."""

    winner: str


@dataclass(slots=True)
class Retried:
    """Another attempt begins, after a failure of this kind."""

    kind: FailureKind


@dataclass(slots=True)
class RetryRefused:
    """The budget for repetitions is used up."""


@dataclass(slots=True)
class InstanceFailed:
    """A failure was booked for an instance; `change`: what follows from it, if anything."""

    name: str
    change: Change | None
    detail: str


Action = (
    SendPrefill
    | SendDecode
    | SendHedge
    | AwaitHedge
    | CancelHedge
    | CancelPrefill
    | Pause
    | GiveUp
    | FellBack
    | HedgeEnded
    | Retried
    | RetryRefused
    | InstanceFailed
)


class RequestFlow:
    """One request from its placement to its end.

    `streams`: the client asked for a stream; an answer in one piece comes when it is whole, so its
    first event is capped only. `budget` bounds repetitions over all requests.
    """

    def __init__(
        self,
        router: Router,
        budget: Budget,
        facts: RequestFacts,
        route: Route,
        caps: LegCaps,
        now_s: float,
        *,
        streams: bool,
    ) -> None:
        self.route = route
        self.state = State.PLACED
        self.retries = 0
        self._router, self._budget, self._facts, self._caps = router, budget, facts, caps
        self._placed_s = now_s
        self._streams = streams
        self._blamed: set[str] = set()
        self._is_repeating = False
        self._repeats_here = False
        self._has_hedge = False
        self._failure = FailureKind.CONNECT

    def begin(self, now_s: float) -> list[Action]:
        """The request was placed: the first leg."""
        prefill = self.route.prefill
        if prefill is None:
            self._step(Event.BEGIN, State.COMPUTING)
            return [self._decode(now_s)]
        self._step(Event.BEGIN, State.PREFILLING)
        # Of an answer in one piece nobody sees how far it is: its end would have to win.
        late_s = self._router.hedges.due_s(self.route) if self._streams else math.inf
        return [SendPrefill(prefill, self._prefill_limit(), late_s)]

    def prefill_late(self, now_s: float) -> list[Action]:
        """P has not answered in time: D begins as well, where the router allows it."""
        if not self._router.hedges.start(self.route, self._facts, now_s):
            self._step(Event.PREFILL_LATE, State.PREFILLING)
            return []
        self._step(Event.PREFILL_LATE, State.HEDGED)
        return [SendHedge(self.route.decode, self._first_event_limit(now_s))]

    def prefill_answered(self, now_s: float, cached_ratio: float | None = None) -> list[Action]:
        """P has computed the prompt; `cached_ratio` of it was in its cache, where it tells."""
        route = self.route
        actions: list[Action] = []
        if self.state is State.HEDGED:
            actions += [HedgeEnded("peer"), CancelHedge()]
        self._step(Event.PREFILL_ANSWERED, State.FETCHING)
        if route.prefill is not None:
            self._router.watch.answered(route.prefill.name)
        self._router.prefill_done(route, self._facts, now_s, cached_ratio)
        actions.append(self._decode(now_s))
        return actions

    def prefill_failed(
        self, why: Fallback, now_s: float, failure: LegFailure | None = None
    ) -> list[Action]:
        """P's leg gave no KV. `failure`: what speaks against P itself."""
        actions: list[Action] = []
        prefill = self.route.prefill
        if failure is not None and prefill is not None:
            actions += self.failed(prefill.name, failure, now_s)
        self._has_hedge = self.state is State.HEDGED
        self._step(Event.PREFILL_FAILED, State.COMPUTING)
        actions.append(self._fall_back(why, now_s))
        actions.append(AwaitHedge() if self._has_hedge else self._decode(now_s))
        return actions

    def hedge_answered(self, now_s: float) -> list[Action]:
        """D's own attempt has its first event before P has answered."""
        self._step(Event.HEDGE_ANSWERED, State.ANSWERED)
        self._router.watch.answered(self.route.decode.name)
        return [HedgeEnded("local"), self._fall_back(Fallback.P_LATE, now_s), CancelPrefill()]

    def hedge_failed(self, failure: LegFailure, now_s: float) -> list[Action]:
        """D's own attempt has failed; P goes on."""
        self._step(Event.HEDGE_FAILED, State.PREFILLING)
        booked = self.failed(self.route.decode.name, failure, now_s)
        self._router.hedges.drop(self.route, now_s)
        return [HedgeEnded("none"), *booked]

    def decode_answered(self) -> list[Action]:
        """D's answer has begun and is good."""
        self._step(Event.DECODE_ANSWERED, State.ANSWERED)
        self._router.watch.answered(self.route.decode.name)
        self._end_repetition()
        return [HedgeEnded("local")] if self._has_hedge else []

    def decode_failed(self, failure: LegFailure, now_s: float, u: float) -> list[Action]:
        """D's leg failed before the client's first byte. `u`: random, 0..1, for a pause."""
        self._end_repetition()
        actions: list[Action] = []
        route, kind = self.route, failure.kind
        was_fetching, self._failure, self._has_hedge = self.state is State.FETCHING, kind, False
        if not (was_fetching and is_innocent(kind)):
            actions += self.failed(route.decode.name, failure, now_s)
        step = after_failure(kind, offloaded=was_fetching, retries=self.retries)
        if was_fetching:
            actions.append(self._fall_back(fallback_reason(kind), now_s))
        if step is Next.SAME_INSTANCE:
            actions += self._repeat(Event.DECODE_FAILED, now_s)
        elif step is Next.OTHER_INSTANCE and self._may_be_had(kind):
            if self.retries:
                actions.append(self._pause(Event.DECODE_FAILED, u, repeats_here=False))
            else:
                actions += self._elsewhere(Event.DECODE_FAILED, now_s, u)
        else:
            actions.append(self._give_up(Event.DECODE_FAILED))
        return actions

    def pause_over(self, now_s: float, u: float) -> list[Action]:
        """The pause before the next attempt is over."""
        if self._repeats_here:
            return self._repeat(Event.PAUSE_OVER, now_s)
        return self._elsewhere(Event.PAUSE_OVER, now_s, u)

    def first_token(self, now_s: float, *, seen: bool = True) -> None:
        """The first output token is there; not `seen`: the answer came in one piece."""
        self._step(Event.FIRST_TOKEN, State.STREAMING)
        self._router.first_token(self.route, self._facts, now_s, seen=seen)

    def came_whole(self, now_s: float) -> None:
        """The answer was there at once, to its end: the only token time that is known."""
        self._step(Event.FIRST_TOKEN, State.STREAMING)
        self._router.came_whole(self.route, now_s)

    def completed(self, cached_ratio: float | None) -> None:
        """The answer is whole; `cached_ratio` of the prompt was in D's cache, where it tells."""
        self._router.completed(self.route, self._facts, cached_ratio)

    def end(self, now_s: float, output_tokens: int | None = None) -> None:
        """The request is over, however it ended. `output_tokens`: of a whole answer."""
        if self.state is not State.ENDED:
            self._step(Event.END, State.ENDED)
            self._end_repetition()
            self._router.finish(self.route, now_s, output_tokens)

    def failed(self, name: str, failure: LegFailure, now_s: float) -> list[Action]:
        """Book a failure for an instance: once per request, however often it is tried there."""
        if failure.kind is FailureKind.BUSY:
            self._router.gate.mark_busy(name, now_s + failure.busy_s)
            return []
        if name in self._blamed:
            return []
        self._blamed.add(name)
        change = self._router.watch.failed(name, failure.kind, failure.detail, now_s)
        return [InstanceFailed(name, change, failure.detail)]

    def has_other(self) -> bool:
        """Whether another instance could be asked, were the present one given up as late."""
        if self.retries >= MAX_RETRIES or not self._budget.has_room():
            return False
        return self._router.has_other(self.route, self._facts)

    def _step(self, event: Event, to: State) -> None:
        if to not in STEPS.get((self.state, event), ()):
            words = f"{event.name} while {self.state.name}, to {to.name}"
            raise IllegalStepError(words.lower())
        self.state = to

    def _decode(self, now_s: float) -> SendDecode:
        route = self.route
        if self.state is State.FETCHING:
            limit = self._transfer_limit(now_s)
            return SendDecode(route.decode, route.prefill, limit, is_repeat=self.retries > 0)
        is_repeat = self.retries > 0 or route.fallback is not None
        limit = self._first_event_limit(now_s)
        return SendDecode(route.decode, None, limit, is_repeat=is_repeat)

    def _fall_back(self, why: Fallback, now_s: float) -> FellBack:
        prefill = self.route.prefill
        self._router.fall_back(self.route, self._facts, why, now_s)
        return FellBack(why, prefill)

    def _may_be_had(self, kind: FailureKind) -> bool:
        """Whether another instance may serve the model that this one denied."""
        watch, model = self._router.watch, self._facts.model
        return kind is not FailureKind.NO_MODEL or watch.lacks_model(self.route.decode.name, model)

    def _elsewhere(self, event: Event, now_s: float, u: float) -> list[Action]:
        """On another instance; for want of one on the same, after a pause."""
        router, route, kind = self._router, self.route, self._failure
        free = router.elsewhere(route, self._facts, now_s)
        if not isinstance(free, Reject):
            has_failed = any(router.fleet.has_failed_lately(c.instance.name) for c in free)
            if not self._take_repetition(is_free=self.retries == 0 and not has_failed):
                return [RetryRefused(), self._give_up(event)]
            router.retry(route, self._facts, now_s, free)
            return self._repeat(event, now_s)
        name = route.decode.name
        is_there = router.fleet.is_used(name) and name not in router.fleet.open()
        if not (may_repeat(kind, self.retries) and is_there):
            return [self._give_up(event)]
        if not self._take_repetition(is_free=False):
            return [RetryRefused(), self._give_up(event)]
        return [self._pause(event, u, repeats_here=True)]

    def _repeat(self, event: Event, now_s: float) -> list[Action]:
        self._step(event, State.COMPUTING)
        self.retries += 1
        return [Retried(self._failure), self._decode(now_s)]

    def _pause(self, event: Event, u: float, *, repeats_here: bool) -> Pause:
        self._step(event, State.PAUSED)
        self._repeats_here = repeats_here
        return Pause(backoff_s(self.retries, u))

    def _give_up(self, event: Event) -> GiveUp:
        self._step(event, State.FAILED)
        return GiveUp()

    def _take_repetition(self, *, is_free: bool) -> bool:
        self._is_repeating = self._budget.take(is_free=is_free)
        return self._is_repeating

    def _end_repetition(self) -> None:
        """The repetition that runs, if one does, has an answer or has failed."""
        if self._is_repeating:
            self._is_repeating = False
            self._budget.give_back()

    def _prefill_limit(self) -> LegLimit:
        caps, latency = self._caps, self._router.latency
        seconds = time_limits.prefill_limit_s(latency, self.route, caps.ttft_s, caps.prefill_s)
        return LegLimit("prefill", seconds, seconds)

    def _transfer_limit(self, now_s: float) -> LegLimit:
        cap_s = self._first_event_cap_s(now_s)
        if not self._streams:
            return LegLimit("ttft", cap_s, cap_s)
        most_s, latency = min(self._caps.transfer_s, cap_s), self._router.latency
        seconds = time_limits.transfer_limit_s(latency, self.route, now_s, most_s)
        return LegLimit("transfer", seconds, seconds)

    def _first_event_limit(self, now_s: float) -> LegLimit:
        cap_s = self._first_event_cap_s(now_s)
        if not self._streams:
            return LegLimit("ttft", cap_s, cap_s)
        latency = self._router.latency
        return LegLimit("ttft", time_limits.first_token_limit_s(latency, self.route, cap_s), cap_s)

    def _first_event_cap_s(self, now_s: float) -> float:
        cap_s = self._caps.ttft_s
        if self.retries:
            return max(min(REPEAT_LEAST_S, cap_s), cap_s - (now_s - self._placed_s))
        return cap_s

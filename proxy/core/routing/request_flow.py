"""The life of one placed request, as a pure state machine: events in, steps out.

A driver performs each `Step` and reports what happened as events. There are two drivers: the proxy
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

    ANSWERED, STREAMING ──▶ MOVING ──▶ ANSWERED

A client may leave at any time. A leg of an offload that is cut then may leave KV pinned on P for
minutes. So P's connection is half-closed, and the KV of a later answer is released. D continues to
fetch until it has begun (LEFT).

A stream whose instance fails or drains migrates, after the tokens that its client has (MOVING), as
often as `LegCaps.moves` allows. One that is to be left stands still for `MOVE_STOP_S` at most, else
it stays. Where its prompt takes longer elsewhere, it runs on until it is computed there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Final

from proxy.core.fleet.health import DOUBT_KINDS, HOLLOW_KINDS
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
from proxy.core.kvcache.trust import Counts
from proxy.core.routing import time_limits
from proxy.core.routing.actions import (
    ANSWER,
    NO_EFFECTS,
    AwaitHedge,
    CancelDecode,
    CancelHedge,
    CancelPrefill,
    Effect,
    FellBack,
    GiveUp,
    HangUpPrefill,
    HedgeEnded,
    IllegalStepError,
    InstanceFailed,
    KeepDecode,
    KvUnreleased,
    LeftKv,
    Leg,
    LegCaps,
    LegFailure,
    LegLimit,
    Move,
    NotMoved,
    Pause,
    ReleaseKv,
    ReleaseResult,
    Retried,
    Retry,
    RetryRefused,
    SendDecode,
    SendHedge,
    SendPrefill,
    Step,
)
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import FailureKind, Fallback, Instance, Reject, RequestFacts, Unmoved

REPEAT_LEAST_S: Final = 1.0
"""Time for a retry when the first attempts have used up the limit."""
MOVE_STOP_S: Final = 1.0
"""Longest wait of a client for the next instance in a planned migration."""
_LEAVES_KV: Final = frozenset(
    {FailureKind.TIMEOUT, FailureKind.LATE, FailureKind.RESET, FailureKind.WENT_DOWN}
)
"""Failures of a fetching D after which P may keep the KV: it was not released."""
_MAY_WAIT: Final = frozenset({FailureKind.BUSY, FailureKind.TOO_LONG})
"""Failures after which there is an instance for the request, which may be busy."""
REDIRECTIONS: Final = 300
"""The least status that is no success."""
MAX_WAITS: Final = 2
"""Most waits in the queue of a request that engines refused as busy."""


_LATE: Final = frozenset({FailureKind.TIMEOUT, FailureKind.LATE})
_STOP: Final = LegLimit("ttft", MOVE_STOP_S, MOVE_STOP_S)


class State(IntEnum):
    """The state of a request."""

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
    MOVING = auto()
    """Another instance was asked to go on with the stream."""
    LEFT = auto()
    """The client has left while D fetches: D's leg goes on, and the lease with it."""
    FAILED = auto()
    """No attempt is left."""
    ENDED = auto()
    """Everything that was charged is taken back."""


class Event(IntEnum):
    """Events reported by a driver; each has a method of RequestFlow."""

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
    STREAM_LOST = auto()
    MOVE_FAILED = auto()
    MOVE_AGAIN = auto()
    PREFILL_SENT = auto()
    PREFILL_LEFT = auto()
    DECODE_SENT = auto()
    DECODE_LEFT = auto()
    LEFT_PREFILL_OVER = auto()
    LEFT_DECODE_OVER = auto()
    END = auto()


_S, _E = State, Event
_RETRIED: Final = frozenset({_S.COMPUTING, _S.PAUSED, _S.FAILED})
_AT_P: Final = (_S.PREFILLING, _S.HEDGED)
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
    # Nobody else could tell whose fault a hollow answer is: the client gets it.
    (_S.FAILED, _E.DECODE_ANSWERED): frozenset({_S.ANSWERED}),
    (_S.ANSWERED, _E.FIRST_TOKEN): frozenset({_S.STREAMING}),
    (_S.ANSWERED, _E.STREAM_LOST): frozenset({_S.ANSWERED, _S.MOVING}),
    (_S.STREAMING, _E.STREAM_LOST): frozenset({_S.STREAMING, _S.MOVING}),
    (_S.MOVING, _E.DECODE_ANSWERED): frozenset({_S.ANSWERED}),
    (_S.MOVING, _E.MOVE_FAILED): frozenset({_S.MOVING, _S.STREAMING, _S.FAILED}),
    (_S.MOVING, _E.MOVE_AGAIN): frozenset({_S.MOVING}),
    **{(s, e): frozenset({s}) for s in _AT_P for e in (_E.PREFILL_SENT, _E.PREFILL_LEFT)},
    (_S.FETCHING, _E.DECODE_SENT): frozenset({_S.FETCHING}),
    (_S.FETCHING, _E.DECODE_LEFT): frozenset({_S.FETCHING, _S.LEFT}),
    **{(state, _E.LEFT_PREFILL_OVER): frozenset({state}) for state in State},
    **{(state, _E.LEFT_DECODE_OVER): frozenset({state}) for state in State},
    (_S.LEFT, _E.LEFT_DECODE_OVER): frozenset({_S.ENDED}),
    **{(state, _E.END): frozenset({_S.ENDED}) for state in State},
    (_S.LEFT, _E.END): frozenset({_S.LEFT}),
}
"""END may come in any state: the client left, the time is up, or the answer has ended.

A leg that was left (PREFILL_LEFT, DECODE_LEFT) may be over at any time afterwards.
"""


def _is_refusal(hollow: LegFailure) -> bool:
    """Whether a hollow answer is a client's error, so that it may be right."""
    is_success = hollow.status is not None and hollow.status < REDIRECTIONS
    return hollow.kind is not FailureKind.KEY_REFUSED and not is_success


class RequestFlow:
    """One request from its placement to its end.

    `streams`: the client asked for a stream. An answer in one piece comes when it is whole, so no
    limit on the first event fits it. `budget` bounds repetitions over all requests. `before`: the
    flow of the same request that has ended where it `may_wait`, and has waited since.
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
        before: RequestFlow | None = None,
    ) -> None:
        self.route = route
        self.state = State.PLACED
        self.retries: int = before.retries if before is not None else 0
        self.waits: int = before.waits + 1 if before is not None else 0
        self.moves = 0
        """Number of legs that have continued the stream."""
        self.may_wait = False
        """Engines are busy and no attempt is left: it may wait for one as at first."""
        self._router, self._known, self._budget = router, router.known, budget
        self._facts, self._caps = facts, caps
        self._placed_s, self._streams = now_s, streams
        self._blamed: set[str] = before._blamed if before is not None else set()
        self._doubted: dict[str, LegFailure] = before._doubted if before is not None else {}
        """How instances failed on it that had taken its connection, while none has served it."""
        self.is_poison: bool = before is not None and before.is_poison
        """Two instances have given the same server error: the request's fault, not theirs."""
        self._hollows: dict[str, LegFailure] = before._hollows if before is not None else {}
        """Hollow answers by their instances, of which another one's answer is to say whose fault
        they are."""
        self._is_acquitted = False
        """Two instances have given the same hollow answer: the request's fault, not theirs."""
        self._refused_until_s: dict[str, float] = (
            before._refused_until_s if before is not None else {}
        )
        """Instances that have said that they are busy, of which another's answer is to judge."""
        self._is_served = True
        """D's answer serves its client, for all that could be seen when it began."""
        self._answers = 0
        """D's number of answers when it was asked for an answer in one piece."""
        self._is_repeating = False
        self._repeats_here = False
        self._has_hedge = False
        self._failure = FailureKind.CONNECT
        self._avoided: set[str] = set()
        """Instances that have lost the stream since its last token, or could not go on with it."""
        self._old: Instance | None = None
        """Where the stream still runs, while it is to be moved from there."""
        self._warms = self._has_warmed = False
        """The stream continues there until the next instance has computed its tokens."""
        self._p = route.prefill
        """Also when the route has no P any more."""
        # A leg that ends without an answer in the second half of its time may have left KV.
        self._p_is_near_s = route.reserved_s + route.predicted_prefill_s / 2
        self._p_has_it = self._d_has_it = False

    def begin(self, now_s: float) -> Leg:
        """The request was placed: the first leg."""
        prefill = self.route.prefill
        if prefill is None:
            self._step(Event.BEGIN, State.COMPUTING)
            return self._decode(now_s)
        self._step(Event.BEGIN, State.PREFILLING)
        # Of an answer in one piece nobody sees how far it is: its end would have to win.
        late_s = self._router.hedges.due_s(self.route) if self._streams else math.inf
        return SendPrefill(prefill, self._prefill_limit(), late_s)

    def prefill_late(self, now_s: float) -> SendHedge | None:
        """P has not answered in time: D begins as well, where the router allows it."""
        if not self._router.hedges.start(self.route, self._facts, now_s):
            self._step(Event.PREFILL_LATE, State.PREFILLING)
            return None
        self._step(Event.PREFILL_LATE, State.HEDGED)
        return SendHedge(self.route.decode, self._first_event_limit(now_s))

    def prefill_answered(self, now_s: float, cached_ratio: float | None = None) -> Step[SendDecode]:
        """P has computed the prompt; `cached_ratio` of it was in its cache, where it tells."""
        route, effects = self.route, NO_EFFECTS
        if self.state is State.HEDGED:
            effects = (HedgeEnded("peer"), CancelHedge())
        self._step(Event.PREFILL_ANSWERED, State.FETCHING)
        if route.prefill is not None:
            self._known.events.answered(route.prefill.name)
        self._router.prefill_done(route, self._facts, now_s, cached_ratio)
        return Step(effects, self._decode(now_s))

    def prefill_failed(
        self,
        why: Fallback,
        now_s: float,
        failure: LegFailure | None = None,
        left: LeftKv = LeftKv.NONE,
    ) -> Step[SendDecode | AwaitHedge]:
        """P's leg gave no KV that D can fetch. `failure`: what speaks against P itself."""
        effects = [*self._left(left, now_s)]
        prefill = self.route.prefill
        if prefill is not None:
            effects += self.failed(prefill.name, failure, now_s)
        self._has_hedge = self.state is State.HEDGED
        self._step(Event.PREFILL_FAILED, State.COMPUTING)
        effects.append(self._fall_back(why, now_s))
        return Step(effects, AwaitHedge() if self._has_hedge else self._decode(now_s))

    def hedge_answered(self, now_s: float, *, is_served: bool = True) -> Sequence[Effect]:
        """D's own attempt has its first event before P has answered; see `decode_answered`."""
        self._step(Event.HEDGE_ANSWERED, State.ANSWERED)
        self._is_served = is_served
        judged = self._answered(now_s, is_served=is_served)
        ended = self._fall_back(Fallback.P_LATE, now_s)
        return [*judged, HedgeEnded("local"), ended, CancelPrefill()]

    def hedge_failed(self, failure: LegFailure, now_s: float) -> Sequence[Effect]:
        """D's own attempt has failed; P goes on."""
        self._step(Event.HEDGE_FAILED, State.PREFILLING)
        booked = self.failed(self.route.decode.name, failure, now_s)
        self._router.hedges.drop(self.route, now_s)
        return [HedgeEnded("none"), *booked]

    def asks_about(self, hollow: LegFailure, now_s: float) -> bool:
        """Whether another instance is to be asked whose fault D's hollow answer is.

        Then `decode_failed` follows, else `decode_answered`. A client's error is taken for its own
        the first times; where another instance has said the same it is.
        """
        name, events = self.route.decode.name, self._known.events
        if hollow.status in [other.status for other in self._hollows.values()]:
            for other in (*self._hollows, name):
                events.acquitted(other)
            self._is_acquitted = True
            return False
        is_due = not _is_refusal(hollow) or bool(self._hollows)
        if not is_due:
            facts, is_redirect = self._facts, 300 <= (hollow.status or 0) < 400
            client = f"{facts.tenant} {facts.session_id or ''}"
            is_due = events.refused(name, facts.model, client, now_s, is_redirect=is_redirect)
        return is_due and self.has_other(now_s)

    def decode_answered(self, now_s: float, *, is_served: bool = True) -> Sequence[Effect]:
        """D's answer has begun, and is to be passed on; not `is_served`: it is hollow.

        Or a hollow one from before, as nobody else could tell whose fault it is.
        """
        is_from_before, self._is_served = self.state is State.FAILED, is_served
        self._step(Event.DECODE_ANSWERED, State.ANSWERED)
        if is_from_before:
            return NO_EFFECTS
        self._old = None
        judged = self._answered(now_s, is_served=is_served)
        self._end_repetition()
        return [*judged, HedgeEnded("local")] if self._has_hedge else judged

    def decode_failed(self, failure: LegFailure, now_s: float, u: float) -> Step[Retry]:
        """D's leg failed before the client's first byte. `u`: random, 0..1, for a pause."""
        self._end_repetition()
        effects: list[Effect] = []
        route, kind = self.route, failure.kind
        was_fetching, self._failure, self._has_hedge = self.state is State.FETCHING, kind, False
        if was_fetching:
            effects += self._left_by_d(kind, now_s)
        # Whether an answer in one piece is stuck or long nobody sees. Elsewhere it takes as long;
        # and an instance that has answered others meanwhile is not stuck.
        is_whole_late = kind is FailureKind.TIMEOUT and not self._streams
        is_busy = is_whole_late and self._known.events.answers(route.decode.name) > self._answers
        if not (is_busy or (was_fetching and is_innocent(kind))):
            effects += self.failed(route.decode.name, failure, now_s)
        where = after_failure(kind, offloaded=was_fetching, retries=self.retries)
        where = Next.GIVE_UP if self.is_poison or is_whole_late else where
        if was_fetching:
            effects.append(self._fall_back(fallback_reason(kind), now_s))
        if where is Next.SAME_INSTANCE:
            return self._repeat(Event.DECODE_FAILED, effects, now_s)
        self._router.give_back(route, now_s)
        if where is not Next.OTHER_INSTANCE or not self._may_be_had(kind):
            return Step(effects, self._give_up(Event.DECODE_FAILED))
        if self.retries:
            return Step(effects, self._pause(Event.DECODE_FAILED, u, repeats_here=False))
        return self._elsewhere(Event.DECODE_FAILED, effects, now_s, u)

    def pause_over(self, now_s: float, u: float) -> Step[Retry]:
        """The pause before the next attempt is over."""
        if self._repeats_here:
            self._router.repeat(self.route, self._facts, now_s)
            return self._repeat(Event.PAUSE_OVER, [], now_s)
        return self._elsewhere(Event.PAUSE_OVER, [], now_s, u)

    def first_token(self, now_s: float, *, seen: bool = True) -> None:
        """The first output token is there; not `seen`: the answer came in one piece."""
        self._step(Event.FIRST_TOKEN, State.STREAMING)
        self._avoided.clear()
        self._router.first_token(self.route, self._facts, now_s, seen=seen)

    def came_whole(self, now_s: float) -> None:
        """The answer was there at once, to its end: the only token time that is known."""
        self._step(Event.FIRST_TOKEN, State.STREAMING)
        self._router.came_whole(self.route, now_s)

    def stream_lost(
        self, output_tokens: int, rest_s: float, now_s: float, failure: LegFailure | None = None
    ) -> Step[Move]:
        """Migrate the stream of a lost instance, after `output_tokens`.

        `rest_s`: what is left of the request's time. `failure`: what speaks against the instance.
        """
        name = self.route.decode.name
        blamed = self.failed(name, failure, now_s, has_begun=True)
        return Step(blamed, self._move(Event.STREAM_LOST, output_tokens, rest_s, now_s))

    def move_asked(self, output_tokens: int, rest_s: float, now_s: float) -> Move:
        """The stream is to leave its instance, where it runs until another one goes on with it."""
        if self.state is not State.STREAMING:
            return NotMoved(Unmoved.NO_IDS)
        old = self.route.decode
        move = self._move(Event.STREAM_LOST, output_tokens, rest_s, now_s, leaves=old)
        if isinstance(move, SendDecode):
            self._old = old
        return move

    def move_again(
        self,
        output_tokens: int,
        now_s: float,
        failure: LegFailure | None = None,
        *,
        is_lost: bool = False,
    ) -> Step[SendDecode]:
        """The instance that was asked first is asked for the rest, behind what has come meanwhile.

        It has computed what the stream had then. Or the old one, where the stream ran on, `is_lost`
        meanwhile; `failure`: what speaks against that one.
        """
        self._step(Event.MOVE_AGAIN, State.MOVING)
        blamed = NO_EFFECTS
        if is_lost and (old := self._old) is not None:
            self._old = None
            self._avoided.add(old.name)
            blamed = self.failed(old.name, failure, now_s, has_begun=True)
        self._router.move_on(self.route, self._facts, output_tokens, now_s)
        self._placed_s, self._warms = now_s, False
        limit = self._first_event_limit(now_s) if self._old is None else _STOP
        return Step(blamed, SendDecode(self.route.decode, None, limit, is_repeat=True))

    def move_failed(
        self, failure: LegFailure | None, output_tokens: int, rest_s: float, now_s: float
    ) -> Step[Move]:
        """The instance that was to go on with the stream has failed before its first event.

        Without a `failure` it does not take the request, for which nobody is blamed.
        """
        name = self.route.decode.name
        has_stopped = self._old is not None and not self._warms
        if has_stopped and failure is not None and failure.kind in _LATE:
            # It was given no time to speak of; the stream has stood still for as long as it may.
            if self._has_warmed or self._old is None:
                stays = self._stay(Event.MOVE_FAILED, Unmoved.TIME, output_tokens, now_s)
                return Step(NO_EFFECTS, stays)
            self._step(Event.MOVE_FAILED, State.MOVING)
            return Step(NO_EFFECTS, self._warm(self._old, now_s))
        blamed = self.failed(name, failure, now_s)
        move = self._move(Event.MOVE_FAILED, output_tokens, rest_s, now_s, leaves=self._old)
        return Step(blamed, move)

    def move_needless(self, why: Unmoved, output_tokens: int, now_s: float) -> NotMoved:
        """The stream that was to leave its instance has ended there meanwhile, or cannot move."""
        return self._stay(Event.MOVE_FAILED, why, output_tokens, now_s)

    def _move(
        self,
        event: Event,
        output_tokens: int,
        rest_s: float,
        now_s: float,
        leaves: Instance | None = None,
    ) -> Move:
        """Place the stream on another instance; `leaves`: the instance where it may continue."""
        router, route = self._router, self.route
        self._avoided.add(route.decode.name)
        if self.moves >= self._caps.moves:
            return self._stay(event, Unmoved.LIMIT, output_tokens, now_s)
        free = router.beside(self._facts, self._avoided, now_s)
        if isinstance(free, Reject):
            return self._stay(event, Unmoved.NO_INSTANCE, output_tokens, now_s)
        before = route.decode
        router.move(route, self._facts, free, output_tokens, now_s)
        if route.predicted_prefill_s >= rest_s:
            self._old = self._old or (before if self.state is State.STREAMING else None)
            return self._stay(event, Unmoved.TIME, output_tokens, now_s)
        self._step(event, State.MOVING)
        self.moves += 1
        self._placed_s = now_s
        self._warms = self._has_warmed = False
        if leaves is not None and route.predicted_prefill_s > MOVE_STOP_S:
            return self._warm(leaves, now_s)
        limit = _STOP if leaves is not None else self._first_event_limit(now_s)
        return SendDecode(route.decode, None, limit, is_repeat=True)

    def _warm(self, old: Instance, now_s: float) -> SendDecode:
        """Have the next instance compute what the stream has, while the stream runs on at `old`."""
        self._warms = self._has_warmed = True
        self._placed_s = now_s
        self._router.runs_on(self.route, old)
        limit = self._first_event_limit(now_s)
        return SendDecode(self.route.decode, None, limit, is_repeat=True, warms=True)

    def _stay(self, event: Event, why: Unmoved, output_tokens: int, now_s: float) -> NotMoved:
        """The stream goes on where it is, or ends there."""
        old, self._old = self._old, None
        if old is not None:
            self._router.stay(self.route, self._facts, old, output_tokens, now_s)
            self._step(event, State.STREAMING)
        else:
            self._step(event, State.FAILED if self.state is State.MOVING else self.state)
        return NotMoved(why)

    def prefill_sent(self) -> None:
        """P's leg is on its way to P."""
        self._step(Event.PREFILL_SENT, self.state)
        self._p_has_it = True

    def prefill_left(self) -> HangUpPrefill | CancelPrefill:
        """End the wait for P: the client has left, or D answered first."""
        self._step(Event.PREFILL_LEFT, self.state)
        return HangUpPrefill() if self._p_has_it else CancelPrefill()

    def left_prefill_over(self, now_s: float, left: LeftKv) -> Sequence[Effect]:
        """End an abandoned leg to P; NAMED: P has answered, and holds KV."""
        self._step(Event.LEFT_PREFILL_OVER, self.state)
        if left is not LeftKv.NONE:
            return self._left(left, now_s)
        if self._p_has_it and now_s >= self._p_is_near_s:
            self._unreleased(now_s)
            return [KvUnreleased(ReleaseResult.UNKNOWN)]
        return NO_EFFECTS

    def decode_sent(self) -> None:
        """The leg that fetches P's KV is on its way to D."""
        self._step(Event.DECODE_SENT, State.FETCHING)
        self._d_has_it = True

    def decode_left(self) -> KeepDecode | CancelDecode:
        """The client has left while D fetches."""
        self._step(Event.DECODE_LEFT, State.LEFT if self._d_has_it else State.FETCHING)
        return KeepDecode() if self._d_has_it else CancelDecode()

    def left_decode_over(self, now_s: float, *, has_begun: bool) -> Sequence[Effect]:
        """The leg of a D that was left is over; `has_begun`: with an answer, so the KV is there."""
        if self.state is State.LEFT:
            self._step(Event.LEFT_DECODE_OVER, State.ENDED)
            self._close(now_s, None)
            if has_begun or not self._router.pins_kv:
                return NO_EFFECTS
            self._unreleased(now_s)
            return [KvUnreleased(ReleaseResult.UNKNOWN)]
        self._step(Event.LEFT_DECODE_OVER, self.state)
        return NO_EFFECTS if self._d_has_it else self._release()

    def release_over(self, result: ReleaseResult, now_s: float) -> None:
        """Note the result of a ReleaseKv; KV that may be pinned counts as used for a while."""
        if result is not ReleaseResult.RELEASED:
            self._unreleased(now_s)

    def ended_short(self, path: str, now_s: float, *, is_short: bool) -> str:
        """Note how long the whole answer is; returns what speaks against D, if it does."""
        name, told = self.route.decode.name, self._known.events.ended
        why = told(name, self._facts, path, now_s, is_short=is_short, streams=self._streams)
        if why:
            self._is_served = False
            self.route.measured = None  # nothing is learned of how quickly it ends
        return why

    def completed(self, cached_ratio: float | None, counts: Counts | None = None) -> None:
        """The answer is whole; see `Router.completed`."""
        if self._is_served:
            name, asker = self.route.decode.name, self._facts.asker
            self._known.events.served(name, self.route.reserved_s, asker)
        self._router.completed(self.route, self._facts, cached_ratio, counts)

    def end(self, now_s: float, output_tokens: int | None = None) -> None:
        """The request is over, however it ended. `output_tokens`: of a whole answer."""
        if self.state is State.LEFT:
            self._step(Event.END, State.LEFT)
        elif self.state is not State.ENDED:
            self._step(Event.END, State.ENDED)
            self._close(now_s, output_tokens)

    def failed(
        self, name: str, failure: LegFailure | None, now_s: float, *, has_begun: bool = False
    ) -> Sequence[Effect]:
        """Book a failure for an instance: once per request, however often it is tried there.

        What the request may cause itself waits for another instance's answer to it; where the
        answer `has_begun` no other will be asked, and a trial decides.
        """
        if failure is None:
            return NO_EFFECTS  # nothing speaks against it
        if failure.kind is FailureKind.BUSY:
            self._refused(name, failure.busy_s, now_s)
            return NO_EFFECTS
        if name in self._blamed:
            return NO_EFFECTS
        self._blamed.add(name)
        if failure.kind in HOLLOW_KINDS:
            return self._hollow(name, failure, now_s, has_begun=has_begun)
        if failure.kind is FailureKind.NO_MODEL and self._known.events.contradicts_itself(name):
            self._hollows[name] = failure
        kind, detail, events, change = failure.kind, failure.detail, self._known.events, None
        if kind not in DOUBT_KINDS:
            change = events.failed(name, kind, detail, now_s)
        elif has_begun:
            change = events.broke(name, self._facts.asker, kind, detail, now_s)
        else:
            self._doubt(name, failure, now_s)
        return [InstanceFailed(name, change, detail)]

    def _doubt(self, name: str, failure: LegFailure, now_s: float) -> None:
        """An instance may have failed by the request's own fault: others' answers to it tell."""
        kind, status = failure.kind, failure.status
        if kind is FailureKind.SERVER_ERROR and status is not None:
            self.is_poison |= status in [f.status for f in self._doubted.values() if f.kind is kind]
        self._doubted[name] = failure
        self._known.events.doubted(name, self._facts.asker, kind, failure.detail, now_s)

    def _refused(self, name: str, busy_s: float, now_s: float) -> None:
        """An instance said that it is busy: so it is for this request; for all, others tell."""
        facts = self._facts
        facts.refuse(name, now_s + busy_s)
        self._refused_until_s[name] = now_s + busy_s
        self._known.gate.refused(name, facts.asker, busy_s, now_s)

    def _hollow(
        self, name: str, failure: LegFailure, now_s: float, *, has_begun: bool
    ) -> Sequence[Effect]:
        events, change = self._known.events, None
        if self._is_acquitted:
            return NO_EFFECTS
        if has_begun:
            change = events.broke(name, self._facts.asker, failure.kind, failure.detail, now_s)
            self.route.measured = None  # nothing is learned of how quickly it fails
        else:
            self._hollows[name] = failure
        is_alone = len(self._known.fleet.believed(self._facts.model)) < 2
        if failure.kind is FailureKind.KEY_REFUSED and is_alone:
            events.key_refused(name, failure.detail, now_s)  # nobody else can be asked
        return [InstanceFailed(name, change, failure.detail)]

    @property
    def has_longer(self) -> bool:
        """Whether an instance has a longer context for the request's model than D."""
        facts = self._facts
        if facts.holder is not None:
            return False
        return self._known.fleet.has_longer(self.route.decode.name, facts.model)

    def has_other(self, now_s: float) -> bool:
        """Whether another instance would be asked, were the present one given up as late now."""
        if self.state is State.MOVING:
            has_moves = self.moves < self._caps.moves
            return has_moves and self._router.has_other(self.route, self._facts, now_s)
        if self.retries >= MAX_RETRIES or not self._budget.has_room():
            return False
        return self._router.has_other(self.route, self._facts, now_s)

    def has_beside(self, now_s: float) -> bool:
        """Whether another instance would take the request's stream now."""
        return self._router.has_other(self.route, self._facts, now_s)

    def silence_limit_s(self, now_s: float) -> float:
        """Longest silence of a started answer."""
        return self._router.silence_limit_s(self.route, now_s, self._caps.idle_s)

    def _answered(self, now_s: float, *, is_served: bool = True) -> Sequence[Effect]:
        """D has answered. Where it serves the request, other instances' failures on it count."""
        events, name = self._known.events, self.route.decode.name
        events.answered(name, is_served=is_served)
        effects = NO_EFFECTS
        if is_served:
            self._judge_busy(name, now_s)
            if self._doubted or self._hollows:
                effects = self._judge(name, now_s)
        self._doubted.clear()
        self._hollows.clear()
        return effects

    def _judge_busy(self, name: str, now_s: float) -> None:
        """An instance serves the request: those that have refused it as busy are busy."""
        gate, asker = self._known.gate, self._facts.asker
        gate.served(name, asker, self.route.reserved_s)
        for other, until_s in self._refused_until_s.items():
            if other != name:
                gate.judged(other, asker, until_s, now_s)
        self._refused_until_s.clear()

    def _judge(self, name: str, now_s: float) -> list[Effect]:
        """An instance serves the request: the failures of others on it speak against those."""
        effects: list[Effect] = []
        events, asker = self._known.events, self._facts.asker
        for other, failure in self._doubted.items():
            if other != name:
                what = failure.detail if failure.status is None else f"status {failure.status}"
                detail = f"{what}, and {name} has served the request"
                change = events.judged(other, asker, failure.kind, detail, now_s)
                effects.append(InstanceFailed(other, change, detail))
        for other, hollow in self._hollows.items():
            if other != name:
                what, is_refusal = hollow.detail, _is_refusal(hollow)
                if hollow.kind is FailureKind.KEY_REFUSED:
                    events.key_refused(other, what, now_s, is_for_all=False)
                change = events.hollowed(
                    other, asker, what, now_s, is_refusal=is_refusal, server=name
                )
                effects.append(InstanceFailed(other, change, what))
        return effects

    def _step(self, event: Event, to: State) -> None:
        if to not in STEPS.get((self.state, event), ()):
            words = f"{event.name} while {self.state.name}, to {to.name}"
            raise IllegalStepError(words.lower())
        self.state = to

    def _close(self, now_s: float, output_tokens: int | None) -> None:
        self._end_repetition()
        self._router.finish(self.route, now_s, output_tokens)

    def _left(self, left: LeftKv, now_s: float) -> Sequence[Effect]:
        """Have KV released that no D will fetch, or book it as used for a while."""
        if left is LeftKv.NAMED:
            return self._release()
        if left is LeftKv.NONE or not self._router.pins_kv:
            return NO_EFFECTS
        self._unreleased(now_s)
        return [KvUnreleased(ReleaseResult.STRANDED)]

    def _left_by_d(self, kind: FailureKind, now_s: float) -> Sequence[Effect]:
        """Have P's KV released, or book it as used for a while: the D that fetches it failed."""
        if not self._d_has_it:
            return self._release()
        if kind in _LEAVES_KV:
            self._unreleased(now_s)
        return NO_EFFECTS

    def _release(self) -> Sequence[Effect]:
        if self._p is None or not self._router.pins_kv:
            return NO_EFFECTS
        return [ReleaseKv(self._p, self._router.releasers(self._p, self.route.decode))]

    def _unreleased(self, now_s: float) -> None:
        if self._p is not None:
            self._known.unreleased_kv.book(self._p.name, self.route.prompt_tokens, now_s)

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
        """Whether another instance may serve what this one has denied, a model or a long prompt."""
        name, facts = self.route.decode.name, self._facts
        if kind is FailureKind.TOO_LONG:
            length = self._known.fleet.length(name, facts.model)
            facts.beyond_tokens = int(length) if math.isfinite(length) else facts.beyond_tokens
        if kind is not FailureKind.NO_MODEL:
            return True
        return self._known.events.lacks_model(name, facts.model)

    def _elsewhere(
        self, event: Event, effects: list[Effect], now_s: float, u: float
    ) -> Step[Retry]:
        """On another instance; for want of one on the same, after a pause."""
        router, route, kind = self._router, self.route, self._failure
        fleet = self._known.fleet
        # The next failure of an instance in doubt would say nothing: its trial decides. And while
        # every instance fails, each request would be run twice: the budget bounds that.
        avoids = kind in DOUBT_KINDS or kind in HOLLOW_KINDS
        free = router.elsewhere(route, self._facts, now_s, avoids_doubted=avoids)
        is_last = avoids and self.retries == 0 and isinstance(free, Reject)
        if is_last:
            free = router.elsewhere(route, self._facts, now_s)
        if not isinstance(free, Reject):
            lately, asker = fleet.has_failed_lately, self._facts.asker
            has_failed = is_last or any(lately(c.instance.name, asker) for c in free)
            if not self._take_repetition(is_free=self.retries == 0 and not has_failed):
                return Step([*effects, RetryRefused()], self._give_up(event))
            router.retry(route, self._facts, now_s, free)
            return self._repeat(event, effects, now_s)
        name = route.decode.name
        is_out = name in fleet.open() or (avoids and name in fleet.failing(self._facts.asker))
        is_there = fleet.is_used(name) and not is_out
        if not (may_repeat(kind, self.retries) and is_there):
            return Step(effects, self._give_up(event))
        if not self._take_repetition(is_free=False):
            return Step([*effects, RetryRefused()], self._give_up(event))
        return Step(effects, self._pause(event, u, repeats_here=True))

    def _repeat(self, event: Event, effects: list[Effect], now_s: float) -> Step[SendDecode]:
        self._step(event, State.COMPUTING)
        self.retries += 1
        return Step([*effects, Retried(self._failure)], self._decode(now_s))

    def _pause(self, event: Event, u: float, *, repeats_here: bool) -> Pause:
        self._step(event, State.PAUSED)
        self._repeats_here = repeats_here
        return Pause(backoff_s(self.retries, u))

    def _give_up(self, event: Event) -> GiveUp:
        self._step(event, State.FAILED)
        self.may_wait = self._failure in _MAY_WAIT and self.waits < MAX_WAITS
        return GiveUp()

    def _take_repetition(self, *, is_free: bool) -> bool:
        self._is_repeating = not is_free and self._budget.take()
        return is_free or self._is_repeating

    def _end_repetition(self) -> None:
        """The repetition that runs, if one does, has an answer or has failed."""
        if self._is_repeating:
            self._is_repeating = False
            self._budget.give_back()

    def _prefill_limit(self) -> LegLimit:
        caps, latency = self._caps, self._known.latency
        seconds = time_limits.prefill_limit_s(latency, self.route, caps.ttft_s, caps.prefill_s)
        return LegLimit("prefill", seconds, seconds)

    def _transfer_limit(self, now_s: float) -> LegLimit:
        if not self._streams:
            return self._answer_limit()
        cap_s = self._first_event_cap_s(now_s)
        most_s, latency = min(self._caps.transfer_s, cap_s), self._known.latency
        seconds = time_limits.transfer_limit_s(latency, self.route, now_s, most_s)
        return LegLimit("transfer", seconds, seconds)

    def _first_event_limit(self, now_s: float) -> LegLimit:
        if not self._streams:
            return self._answer_limit()
        cap_s, latency = self._first_event_cap_s(now_s), self._known.latency
        seconds = time_limits.first_token_limit_s(latency, self.route, cap_s)
        return LegLimit("ttft", seconds, cap_s, self._caps.ttft_s)

    def _answer_limit(self) -> LegLimit:
        """Limit of an answer in one piece: each attempt has the whole limit."""
        self._answers = self._known.events.answers(self.route.decode.name)
        caps = self._caps
        return LegLimit(ANSWER, caps.answer_s, caps.answer_s, silence_s=caps.idle_s)

    def _first_event_cap_s(self, now_s: float) -> float:
        cap_s = self._caps.ttft_s
        if self.retries:
            return max(min(REPEAT_LEAST_S, cap_s), cap_s - (now_s - self._placed_s))
        return cap_s

"""Health of one instance: a state machine fed by probes and by traffic.

    healthy -> suspect   something failed since it last worked; it is still chosen
    suspect -> ejected   probes: `FALL` in a row failed; or no server listened `CONNECTS` times; or
                         the breaker opened: `FAULTS` requests in a row failed within `WINDOW_S`, or
                         a trial failed that decided on doubts
    ejected -> probing   probes are answered again, or the breaker's time is over
    probing -> healthy   `RISE` probes in a row were answered, and the breaker's trial as well; or
                         the first one ever

The two causes are kept apart. A server that answers probes while its inference hangs stays out
until it answers a trial, a request by the proxy. A server whose probes fail may still hold its KV.
Only if no server listens is it `is_gone`: its KV is lost, and a new incarnation returns.

A late probe proves nothing against an instance that answers requests. A saturated API server is
late for all probes, and its load would move to the next one. So where an answer, or a piece of one,
has come since the probe began, it does not count. An answer ends a count of late probes. Refused
probes and bad answers count all the same.

Busy answers and clients' errors are not failures. A caller counts an instance once per request of a
client, so that no single one can open a breaker. What fails on an accepted connection is a doubt at
first (`DOUBT_KINDS`), since the request itself may cause it wherever it runs. `DOUBTS` in a row
that nobody has judged make a trial due, which decides. Until then they keep repetitions away: those
of the client that has them, and all others' once two have some (core.fleet.askers). Where another
instance has served that request it is judged: it makes a trial due, and is a failure once a second
client has had the same.
So one client's requests alone cannot eject an instance that works. They keep that client away from
it (core.fleet.askers). So it is with hollow answers, whatever their status (core.fleet.hollow), and
with broken ones (core.fleet.broken). A client's error ends no doubt, as it needs no model.
Hysteresis: of three changes in a row the last is `CALM_S` after the first, so that a flapping probe
moves nothing. Only `is_gone` is set at once.

Answers that have begun go on where an instance is ejected, as it may only be slow. Once it is out
and `CERTAIN` probes in a row have failed they are ended, unless a piece of one has come within
`MUTE_S`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from proxy.core.fleet.askers import DOUBTS, HOLLOW_GAIN, Askers, Unjudged
from proxy.core.fleet.broken import Broken
from proxy.core.fleet.hollow import Hollow
from proxy.core.fleet.short import Short
from proxy.core.types import FailureKind

FALL = 2
CERTAIN = 4
"""Probes in a row that have failed where an instance that is ejected will not be back soon."""
MUTE_S = 5.0
"""If it has said nothing for so long either, its answers that have begun are over."""
RISE = 2
CONNECTS = 3
FAULTS = 5
DOUBT_TRIAL_S = 1.0
"""Seconds between two trials of an instance in doubt, at least."""
MOST_UNDECIDED = 3
"""Trials in a row that were late and decided nothing: each doubles that time, so many at most."""
WINDOW_S = 10.0
OPEN_S, OPEN_MAX_S = 5.0, 60.0
"""Seconds that a breaker stays open: the first time, and at most; doubled each time it opens."""
TRIED_S = 10.0
"""Seconds from a failed trial to the next one, at most: no client pays for it."""
CALM_S = 10.0
JITTER_RATIO = 0.2
"""Random part of the probe interval, to either side."""
UNDECIDED_KINDS = frozenset({FailureKind.TIMEOUT, FailureKind.LATE})
"""Failures of a trial that do not say whether an instance in doubt works: it may have a queue."""
HOLLOW_KINDS = frozenset({FailureKind.HOLLOW, FailureKind.KEY_REFUSED})
"""Hollow answers; see core.fleet.hollow."""
FAULT_KINDS = frozenset(
    {
        FailureKind.CONNECT,
        FailureKind.UNREACHABLE,
        FailureKind.RESET,
        FailureKind.SERVER_ERROR,
        FailureKind.TIMEOUT,
        FailureKind.LATE,
        FailureKind.MALFORMED,
    }
)
"""Failures that count against an instance; not: a busy answer, or a failure of its peer."""
DOUBT_KINDS = FAULT_KINDS - {FailureKind.CONNECT, FailureKind.UNREACHABLE}
"""Those of them that the request itself may cause: the instance has taken its connection."""


class State(StrEnum):
    """The states in the order of the metric `breaker_state`, which shows the position."""

    HEALTHY = "healthy"
    """Requests are sent there."""
    SUSPECT = "suspect"
    """A health check or request failed lately; requests are still sent there."""
    EJECTED = "ejected"
    """Health checks or requests fail; requests are sent there only while more than half of the
    fleet is ejected."""
    PROBING = "probing"
    """Ejected, but health checks succeed again, or a trial is under way."""
    ASLEEP = "asleep"
    """The engine reports that it, or a part of it, is asleep: no requests are sent there."""
    PAUSED = "paused"
    """The engine reports that it is paused, as for new weights: no requests are sent there."""


class Change(StrEnum):
    """A change of an instance's health that the caller logs and acts on."""

    SILENT = "silent"
    """Its probes fail."""
    OPENED = "opened"
    """Requests to it fail, whatever its probes say."""
    GONE = "gone"
    """Its port is closed; it may have been ejected before."""
    BACK = "back"


@dataclass(slots=True)
class Health:
    """One instance's health, up until a failure; times are the router's clock, in s."""

    is_up: bool = True
    """Not ejected."""
    is_gone: bool = False
    """No server listens there."""
    was_seen: bool = False
    """It has answered once."""
    has_failed_lately: bool = False
    """Whether something has failed since it last worked."""
    last_error: str | None = None
    last_error_s: float | None = None
    """Time of `last_error`, which stays when it works again."""
    back_s: float | None = None
    """Time of its last return."""
    rest: State | None = None
    """ASLEEP or PAUSED while its engine reports so; no fault."""
    rest_s: float = 0.0
    """Time at which `rest` began."""
    next_probe_s: float = -math.inf
    probes: int = 0
    answers: int = 0
    """Clients' requests that it has answered."""
    unjudged: Unjudged = field(default_factory=Unjudged)
    """Its failures of DOUBT_KINDS."""
    hollow: Hollow = field(default_factory=Hollow)
    """Its hollow answers."""
    short: Short = field(default_factory=Short)
    """Its answers with next to nothing in them."""
    broken: Broken = field(default_factory=Broken)
    """Its answers that broke off after they had begun, and failures that another one has served."""
    askers: Askers = field(default_factory=Askers)
    """The clients that it has failed, each for itself."""
    _late: int = 0
    _doubt_trial_s: float = -math.inf
    _undecided: int = 0
    """Trials in a row that decided nothing: each next one comes later."""
    _failed: int = 0
    _is_late: bool = False
    _answers_before: int = 0
    _answered: int = 0
    _connects: int = 0
    _is_silent: bool = False
    _faults: deque[float] = field(default_factory=lambda: deque(maxlen=FAULTS))
    _open_until_s: float | None = None
    _opened: int = 0
    _changes: deque[float] = field(default_factory=lambda: deque(maxlen=2))
    _noted: State | None = None
    _since_s: float = 0.0

    @classmethod
    def unproven(cls) -> Health:
        """Health of an instance that joins a serving fleet: out until it answers a probe."""
        return cls(is_up=False, is_gone=True, _is_silent=True)

    def state(self, now_s: float) -> State:
        """The state as one of STATES."""
        if self.is_up:
            if self.rest is not None:
                return self.rest
            is_suspect = self.is_suspect or self.is_doubted or self.askers.is_any(now_s)
            return State.SUSPECT if is_suspect else State.HEALTHY
        is_new = not self.was_seen and not self._failed
        is_rising = is_new or (self._is_silent and self._answered > 0)
        is_due = self._open_until_s is not None and self._open_until_s <= now_s
        return State.PROBING if is_rising or is_due else State.EJECTED

    def since_s(self, now_s: float) -> float:
        """Since when it is in its present state, as far as anybody has looked."""
        state = self.state(now_s)
        if state is not self._noted:
            self._noted, self._since_s = state, now_s
        return self._since_s

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open: requests failed here, and none has worked since."""
        return self._open_until_s is not None

    @property
    def is_out_for_certain(self) -> bool:
        """Whether it is ejected, and its probes fail on and on: it hangs, or cannot be reached."""
        return not self.is_up and self._failed >= CERTAIN

    @property
    def is_suspect(self) -> bool:
        """Whether something has failed, or was hollow, since it last worked."""
        return self.has_failed_lately or self.hollow.doubts > 0 or self.short.is_doubted

    @property
    def is_doubted(self) -> bool:
        """Whether a trial has to say if it still works: it only fails lately, for all one sees."""
        is_failing = self.unjudged.count >= DOUBTS or self.hollow.doubts > 0
        return is_failing or self.broken.is_open or self.short.is_doubted

    def is_failing_for(self, client: str) -> bool:
        """Whether that is so for a client's requests that could be repeated elsewhere."""
        return self.unjudged.are_enough(client) or self._is_hollow_for(client)

    def has_failed_for(self, client: str) -> bool:
        """Whether something has failed since it last worked, or was hollow to this client."""
        is_doubted = self.has_failed_lately or self.short.is_doubted_for(client)
        return is_doubted or self._is_hollow_for(client)

    def _is_hollow_for(self, client: str) -> bool:
        hollow = self.hollow
        return hollow.shared > 0 or (hollow.doubts > 0 and self.askers.has(client))

    def hollow_weight(self, client: str, now_s: float) -> float:
        """Doubt by its hollow answers to several clients, or short ones to this one too, 0 to 1.

        One that is out for that may be used all the same, where more than half of the fleet is out.
        """
        is_out = not self.is_up and (self.hollow.doubts > 0 or self.short.is_doubted)
        return 1.0 if is_out else max(self.hollow.weight(now_s), self.short.weight(client, now_s))

    @property
    def is_only_short(self) -> bool:
        """Whether it is in doubt for short answers alone, so that a trial asks for a long one."""
        is_failing = self.unjudged.count >= DOUBTS or self.hollow.doubts > 0
        return self.short.is_doubted and not (is_failing or self.broken.is_open)

    def shortened(self, path: str, error: str, now_s: float, *, streams: bool) -> None:
        """A short answer counts, as its peers give longer ones: a trial decides."""
        self._note(error, now_s)
        self.short.doubt(path, now_s, streams=streams)

    def weight_for(self, client: str, now_s: float) -> float:
        """Doubt for one client's requests, 0 to 1, by what has failed here."""
        return self.askers.weight(client, now_s)

    @property
    def is_only_hollow(self) -> bool:
        """Whether it is up, and in doubt for hollow answers alone."""
        return self.is_up and self.unjudged.count < DOUBTS and not self.broken.cuts

    def probe_due(self, now_s: float) -> bool:
        """Whether to probe now; an instance that begins to change is probed at the next tick."""
        if self.is_up:
            return self.has_failed_lately or now_s >= self.next_probe_s
        return (self._is_silent and self._answered > 0) or now_s >= self.next_probe_s

    def probing(self, now_s: float, interval_s: float, u: float) -> None:
        """Note a probe; the next follows after the interval, spread by `u` in 0..1."""
        self.probes += 1
        self._answers_before = self.answers
        self.next_probe_s = now_s + interval_s * (1.0 + JITTER_RATIO * (2.0 * u - 1.0))

    def probe_failed(
        self,
        error: str,
        now_s: float,
        *,
        is_refused: bool = False,
        is_late: bool = False,
        is_heard: bool = False,
    ) -> Change | None:
        """Note a probe without an answer, or with a bad one. `is_refused`: no server listens.

        `is_late`: none in time; `is_heard`: meanwhile an answer to a request has gone on.
        """
        self._note(error, now_s)
        if is_late and self.is_up and (is_heard or self.answers != self._answers_before):
            self._end_of_late()
            return None
        self.has_failed_lately = True
        self._is_late = is_late and (self._is_late or not self._failed)
        self._answered = 0
        self._failed += 1
        if is_refused and (self._failed >= FALL or not self.was_seen):
            return self._go(now_s)
        if not self.was_seen and self.is_up:
            # It never answered: it is not used, not even in a panic.
            self._is_silent = self.is_gone = True
            return self._leave(Change.SILENT, now_s)
        if self._is_silent or self._failed < FALL or not self._is_calm(now_s):
            return None
        self._is_silent = True
        return self._leave(Change.SILENT, now_s)

    def probe_answered(self, now_s: float) -> Change | None:
        """A probe succeeded."""
        is_first, self.was_seen = not self.was_seen, True
        self._failed, self._is_late = 0, False
        self._answered += 1
        if is_first and self.is_gone:
            self._is_silent = self.is_gone = False
            self._connects = 0
            return self._return(now_s)
        if not self._is_silent:
            self._connects = 0
            if self._faults and now_s - self._faults[-1] > WINDOW_S:
                self._faults.clear()
            self.has_failed_lately = not self.is_up or bool(self._faults)
            return None
        if self._answered < RISE or not self._is_calm(now_s):
            return None
        self._is_silent = False
        if self.is_gone:
            # Another process: the failures of the old one do not count.
            self.is_gone, self._open_until_s = False, None
            self._connects = self._opened = 0
            self._faults.clear()
        return self._return(now_s) if self._open_until_s is None else None

    def doubted(self, client: str, kind: FailureKind, error: str, now_s: float) -> None:
        """A client's request failed here, in one of DOUBT_KINDS; it may be the cause itself."""
        self._note(error, now_s)
        is_late = kind in UNDECIDED_KINDS
        if self.rest is None or not is_late:
            self.unjudged.failed(client)
            self._late += is_late

    def judged(self, client: str, kind: FailureKind, error: str, now_s: float) -> bool:
        """Another instance has served a client's request that failed here; as `broke`.

        Requests without a name may be anybody's, so each of them counts.
        """
        self.unjudged.judged(client)
        if kind in UNDECIDED_KINDS:
            self._late = max(0, self._late - 1)
        return self.broke(client, kind, error, now_s) or not client

    def broke(self, client: str, kind: FailureKind, error: str, now_s: float) -> bool:
        """An answer to a client broke off; whether it counts: `failed` or `hollowed` comes."""
        self._note(error, now_s)
        is_late, is_cut = kind in UNDECIDED_KINDS, kind in DOUBT_KINDS
        if self.rest is not None and is_late:
            return False
        self.askers.failed(client, now_s)
        was_several = self.broken.is_several
        self.broken.broke(client, now_s, is_cut=is_cut, is_late=is_late)
        if is_cut and self.broken.is_several and not was_several:
            self._faults.append(now_s)  # that of the first client
        return self.broken.is_several

    def hollowed(
        self, client: str | None, why: str, now_s: float, *, is_refusal: bool, server: str = ""
    ) -> Change | None:
        """Note a hollow answer, by its own fault as far as known; `server` served the request.

        `client`: whose it was; None: two have had one. Where trials tell nothing clients' requests
        have to decide: those of two, or of clients without a name, who may be anybody.
        """
        error = f"{why}, and {server} has served the request" if server else why
        self._note(error, now_s)
        is_priced = self.hollow.counts(why, now_s, is_refusal=is_refusal)
        if client is not None and is_priced:
            self.askers.failed(client, now_s, HOLLOW_GAIN)
        is_for_all = client is None or self.askers.are_several(now_s)
        if is_for_all and is_priced:
            self.hollow.count_for_all(now_s)
        if self.hollow.is_blind and (is_for_all or not client):
            return self.failed(FailureKind.HOLLOW, error, now_s)
        return None

    def refused_key(self, error: str, now_s: float, *, is_for_all: bool = True) -> None:
        """Note a refusal of the proxy's own key: a trial is due.

        Not `is_for_all`: another instance has taken it, with a client's request.
        """
        self._note(error, now_s)
        self.hollow.key_refused(error, is_for_all=is_for_all)

    def failed(self, kind: FailureKind, error: str, now_s: float) -> Change | None:
        """A client's request failed here, in one of FAULT_KINDS, or HOLLOW."""
        self._note(error, now_s)
        if self.rest is not None and kind in UNDECIDED_KINDS:
            return None
        self.has_failed_lately = True
        self._faults.append(now_s)
        if kind is FailureKind.CONNECT:
            self._connects += 1
        elif kind is not FailureKind.RESET:  # a request that was on its way when the instance died
            self._connects = 0
        if self._connects >= CONNECTS and now_s - self._faults[-CONNECTS] <= WINDOW_S:
            return self._go(now_s)
        if not self.is_up or len(self._faults) < FAULTS or now_s - self._faults[0] > WINDOW_S:
            return None
        if not self._is_calm(now_s):
            return None
        self._open(now_s)
        return self._leave(Change.OPENED, now_s)

    def answered(self, *, is_served: bool = True) -> None:
        """A client's request got an answer. Not `is_served`: a client's error, or a hollow one.

        An ejected one does not come back by that: its requests may be older than the trouble.
        """
        self.was_seen = True
        self.answers += 1
        if not is_served:
            self._end_of_late()
            return
        self._late = 0
        self.unjudged.clear()
        if self.has_failed_lately and self.is_up:
            self._end_of_late()
            self._faults.clear()
            self._connects = 0
            self.has_failed_lately = bool(self._failed)

    def _note(self, error: str, now_s: float) -> None:
        self.last_error, self.last_error_s = error, now_s

    def _end_of_late(self) -> None:
        """Requests are answered: probes that were late, and only those, count no more."""
        if self._is_late:
            self._failed, self._is_late = 0, False

    def trial_due(self, now_s: float) -> bool:
        """Whether to send a trial now: an open breaker's time is over and probes are answered.

        Or while it is up: it is in doubt, and no trial was sent lately. Never to one that rests.
        """
        if self.rest is not None:
            return False
        if self.is_up:
            is_rested = now_s - self._doubt_trial_s >= DOUBT_TRIAL_S * 2.0**self._undecided
            is_due = self.unjudged.count >= DOUBTS or self.hollow.is_trial_due(now_s)
            is_due = is_due or self.broken.is_trial_due(now_s) or self.short.is_doubted
            return is_due and is_rested and self._is_calm(now_s)
        open_until_s = self._open_until_s
        is_over = open_until_s is not None and open_until_s <= now_s
        return is_over and not self._is_silent and self._is_calm(now_s)

    def trial_begins(self, now_s: float) -> None:
        """A trial, the proxy's own request, is sent."""
        self._doubt_trial_s = now_s

    def trial_failed(
        self, error: str, now_s: float, kind: FailureKind = FailureKind.SERVER_ERROR
    ) -> Change | None:
        """The trial failed: the breaker stays open, or opens where it was to decide on doubts."""
        self._note(error, now_s)
        if self.is_up:
            is_undecided = kind in UNDECIDED_KINDS and self._late + self.broken.late < DOUBTS
            if not self.is_doubted or is_undecided or not self._is_calm(now_s):
                self._doubt_trial_s = now_s
                self._undecided = min(self._undecided + 1, MOST_UNDECIDED)
                self.askers.goes_on(now_s)
                return None
            self._late = self._undecided = 0
            self.unjudged.clear()
            self.broken.clear()
            self._open(now_s)
            return self._leave(Change.OPENED, now_s)
        if self._open_until_s is not None:
            self._open_until_s = now_s + min(TRIED_S, OPEN_S * 2.0**self._opened)
        return None

    def trial_answered(self, now_s: float, *, is_blind: bool = False) -> Change | None:
        """The trial was answered: a breaker closes, doubts are gone.

        `is_blind`: with an error, as its peers answer it too.
        """
        self._late = self._undecided = 0
        self.unjudged.clear()
        self.hollow.passed(is_blind=is_blind)
        self.short.passed(now_s)
        self.broken.passed(now_s)
        if self.is_up or not self.trial_due(now_s):
            return None
        self._open_until_s = None
        return self._return(now_s)

    def renew(self, now_s: float) -> None:
        """Another process answers here: the failures of the old one do not count."""
        self._faults.clear()
        self._connects = self._opened = self._late = self._undecided = 0
        self.unjudged.clear()
        self.hollow.renew()
        self.short.clear()
        self.broken.clear()
        self.askers.clear()
        if self._open_until_s is not None:
            self._open_until_s = now_s

    def _open(self, now_s: float) -> None:
        if self.back_s is not None and self.is_up and now_s - self.back_s > OPEN_MAX_S:
            self._opened = 0
        self._open_until_s = now_s + min(OPEN_MAX_S, OPEN_S * 2.0**self._opened)
        self._opened = min(self._opened + 1, 10)

    def _is_calm(self, now_s: float) -> bool:
        return len(self._changes) < 2 or now_s - self._changes[0] >= CALM_S

    def _go(self, now_s: float) -> Change | None:
        if self.is_gone:
            return None
        self._is_silent = self.is_gone = True
        self._answered = 0
        if self.is_up:
            self._leave(Change.GONE, now_s)
        return Change.GONE

    def _leave(self, why: Change, now_s: float) -> Change:
        self.is_up = False
        self._changes.append(now_s)
        return why

    def _return(self, now_s: float) -> Change:
        self.is_up, self.has_failed_lately = True, False
        self._faults.clear()
        self._failed = self._connects = self._late = self._undecided = 0
        self.unjudged.clear()
        self.hollow.returned()
        self.short.clear()
        self.broken.clear()
        self.askers.clear()
        self.back_s = now_s
        self._changes.append(now_s)
        return Change.BACK

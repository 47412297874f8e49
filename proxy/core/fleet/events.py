"""Events of the instances (probes, failures, restarts), and what each does to their state.

One event in, at most one `Change` out, which the caller logs and acts on.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.fleet.askers import FADE_MOST_S
from proxy.core.fleet.health import FAULT_KINDS, Change, State
from proxy.core.fleet.hollow import FADE_S
from proxy.core.fleet.members import SAME_START_S, Fleet, Member
from proxy.core.fleet.short import WHY
from proxy.core.types import FailureKind, RequestFacts


class InstanceEvents:
    """The events of one fleet; `changed` is called when an instance goes or comes."""

    def __init__(self, fleet: Fleet, changed: Callable[[], None]) -> None:
        self._fleet = fleet
        self._tell = changed

    def probe_failed(
        self,
        name: str,
        error: str,
        now_s: float,
        *,
        is_refused: bool = False,
        is_late: bool = False,
        is_heard: bool = False,
    ) -> Change | None:
        """Note a failed probe. If no server listens (`is_refused`) twice, its KV is lost.

        One that is merely slow keeps prefixes and homes for its return. See `Health.probe_failed`.
        """
        member = self._fleet.get(name)
        if member is None:
            return None
        failed = member.health.probe_failed
        change = failed(error, now_s, is_refused=is_refused, is_late=is_late, is_heard=is_heard)
        return self._changed(member, change, now_s)

    def probe_answered(self, name: str, now_s: float) -> Change | None:
        """A probe succeeded."""
        member = self._fleet.get(name)
        if member is None:
            return None
        was_seen = member.health.was_seen
        change = member.health.probe_answered(now_s)
        if member.state.is_dropped and not member.health.is_gone:
            self._fleet.process_came(name)
        if not was_seen:
            member.health.since_s(now_s)
            if change is not None:
                self._tell()  # the first answer ever: the instance need not start slowly
            return change
        return self._changed(member, change, now_s)

    def failed(self, name: str, kind: FailureKind, error: str, now_s: float) -> Change | None:
        """A client's request failed on the instance; called once per request and instance."""
        member = self._fleet.get(name)
        if member is None or kind not in FAULT_KINDS:
            return None
        return self._changed(member, member.health.failed(kind, error, now_s), now_s)

    def doubted(self, name: str, client: str, kind: FailureKind, error: str, now_s: float) -> None:
        """A client's request failed on the instance: its own fault, or the request's.

        Called once per request and instance.
        """
        if (member := self._fleet.get(name)) is not None:
            member.health.doubted(client, kind, error, now_s)

    def judged(
        self, name: str, client: str, kind: FailureKind, error: str, now_s: float
    ) -> Change | None:
        """Another instance has served a client's request that failed here.

        It counts once two clients have had that.
        """
        member = self._failing(name, now_s)
        if member is None or not member.health.judged(client, kind, error, now_s):
            return None
        return self.failed(name, kind, error, now_s)

    def _failing(self, name: str, now_s: float) -> Member | None:
        """An instance that has failed a client, which may be priced for it from now on."""
        self._fleet.note_doubt(now_s + FADE_MOST_S)
        return self._fleet.get(name)

    def broke(
        self, name: str, client: str, kind: FailureKind, error: str, now_s: float
    ) -> Change | None:
        """An answer of the instance broke off, or ended by `abort` or `error`, within.

        It counts once two clients have had that.
        """
        member = self._failing(name, now_s)
        if member is None or not member.health.broke(client, kind, error, now_s):
            return None
        if kind is FailureKind.HOLLOW:
            return self.hollowed(name, None, error, now_s)
        return self.failed(name, kind, error, now_s)

    def hollowed(
        self,
        name: str,
        client: str | None,
        why: str,
        now_s: float,
        *,
        is_refusal: bool = False,
        server: str = "",
    ) -> Change | None:
        """Note a hollow answer of the instance to a client; None: two have had one.

        `is_refusal`: it was a client's error; `server`: the instance that has served the request.
        """
        member = self._fleet.get(name)
        if member is None:
            return None
        self._fleet.note_doubt(now_s + (FADE_S if client is None else FADE_MOST_S))
        hollowed = member.health.hollowed
        change = hollowed(client, why, now_s, is_refusal=is_refusal, server=server)
        return self._changed(member, change, now_s)

    def key_refused(self, name: str, error: str, now_s: float, *, is_for_all: bool = True) -> None:
        """The instance refuses the proxy's own key."""
        if (member := self._fleet.get(name)) is not None:
            member.health.refused_key(error, now_s, is_for_all=is_for_all)

    def refused(
        self, name: str, model: str, client: str, now_s: float, *, is_redirect: bool = False
    ) -> bool:
        """Note a client's error; returns whether another instance is asked for a second answer."""
        member = self._fleet.get(name)
        if member is None:
            return False
        served = [m.health.hollow.answers for m in self._fleet.believed(model) if m is not member]
        refused = member.health.hollow.refused
        return refused(client, now_s, sum(served), is_redirect=is_redirect)

    def acquitted(self, name: str) -> None:
        """Another instance refuses what this one has refused."""
        if (member := self._fleet.get(name)) is not None:
            member.health.hollow.acquitted()

    def served(self, name: str, since_s: float, client: str = "") -> None:
        """Note a client's complete answer of the instance, with the time it got the request."""
        if (member := self._fleet.get(name)) is not None:
            member.health.hollow.served(since_s)
            member.health.broken.served(since_s)
            member.health.askers.served(client, since_s)

    def ended(
        self,
        name: str,
        facts: RequestFacts,
        path: str,
        now_s: float,
        *,
        is_short: bool,
        streams: bool,
    ) -> str:
        """Note how long a whole answer is; returns what speaks against the instance, if it does."""
        member = self._fleet.get(name)
        if member is None:
            return ""
        short = member.health.short
        short.note(facts.asker, is_short=is_short)
        if not is_short:
            return ""
        peers = [m.health.short for m in self._fleet.believed(facts.model) if m is not member]
        known, count = sum([p.known for p in peers]), sum([p.count for p in peers])
        if not peers or not short.is_odd(now_s, known, count):
            return ""
        self._fleet.note_doubt(now_s + FADE_S)
        member.health.shortened(path, WHY, now_s, streams=streams)
        member.health.since_s(now_s)
        return WHY

    def answered(self, name: str, *, is_served: bool = True) -> None:
        """A client's request got an answer from the instance; see `Health.answered`."""
        if (member := self._fleet.get(name)) is not None:
            member.health.answered(is_served=is_served)

    def answers(self, name: str) -> int:
        """Number of clients' requests that the instance has answered."""
        member = self._fleet.get(name)
        return 0 if member is None else member.health.answers

    def trial_ended(
        self,
        name: str,
        error: str | None,
        now_s: float,
        kind: FailureKind = FailureKind.SERVER_ERROR,
        *,
        is_blind: bool = False,
    ) -> Change | None:
        """The proxy's own request to an instance is over: `error` of this kind, or an answer.

        `is_blind`: an answer that tells nothing, see `Health.trial_answered`.
        """
        member = self._fleet.get(name)
        if member is None:
            return None
        if error is not None:
            self._fleet.note_doubt(now_s + FADE_MOST_S)
            return self._changed(member, member.health.trial_failed(error, now_s, kind), now_s)
        change = member.health.trial_answered(now_s, is_blind=is_blind)
        return self._changed(member, change, now_s)

    def rests(self, name: str, rest: State | None, now_s: float) -> bool:
        """Note that its engine is ASLEEP, PAUSED or neither; returns whether that is new."""
        member = self._fleet.get(name)
        if member is None or member.health.rest is rest:
            return False
        if member.health.rest is None:
            member.health.rest_s = now_s
        member.health.rest = rest
        member.health.since_s(now_s)
        self._tell()
        return True

    def restarted(self, name: str, now_s: float) -> None:
        """Another process answers at the instance's address: drop what was known of the old one."""
        member = self._fleet.get(name)
        if member is not None and not member.health.is_gone:
            self._fleet.process_came(name)
            member.health.renew(now_s)
            member.health.back_s = now_s
            self._fleet.returned(name)
            self._tell()

    def observe_start(self, name: str, start_s: float | None, now_s: float) -> bool:
        """Take in the process start time, unix seconds; returns whether it is another process."""
        member = self._fleet.get(name)
        if member is None or start_s is None or member.health.is_gone:
            return False  # a process that returns counts as another one in any case
        member.starts.observe(start_s, now_s)
        state = member.state
        known_s, state.start_s = state.start_s, max(start_s, state.start_s or start_s)
        if known_s is None or start_s <= known_s + SAME_START_S:
            return False
        self.restarted(name, now_s)
        member.state.start_s = start_s
        return True

    def are_several(self, name: str, now_s: float) -> bool:
        """Whether several processes answer at an instance's address, by their start times."""
        member = self._fleet.get(name)
        return member is not None and member.starts.are_several(now_s)

    def lacks_model(self, name: str, model: str) -> bool:
        """The instance denied a model; true when another one may serve it.

        It keeps the model until its own list says otherwise.
        """
        member = self._fleet.get(name)
        if member is not None and (member.models is None or model in member.models):
            member.rereads_models, member.denied = True, model
        return any(m.instance.name != name for m in self._fleet.believed(model))

    def contradicts_itself(self, name: str) -> bool:
        """Whether an instance has denied a model that its list still had afterwards."""
        member = self._fleet.get(name)
        return member is not None and member.contradicts

    def _changed(self, member: Member, change: Change | None, now_s: float) -> Change | None:
        member.health.since_s(now_s)
        if change is Change.GONE:
            self._fleet.process_gone(member.instance.name)
        elif change is Change.BACK:
            self._fleet.returned(member.instance.name)
        if change is not None:
            self._tell()
        return change

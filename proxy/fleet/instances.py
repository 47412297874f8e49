"""Connections and reports of the instances by name; acts on failures and recoveries, logs them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from urllib.parse import urlsplit

from proxy.config.values import InstanceSpec
from proxy.core.accounts.engine_reports import EngineKv, EngineStats
from proxy.core.admission.largest_pays import LargestPays
from proxy.core.fleet.health import MUTE_S, Change, State
from proxy.core.fleet.short import WHY
from proxy.core.known.fleet_state import FleetState
from proxy.core.types import THRESHOLD_FIELDS, FailureKind, Instance
from proxy.net.addresses import literal
from proxy.net.timeouts import Clock
from proxy.net.upstream.client import LENGTH, Upstream
from proxy.net.upstream.pool import ConnectOptions
from proxy.net.upstream.response import EVENTS_BYTES, Holder, Share
from proxy.net.upstream.response_check import A_HOLLOW
from proxy.protocol.errors import UpstreamFailure
from proxy.telemetry.log import Throttle, more

_WORDS = {
    Change.SILENT: "ejected, its probes fail",
    Change.OPENED: "ejected, requests to it fail",
    Change.GONE: "down",
}
_LATE = frozenset({FailureKind.TIMEOUT, FailureKind.UNREACHABLE})
"""Probe failures that a serving instance may have: it, or the network, is slow."""
_CARD = (LENGTH, "root")
"""Members of a model's card that should be alike on all instances."""
_MOST_COMPARED = 256
"""Models of an instance that are compared with others', as an engine may list thousands; and about
as many, of all instances, in one turn of the loop."""
_EACH_ITSELF = "the proxy cannot see which engine has cached what; give each engine as an instance"
_MOST_ADDRESSES = 8
_MOST_TOLD, _SHOWN, _MOST_CHARS = 3, 100, 1024
"""Differences that a warning names, and characters of each name and value in it."""
ANSWERS = "answers"
"""The topic of the warning on hollow or short answers."""
_KV_THRESHOLD, _SIZE_SERIES = THRESHOLD_FIELDS[0], "vllm:cache_config_info"
_NONE_UP = "no instance is up: every request is refused"
_ALL_REST = "every instance that is up is asleep or paused: every request is refused"
_RESTS = {
    State.ASLEEP: "is asleep, as its engine reports: it gets no requests",
    State.PAUSED: "is paused, as its engine reports: it gets no requests",
}
_PANIC = "more than half of the instances are out: ejected ones are used too"
_HANGS = "answers no health check, and has sent nothing for %g s"
_FINE = "enough instances are up again"
_log = logging.getLogger(__name__)


class Instances:
    """Connections and last reports by instance name, over a fleet's state.

    `on_replay` is called when a stale connection was replaced, `on_removed` with the name of a
    removed instance.
    """

    def __init__(
        self,
        known: FleetState,
        clock: Clock,
        connect_options: ConnectOptions,
        on_replay: Callable[[], None],
        on_removed: Callable[[str], None],
    ) -> None:
        self.known, self.clock = known, clock
        self.connect_options = connect_options
        self.by_name: dict[str, Upstream] = {}
        self.specs: dict[str, InstanceSpec] = {}
        """The entry of each instance, with its sensors; bounded by the instances."""
        self.reports: dict[str, EngineStats] = {}
        self.warnings: dict[str, dict[str, str]] = {}
        """Warnings on a serving instance, by its name and a topic."""
        self._cards: dict[str, dict[str, tuple[object, ...]]] = {}
        """The compared members of each model's card, by instance."""
        self.probe_wanted, self.trial_wanted = asyncio.Event(), asyncio.Event()
        """Set where an instance was added, or is in doubt: a probe or trial is due at once."""
        self.cards_changed = asyncio.Event()
        """Set where model cards are to be compared."""
        self._on_replay, self._on_removed = on_replay, on_removed
        self.pending: LargestPays[Holder] = LargestPays(EVENTS_BYTES)
        """What is held of answers that have not begun, and of incomplete events; by instance."""
        self._served: dict[str, frozenset[str]] = {}
        """The models of each instance; if it has none of them any more, those that it had."""
        self._fleet_text, self._fleet_since_s, self._is_look_due = _FINE, 0.0, False
        self._suspects, self._lines = Throttle(), Throttle()
        self._said: dict[str, dict[str, str]] = {}
        """The warnings that were logged last, as `warnings` has them."""

    def get(self, name: str) -> Upstream | None:
        """An instance's connections; None if it is not known."""
        return self.by_name.get(name)

    def all(self) -> Collection[Upstream]:
        """Every instance's connections."""
        return self.by_name.values()

    def upstream(self, name: str) -> Upstream:
        """An instance's connections; raises UpstreamFailure if it was removed meanwhile."""
        found = self.by_name.get(name)
        if found is None:
            raise UpstreamFailure(FailureKind.CONNECT, "the instance was removed")
        return found

    @property
    def is_serving(self) -> bool:
        """Whether an instance may be used that has answered before."""
        return any(m.health.was_seen for m in self.known.fleet.usable())

    def add(self, spec: InstanceSpec, connect_timeout_s: float) -> None:
        """Add an instance to the fleet and open its Upstream.

        While others serve it takes no request before its first answered probe. Where none has
        answered yet, as when the process starts, to try is better than to refuse.
        """
        instance = Instance(spec.name, spec.url, spec.bootstrap_url, spec.thermal == "plugin")
        self.known.add(instance, is_proven=not self.is_serving)
        self.specs[spec.name] = spec
        share = Share(self.pending, spec.name)
        self.by_name[spec.name] = Upstream(
            instance, connect_timeout_s, self._on_replay, self.connect_options, share
        )
        self.probe_wanted.set()

    def remove(self, name: str) -> None:
        """Remove an instance and end its connections."""
        self.known.remove(name)
        self._on_removed(name)
        spec = self.specs.pop(name, None)
        self.reports.pop(name, None)
        self.warnings.pop(name, None)
        self._said.pop(name, None)
        self._served.pop(name, None)
        if self._cards.pop(name, None) is not None:
            self.cards_changed.set()
        if (upstream := self.by_name.pop(name, None)) is not None:
            if any(literal(host) is None for host in _hosts([upstream], [spec] if spec else [])):
                hosts = _hosts(self.by_name.values(), self.specs.values())
                self.connect_options.resolver.keep(hosts)
            upstream.went_down()
            upstream.abort()

    def has_drained(self, name: str) -> bool:
        """Whether an instance drains, and has no request left: it is about to be removed.

        A stream that is being moved is charged elsewhere already, and may have to stay.
        """
        member, upstream = self.known.fleet.get(name), self.by_name.get(name)
        if member is None or not member.is_draining:
            return False
        return self.known.ledger.own(name).is_idle and not (upstream and upstream.in_use)

    def observe_report(self, name: str, stats: EngineStats, mark: int | None = None) -> None:
        """Store an engine's report; `mark` is equal for equal reports, see ReportHistory."""
        if name in self.by_name:
            kv = EngineKv(stats.kv_total_tokens, stats.kv_used_ratio, stats.kv_used_by_rank)
            self.observe_start(name, stats.start_s)
            self.reports[name] = stats
            self.known.gate.observe_engine(name, kv, self.clock.now_s(), mark)
            if not stats.kv_total_tokens:
                self.known.note_published_size(name)

    def note_kv_size(self, name: str) -> None:
        """Warn where the KV threshold has no effect on an instance."""
        member = self.known.fleet.get(name)
        if member is None or not (member.health.was_seen and member.health.is_up):
            return
        lacks = (
            f"{_KV_THRESHOLD} has no effect: its /metrics tell no KV cache size ({_SIZE_SERIES})"
        )
        self.warn(name, "KV threshold", lacks if self.known.lacks_kv_size(name) else None)

    def warn(self, name: str, topic: str, text: str | None) -> None:
        """Log and show what an operator should know of an instance; None: it is over.

        Of a topic the same text is logged once. Of one that comes and goes, or changes, a line is
        logged now and then: what was not said is, by a later call that says the same.
        """
        if name not in self.by_name:
            return  # it was removed meanwhile
        told, said = self.warnings.setdefault(name, {}), self._said.setdefault(name, {})
        if text is None:
            told.pop(topic, None)
        else:
            told[topic] = text
        if said.get(topic) == text:
            return
        unsaid = self._lines.turn((name, topic, text is None), self.clock.now_s())
        if unsaid is None:
            return
        if text is None:
            del said[topic]
            _log.info("instance %s: %s: in order again%s", name, topic, more(unsaid))
        else:
            said[topic] = text
            _log.warning("instance %s: %s%s", name, text, more(unsaid))

    def note_models(self, name: str, models: Collection[str], wanted: str | None) -> None:
        """Warn where an instance serves other models than it did, or than the options name."""
        if name not in self.by_name:
            return
        lacks = wanted is not None and wanted not in models
        text = f"serves {_named(models)}, not {wanted} (--model)"
        self.warn(name, "model", text if lacks else None)
        before, now = self._served.get(name, frozenset()), frozenset(models)
        is_other = bool(before) and before.isdisjoint(now)
        text = f"serves {_named(now)}, where it served {_named(before)} before"
        self.warn(name, "models served", text if is_other else None)
        if not is_other:
            self._served[name] = now

    def observe_cards(self, name: str, cards: Collection[Mapping[str, object]]) -> None:
        """Note an instance's model cards: they are compared with the others' soon.

        Those of adapters have a path for `root`, and their base model's length.
        """
        if name in self.by_name:
            models = islice((card for card in cards if not card.get("parent")), _MOST_COMPARED)
            told = {str(c["id"]): tuple(_compared(c.get(key)) for key in _CARD) for c in models}
            if told != self._cards.get(name):
                self._cards[name] = told
                self.cards_changed.set()

    async def compare_cards(self) -> None:
        """Compare each card with that of the first instance that serves the model, in turns."""
        self.cards_changed.clear()
        first: dict[str, tuple[str, tuple[object, ...]]] = {}
        compared = 0
        for name, cards in [(name, self._cards.get(name, {})) for name in self.by_name]:
            differing = []
            for model, card in cards.items():
                other, theirs = first.setdefault(model, (name, card))
                if card != theirs:
                    differing += _differences(model, card, other, theirs)
            more = f" and {len(differing) - _MOST_TOLD} more" if differing[_MOST_TOLD:] else ""
            text = f"its model cards differ: {'; '.join(differing[:_MOST_TOLD])}{more}"
            self.warn(name, "model cards", text if differing else None)
            compared += 1 + len(cards)
            if compared >= _MOST_COMPARED:
                compared = 0
                await asyncio.sleep(0)

    def use_bootstrap(self, upstream: Upstream, url: str) -> None:
        """Allow offloads to an instance: a bootstrap server was found."""
        name = upstream.instance.name
        if self.by_name.get(name) is upstream:
            self.known.use_bootstrap(upstream.use_bootstrap(url))
            _log.info("instance %s: its bootstrap server is at %s: offloads are on", name, url)

    def note_addresses(self, name: str) -> None:
        """Warn where an instance's name has several addresses of one kind."""
        if (upstream := self.by_name.get(name)) is None:
            return
        host = urlsplit(upstream.instance.url).hostname or ""
        several = self.connect_options.resolver.several(host)
        named = ", ".join(several[:_MOST_ADDRESSES]) + (", ..." * (len(several) > _MOST_ADDRESSES))
        text = f"its name {host} has {len(several)} addresses ({named}): {_EACH_ITSELF}"
        self.warn(name, "addresses", text if several else None)

    def neighbours(self, name: str) -> list[str]:
        """The other instances that have an address of this one's: they share its host."""
        own, others = self._addresses(name)
        return [other for other, theirs in others.items() if not own.isdisjoint(theirs)]

    def is_alone_on_its_host(self, name: str) -> bool:
        """Whether no other instance has an address of this one's.

        False as well while another one's name has no address yet.
        """
        own, others = self._addresses(name)
        return bool(own) and all(theirs and own.isdisjoint(theirs) for theirs in others.values())

    def _addresses(self, name: str) -> tuple[frozenset[str], dict[str, frozenset[str]]]:
        """The addresses of an instance, and of each other one, as far as they are known."""
        last = self.connect_options.resolver.last
        known = {n: last(urlsplit(u.instance.url).hostname or "") for n, u in self.by_name.items()}
        return known.pop(name), known

    def usage_judged(self, name: str, model: str) -> None:
        """Log that an instance's usage is doubted from now on, or no longer."""
        own = self.known.fleet.states.of(name).bytes_per_token.get(model)
        if own is None or not own.is_doubted:
            _log.info("instance %s: its reported usage is used again, of model %s", name, model)
            return
        said = name, own.value, model, self.known.bytes_per_token.of(model)
        _log.warning(
            "instance %s: its reported usage is ignored: %.3g bytes of prompt per token of "
            "model %s, where the fleet has %.3g",
            *said,
        )

    async def close(self) -> None:
        """Close every connection, of all instances at once."""
        for upstream in self.by_name.values():
            upstream.abort()
        await asyncio.sleep(0)  # lets TLS connections send their close_notify

    def probe_failed(self, name: str, failure: UpstreamFailure, took_s: float = 0.0) -> None:
        """A health check failed after `took_s`."""
        if failure.kind is FailureKind.NO_ROOM:
            return
        upstream = self.by_name.get(name)
        change = self.known.events.probe_failed(
            name,
            str(failure),
            self.clock.now_s(),
            is_refused=failure.kind is FailureKind.CONNECT,
            is_late=failure.kind in _LATE,
            is_heard=upstream is not None and upstream.is_heard_within(took_s),
        )
        self.act(name, change, str(failure))
        member = self.known.fleet.get(name)
        if upstream is None or member is None or not member.health.is_out_for_certain:
            return
        if ended := upstream.end_mute_answers(MUTE_S, f"{name} {_HANGS % MUTE_S}"):
            _log.warning("instance %s: %d answers ended: it %s", name, ended, _HANGS % MUTE_S)

    def probe_answered(self, name: str) -> None:
        """A health check was answered."""
        self.note_hollow(name)
        self.act(name, self.known.events.probe_answered(name, self.clock.now_s()), "")

    def trial_ended(
        self, name: str, failure: UpstreamFailure | None, *, is_blind: bool = False
    ) -> None:
        """Note the end of a trial: the proxy's own request to a doubted instance.

        `is_blind`: with an answer that tells nothing.
        """
        error = str(failure) if failure is not None else None
        kind = failure.kind if failure is not None else FailureKind.SERVER_ERROR
        _log.info("instance %s: trial %s", name, error or "answered")
        ended = self.known.events.trial_ended
        change = ended(name, error, self.clock.now_s(), kind, is_blind=is_blind)
        self.act(name, change, f"trial {error}" if change is Change.OPENED else "")

    def note_hollow(self, name: str) -> None:
        """Warn while answers of an instance are hollow by its own fault, as far as known."""
        member = self.known.fleet.get(name)
        if member is not None:
            hollow, is_short = member.health.hollow, member.health.short.is_doubted
            is_so = hollow.doubts > 0 or hollow.weight(self.clock.now_s()) > 0
            said = f"its answers are hollow: {hollow.why.removeprefix(A_HOLLOW)}"
            why = said if is_so else WHY if is_short else None
            self.warn(name, ANSWERS, why)

    def observe_start(self, name: str, start_s: float | None) -> None:
        """Note the start time that an instance's process reports, unix seconds."""
        events, now_s = self.known.events, self.clock.now_s()
        if events.observe_start(name, start_s, now_s):
            self._restarted(name, "started later")
        text = f"engines of several start times answer at its address: {_EACH_ITSELF}"
        self.warn(name, "start times", text if events.are_several(name, now_s) else None)

    def rests(self, name: str, rest: State | None) -> None:
        """Note that its engine is asleep, paused, or neither."""
        if self.known.rests(name, rest, self.clock.now_s()):
            _log.info("instance %s %s", name, _RESTS[rest] if rest else "is awake again")
            self._fleet_changed()

    def engine_changed(self, name: str) -> None:
        """The instance's bootstrap server reports another engine id than before."""
        self.known.events.restarted(name, self.clock.now_s())
        self._restarted(name, "has another engine id")

    def _restarted(self, name: str, why: str) -> None:
        _log.warning(
            "instance %s is another process (%s): its cache and times are forgotten", name, why
        )
        self.reports.pop(name, None)
        if (upstream := self.by_name.get(name)) is not None:
            upstream.forget_engine_id()

    def act(self, name: str, change: Change | None, error: str) -> None:
        """Act on an instance's change of health: log it, and end requests that wait there."""
        if change is None:
            if error:
                self._note_suspect(name, error)
                self.note_hollow(name)
            member = self.known.fleet.get(name)
            if member is not None and member.health.is_doubted:
                self.trial_wanted.set()
            return
        upstream = self.by_name.get(name)
        if change is Change.BACK:
            _log.info("instance %s is up", name)
            self._fleet_changed()
            if upstream is not None:
                upstream.came_up()
            return
        _log.warning("instance %s is %s: %s", name, _WORDS[change], error)
        if change is Change.GONE:
            self.reports.pop(name, None)
        self._fleet_changed()
        # Requests that wait there are retried elsewhere at once, unless the instance is still used.
        # With an open breaker some of them may still be answered.
        is_left = change is Change.GONE or not self.known.fleet.is_used(name)
        if upstream is not None and is_left and change is not Change.OPENED:
            upstream.went_down()

    def _note_suspect(self, name: str, error: str) -> None:
        """Log the first failure of an instance that worked, at once and then now and then."""
        member, now_s = self.known.fleet.get(name), self.clock.now_s()
        is_news = member is not None and member.health.state(now_s) is State.SUSPECT
        suppressed = self._suspects.turn(name, now_s) if is_news else None
        if suppressed is None:
            _log.debug("instance %s: %s", name, error)
        else:
            _log.warning("instance %s is suspect: %s%s", name, error, more(suppressed))

    @property
    def fleet_warning(self) -> tuple[str, float] | None:
        """The fault that keeps the fleet from serving normally, and its start; None without one."""
        return None if self._fleet_text == _FINE else (self._fleet_text, self._fleet_since_s)

    @property
    def none_up(self) -> str:
        """Why no instance can be used, where none can."""
        is_resting = self.known.fleet.rested_s("", self.clock.now_s()) is not None
        return _ALL_REST if is_resting else _NONE_UP

    def _fleet_changed(self) -> None:
        """Look at the whole fleet once for all changes of a turn of the loop."""
        if not self._is_look_due:
            self._is_look_due = True
            asyncio.get_running_loop().call_soon(self._note_fleet)

    def _note_fleet(self) -> None:
        """Log a line when the fleet begins or ceases to be able to serve normally."""
        self._is_look_due, fleet = False, self.known.fleet
        text = (_PANIC if fleet.is_panicking() else _FINE) if fleet.usable() else self.none_up
        if text != self._fleet_text:
            self._fleet_text, self._fleet_since_s = text, self.clock.now_s()
            _log.log(logging.INFO if text == _FINE else logging.WARNING, text)


def _hosts(upstreams: Iterable[Upstream], specs: Iterable[InstanceSpec]) -> set[str]:
    """The hosts at which instances are."""
    instances = [upstream.instance for upstream in upstreams]
    urls = [url for i in instances for url in (i.url, i.bootstrap_url) if url]
    urls += [url for spec in specs for url in spec.urls]
    return {urlsplit(url).hostname or "" for url in urls}


def _differences(
    model: str, card: Iterable[object], other: str, theirs: Iterable[object]
) -> list[str]:
    """What one card of a model has otherwise than another instance's."""
    return [
        f"{key} of {model[:_SHOWN]} is {str(own)[:_SHOWN]}, at {other} {str(its)[:_SHOWN]}"
        for key, own, its in zip(_CARD, card, theirs, strict=True)
        if own != its
    ]


def _named(models: Collection[str]) -> str:
    """A few models by name."""
    shown = ", ".join(model[:_SHOWN] for model in sorted(models)[:_MOST_TOLD]) or "no model"
    return f"{shown} and {len(models) - _MOST_TOLD} more" if len(models) > _MOST_TOLD else shown


def _compared(told: object) -> object:
    """What is compared of a card's member: a number, or the beginning of a text."""
    if isinstance(told, str):
        return told[:_MOST_CHARS]
    return told if told is None or isinstance(told, int | float) else "of another form"

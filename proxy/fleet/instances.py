"""Failures and recoveries of instances: reported to the core, acted on, logged."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from proxy.core.fleet.health import Change
from proxy.core.routing.router import Router
from proxy.core.types import FailureKind
from proxy.net.timeouts import Clock
from proxy.net.upstream.client import Upstream
from proxy.protocol.errors import UpstreamFailure

_WORDS = {
    Change.SILENT: "ejected, its probes fail",
    Change.OPENED: "ejected, requests to it fail",
    Change.GONE: "down",
}
_NOBODY = "no instance is up: every request is refused"
_PANIC = "more than half of the instances are out: ejected ones are used too"
_FINE = "enough instances are up again"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Watcher:
    """Reports to a router, and ends what waits on the connections of its instances."""

    router: Router
    upstreams: dict[str, Upstream]
    clock: Clock
    _said: str = _FINE

    def probe_failed(self, name: str, failure: UpstreamFailure) -> None:
        """A health check failed."""
        if failure.kind is FailureKind.NO_ROOM:
            return
        is_refused = failure.kind is FailureKind.CONNECT
        now_s = self.clock.now_s()
        watch = self.router.watch
        change = watch.probe_failed(name, str(failure), now_s, is_refused=is_refused)
        self.act(name, change, str(failure))

    def probe_answered(self, name: str) -> None:
        """A health check was answered."""
        self.act(name, self.router.watch.probe_answered(name, self.clock.now_s()), "")

    def trial_ended(self, name: str, failure: UpstreamFailure | None) -> None:
        """A trial, the proxy's own request to an instance with an open breaker, has ended."""
        error = str(failure) if failure is not None else None
        _log.info("instance %s: trial %s", name, error or "answered")
        self.act(name, self.router.watch.trial_ended(name, error, self.clock.now_s()), "")

    def observe_start(self, name: str, start_s: float | None) -> None:
        """Take in the start time that an instance's process reports, unix seconds."""
        if self.router.watch.observe_start(name, start_s, self.clock.now_s()):
            self._restarted(name, "started later")

    def engine_changed(self, name: str) -> None:
        """The instance's bootstrap server names another engine than before."""
        self.router.watch.restarted(name, self.clock.now_s())
        self._restarted(name, "has another engine id")

    def _restarted(self, name: str, why: str) -> None:
        _log.warning(
            "instance %s is another process (%s): its cache and times are forgotten", name, why
        )
        if (upstream := self.upstreams.get(name)) is not None:
            upstream.forget_engine_id()

    def act(self, name: str, change: Change | None, error: str) -> None:
        """Act on an event of an instance: log it, and end what waits there."""
        if change is None:
            if error:
                _log.debug("instance %s: %s", name, error)
            return
        upstream = self.upstreams.get(name)
        if change is Change.BACK:
            _log.info("instance %s is up", name)
            self._note_fleet()
            if upstream is not None:
                upstream.came_up()
            return
        _log.warning("instance %s is %s: %s", name, _WORDS[change], error)
        self._note_fleet()
        # Requests that wait there run elsewhere at once, unless no other place is better. With an
        # open breaker some of them may still be answered.
        is_left = change is Change.GONE or not self.router.fleet.is_used(name)
        if upstream is not None and is_left and change is not Change.OPENED:
            upstream.went_down()

    def _note_fleet(self) -> None:
        """Log a line when the fleet became able or unable to serve as it should."""
        fleet = self.router.fleet
        said = (_PANIC if fleet.is_panicking() else _FINE) if fleet.usable() else _NOBODY
        if said != self._said:
            self._said = said
            _log.log(logging.INFO if said == _FINE else logging.WARNING, said)

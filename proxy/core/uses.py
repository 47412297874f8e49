"""A route's use of its prompt's blocks: where it began, and whether that instance is still the one.

An instance that went down in between has lost everything, one that came back is another: of what
was begun before, neither reports nor blocks count.
"""

from __future__ import annotations

from proxy.core.fleet import Fleet
from proxy.core.gate import Gate
from proxy.core.reuse import Reuse, Use
from proxy.core.route import Route
from proxy.core.types import RequestFacts


class Uses:
    """Keeps `Route.use` in step with the request's course."""

    def __init__(self, reuse: Reuse, fleet: Fleet, gate: Gate) -> None:
        self._reuse = reuse
        self._fleet = fleet
        self._gate = gate

    def begin(self, route: Route, name: str, facts: RequestFacts) -> None:
        """An instance is going to compute the prompt, instead of whoever was before."""
        self.end(route)
        if route.lease.is_open:
            route.use = self.open(name, facts)

    def open(self, name: str, facts: RequestFacts) -> Use | None:
        """A use that is not, or not yet, the route's own."""
        if (member := self._fleet.get(name)) is None:
            return None
        self._reuse.limit(name, self._gate.kv_tokens(name), facts)
        return self._reuse.begin(name, member.incarnation, facts)

    def close(self, use: Use | None) -> None:
        """It is not wanted any more."""
        if use is not None:
            self._reuse.end(use)

    def computed(
        self, route: Route, facts: RequestFacts, cached_ratio: float | None = None
    ) -> None:
        """It has, and found `cached_ratio` of it in its cache, where it tells that already."""
        if (use := self._current(route)) is not None:
            if cached_ratio is not None:
                self._reuse.reported(use, facts, cached_ratio)
            self._reuse.computed(use, facts)

    def received(self, route: Route, facts: RequestFacts) -> None:
        """D got the KV from P, which needs it no more."""
        self.end(route)
        name = route.decode.name
        member = self._fleet.get(name)
        if route.lease.is_open and member is not None and not member.health.is_gone:
            route.use = self._reuse.received(name, member.incarnation, facts)

    def completed(self, route: Route, facts: RequestFacts, cached_ratio: float | None) -> None:
        """The answer came to its end."""
        if (use := self._current(route)) is not None:
            if cached_ratio is not None and use.instance == route.decode.name:
                self._reuse.reported(use, facts, cached_ratio)
            self._reuse.released(use, facts)

    def end(self, route: Route) -> None:
        """Over, however it ended."""
        use, route.use = route.use, None
        self.close(use)

    def _current(self, route: Route) -> Use | None:
        use = route.use if route.lease.is_open else None
        member = self._fleet.get(use.instance) if use is not None else None
        if use is None or member is None or member.health.is_gone:
            return None
        return use if member.incarnation == use.incarnation else None

"""The two legs of an offload, each so that no KV stays pinned when the client leaves.

P frees its KV when its leg is cut, and keeps it for D once it has answered. When the client leaves,
the proxy half-closes its connection to P: P stops, or its answer still arrives and the proxy
releases the KV. The proxy waits for D to begin before it cuts the decode leg: a D cut earlier never
tells P to free the KV.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import orjson

from proxy.core.connectors.base import KV_PARAMS, Edits
from proxy.core.routing.request_flow import RequestFlow
from proxy.core.routing.route import Route
from proxy.core.types import Fallback, Instance
from proxy.net.timeouts import Limit
from proxy.net.upstream.client import OnSent
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.errors import UpstreamFailure
from proxy.state.detached import DetachedLeg
from proxy.state.proxy_state import ProxyState

RELEASE_S = 5.0
RELEASERS = 2
"""Instances that are asked, the second where the first cannot be reached."""
_NO_MODEL = "cache-proxy-release"
_HEADERS = b"Content-Type: application/json\r\nAccept: application/json\r\n"


class PrefillHalf:
    """P's leg."""

    def __init__(self, state: ProxyState, route: Route) -> None:
        self._state, self._route = state, route
        self._reply: UpstreamResponse | None = None
        # From half of its time on a leg that ends without an answer may have ended as it was left.
        self._p = route.prefill  # the route itself forgets it where D's own attempt wins
        self._near_end_s = route.reserved_s + route.predicted_prefill_s / 2

    async def run(
        self, leg: Callable[[OnSent], Coroutine[Any, Any, Edits | Fallback]]
    ) -> Edits | Fallback:
        """Its result; raises UpstreamFailure."""
        return await self._state.aftermath.keep(
            DetachedLeg(lambda: leg(self._on_sent), self._on_left, self._unwanted)
        )

    def _on_sent(self, reply: UpstreamResponse) -> None:
        self._reply = reply

    def _on_left(self) -> bool:
        return self._reply is not None and self._reply.hang_up()

    def _unwanted(self, result: Edits | Fallback | None) -> None:
        state, route = self._state, self._route
        if isinstance(result, Edits):
            release(state, route, self._p, result)
        elif self._p and self._reply and state.clock.now_s() >= self._near_end_s:
            _note(state, self._p.name, route.prompt_tokens, "unknown")


class DecodeHalf:
    """D's leg. `is_kept`: the client left, D goes on, and the lease ends with it."""

    def __init__(self, state: ProxyState, flow: RequestFlow, edits: Edits) -> None:
        self._state, self._flow, self._edits = state, flow, edits
        self._p = flow.route.prefill
        self._is_sent = False
        self.is_kept = False

    async def run(
        self, leg: Callable[[OnSent], Coroutine[Any, Any, UpstreamResponse]]
    ) -> UpstreamResponse:
        """D's answer; raises UpstreamFailure."""
        try:
            return await self._state.aftermath.keep(
                DetachedLeg(lambda: leg(self._on_sent), self._on_left, self._unwanted)
            )
        except UpstreamFailure:
            if not self._is_sent:
                release(self._state, self._flow.route, self._p, self._edits)
            raise

    def _on_sent(self, reply: UpstreamResponse) -> None:
        del reply
        self._is_sent = True

    def _on_left(self) -> bool:
        self.is_kept = self._is_sent
        return self._is_sent

    def _unwanted(self, reply: UpstreamResponse | None) -> None:
        if reply is not None:
            reply.close()
        if self.is_kept:
            self._flow.end(self._state.clock.now_s())
        elif not self._is_sent:
            release(self._state, self._flow.route, self._p, self._edits)


def release(state: ProxyState, route: Route, p: Instance | None, edits: Edits) -> None:
    """P holds KV that nobody will fetch: let it go, by way of anybody else.

    An engine that refuses a decode leg tells its P (vLLM since 0.22). Only for legs that no D ever
    saw: to release what was fetched occupies one of P's senders until the abort timeout.
    """
    params = edits.put.get(KV_PARAMS)
    if params is None or p is None:
        return
    fleet = state.router.fleet
    known = fleet.get(p.name)
    models = known.models if known is not None else None
    up = [m for m in fleet.up() if m.instance.name != p.name]
    # Those of P's kind first, as KV moves among them; D last: mostly it cannot be reached.
    up.sort(key=lambda m: (m.models != models, m.instance.name == route.decode.name))
    names = [m.instance.name for m in up[:RELEASERS]]
    note = partial(_note, state, p.name, route.prompt_tokens)
    if not names or state.aftermath.spawn(_release(state, names, params, note)) is None:
        note("stranded")


def _note(state: ProxyState, p: str, tokens: int, result: str) -> None:
    state.metrics.releases.labels(result).inc()
    if result != "released":
        state.router.unreleased_kv.book(p, tokens, state.clock.now_s())


async def _release(
    state: ProxyState, names: list[str], params: Any, note: Callable[[str], None]
) -> None:
    """Ask one after the other, up to the first that may have heard it."""
    sent: list[UpstreamResponse] = []
    result = "failed"
    try:
        with Limit(RELEASE_S):
            while names and not sent:
                result = await _refused(state, names.pop(0), params, sent.append)
    except TimeoutError:
        pass
    finally:
        note(result)


async def _refused(state: ProxyState, name: str, params: Any, on_sent: OnSent) -> str:
    body = {"model": _NO_MODEL, "prompt": [1], "max_tokens": 0, KV_PARAMS: params}
    raw = orjson.dumps(body)
    try:
        upstream = state.instances.upstream(name)
        reply = await upstream.send("POST", "/v1/completions", _HEADERS, raw, on_sent)
    except UpstreamFailure:
        return "failed"
    reply.close()
    return "released" if 400 <= reply.status < 500 else "failed"

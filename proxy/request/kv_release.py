"""Releases of KV that P holds for a D that will not fetch it.

An instance that is asked to fetch it for a model that does not exist refuses, and tells P to let
go. Which instances are asked is the router's choice (`Router.releasers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from proxy.core.connectors.base import KV_PARAMS, Edits
from proxy.core.routing.actions import ReleaseResult
from proxy.net.timeouts import Limit
from proxy.net.upstream.client import OnSent, Upstream
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.errors import UpstreamFailure
from proxy.state.detached import DetachedTasks

RELEASE_S = 5.0
_NO_MODEL = "cache-proxy-release"
_REFUSED = frozenset({400, 404, 422})
"""Statuses about the request itself; an engine that refuses the key, or is busy, has not read
it."""
_HEADERS = b"Content-Type: application/json\r\nAccept: application/json\r\n"


class KvReleases:
    """Asks instances to free KV, in tasks that outlive the request.

    `upstream` gives an instance's connections by name; raises UpstreamFailure.
    """

    def __init__(self, upstream: Callable[[str], Upstream], detached: DetachedTasks) -> None:
        self._upstream, self._detached = upstream, detached

    def release(
        self,
        ask: Sequence[str],
        edits: Edits,
        credentials: bytes,
        on_over: Callable[[ReleaseResult], None],
    ) -> None:
        """Free the KV that `edits` name; `on_over` gets the result.

        `credentials`: header lines with the client's own key, where instances get that.

        Only for KV that no D was asked to fetch: to release what was fetched occupies one of P's
        senders until the abort timeout.
        """
        params = edits.put.get(KV_PARAMS)
        if params is None:
            return
        work = self._release(ask, params, _HEADERS + credentials, on_over)
        if not ask or self._detached.spawn(work) is None:
            work.close()
            on_over(ReleaseResult.STRANDED)

    async def _release(
        self,
        ask: Sequence[str],
        params: Any,
        head: bytes,
        on_over: Callable[[ReleaseResult], None],
    ) -> None:
        """Ask one after the other, up to the first that may have received it."""
        sent: list[UpstreamResponse] = []
        result = ReleaseResult.FAILED
        try:
            with Limit(RELEASE_S):
                for name in ask:
                    result = await self._refused(name, params, head, sent.append)
                    if sent:
                        break
        except TimeoutError:
            pass
        finally:
            on_over(result)

    async def _refused(self, name: str, params: Any, head: bytes, on_sent: OnSent) -> ReleaseResult:
        body = {"model": _NO_MODEL, "prompt": [1], "max_tokens": 0, KV_PARAMS: params}
        try:
            upstream = self._upstream(name)
            raw = orjson.dumps(body)
            head = upstream.keyed(head)
            reply = await upstream.send("POST", "/v1/completions", head, raw, on_sent)
        except UpstreamFailure:
            return ReleaseResult.FAILED
        reply.close()
        return ReleaseResult.RELEASED if reply.status in _REFUSED else ReleaseResult.FAILED

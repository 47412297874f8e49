"""The live page: `GET /ui`, its events, and the page of one decision, for whoever has the token.

Nothing is computed while nobody looks. All viewers see the same snapshot, made once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from aiohttp import web

from proxy.admin.page import html, text
from proxy.core.placement.decision import PlacementView
from proxy.core.placement.policies import POLICIES
from proxy.core.placement.stored import as_json
from proxy.net.server.responses import error_response, json_response
from proxy.net.timeouts import Limit
from proxy.state.in_flight import InFlight
from proxy.telemetry.explain import Explained
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.request_log import record_json
from proxy.telemetry.requests import DECISIONS_KEPT, REFUSED_KEPT, not_kept

EVERY_S = 1.0
MOST_VIEWERS = 8
STALL_S = 10.0
"""A viewer that takes nothing for so long is cut."""
RETRY_S = 5
"""How long a browser waits before it asks again."""
HEAD = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
UNBUFFERED = {"X-Accel-Buffering": "no"}
"""Has nginx pass each event on at once."""
Json = dict[str, Any]


class LivePage:
    """/ui for browsers and terminals.

    `look` returns what there is to see (`Look.snapshot`); `last` and `view_of`: as of `/decisions`.
    """

    def __init__(
        self,
        look: Callable[[], Json],
        in_flight: InFlight,
        now_s: Callable[[], float],
        last: Callable[[int], Sequence[RequestRecord]],
        view_of: Callable[[object], PlacementView | None],
    ) -> None:
        self._look, self._in_flight, self._now_s = look, in_flight, now_s
        self._last, self._view_of = last, view_of
        self._seen: Json = {}
        self._parts = html.Parts()
        self._found: dict[str, html.Markup] = {}
        self._seen_s = self._found_s = -EVERY_S
        self.viewers = 0

    async def page(self, request: web.Request) -> web.StreamResponse:
        """The page; as text or JSON for who asks for that."""
        wanted = _form(request)
        if wanted == "json":
            return json_response(self._snapshot())
        if wanted == "text":
            return web.Response(text=text.page(self._snapshot()), headers=HEAD)
        return _html(html.page(self._sections()))

    async def decision(self, request: web.Request) -> web.StreamResponse:
        """One of the last decisions: timeline, options, what others would have chosen, JSON."""
        request_id = request.match_info["request_id"]
        kept = self._last(DECISIONS_KEPT + REFUSED_KEPT)
        record = next((one for one in kept if one.request_id == request_id), None)
        if record is None:
            return error_response(404, not_kept(kept))
        raw = orjson.loads(record_json(record))
        view = self._view_of(record.candidates)
        columns = orjson.loads(orjson.dumps(as_json(view))) if view is not None else None
        explained = Explained(raw | {"columns": columns})
        policies = list(POLICIES) if columns is not None else []
        wanted = _form(request)
        if wanted == "json":
            return json_response(explained.as_json(policies))
        if wanted == "text":
            return web.Response(text=explained.text(policies), headers=HEAD)
        shown = orjson.dumps(raw, option=orjson.OPT_INDENT_2).decode()
        return _html(html.decision_page(explained, policies, shown))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the parts of the page that have changed, once a second."""
        if self.viewers >= MOST_VIEWERS:
            return error_response(503, f"ui: {MOST_VIEWERS} viewers look already", _retry())
        if self._in_flight.is_leaving:
            return error_response(503, "ui: the proxy stops", _retry())
        response = web.StreamResponse(headers=HEAD | UNBUFFERED)
        response.content_type = "text/event-stream"
        self.viewers += 1
        try:
            with Limit(STALL_S):
                await response.prepare(request)
            await self._feed(request, response)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.viewers -= 1
        return response

    async def _feed(self, request: web.Request, response: web.StreamResponse) -> None:
        """Send until the viewer or the proxy leaves; raises TimeoutError where it takes nothing.

        Nothing is sent while bytes of before have not left: a slow viewer gets the newest later.
        """
        sent: dict[str, html.Markup] = {}
        taken_s = self._now_s()
        while (transport := request.transport) is not None and not self._in_flight.is_leaving:
            now_s = self._now_s()
            if not transport.get_write_buffer_size():
                found, taken_s = self._sections(), now_s
                changed = {key: part for key, part in found.items() if sent.get(key) != part}
                sent = found
                with Limit(STALL_S):
                    await response.write(b"data: %b\n\n" % orjson.dumps(changed))
            elif now_s - taken_s > STALL_S:
                raise TimeoutError
            # All viewers wake at the same moment, so one snapshot is made for all.
            await asyncio.sleep(EVERY_S - now_s % EVERY_S)

    def _snapshot(self) -> Json:
        """What there is to see, at most EVERY_S old."""
        now_s = self._now_s()
        if int(now_s / EVERY_S) != int(self._seen_s / EVERY_S):
            self._seen, self._seen_s = self._look(), now_s
        return self._seen

    def _sections(self) -> dict[str, html.Markup]:
        seen = self._snapshot()
        if self._found_s != self._seen_s:
            self._found, self._found_s = self._parts.of(seen), self._seen_s
        return self._found


def _form(request: web.Request) -> str:
    """What a client wants: html where it names that, as browsers do, else json or text."""
    accepts = request.headers.get("Accept", "")
    for name, wanted in (("text/html", "html"), ("application/json", "json")):
        if name in accepts:
            return wanted
    return "text"


def _html(page: str) -> web.Response:
    headers = HEAD | {"Content-Security-Policy": html.POLICY}
    return web.Response(text=page, content_type="text/html", headers=headers)


def _retry() -> dict[str, str]:
    return {"Retry-After": str(RETRY_S)}

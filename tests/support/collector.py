"""A collector of traces: a real OTLP/HTTP receiver that keeps the spans it is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.harness import until


class Span:
    """A span as it came over the wire."""

    def __init__(self, raw: Any, resource: dict[str, Any]) -> None:
        self.name: str = raw.name
        self.trace, self.id, self.parent = (
            part.hex() for part in (raw.trace_id, raw.span_id, raw.parent_span_id)
        )
        self.kind, self.is_error = raw.kind, raw.status.code == 2
        self.message: str = raw.status.message
        self.times: tuple[int, int] = raw.start_time_unix_nano, raw.end_time_unix_nano
        self.resource, self.attributes = resource, plain(raw.attributes)

    def __getitem__(self, name: str) -> Any:
        return self.attributes.get(name)

    def __repr__(self) -> str:
        return f"{self.name} {self.attributes}"


def plain(attributes: Any) -> dict[str, Any]:
    return {one.key: value(one.value) for one in attributes}


def value(of: Any) -> Any:
    kind = of.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in of.array_value.values]
    return getattr(of, kind)


class Collector:
    """Answers `status`; `answer` may stand in for the whole answer."""

    def __init__(self, status: int = 200) -> None:
        self.status, self.answer = status, b""
        self.spans: list[Span] = []
        self.calls = 0
        self.headers: Any = None
        self.peers: list[Any] = []
        """The client's address of each call."""
        self.url = ""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        self.calls += 1
        self.headers = request.headers
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        told = ExportTraceServiceRequest.FromString(await request.read())
        for group in told.resource_spans:
            resource = plain(group.resource.attributes)
            for scope in group.scope_spans:
                if self.status == 200:
                    self.spans += [Span(raw, resource) for raw in scope.spans]
        return web.Response(status=self.status, body=self.answer)

    async def got(self, count: int, of: Callable[[Span], bool] = lambda span: True) -> list[Span]:
        """The spans, once so many of them are of this kind."""
        await until(lambda: sum(map(of, self.spans)) >= count, f"{count} spans of {self.spans}")
        return self.spans

    async def request(self) -> Span:
        """The span of the only request."""
        await self.got(1, is_server)
        (found,) = filter(is_server, self.spans)
        return found

    def below(self, parent: Span) -> list[Span]:
        """The children of a span, in the order of their begin."""
        found = [span for span in self.spans if span.parent == parent.id]
        assert {span.trace for span in found} <= {parent.trace}
        return sorted(found, key=lambda span: span.times)


def is_server(span: Span) -> bool:
    return bool(span.kind == 2)

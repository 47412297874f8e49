"""The part of a Kubernetes API that discovery asks: EndpointSlices, and the faults of an API."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any, Self

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

NAMESPACE, SERVICE = "inference", "vllm"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
TOKEN = "a-token"
HTTP = ({"name": "http", "port": 8000, "protocol": "TCP"},)


def endpoint(pod: str, address: str, *, ready: bool = True, terminating: bool = False) -> Any:
    """An endpoint as a control plane of 1.30 writes it."""
    return {
        "addresses": [address],
        "conditions": {
            "ready": ready and not terminating,
            "serving": ready,
            "terminating": terminating,
        },
        "nodeName": "node-1",
        "targetRef": {"kind": "Pod", "name": pod, "namespace": NAMESPACE, "uid": f"uid-{pod}"},
    }


def a_slice(
    name: str, *endpoints: Any, ports: Any = HTTP, kind: str = "IPv4", service: str = SERVICE
) -> dict[str, Any]:
    labels = {"kubernetes.io/service-name": service}
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "addressType": kind,
        "endpoints": [*endpoints] or None,
        "ports": [*ports],
    }


class SlicesApi:
    """A server that can also stand still, refuse, and say what no API should."""

    def __init__(self, secure: ssl.SSLContext | None = None) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.statuses: dict[str, int] = {}
        """The status of each answer to `list` and `watch`, where it is not 200; 0: none comes."""
        self.raw_list: bytes | None = None
        """What a list is instead; sent without end where `is_endless`."""
        self.is_endless = self.is_silent = False
        """`is_silent`: a watch tells nothing, like a connection that is half open."""
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.tokens: set[str | None] = set()
        self._secure = secure
        self._version = 100
        self._watches: list[asyncio.Queue[bytes | None]] = []
        self._server: TestServer | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        await self.back()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gone()

    @property
    def url(self) -> str:
        return f"http{'s' * (self._secure is not None)}://127.0.0.1:{self.port}"

    async def back(self) -> None:
        """Listen, on the same port as before."""
        app = web.Application()
        app.router.add_get(PATH, self._answer)
        self._server = TestServer(app, host="127.0.0.1", port=self.port)
        await self._server.start_server(ssl=self._secure)
        assert self._server.port is not None
        self.port = self._server.port

    async def gone(self) -> None:
        """Cut every connection and listen no more."""
        self.cut()
        if self._server is not None:
            await self._server.close()
            self._server = None

    def cut(self) -> None:
        """End every watch as an API does whose time is over."""
        for queue in self._watches:
            queue.put_nowait(None)

    def put(self, one: dict[str, Any], *, is_told: bool = True) -> None:
        """Add a slice, or change it."""
        name = one["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self._version += 1
        one["metadata"]["resourceVersion"] = str(self._version)
        self.slices[name] = one
        if is_told:
            self.tell(kind, one)

    def delete(self, name: str, *, is_told: bool = True) -> None:
        """Delete a slice; `is_told` False: the event is lost."""
        self._version += 1
        one = self.slices.pop(name)
        if is_told:
            self.tell("DELETED", one)

    def tell(self, kind: str, told: Any) -> None:
        """Send an event to every watch."""
        self.send(orjson.dumps({"type": kind, "object": told}) + b"\n")

    def bookmark(self) -> None:
        self.tell("BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}})

    def send(self, data: bytes) -> None:
        if not self.is_silent:
            for queue in self._watches:
                queue.put_nowait(data)

    def count(self, what: str) -> int:
        """How many lists, or watches, were asked for."""
        return sum(kind == what for kind, _ in self.asked)

    @property
    def watches(self) -> int:
        """How many go on."""
        return len(self._watches)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        what = "watch" if request.query.get("watch") == "true" else "list"
        self.asked.append((what, dict(request.query)))
        self.tokens.add(request.headers.get("Authorization"))
        if (status := self.statuses.get(what)) == 0:
            await asyncio.Event().wait()
        if status:
            return web.json_response({"kind": "Status", "code": status}, status=status)
        if what == "watch":
            return await self._watch(request)
        if self.raw_list is None:
            return web.json_response(self._list(request.query["labelSelector"]))
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(self.raw_list)
        while self.is_endless:
            await response.write(self.raw_list)
        return response

    def _list(self, selector: str) -> dict[str, Any]:
        key, _, value = selector.partition("=")
        items = [s for s in self.slices.values() if s["metadata"]["labels"].get(key) == value]
        version = {"resourceVersion": str(self._version)}
        return {"kind": "EndpointSliceList", "metadata": version, "items": items}

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watches.append(queue)
        try:
            while (data := await queue.get()) is not None:
                await response.write(data)
        finally:
            self._watches.remove(queue)
        return response


def account(home: Path, token: str = TOKEN, ca: Path | None = None) -> Path:
    """The folder of a service account."""
    home.mkdir(exist_ok=True)
    (home / "token").write_text(f"{token}\n")
    (home / "ca.crt").write_bytes(b"" if ca is None else ca.read_bytes())
    return home

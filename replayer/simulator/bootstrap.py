"""Mooncake's bootstrap server, and the receiving side that asks it.

`GET /query` answers like vLLM's: engine id and worker address per rank. The worker's side channel
(ZMQ and RDMA in reality) is played by `POST /sim/pull` on the same port: the answer comes when the
transfer is complete, or says that it was refused. If the sender dies, no answer ever comes: real
receivers wait out their timeout, because their socket reconnects for ever, and so do these.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from enum import Enum
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp import web

from replayer.engine.types import Pull, RemoteKv
from replayer.simulator.faults import Faults

log = logging.getLogger(__name__)
_QUERY_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_PULL_TIMEOUT = aiohttp.ClientTimeout(total=None)
_KNOWN_WORKERS = 1_024
# Unreachable, too slow, not JSON, or JSON of another shape.
_LOOK_UP_ERRORS = (
    aiohttp.ClientError,
    TimeoutError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
)
Serve = Callable[[Pull], Awaitable[bool]]


class PullResult(Enum):
    """How a pull ended, as the receiver learns it."""

    DONE = "done"
    FAILED = "failed"
    LOST = "lost"


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


async def _spoiled(query: str) -> web.Response | None:
    """The answer to `/query` where that is switched to be a wrong one, or never comes."""
    if query == "hang":
        await _never()
    answers = {"error": (500, b""), "garbage": (200, b'{"0": ['), "empty": (200, b"{}")}
    if query not in answers:
        return None
    status, body = answers[query]
    return web.Response(status=status, body=body, content_type="application/json")


def bootstrap_app(
    engine_id: str, port_of: Callable[[], int], serve: Serve, faults: Faults
) -> web.Application:
    """Return the bootstrap server of one engine; `serve` carries out a pull on it."""

    async def query(_request: web.Request) -> web.Response:
        if (spoiled := await _spoiled(faults.query)) is not None:
            return spoiled
        address = {"0": {"0": f"tcp://127.0.0.1:{port_of()}"}}
        body = {"0": {"engine_id": engine_id, "worker_addr": address}}
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def pull(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        if body["engine_id"] != engine_id:
            return web.Response(status=409)
        if faults.pull == "hang":
            await _never()
        if faults.pull == "refuse":
            return web.Response(body=b'{"ok":false}', content_type="application/json")
        order = Pull(body["transfer_id"], body["tokens"], uuid.uuid4())
        ok = await serve(order)
        return web.Response(body=orjson.dumps({"ok": ok}), content_type="application/json")

    app = web.Application()
    app.router.add_get("/query", query)
    app.router.add_post("/sim/pull", pull)
    return app


class Receiver:
    """Fetches KV from other engines; like vLLM it asks once where each lives, then never again.

    `gives_up`: a lost sender is noticed, as NIXL does, whose sockets do not reconnect for ever.
    """

    def __init__(self, session: aiohttp.ClientSession, *, gives_up: bool = False) -> None:
        self._session = session
        self._on_lost = PullResult.FAILED if gives_up else PullResult.LOST
        self._workers: dict[str, str] = {}

    async def fetch(self, remote: RemoteKv, tokens: int) -> PullResult:
        """Pull `tokens` of KV; returns when they are here, refused, or certainly never come."""
        worker = self._workers.get(remote.engine_id) or await self._look_up(remote)
        if worker is None:
            return PullResult.FAILED
        order = {"engine_id": remote.engine_id, "transfer_id": remote.transfer_id, "tokens": tokens}
        try:
            async with self._session.post(
                f"{worker}/sim/pull", data=orjson.dumps(order), timeout=_PULL_TIMEOUT
            ) as answer:
                if answer.status != 200:
                    return self._on_lost
                ok = orjson.loads(await answer.read())["ok"]
        except aiohttp.ClientError as error:
            log.warning("transfer %s: no answer from %s: %s", remote.transfer_id, worker, error)
            return self._on_lost
        return PullResult.DONE if ok else PullResult.FAILED

    async def _look_up(self, remote: RemoteKv) -> str | None:
        """Ask a bootstrap server for its worker; None when it is dead or another engine's."""
        try:
            async with self._session.get(
                f"{remote.bootstrap_url.rstrip('/')}/query", timeout=_QUERY_TIMEOUT
            ) as answer:
                ranks = orjson.loads(await answer.read())
            found = {rank["engine_id"]: rank["worker_addr"]["0"]["0"] for rank in ranks.values()}
            address = urlsplit(found[remote.engine_id])
        except _LOOK_UP_ERRORS as error:
            log.warning(
                "engine %s not found at %s: %r", remote.engine_id, remote.bootstrap_url, error
            )
            return None
        if len(self._workers) >= _KNOWN_WORKERS:
            self._workers.clear()
        worker = f"http://{address.hostname}:{address.port}"
        self._workers[remote.engine_id] = worker
        return worker

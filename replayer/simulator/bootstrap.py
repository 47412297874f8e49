"""Mooncake's bootstrap server, and the receiver that pulls KV from other engines.

`GET /query` answers like vLLM's: engine id and worker address per rank. `POST /sim/pull` on the
same port replaces the worker's side channel (ZMQ and RDMA in vLLM): it answers when the transfer is
complete or refused. After a sender's death no answer comes: vLLM's receivers wait until their
timeout, because their socket reconnects for ever, and so do these.
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
# Errors of a server that is unreachable, too slow, or answers with other data than expected.
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
    """Result of a pull for the receiver."""

    DONE = "done"
    FAILED = "failed"
    LOST = "lost"


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


async def _faulty_answer(query: str) -> web.Response | None:
    """Answer `/query` as the fault `query` demands; None without a fault."""
    if query == "hang":
        await _never()
    answers = {"error": (500, b""), "garbage": (200, b'{"0": ['), "empty": (200, b"{}")}
    if query not in answers:
        return None
    status, body = answers[query]
    return web.Response(status=status, body=body, content_type="application/json")


def bootstrap_app(
    engine_id: str, address_of: Callable[[], tuple[str, int]], serve: Serve, faults: Faults
) -> web.Application:
    """Make the bootstrap server of one engine; `serve` executes a pull from that engine.

    `address_of` gives the host and port at which others pull.
    """

    async def query(_request: web.Request) -> web.Response:
        if (faulty := await _faulty_answer(faults.query)) is not None:
            return faulty
        host, port = address_of()
        address = {"0": {"0": f"tcp://{host}:{port}"}}
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
    """Fetches KV from other engines; looks up an engine's address once, as vLLM does.

    `gives_up`: report a lost sender as a failure, as NIXL does, whose sockets do not reconnect.
    """

    def __init__(self, session: aiohttp.ClientSession, *, gives_up: bool = False) -> None:
        self._session = session
        self._on_lost = PullResult.FAILED if gives_up else PullResult.LOST
        self._workers: dict[str, str] = {}

    async def fetch(self, remote: RemoteKv, tokens: int) -> PullResult:
        """Pull `tokens` of KV; returns when they have arrived or the pull has failed."""
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
        """Ask a bootstrap server for its worker's URL; None if it is down or of another engine."""
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

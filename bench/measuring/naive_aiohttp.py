"""Baseline: what a straightforward aiohttp proxy costs. `naive_aiohttp PORT URL,URL,..`.

JSON in, JSON out, a ClientSession, sticky by x-session-id, the instance with the fewest tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import aiohttp
import uvloop
from aiohttp import web


@dataclass(slots=True)
class Instance:
    """One engine and what this proxy has there."""

    url: str
    ongoing_tokens: int = 0
    requests: int = 0


@dataclass(slots=True)
class Proxy:
    """The handler and its state."""

    instances: list[Instance]
    homes: dict[str, Instance] = field(default_factory=dict)
    session: aiohttp.ClientSession = field(init=False)

    async def start(self, app: web.Application) -> None:
        """Open the client session in the running loop."""
        del app
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )

    async def stop(self, app: web.Application) -> None:
        """Close it."""
        del app
        await self.session.close()

    def pick(self, session_id: str | None) -> Instance:
        """The session's home, or the least loaded."""
        home = self.homes.get(session_id) if session_id else None
        if home is None:
            home = min(self.instances, key=lambda i: (i.ongoing_tokens, i.requests))
            if session_id:
                self.homes[session_id] = home
        return home

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """One request from end to end."""
        body = await request.json()
        tokens = sum(len(message["content"]) for message in body["messages"]) // 4
        instance = self.pick(request.headers.get("x-session-id"))
        instance.ongoing_tokens += tokens
        instance.requests += 1
        try:
            async with self.session.post(instance.url + request.path, json=body) as answer:
                if not body.get("stream"):
                    return web.json_response(await answer.json(), status=answer.status)
                headers = {"content-type": "text/event-stream"}
                response = web.StreamResponse(status=answer.status, headers=headers)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        finally:
            instance.ongoing_tokens -= tokens


async def health(request: web.Request) -> web.Response:
    """Say that it runs."""
    del request
    return web.json_response({})


def main() -> None:
    """Serve until a signal."""
    proxy = Proxy([Instance(url) for url in sys.argv[2].split(",")])
    app = web.Application(client_max_size=1 << 30)
    app.on_startup.append(proxy.start)
    app.on_cleanup.append(proxy.stop)
    app.router.add_post("/{tail:.*}", proxy.relay)
    app.router.add_get("/health", health)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)


if __name__ == "__main__":
    main()

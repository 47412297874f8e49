"""GET /replicas: the other proxies of this fleet, as this one hears them."""

from __future__ import annotations

from aiohttp import web

from proxy.net.server.responses import error_response, json_response
from proxy.state.replicas import Replicas


class ReplicasPath:
    """/replicas; `replicas`: None without `--share`."""

    def __init__(self, replicas: Replicas | None) -> None:
        self._replicas = replicas

    async def replicas(self, request: web.Request) -> web.Response:
        """The state of sharing, and each replica that is heard."""
        del request
        if self._replicas is None:
            return error_response(404, "replicas: this process is alone; --share URL shares")
        return json_response(self._replicas.told())

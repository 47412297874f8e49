"""An instance with the plugin vllm-thermal, as HTTP shows it: the plugin's code behind aiohttp."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.support.told_engine import ToldEngine
from vllm_thermal.control import Control, WishError
from vllm_thermal.endpoint import PATH, Door, answered, error


class ThermalEngines:
    """Data-parallel engines, of which each runs `running` requests and has room for 16."""

    def __init__(self, token: str, ranks: int = 1, running: int = 8) -> None:
        self.controls = [Control(16, 2048) for _ in range(ranks)]
        self.running = running
        self.bodies: list[Any] = []
        self.door = Door({"VLLM_THERMAL_TOKEN": token})

    async def call(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """What vLLM's client of its engines does."""
        self.bodies += arguments
        return [self._answer(control, *arguments) for control in self.controls]

    def _answer(self, control: Control, *arguments: Any) -> dict[str, Any]:
        now_s = time.monotonic()
        try:
            for body in arguments:
                control.change(body, now_s, self.running)
        except WishError as why:
            return {"refused": 400, "why": str(why)}
        return control.status(now_s, self.running, 0)

    async def handle(self, request: web.Request) -> web.Response:
        """A request of the path."""
        if not self.door.lets_in(request.headers.get("Authorization", "")):
            status, answer = error(401, "the token is missing or wrong: Authorization: Bearer")
        else:
            status, answer = await answered(self.call, request.method, await request.read())
        return web.json_response(answer, status=status)


@asynccontextmanager
async def serving(handler: Any) -> AsyncIterator[str]:
    """The URL of an instance on which `handler` answers the plugin's path."""
    engine = ToldEngine()
    engine.routes[PATH] = handler
    async with engine:
        yield engine.url

"""A plugin in the test's own process: a gRPC server on a port that the kernel has chosen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from planner.config.plugins import PluginSpec
from planner.plugin_api import planner_plugin_pb2 as pb
from planner.plugin_api import planner_plugin_pb2_grpc as pb_grpc

Answer = Callable[[pb.EvaluateRequest], pb.EvaluateResponse]


def wish(kind: str, replicas: int = 0, component: str = "c", **more: Any) -> pb.EvaluateResponse:
    """An answer with one target."""
    target = pb.Target(component=component, kind=kind, replicas=replicas)
    return pb.EvaluateResponse(targets=[target], **more)


class Plugin(pb_grpc.PlannerPluginServicer):
    """A plugin whose answer a test sets; what it was asked is kept."""

    def __init__(self, answer: pb.EvaluateResponse | None = None, protocol: int = 1) -> None:
        self.answer, self.protocol = answer or pb.EvaluateResponse(), protocol
        self.asked: list[pb.EvaluateRequest] = []
        self.described = 0
        self.token = ""
        self.sleeps: asyncio.Event | None = None
        self.fails: grpc.StatusCode | Exception | None = None

    async def Describe(self, request: Any, context: Any) -> pb.DescribeResponse:  # noqa: N802
        self.described += 1
        await self._checked(context)
        return pb.DescribeResponse(protocol=self.protocol)

    async def Evaluate(self, request: Any, context: Any) -> pb.EvaluateResponse:  # noqa: N802
        await self._checked(context)
        self.asked.append(request)
        if self.sleeps is not None:
            await self.sleeps.wait()
        if isinstance(self.fails, Exception):
            raise self.fails
        if self.fails is not None:
            await context.abort(self.fails, "on purpose\n\x1b[31m")
        return self.answer

    async def _checked(self, context: Any) -> None:
        sent = dict(context.invocation_metadata()).get("authorization", "")
        if self.token and sent != f"Bearer {self.token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")


@asynccontextmanager
async def served(plugin: Plugin, port: int = 0) -> AsyncIterator[int]:
    """The plugin at a port of loopback."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_PlannerPluginServicer_to_server(plugin, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        if plugin.sleeps is not None:
            plugin.sleeps.set()
        await server.stop(None)


def spec(port: int, name: str = "theirs", stage: str = "propose", **more: Any) -> PluginSpec:
    """What the planner knows of it."""
    slow: dict[str, Any] = {"deadline_seconds": 20.0}  # the machine may be busy
    return PluginSpec(name=name, stage=stage, address=f"127.0.0.1:{port}", **slow | more)

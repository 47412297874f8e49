"""Calls one plugin by gRPC: bounded in time and size, and any failure becomes a line."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from planner.config.plugins import PluginSpec
from planner.core.pipeline import Failed, Said
from planner.core.types import Context, Stage
from planner.plugin_api import planner_plugin_pb2 as pb
from planner.plugin_api.wire import PROTOCOL, plain, request_of, said_of

MOST_BYTES = 1 << 16
"""Of an answer; a larger one is not parsed."""
SERVICE = pb.DESCRIPTOR.services_by_name["PlannerPlugin"].full_name
OPTIONS = [
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.enable_http_proxy", 0),
    # A plugin that comes back is found again within a tick.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class Channel:
    """The connection to one plugin, which is made at its first call."""

    def __init__(self, spec: PluginSpec) -> None:
        self._spec = spec
        self._channel = grpc.aio.insecure_channel(spec.address, options=OPTIONS)
        self._describe = self._method("Describe", pb.DescribeResponse)
        self._evaluate = self._method("Evaluate", pb.EvaluateResponse)
        token = spec.token
        self._metadata = (
            ()
            if token is None
            else (("authorization", f"Bearer {token.get_secret_value().strip()}"),)
        )
        self._is_known = False
        """Whether it has said its protocol since it failed last: it may be another one now."""

    def _method(self, name: str, answer: Any) -> Any:
        # The generated stub would give None for bytes that are no message, and log a traceback.
        return self._channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=partial(_parsed, answer),
        )

    async def describe(self) -> Failed | None:
        """Whether it is there and speaks our protocol."""
        return await self._described(self._end_s())

    async def ask(self, stage: Stage, context: Context) -> Said | Failed:
        """What it says of a tick."""
        end_s = self._end_s()
        if not self._is_known and (failed := await self._described(end_s)) is not None:
            return failed
        answer = await self._called(self._evaluate, request_of(stage, context), end_s)
        return answer if isinstance(answer, Failed) else said_of(answer, self._spec)

    async def aclose(self) -> None:
        """Close the connection; no call may be under way."""
        await self._channel.close()

    def _end_s(self) -> float:
        return asyncio.get_running_loop().time() + self._spec.deadline_seconds

    async def _described(self, end_s: float) -> Failed | None:
        request = pb.DescribeRequest(protocol=PROTOCOL)
        answer = await self._called(self._describe, request, end_s)
        if isinstance(answer, Failed):
            return answer
        if answer.protocol != PROTOCOL:
            return Failed(f"it speaks protocol {answer.protocol}, not {PROTOCOL}")
        self._is_known = True
        return None

    async def _called(self, call: Any, request: Any, end_s: float) -> Any:
        rest_s = end_s - asyncio.get_running_loop().time()
        try:
            return await call(request, timeout=rest_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            self._is_known = False
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Failed(f"no answer within {self._spec.deadline_seconds:g} s")
            name = error.code().name.lower()
            return Failed(f"{self._spec.address}: {name}: {plain(error.details() or '')}")


def _parsed(kind: Any, raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except DecodeError:
        return Failed("its answer is no message of the protocol")

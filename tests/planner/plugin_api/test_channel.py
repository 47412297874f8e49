"""Calls of a plugin on real sockets: what it says, and every way in which it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from planner.core.pipeline import Failed
from planner.core.types import FinalPrediction, Kind, Prediction, Proposal, Stage, Target
from planner.plugin_api import planner_plugin_pb2 as pb
from planner.plugin_api.channel import MOST_BYTES, Channel
from planner.plugin_api.wire import MOST_TEXT
from tests.planner.core.test_pipeline import context
from tests.planner.plugin_api.server import Plugin, served, spec, wish


@asynccontextmanager
async def called(plugin: Plugin, **more: Any) -> AsyncIterator[Channel]:
    async with served(plugin) as port:
        channel = Channel(spec(port, **more))
        try:
            yield channel
        finally:
            await channel.aclose()


async def failure(plugin: Plugin, **more: Any) -> str:
    async with called(plugin, **more) as channel:
        found = await channel.ask(Stage.PROPOSE, context())
    assert isinstance(found, Failed)
    return found.reason


async def test_it_is_asked_with_the_tick_and_answers() -> None:
    plugin = Plugin(wish("AT_LEAST", 4, is_final=True, reason="a  sale\nbegins"))
    async with called(plugin, priority=7) as channel:
        found = await channel.ask(Stage.PROPOSE, context())
        assert await channel.ask(Stage.PROPOSE, context()) == found
    target = Target("c", Kind.AT_LEAST, 4)
    assert found == Proposal("theirs", (target,), 7, is_final=True, reason="a sale begins")
    assert plugin.described == 1, "once for a plugin that goes on answering"
    (asked, _) = plugin.asked
    assert (asked.protocol, asked.stage, asked.context.tick) == (1, pb.PROPOSE, 1)
    (component,) = asked.context.components
    assert (component.name, component.ready, component.baseline) == ("c", 2, 2)


async def test_a_prediction_has_what_it_says_and_zero_is_a_value() -> None:
    said = pb.Prediction(next_num_req=0.0, next_isl=float("nan"))
    plugin = Plugin(pb.EvaluateResponse(prediction=said, targets=wish("SET", 9).targets))
    async with called(plugin, stage="predict") as channel:
        found = await channel.ask(Stage.PREDICT, context())
    assert isinstance(found, Prediction)
    assert (found.next_num_req, found.next_osl) == (0.0, None)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (pb.Prediction(next_num_req=0.0), FinalPrediction(0.0)),
        (pb.Prediction(), Prediction()),
        (None, Prediction()),
    ],
)
async def test_a_prediction_is_final_where_it_says_something(said: Any, found: Prediction) -> None:
    plugin = Plugin(pb.EvaluateResponse(prediction=said, is_final=True))
    async with called(plugin, stage="predict") as channel:
        assert await channel.ask(Stage.PREDICT, context()) == found


async def test_nothing_to_say_is_no_failure() -> None:
    async with called(Plugin()) as channel:
        assert await channel.ask(Stage.PROPOSE, context()) is None


async def test_one_that_sleeps_is_not_waited_for() -> None:
    plugin = Plugin()
    plugin.sleeps = asyncio.Event()
    assert await failure(plugin, deadline_seconds=0.2) == "no answer within 0.2 s"


@pytest.mark.parametrize(
    ("fails", "code"),
    [
        (RuntimeError("broken"), "unknown"),
        (grpc.StatusCode.CANCELLED, "cancelled"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "resource_exhausted"),
    ],
)
async def test_one_that_raises_is_a_line(fails: Any, code: str) -> None:
    plugin = Plugin()
    plugin.fails = fails
    found = await failure(plugin)
    assert f": {code}: " in found
    assert found.isprintable()


async def test_a_wrong_token_is_named_and_the_right_one_is_not() -> None:
    plugin = Plugin()
    plugin.token = "the right one"
    found = await failure(plugin, token="another")
    assert found.endswith("unauthenticated: wrong token")
    async with called(plugin, token="the right one") as channel:
        assert await channel.ask(Stage.PROPOSE, context()) is None


async def test_another_protocol_is_not_asked() -> None:
    plugin = Plugin(protocol=2)
    assert await failure(plugin) == "it speaks protocol 2, not 1"
    assert plugin.asked == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (pb.EvaluateResponse(reason="x" * MOST_BYTES), "resource_exhausted"),
        (pb.EvaluateResponse(targets=65 * list(wish("SET", 1).targets)), "65 targets, at most 64"),
        (pb.EvaluateResponse(targets=[pb.Target(component="c")]), "a target of no kind"),
        (pb.EvaluateResponse.FromString(b"\n\x05\n\x01c\x10\x09"), "a target of no kind"),
    ],
)
async def test_what_is_too_much_or_of_another_form_is_a_failure(answer: Any, why: str) -> None:
    assert why in await failure(Plugin(answer))


async def test_bytes_that_are_no_answer_are_a_failure() -> None:
    plugin = Plugin()

    async def evaluate(request: bytes, context: Any) -> bytes:
        return b"\xff\xff\xff"

    handler = grpc.unary_unary_rpc_method_handler(evaluate)
    server = grpc.aio.server()
    name = "cache_proxy.planner.plugin.v1.PlannerPlugin"
    describe = grpc.unary_unary_rpc_method_handler(
        plugin.Describe,
        request_deserializer=pb.DescribeRequest.FromString,
        response_serializer=pb.DescribeResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(name, {"Evaluate": handler, "Describe": describe}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = Channel(spec(port))
    found = await channel.ask(Stage.PROPOSE, context())
    await channel.aclose()
    await server.stop(None)
    assert isinstance(found, Failed)
    assert found.reason == "its answer is no message of the protocol"


async def test_a_long_reason_is_cut() -> None:
    async with called(Plugin(wish("SET", 3, reason="y" * 5000))) as channel:
        found = await channel.ask(Stage.PROPOSE, context())
    assert isinstance(found, Proposal)
    assert len(found.reason) == MOST_TEXT


async def test_one_that_comes_back_is_found_again() -> None:
    plugin = Plugin(wish("SET", 3))
    async with served(plugin) as port:
        channel = Channel(spec(port))
        assert isinstance(await channel.ask(Stage.PROPOSE, context()), Proposal)
    dead = await channel.describe()
    assert dead is not None
    assert f"127.0.0.1:{port}: unavailable: " in dead.reason
    async with served(plugin, port):
        while isinstance(found := await channel.ask(Stage.PROPOSE, context()), Failed):
            await asyncio.sleep(0.05)
        assert isinstance(found, Proposal)
        assert plugin.described == 2, "it may be another version"
        await channel.aclose()

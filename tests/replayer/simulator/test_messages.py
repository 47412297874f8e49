"""/v1/messages of a simulated engine: what a body means as a chat, and Anthropic's events."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replayer.simulator.host import SimEngine, SimFleet
from replayer.simulator.messages import as_chat
from replayer.simulator.openai.errors import ApiError
from replayer.simulator.openai.rendering import render_chat
from replayer.simulator.openai.responses import ResponseStore
from tests.support.sim_http import decode_leg, post

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hello there"}]
BASE: dict[str, Any] = {"model": "sim-8b", "max_tokens": 8, "messages": HELLO}
CALL = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a.py"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x=1"}]}


async def events(
    http: aiohttp.ClientSession, engine: SimEngine, **body: Any
) -> list[dict[str, Any]]:
    async with http.post(engine.url + PATH, json=BASE | {"stream": True} | body) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        raw = (await answer.read()).decode()
    *pairs, rest = [event.split("\n") for event in raw.split("\n\n")]
    assert rest == [""]
    told = [orjson.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {one['type']}" for one in told]
    return told


async def test_a_message_whole_and_streamed(http: aiohttp.ClientSession, engine: SimEngine) -> None:
    status, whole = await post(http, engine, PATH, **BASE)
    assert (status, whole["type"], whole["role"]) == (200, "message", "assistant")
    assert whole["stop_reason"] == "max_tokens"
    assert whole["usage"]["output_tokens"] == len(whole["content"][0]["text"].split()) == 8
    start, block, *deltas, block_end, end, stop = await events(http, engine)
    assert start["message"]["content"] == []
    assert start["message"]["usage"] == {"input_tokens": 7, "output_tokens": 0}
    assert (block["type"], block["index"]) == ("content_block_start", 0)
    assert "".join(d["delta"]["text"] for d in deltas) == whole["content"][0]["text"]
    assert (block_end["type"], stop) == ("content_block_stop", {"type": "message_stop"})
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"] == whole["usage"]


async def test_tokens_of_the_cache_are_counted_apart(
    http: aiohttp.ClientSession, engine: SimEngine
) -> None:
    body = BASE | {"messages": [{"role": "user", "content": "one two three " * 30}]}
    _, counted = await post(http, engine, f"{PATH}/count_tokens", **body)
    assert counted == {
        "input_tokens": 95,
        "context_management": {"original_input_tokens": 95},
    }
    first, second = [(await post(http, engine, PATH, **body))[1]["usage"] for _ in range(2)]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert [first[name] for name in names] == [15, 80, 0]
    assert [second[name] for name in names] == [15, 0, 80]


async def test_an_answer_ends_by_itself_since_a_limit_must_be_given(
    http: aiohttp.ClientSession, engine: SimEngine
) -> None:
    _, said = await post(http, engine, PATH, **BASE | {"max_tokens": 32_000})
    assert said["stop_reason"] == "end_turn"
    assert 0 < said["usage"]["output_tokens"] < 32_000


@pytest.mark.parametrize(
    ("changed", "status", "told"),
    [
        ({"model": "nobody"}, 404, ("error", "NotFoundError", "model `nobody` does not exist")),
        (
            {"max_tokens": 10**6},
            400,
            ("error", "BadRequestError", "max_completion_tokens=1000000 "),
        ),
        ({"max_tokens": None}, 400, (None, "Bad Request", "body.max_tokens")),
        ({"max_tokens": 0}, 400, (None, "Bad Request", "max_tokens must be positive")),
        ({"model": None}, 400, (None, "Bad Request", "body.model")),
        ({"messages": "hello"}, 400, (None, "Bad Request", "body.messages")),
        ({"messages": [{"role": "tool"}]}, 400, (None, "Bad Request", "body.messages.role")),
        ({"stream": "perhaps"}, 400, (None, "Bad Request", "body.stream")),
    ],
)
async def test_errors_have_anthropics_form_once_the_body_is_valid(
    http: aiohttp.ClientSession,
    engine: SimEngine,
    changed: dict[str, Any],
    status: int,
    told: tuple[str | None, str, str],
) -> None:
    got, body = await post(http, engine, PATH, **BASE | changed)
    assert (got, body.get("type"), body["error"]["type"]) == (status, *told[:2])
    assert told[2] in body["error"]["message"]


async def test_an_engine_that_fails_ends_a_stream_with_an_error_event() -> None:
    async with SimFleet(2, speed=50.0, kv_load_failure_policy="fail") as fleet:
        async with aiohttp.ClientSession() as http:
            sender, engine = fleet.engines
            lost = {"remote_engine_id": "gone", "transfer_id": "t"}
            leg = decode_leg(sender)["kv_transfer_params"] | lost
            long = [{"role": "user", "content": "one two three " * 30}]
            *_, last = await events(http, engine, messages=long, kv_transfer_params=leg)
    assert (last["type"], last["error"]["message"]) == ("error", "Internal server error")


@pytest.mark.parametrize(
    ("messages", "chat"),
    [
        (HELLO, HELLO),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image"}],
                }
            ],
        ),
        (
            [{"role": "assistant", "content": [{"type": "text", "text": "I read"}, CALL]}],
            [
                {
                    "role": "assistant",
                    "content": "I read",
                    "tool_calls": [
                        {
                            "id": "t1",
                            "type": "function",
                            "function": {"name": "read", "arguments": '{"path":"a.py"}'},
                        }
                    ],
                }
            ],
        ),
        (
            [{"role": "user", "content": [RESULT, {"type": "text", "text": "go on"}]}],
            [{"role": "tool", "content": "x=1"}, {"role": "user", "content": "go on"}],
        ),
        ([{"role": "user", "content": [RESULT]}], [{"role": "tool", "content": "x=1"}]),
        (
            [{"role": "assistant", "content": [{"type": "thinking", "thinking": "?"}]}],
            [{"role": "assistant", "content": "", "reasoning": "?"}],
        ),
    ],
)
def test_blocks_are_the_messages_of_a_chat(messages: Any, chat: Any) -> None:
    assert as_chat(BASE | {"messages": messages})["messages"] == chat


def test_system_and_tools_are_a_part_of_the_prompt_and_a_billing_header_is_not() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cch=1f"}
    tool = {"name": "read", "description": "reads", "input_schema": {"type": "object"}}
    body = BASE | {"system": [header, {"type": "text", "text": "be brief"}], "tools": [tool]}
    chat = as_chat(body)
    assert chat["messages"] == [{"role": "system", "content": "be brief"}, *HELLO]
    function = {"name": "read", "description": "reads", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]


WORDS = ["type", "role", "user", "assistant", "content", "text", "name", "input", "tool_use"]
WORDS += ["tool_result", "function_call", "function_call_output", "output", "system"]
SCALARS = st.none() | st.booleans() | st.integers() | st.sampled_from(WORDS) | st.text(max_size=3)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=12,
)


@example([{"type": []}], None, None)
@example([{"type": "function_call", "arguments": 1}], ["x"], {})
@given(JSON, JSON, JSON)
def test_any_json_is_a_chat_or_an_error_of_vllms(given_: Any, system: Any, tools: Any) -> None:
    message = BASE | {"messages": given_, "system": system, "tools": tools}
    response = {"input": given_, "instructions": system, "tools": tools}
    for read, body in ((as_chat, message), (ResponseStore().as_chat, response)):
        with suppress(ApiError):
            assert isinstance(render_chat(read(body)), str)

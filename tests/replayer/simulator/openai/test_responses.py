"""/v1/responses of a simulated engine: real-shaped answers, kept by the engine that made them."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
import pytest

from replayer.simulator.host import SimFleet
from replayer.simulator.openai.errors import ApiError
from replayer.simulator.openai.responses import ResponseStore, messages_of

BODY: dict[str, Any] = {"model": "sim-8b", "input": "hello there", "max_output_tokens": 4}


async def call(http: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> Any:
    async with http.request(method, url, json=body) as response:
        return response.status, orjson.loads(await response.read())


async def test_a_response_is_found_and_continued_where_it_was_made() -> None:
    async with SimFleet(2, speed=1000.0, tick=0.0) as fleet, aiohttp.ClientSession() as http:
        here, there = (f"{engine.url}/v1/responses" for engine in fleet.engines)
        status, made = await call(http, "POST", here, BODY)
        assert (status, made["status"], made["object"]) == (200, "incomplete", "response")
        assert made["incomplete_details"] == {"reason": "max_output_tokens"}
        assert made["usage"]["output_tokens"] == 4
        assert await call(http, "GET", f"{here}/{made['id']}") == (200, made)
        status, error = await call(http, "GET", f"{there}/{made['id']}")
        assert (status, error["error"]["type"]) == (404, "invalid_request_error")
        more = BODY | {"previous_response_id": made["id"]}
        status, second = await call(http, "POST", here, more)
        assert (status, second["previous_response_id"]) == (200, made["id"])
        assert second["usage"]["input_tokens"] > made["usage"]["total_tokens"]
        assert (await call(http, "POST", there, more))[0] == 404
        assert (await call(http, "POST", f"{here}/{made['id']}/cancel"))[0] == 400
        assert (await call(http, "DELETE", f"{here}/{made['id']}"))[0] == 405
        _, unkept = await call(http, "POST", here, BODY | {"store": False})
        assert (await call(http, "GET", f"{here}/{unkept['id']}"))[0] == 404


async def test_a_stream_begins_with_its_id_and_ends_with_the_whole() -> None:
    async with SimFleet(1, speed=1000.0, tick=0.0) as fleet, aiohttp.ClientSession() as http:
        url = f"{fleet.engines[0].url}/v1/responses"
        async with http.post(url, json=BODY | {"stream": True}) as response:
            raw = (await response.read()).decode()
        events = [orjson.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: ")]
        assert raw.startswith('event: response.created\ndata: {"response":{"id":"resp_')
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        kinds = [e["type"].removeprefix("response.") for e in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert kinds[-4:] == [
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        whole = events[-1]["response"]
        said = "".join(e["delta"] for e in events if e["type"].endswith(".delta"))
        assert whole["output"][0]["content"][0]["text"] == said
        assert await call(http, "GET", f"{url}/{whole['id']}") == (200, whole)


CALL = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
OWN_CALL = {"type": "custom_tool_call", "call_id": "c1", "name": "read", "input": "{}"}
SAID = {"role": "assistant", "content": "I read"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hello", [{"role": "user", "content": "hello"}]),
        ([CALL], [{"role": "assistant", "tool_calls": [CALLED]}]),
        ([OWN_CALL], [{"role": "assistant", "tool_calls": [CALLED]}]),
        ([SAID, CALL, CALL], [SAID | {"tool_calls": [CALLED, CALLED]}]),
        ([{"type": "function_call_output", "output": "x"}], [{"role": "tool", "content": "x"}]),
        ([{"type": "reasoning", "summary": []}, SAID], [SAID]),
        (
            [THOUGHT, SAID, CALL, CALL, THOUGHT, SAID],
            [
                SAID | {"reasoning": "hm", "tool_calls": [CALLED, CALLED]},
                SAID | {"reasoning": "hm"},
            ],
        ),
        ([SAID, SAID], [SAID, SAID]),
    ],
)
def test_items_of_a_coding_agent_are_the_messages_of_a_chat(items: Any, messages: Any) -> None:
    assert messages_of(items) == messages
    assert "tool_calls" not in SAID, "what the client sent is left as it is"


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "x"}, "text", 7, None])
def test_an_item_of_another_type_is_refused(item: Any) -> None:
    with pytest.raises(ApiError, match="Unsupported input item type: "):
        messages_of([item])


def test_instructions_hold_for_one_response() -> None:
    store = ResponseStore()
    first = store.as_chat({"input": "a", "instructions": "be brief"})["messages"]
    said_then = {"role": "assistant", "content": [{"text": "b"}]}
    store.keep({"id": "resp_1", "output": [said_then]}, first)
    more = {"input": "c", "instructions": "be kind", "previous_response_id": "resp_1"}
    said = [(m["role"], m["content"]) for m in store.as_chat(more)["messages"]]
    assert said == [
        ("system", "be kind"),
        ("user", "a"),
        ("assistant", [{"text": "b"}]),
        ("user", "c"),
    ]

"""Tool calls of the scripted model, as the clients' own libraries read them."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from replayer.simulator.host import SimEngine, SimFleet

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
ASK = "what is in this folder? " * 40
COMMAND = "echo step 0; ls; cat README.md"
pytestmark = pytest.mark.official


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with SimFleet(1, speed=50.0, tool_calls=1) as fleet:
        yield fleet.engines[0]


@pytest.mark.long
async def test_chat(engine: SimEngine) -> None:
    openai: Any = importlib.import_module("openai")
    function = {"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    ask: dict[str, Any] = {"model": "sim-8b", "tools": [function], "messages": messages}
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="x") as client:
        whole = (await client.chat.completions.create(**ask)).choices[0]
        usage = {"stream_options": {"include_usage": True}}
        async with client.chat.completions.stream(**ask, **usage) as stream:
            streamed = await stream.get_final_completion()
        choice = streamed.choices[0]
        for found in (whole, choice):
            (asked,) = found.message.tool_calls
            assert (found.finish_reason, asked.function.name) == ("tool_calls", "bash")
            assert orjson.loads(asked.function.arguments) == {"command": COMMAND}
        assert choice.message.content == whole.message.content
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append(
            {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "a.py"}
        )
        last = await client.chat.completions.create(**ask)
        assert last.choices[0].finish_reason == "stop"
    # What was said before is cached, as it was said.
    said = streamed.usage.prompt_tokens + streamed.usage.completion_tokens
    assert said - 16 < last.usage.prompt_tokens_details.cached_tokens


@pytest.mark.long
async def test_messages(engine: SimEngine) -> None:
    anthropic: Any = importlib.import_module("anthropic")
    tool = {"name": "bash", "input_schema": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    ask = {"model": "sim-8b", "tools": [tool], "messages": messages, "max_tokens": 1000}
    async with anthropic.AsyncAnthropic(base_url=engine.url, api_key="x") as client:
        whole = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            streamed = await stream.get_final_message()
        for found in (whole, streamed):
            thought, text, asked = found.content
            assert (found.stop_reason, text.type) == ("tool_use", "text")
            assert (asked.name, asked.input) == ("bash", {"command": COMMAND})
            assert thought.signature
        assert streamed.content[0].thinking == whole.content[0].thinking
        messages.append({"role": "assistant", "content": streamed.content})
        result = {"type": "tool_result", "tool_use_id": streamed.content[-1].id, "content": "a.py"}
        messages.append({"role": "user", "content": [result]})
        last = await client.messages.create(**ask)
    assert last.stop_reason == "end_turn"
    usage = streamed.usage
    said = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    assert said + usage.output_tokens - 16 < last.usage.cache_read_input_tokens


@pytest.mark.long
async def test_responses(engine: SimEngine) -> None:
    openai: Any = importlib.import_module("openai")
    tool = {"type": "function", "name": "bash", "parameters": SCHEMA}
    items: list[Any] = [{"role": "user", "content": ASK}]
    ask: dict[str, Any] = {"model": "sim-8b", "tools": [tool], "input": items}
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="x") as client:
        whole = await client.responses.create(**ask)
        async with client.responses.stream(**ask) as stream:
            streamed = await stream.get_final_response()
        for found in (whole, streamed):
            _, message, asked = found.output
            assert (found.status, message.type) == ("completed", "message")
            assert (asked.name, orjson.loads(asked.arguments)) == ("bash", {"command": COMMAND})
        assert streamed.output_text == whole.output_text
        result = {
            "type": "function_call_output",
            "call_id": streamed.output[-1].call_id,
            "output": "a.py",
        }
        kept = await client.responses.create(
            **ask | {"input": [result], "previous_response_id": streamed.id}
        )
        items += [item.model_dump(exclude_none=True) for item in streamed.output]
        items.append(result)
        last = await client.responses.create(**ask)
    assert [item.type for item in last.output] == ["reasoning", "message"]
    assert last.usage.input_tokens == kept.usage.input_tokens
    cached = last.usage.input_tokens_details.cached_tokens
    assert streamed.usage.total_tokens - 16 < cached


async def test_the_openai_client_is_served(engine: SimEngine) -> None:
    openai: Any = importlib.import_module("openai")
    client = openai.AsyncOpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0)
    async with client:
        whole = await client.chat.completions.create(
            model="sim-8b", messages=[{"role": "user", "content": "hello"}], max_tokens=7
        )
        stream = await client.chat.completions.create(
            model="sim-8b",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=7,
            stream=True,
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert text == whole.choices[0].message.content
        plain = await client.completions.create(model="sim-8b", prompt="hello", max_tokens=3)
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 3
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="hello")

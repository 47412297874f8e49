"""The official clients, unmodified, through the proxy.

They take a second and more to import: all who need them in front of the proxy stand here, so that
few of the processes that run the tests import them.
"""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.scenarios import test_dialects, test_streams
from tests.scenarios.test_dialects import CHAT, COMPLETIONS, RESPONSES, SILENT, TYPES, silent
from tests.scenarios.test_streams import BREAKS
from tests.support.examined import facts_of
from tests.support.harness import chat, proxied, until

pytestmark = pytest.mark.official


@pytest.fixture
def openai() -> Any:
    return importlib.import_module("openai")


@pytest.fixture
def anthropic() -> Any:
    return importlib.import_module("anthropic")


@pytest.fixture
def said() -> Any:
    """Any: the client's own message types are of no interest here."""
    return [{"role": "user", "content": "hello there"}]


async def test_chat_and_completions(tmp_path: Path, openai: Any, said: Any) -> None:
    async with proxied(tmp_path, 2) as (proxy, _):
        async with openai.AsyncOpenAI(base_url=f"{proxy.server.url}/v1", api_key="x") as client:
            whole = await client.chat.completions.create(
                model="sim-8b",
                messages=said,
                max_tokens=6,
            )
            stream = await client.chat.completions.create(
                model="sim-8b",
                messages=said,
                max_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
            )
            pieces = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in pieces if c.choices)
            assert text == whole.choices[0].message.content
            assert pieces[-1].usage is not None
            assert pieces[-1].usage.completion_tokens == 6

            plain = await client.completions.create(model="sim-8b", prompt="a b", max_tokens=4)
            parts = await client.completions.create(
                model="sim-8b", prompt="a b", max_tokens=4, stream=True
            )
            assert "".join([c.choices[0].text async for c in parts]) == plain.choices[0].text
            assert [m.id async for m in client.models.list()] == ["sim-8b"]
        await proxy.at_rest()


async def test_responses_and_embeddings(tmp_path: Path, openai: Any) -> None:
    """The client checks the order of a response's events, and unpacks vectors from base64."""
    async with proxied(tmp_path, 2) as (proxy, _):
        async with openai.AsyncOpenAI(base_url=f"{proxy.server.url}/v1", api_key="x") as client:
            ask: Any = {"model": "sim-8b", "input": "hello there", "max_output_tokens": 6}
            whole = await client.responses.create(**ask)
            async with client.responses.stream(**ask) as stream:
                deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
                streamed = await stream.get_final_response()
            assert "".join(deltas) == streamed.output_text == whole.output_text
            assert streamed.usage is not None
            assert streamed.usage.output_tokens == 6
            vectors = await client.embeddings.create(model="sim-8b", input=["a b", "c"])
            assert [len(one.embedding) for one in vectors.data] == [1024, 1024]
            assert vectors.usage.prompt_tokens == 3
        await proxy.at_rest()


async def test_it_obeys_the_time_it_is_told(tmp_path: Path, openai: Any, said: Any) -> None:
    """Busy once, free when it comes again: its caller notices nothing."""
    async with proxied(tmp_path, 1, active_prefill_tokens_threshold=0, max_queue=0) as (proxy, _):
        now_s = proxy.server.state.clock.now_s
        facts = facts_of("/v1/completions", chat("x y z"))
        backlog = proxy.router.admit(facts, now_s())
        options: Any = {"base_url": f"{proxy.server.url}/v1", "api_key": "x", "max_retries": 1}
        async with openai.AsyncOpenAI(**options) as client, asyncio.TaskGroup() as group:
            asked = group.create_task(
                client.chat.completions.create(model="sim-8b", messages=said, max_tokens=2)
            )
            await until(lambda: proxy.rejected("prefill_tokens") == 1)
            proxy.router.finish(backlog, now_s())
            assert (await asked).choices[0].message.content
        refused, served = await proxy.records(2)
        assert (refused["outcome"], served["outcome"]) == ("rejected", "ok")
        assert served["t_proxy_recv"] - refused["t_done"] >= 0.05, "what it was told at least"


async def test_errors_are_its_own_exceptions(tmp_path: Path, openai: Any, said: Any) -> None:
    async with proxied(tmp_path, 1, active_prefill_tokens_threshold=0, max_queue=0) as (proxy, _):
        options: Any = {"base_url": f"{proxy.server.url}/v1", "api_key": "x", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as client:
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(
                    model="nobody",
                    messages=said,
                )
            now_s = proxy.server.state.clock.now_s
            backlog = proxy.router.admit(
                facts_of("/v1/completions", chat("x y z")),
                now_s(),
            )
            with pytest.raises(openai.InternalServerError) as busy:
                await client.chat.completions.create(
                    model="sim-8b",
                    messages=said,
                )
            assert busy.value.status_code == 503
            assert "All workers are busy" in busy.value.message
            proxy.router.finish(backlog, now_s())


READ: dict[str, Any] = {
    "name": "read",
    "description": "reads a file",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}


async def test_messages_tools_and_counts(tmp_path: Path, anthropic: Any) -> None:
    ask: dict[str, Any] = {"model": "sim-8b", "system": "be brief", "tools": [READ]}
    said: list[dict[str, Any]] = [{"role": "user", "content": "what is in a.py?"}]
    async with proxied(tmp_path, 2) as (proxy, _):
        async with anthropic.AsyncAnthropic(base_url=proxy.server.url, api_key="x") as client:
            whole = await client.messages.create(**ask, messages=said, max_tokens=6)
            async with client.messages.stream(**ask, messages=said, max_tokens=6) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                streamed = await stream.get_final_message()
            assert text == streamed.content[0].text == whole.content[0].text
            assert (streamed.stop_reason, streamed.usage.output_tokens) == ("max_tokens", 6)
            counted = await client.messages.count_tokens(**ask, messages=said)
            usage = whole.usage
            cached = usage.cache_creation_input_tokens + usage.cache_read_input_tokens
            assert counted.input_tokens == usage.input_tokens + cached

            call = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a.py"}}
            result = {"type": "tool_result", "tool_use_id": "t1", "content": "x = 1"}
            said += [
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ]
            turn = await client.messages.create(**ask, messages=said, max_tokens=6)
            assert turn.content[0].text
        records = await proxy.records(4)
        assert {record["outcome"] for record in records} == {"ok"}
        await proxy.at_rest()


async def test_they_raise_however_a_stream_breaks(
    tmp_path: Path, openai: Any, anthropic: Any
) -> None:
    """One break of each code: of others with it a client gets the same (test_streams.py)."""
    said: Any = [{"role": "user", "content": "hello"}]
    options: dict[str, Any] = {"api_key": "x", "max_retries": 0}
    for code, script in {code: script for _, script, _, code in reversed(BREAKS)}.items():
        if code == "bad_upstream":
            continue
        async with test_streams.fed(tmp_path, script, idle_timeout=0.1) as (proxy, _):
            url = proxy.server.url
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as client:
                stream = await client.chat.completions.create(
                    model="sim-8b", messages=said, stream=True
                )
                with pytest.raises(openai.APIError):
                    [piece async for piece in stream]
                events = await client.responses.create(model="sim-8b", input="x", stream=True)
                with pytest.raises(openai.APIError):
                    [piece async for piece in events]
            async with anthropic.AsyncAnthropic(base_url=url, **options) as other:
                messages = await other.messages.create(
                    model="sim-8b", messages=said, max_tokens=9, stream=True
                )
                with pytest.raises(anthropic.APIError):
                    [piece async for piece in messages]


async def test_they_go_through_silences(tmp_path: Path, openai: Any, anthropic: Any) -> None:
    said: Any = [{"role": "user", "content": "hello"}]
    options: dict[str, Any] = {"api_key": "x", "max_retries": 0}
    for path, first, then in SILENT:
        go = asyncio.Event()
        async with test_dialects.fed(
            tmp_path, silent(first, then, go), heartbeat_interval=0.02
        ) as (proxy, _):
            asyncio.get_running_loop().call_later(0.15, go.set)  # the silence is the input
            url = proxy.server.url
            events: list[Any]
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as client,
                anthropic.AsyncAnthropic(base_url=url, **options) as other,
            ):
                if path == CHAT:
                    async with client.chat.completions.stream(model="m", messages=said) as chat:
                        events = [event async for event in chat]
                elif path == COMPLETIONS:
                    texts = await client.completions.create(model="m", prompt="x", stream=True)
                    events = [event async for event in texts]
                elif path == RESPONSES:
                    made = await client.responses.create(model="m", input="x", stream=True)
                    events = [event async for event in made]
                else:
                    message = await other.messages.create(
                        model="m", messages=said, max_tokens=9, stream=True
                    )
                    events = [event async for event in message]
            assert events
            (record,) = await proxy.records(1)
            assert record["outcome"] == "ok"
        (tmp_path / "log").unlink()


def test_the_types_are_those_that_anthropics_client_knows(anthropic: Any) -> None:
    assert set(TYPES.values()) - {"request_too_large"} <= set(get_args(anthropic.types.ErrorType))

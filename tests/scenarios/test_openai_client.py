"""The official client, unmodified, through the proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.examined import facts_of
from tests.support.harness import chat, proxied, until


@pytest.fixture
def said() -> Any:
    """Any: the client's own message types are of no interest here."""
    return [{"role": "user", "content": "hello there"}]


async def test_chat_and_completions(tmp_path: Path, said: Any) -> None:
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


async def test_responses_and_embeddings(tmp_path: Path) -> None:
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


async def test_it_obeys_the_time_it_is_told(tmp_path: Path, said: Any) -> None:
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


async def test_errors_are_its_own_exceptions(tmp_path: Path, said: Any) -> None:
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

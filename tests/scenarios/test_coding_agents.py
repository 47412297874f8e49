"""What coding agents send, through the proxy: Anthropic's own client, and the documented curl."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.harness import proxied
from tests.test_docs import marked

READ: dict[str, Any] = {
    "name": "read",
    "description": "reads a file",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}


async def test_messages_tools_and_counts(tmp_path: Path) -> None:
    # Above a second to import, for every process that only collects this file as well.
    anthropic: Any = importlib.import_module("anthropic")
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


async def test_the_curl_examples_of_the_documentation(tmp_path: Path) -> None:
    text = marked("docs/reference/engine-sim.md", "curl").replace("\\\n", " ")
    async with proxied(tmp_path, 2) as (proxy, _):
        asked = []
        for curl, url, _header, content_type, _data, body in map(shlex.split, text.splitlines()):
            assert (curl, content_type) == ("curl", "Content-Type: application/json")
            headers = {"Content-Type": "application/json"}
            answer = await proxy.post(body.encode(), urlsplit(url).path, headers=headers)
            assert answer.status == 200, answer.body
            asked.append(urlsplit(url).path.removeprefix("/v1/"))
        assert asked == ["messages", "messages/count_tokens", "responses", "embeddings"]
        await proxy.at_rest()

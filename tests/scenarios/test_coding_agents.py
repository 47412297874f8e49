"""What coding agents send, through the proxy: the documented curl."""

from __future__ import annotations

import shlex
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.harness import proxied
from tests.test_docs import marked


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

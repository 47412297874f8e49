"""Calls of admin paths."""

from __future__ import annotations

from typing import Any

import orjson

from tests.support.harness import ServedProxy


async def call(
    proxy: ServedProxy, method: str, path: str, body: Any = None, **kw: Any
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes | None) else orjson.dumps(body)
    headers = {"Content-Type": "application/json"} | kw.pop("headers", {})
    async with proxy.http.request(method, path, data=data, headers=headers, **kw) as response:
        return response.status, orjson.loads(await response.read())

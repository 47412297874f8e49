"""A transfer, a request's body and a prefill leg's answer, for tests of the connectors."""

from __future__ import annotations

from proxy.core.connectors.base import KV_PARAMS, Transfer
from proxy.core.types import Instance

P = Instance("p", "http://p:8000", "http://p:8998")
TRANSFER = Transfer("xfer-1", P, "engine-1", "r-p")
BODY = {
    "model": "m",
    "messages": [],
    "tools": [],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 99,
    "min_tokens": 9,
    "stop": ["x"],
    "logprobs": True,
    "temperature": 0.5,
    "cache_salt": "s",
}


def answer(reason: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "finish_reason": reason}], KV_PARAMS: None}

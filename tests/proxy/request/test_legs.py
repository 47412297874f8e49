"""The prefill leg: what P's answer gives to D, and what is said of one that gives nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest

from proxy.core.connectors import CONNECTORS
from proxy.core.connectors.base import Edits
from proxy.core.types import FailureKind, Fallback, Instance
from proxy.protocol.body import Members
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.examined import Examined, Task, examine
from proxy.request.client_request import Outgoing
from proxy.request.legs import prefill_leg
from proxy.telemetry.log import LOG_EVERY_S, Throttle

PARSED = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
RAW = orjson.dumps(PARSED)
FOUND = examine(Task("/v1/chat/completions", RAW, is_object=True, salt=None), 100)
assert isinstance(FOUND, Examined)
OUT = Outgoing("POST", "/v1/chat/completions", b"X-Request-Id: r-1\r\n", Members(RAW), FOUND)
GOOD = (
    b'{"choices":[{"index":0,"finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":8,"prompt_tokens_details":{"cached_tokens":2}}}'
)


class P:
    """An instance that answers a prefill leg; it is an upstream client and its response in one."""

    instance = Instance("p", "http://p:1", "http://p:2")
    is_down = False
    is_stream = False

    def __init__(self, answer: bytes = GOOD, status: int = 200) -> None:
        self.answer, self.status = answer, status
        self.throttle = Throttle()
        self.sent: list[dict[str, Any]] = []
        self.is_closed = False
        self.failure: UpstreamFailure | None = None
        self.id: str | None = "engine"

    @contextmanager
    def watch(self, scope: object) -> Iterator[None]:
        yield

    async def engine_id(self) -> str | None:
        return self.id

    async def send(self, method: str, path: str, headers: bytes, body: bytes, on_sent: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        assert headers.startswith(b"X-Request-Id: r-p\r\n")
        self.sent.append(orjson.loads(body))
        return self

    async def read(self, limit: int) -> bytes:
        return self.answer[:limit]

    def close(self) -> None:
        self.is_closed = True


async def leg(p: Any, connector: str = "mooncake") -> Edits | Fallback:
    return await prefill_leg(OUT, p, CONNECTORS[connector], "r-p", 5.0)


async def test_p_computes_one_token_and_tells_what_it_had() -> None:
    """D's count includes what came over and says nothing."""
    p = P()
    result = await leg(p)
    assert isinstance(result, Edits)
    assert result.cached_ratio == 0.25
    assert p.is_closed
    [sent] = p.sent
    assert (sent["max_tokens"], sent["stream"]) == (1, False)
    assert sent["messages"] == PARSED["messages"]


@pytest.mark.parametrize(
    ("answer", "status", "expected"),
    [
        (b"{", 200, Fallback.P_ERROR),
        (b"[]", 200, Fallback.P_FINISH_REASON),
        (GOOD, 400, Fallback.P_ERROR),
        (b'{"kv_transfer_params":{"remote_engine_id":"other"}}', 200, Fallback.KV_PARAMS),
    ],
)
async def test_an_answer_that_gives_nothing(answer: bytes, status: int, expected: Fallback) -> None:
    p = P(answer, status)
    assert await leg(p) is expected
    assert p.is_closed


async def test_without_an_engines_id_p_is_not_asked() -> None:
    p = P()
    p.id = None
    assert await leg(p) is Fallback.ENGINE_ID_UNKNOWN
    assert not p.sent


async def test_a_failure_is_for_the_caller_to_route_around() -> None:
    p = P()
    p.failure = UpstreamFailure(FailureKind.CONNECT, "refused")
    with pytest.raises(UpstreamFailure):
        await leg(p)


async def test_kv_params_that_are_not_used_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    p = P(b'{"kv_transfer_params":{"remote_engine_id":"other"}}')
    for _ in range(100):
        assert await leg(p) is Fallback.KV_PARAMS
    (line,) = caplog.messages
    assert line == "instance p: its kv_transfer_params are not used: another remote_engine_id"
    later_s = asyncio.get_running_loop().time() + LOG_EVERY_S
    assert p.throttle.turn("kv_transfer_params", later_s) == 99

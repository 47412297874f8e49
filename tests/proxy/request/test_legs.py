"""The prefill leg: what P's answer gives to D, and what is said of one that gives nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import orjson
import pytest

from proxy.core import is_compiled
from proxy.core.connectors import CONNECTORS
from proxy.core.connectors.base import KV_PARAMS, Edits
from proxy.core.routing.actions import LeftKv, LegLimit
from proxy.core.types import FailureKind, Fallback, Instance
from proxy.protocol.body import Members
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.examined import Examined, Task, examine
from proxy.request.client_request import Outgoing
from proxy.request.legs import FirstEventLimit, Unusable, prefill_leg
from proxy.telemetry.log import LOG_EVERY_S, Throttle
from tests.support.virtual_time import run

pytestmark = pytest.mark.skipif(is_compiled(), reason="P stands in for a class that is compiled")

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

    def keyed(self, headers: bytes) -> bytes:
        return headers

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


async def leg(p: Any, connector: str = "mooncake") -> Edits | Fallback | Unusable:
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


ENDED = b'{"choices":[{"index":0,"finish_reason":"%b"}]}'
OTHER = (
    b'{"kv_transfer_params":{"remote_engine_id":"other"},"choices":[{"finish_reason":"length"}]}'
)


@pytest.mark.parametrize(
    ("answer", "status", "expected"),
    [
        (GOOD, 400, Fallback.P_ERROR),
        (ENDED % b"stop", 200, Fallback.P_FINISH_REASON),
        (ENDED % b"abort", 200, Fallback.P_FINISH_REASON),
    ],
)
async def test_an_answer_that_says_that_nothing_is_held(
    answer: bytes, status: int, expected: Fallback
) -> None:
    p = P(answer, status)
    assert await leg(p) is expected
    assert p.is_closed


@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"{", Fallback.P_ERROR),
        (b"", Fallback.P_ERROR),
        (b'"' + b"x" * (2 << 20) + b'"', Fallback.P_ERROR),
        (b"[]", Fallback.P_FINISH_REASON),
        (b"{}", Fallback.P_FINISH_REASON),
        (ENDED % b"tool_calls", Fallback.P_FINISH_REASON),
        (OTHER, Fallback.KV_PARAMS),
    ],
    ids=["cut", "empty", "long", "list", "no choice", "a tool", "other params"],
)
async def test_an_answer_of_no_use_may_hold_kv(
    connector: str, answer: bytes, expected: Fallback
) -> None:
    """With Mooncake the proxy has named it; with NIXL only P could have."""
    p = P(answer)
    p.id = "engine" if connector == "mooncake" else None
    p.instance = replace(p.instance, url="http://other:1") if connector == "nixl" else p.instance
    given = answer.replace(b'"remote_engine_id":"other"', b'"remote_host":"elsewhere"')
    p.answer = given if connector == "nixl" else answer
    result = await leg(p, connector)
    assert isinstance(result, Unusable)
    assert result.why is expected
    if connector == "nixl" or expected is Fallback.KV_PARAMS:
        assert (result.edits, result.left) == (None, LeftKv.UNNAMED)
        return
    assert result.edits is not None
    assert result.left is LeftKv.NAMED
    [sent] = p.sent
    given_id = sent[KV_PARAMS]["transfer_id"]
    assert result.edits.put[KV_PARAMS]["transfer_id"] == given_id


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
    p = P(OTHER)
    for _ in range(100):
        result = await leg(p)
        assert isinstance(result, Unusable)
        assert result.why is Fallback.KV_PARAMS
    (line,) = caplog.messages
    assert line == "instance p: its kv_transfer_params are not used: another remote_engine_id"
    later_s = asyncio.get_running_loop().time() + LOG_EVERY_S
    assert p.throttle.turn("kv_transfer_params", later_s) == 99


def seconds_at(
    late_s: list[float], seconds: float, cap_s: float, has_other: Callable[[float], bool]
) -> list[float]:
    """The seconds of such a limit after it was looked at so late each time, until it was met.

    In virtual time: by a real clock some would pass until the limit begins.
    """

    async def test() -> list[float]:
        began_s, seen = asyncio.get_running_loop().time(), []
        limit = FirstEventLimit(LegLimit("ttft", seconds, cap_s), has_other)
        with suppress(TimeoutError), limit:
            for one_s in late_s:
                limit.look(began_s + one_s)
                seen.append(limit.seconds)
                await asyncio.sleep(0)
            seen.append(math.inf)
        return seen

    found: list[float] = run(test())
    return found


def test_a_late_leg_is_given_up_once_somebody_else_would_take_it() -> None:
    asked: list[float] = []

    def has_other(now_s: float) -> bool:
        asked.append(now_s)
        return len(asked) == 3

    seen = seconds_at([50.0, 100.1, 100.5, 104.0, 105.5, 106.0], 100.0, 300.0, has_other)
    assert seen == pytest.approx([100.0, 101.1, 101.1, 105.0, 105.0])
    assert len(asked) == 3


def test_a_late_leg_that_nobody_else_would_take_has_all_of_its_time() -> None:
    seen = seconds_at([100.1, 101.2, 101.4, 101.6], 100.0, 101.5, lambda now_s: False)
    assert seen == pytest.approx([101.1, 101.5, 101.5, 101.5])

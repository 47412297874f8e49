"""What an instance does to requests is said once in a while, however many they are."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import count
from pathlib import Path

import aiohttp
import pytest

from proxy.core.placement.decision import Choice, PlacementView, chosen
from proxy.core.placement.wrappers import failing_open
from proxy.core.types import FailureKind, Reason
from proxy.telemetry.log import KEYS, LOG_EVERY_S, LoopFaults, Throttle
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.requests import FailureLog
from tests.support.harness import (
    ANSWER,
    STREAM_HEAD,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    chunk,
    event,
    plain,
    resets,
    says,
    stalls,
)

CUT = resets(STREAM_HEAD + chunk(event("half")))
CRASHED = says(plain(b'{"error":{"message":"boom"}}', "500 Internal Server Error"))


def test_each_cause_has_its_turns() -> None:
    throttle = Throttle()
    assert [throttle.turn("a", i * 0.01) for i in range(100)] == [0] + [None] * 99
    assert throttle.turn("b", 1.0) == 0
    assert throttle.turn("a", LOG_EVERY_S) == 99
    assert throttle.turn("a", 2 * LOG_EVERY_S) == 0


async def test_a_fault_in_callbacks_of_the_loop_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once per line of code: the text of each has another address in it."""
    loop = asyncio.get_running_loop()

    def fails(value: object) -> None:
        raise TypeError(f"a fault with {value}")

    def fails_too() -> None:
        raise TypeError("another line")

    loop.set_exception_handler(LoopFaults())
    for at in range(50):
        loop.call_soon(fails, at)
    loop.call_soon(fails_too)
    for _ in range(3):
        loop.call_exception_handler({"message": "without an exception"})
    await asyncio.sleep(0)
    lines = [record for record in caplog.records if record.name == "asyncio"]
    assert len(lines) == 3
    assert all(record.levelname == "ERROR" for record in lines)
    assert "a fault with 0" in caplog.text, "with its traceback"


def test_causes_are_bounded() -> None:
    throttle = Throttle()
    assert all(throttle.turn(i, 0.0) == 0 for i in range(3 * KEYS))
    assert len(throttle._causes) == KEYS
    assert throttle.turn(3 * KEYS - 1, 0.0) is None


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        (CUT, 200, "instance bad: engine_lost: upstream: "),
        (CRASHED, 500, "instance bad: server_error: status 500 "),
        (resets(), 502, "instance bad: reset: "),
        (stalls(), 504, "instance bad: timeout: no first event in "),
        (says(plain(b"{}", "503 Service Unavailable")), 503, None),
    ],
)
async def test_a_request_that_an_instance_failed_is_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, script: Script, status: int, said: str | None
) -> None:
    """With instance, kind, detail and request; that an engine is busy is no failure."""
    async with RawEngine(script) as engine:
        async with ServedProxy(
            tmp_path / "log",
            [f"bad={engine.address}"],
            health_interval=60,
            ttft_timeout=0.2,
            max_queue=0,
        ) as proxy:
            for name in ("first", "second"):
                async with proxy.http.post(
                    "/v1/chat/completions", json=chat("x"), headers={"X-Request-Id": name}
                ) as response:
                    assert name == "second" or response.status == status
                    with contextlib.suppress(aiohttp.ClientPayloadError):
                        await response.read()
            await proxy.records(2)
    found = [line for line in caplog.messages if "failed" in line]
    assert len(found) == (said is not None), found
    if said is not None:
        assert found[0].startswith(said)
        assert found[0].endswith("(request first failed)")


def test_a_line_says_how_many_it_stands_for(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    record = RequestRecord(request_id="r", endpoint="/v1/completions", t_proxy_recv=0.0)
    record.decode_instance = "a"
    for i in range(5):
        log.note(record, FailureKind.RESET, "x" * 9999, float(i))
    log.note(record, FailureKind.RESET, "gone", LOG_EVERY_S)
    first, last = caplog.messages
    assert len(first) < 400
    assert last == "instance a: reset: gone (request r failed; 4 more since the last line)"


POLICY_FAILED = "the policy failed; requests are placed by load: "


def test_what_a_policy_raises_is_a_line_per_line_of_its_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The words may be other ones for every request, and would fill the log."""
    log = FailureLog()
    for i in range(5):
        log.note_mistake(f"KeyError: {i} (cost.py:7)", 0.1 * i)
    log.note_mistake("KeyError: 5 (cost.py:8)", 1.0)
    log.note_mistake("KeyError: 6 (cost.py:7)", LOG_EVERY_S)
    assert caplog.messages == [
        POLICY_FAILED + "KeyError: 0 (cost.py:7)",
        POLICY_FAILED + "KeyError: 5 (cost.py:8)",
        POLICY_FAILED + "KeyError: 6 (cost.py:7); 4 more since the last line",
    ]


@pytest.mark.parametrize(("first", "requests"), [(1, 2), (2, 1)])
async def test_a_policy_that_raises_is_said_where_it_placed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, requests: int
) -> None:
    """Once; also where it did not raise before the repetition."""
    asked = count(1)

    def broken(view: PlacementView) -> Choice:
        if next(asked) < first:
            return chosen(view, view.free[0], None, Reason.MARGIN, placed=True)
        raise ZeroDivisionError

    async with RawEngine(resets()) as bad, RawEngine(says(ANSWER)) as good:
        names = [f"a={bad.address}", f"b={good.address}"]
        async with ServedProxy(tmp_path / "log", names, health_interval=60) as proxy:
            await proxy.up()
            proxy.router._decide = failing_open(broken)
            for _ in range(requests):
                assert (await proxy.post(chat("x"))).status == 200
            await proxy.records(requests)
    said = [line for line in caplog.messages if line.startswith(POLICY_FAILED)]
    assert len(said) == 1
    assert "ZeroDivisionError: " in said[0]

"""The log on stderr never makes a request wait."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
from subprocess import PIPE

import aiohttp
import orjson
import pytest

from proxy.telemetry.log import LINES, StderrLog
from replayer.simulator.host import SimFleet
from tests.support.harness import addresses, chat
from tests.support.proxy_process import ProxyProcess, url_in


@pytest.mark.long
@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_stderr_nobody_reads_stops_nothing(*, is_closed: bool) -> None:
    """Closed, or full: every change has a line of its own, together more than a pipe holds."""
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        with ProxyProcess("--instances", addresses(fleet)[0], stderr=PIPE) as child:
            assert child.stderr is not None
            url = await asyncio.to_thread(url_in, child.stderr)
            if is_closed:
                child.stderr.close()
            async with aiohttp.ClientSession(url) as http:
                for turn in range(300):
                    async with http.post(f"/sessions/{'x' * 180}{turn}/end") as response:
                        assert response.status == 404
                async with http.post("/v1/chat/completions", json=chat("x")) as response:
                    assert response.status == 200
            child.terminate()
            assert await child.ended() == 0


class Stuck:
    """A stderr that takes nothing until it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.text = ""

    def write(self, text: str) -> None:
        self.let.wait()
        self.text += text

    def flush(self) -> None: ...


def test_what_was_dropped_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    monkeypatch.setattr(sys, "stderr", stuck)
    log = StderrLog("text")
    record = logging.LogRecord("x", logging.INFO, "", 0, "line", None, None)
    for _ in range(LINES + 50):
        log.emit(record)
    stuck.let.set()
    while not log._lines.empty():
        pass
    log.emit(record)
    log.close()
    assert "log lines dropped" in stuck.text
    kept = stuck.text.count("INFO line")
    dropped = sum(map(int, re.findall(r"(\d+) log lines dropped", stuck.text)))
    assert kept + dropped == LINES + 51


def test_a_line_of_json_has_the_exception() -> None:
    log = StderrLog("json")
    try:
        raise RuntimeError("it\nbroke")
    except RuntimeError:
        given = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    try:
        line = orjson.loads(log.format(given))
    finally:
        log.close()
    assert line["message"] == "failed"
    assert "Traceback" in line["exception"]
    assert "RuntimeError: it" in line["exception"]

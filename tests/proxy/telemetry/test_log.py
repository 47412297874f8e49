"""The log on stderr never makes a request wait."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import threading
from pathlib import Path

import aiohttp
import orjson
import pytest

from proxy.telemetry.log import LINES, StderrLog
from replayer.simulator.host import SimFleet
from tests.proxy.test_cli import COMMAND
from tests.support.harness import addresses, chat


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_stderr_nobody_reads_stops_nothing(tmp_path: Path, *, is_closed: bool) -> None:
    """Closed, or full: every change has a line of its own, together more than a pipe holds."""
    reading, writing = os.pipe()
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        options = ["--instances", addresses(fleet)[0], "--host", "127.0.0.1", "--port", "0"]
        child = await asyncio.create_subprocess_exec(*COMMAND, *options, stderr=writing)
        os.close(writing)
        try:
            line = b""
            while b"listening on " not in line or not line.endswith(b"\n"):
                line += await asyncio.to_thread(os.read, reading, 4096)
            url = line[line.index(b"http://") :].split()[0].decode()
            if is_closed:
                os.close(reading)
            async with aiohttp.ClientSession(url) as http:
                for turn in range(300):
                    async with http.post(f"/sessions/{'x' * 180}{turn}/end") as response:
                        assert response.status == 404
                async with http.post("/v1/chat/completions", json=chat("x")) as response:
                    assert response.status == 200
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
            if not is_closed:
                os.close(reading)


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

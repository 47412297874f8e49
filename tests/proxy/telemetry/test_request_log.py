"""The request log never makes a request wait, and says what it dropped."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from proxy.telemetry import request_log
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.request_log import RequestLog
from tests.support.harness import chat, proxied, until
from tests.support.waiting import until_true

CONTRACT = """
request_id session_id turn model stream route_class offload_decision_reason policy
prefill_instance decode_instance isl_tokens hit_tokens new_tokens new_tokens_prefill
cached_tokens osl_tokens t_proxy_recv t_decided t_prefill_sent t_prefill_done t_decode_sent
t_first_token t_done predicted_ttft_s predicted_transfer_s candidates outcome status error
retries fallback
"""


def test_every_record_is_a_line_in_order(tmp_path: Path) -> None:
    drops: list[int] = []
    log = RequestLog(tmp_path / "log", lambda: drops.append(1))
    for i in range(2000):
        log.write(RequestRecord(request_id=f"r{i}"))
    log.close()
    lines = (tmp_path / "log").read_bytes().splitlines()
    assert [orjson.loads(line)["request_id"] for line in lines] == [f"r{i}" for i in range(2000)]
    assert not drops


def test_the_keys_are_the_contracts(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log", lambda: None)
    log.write(RequestRecord(request_id="r"))
    log.close()
    assert set(CONTRACT.split()) <= set(orjson.loads((tmp_path / "log").read_bytes()))


def test_a_full_disk_drops_and_counts(tmp_path: Path) -> None:
    drops: list[int] = []
    log = RequestLog(Path("/dev/full"), lambda: drops.append(1))
    for i in range(10):
        log.write(RequestRecord(request_id=f"r{i}"))
    log.close()
    assert len(drops) == 10


def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: object) -> None:
    drops: list[int] = []
    log = RequestLog(tmp_path / "log", lambda: drops.append(1))
    # The writer cannot be stopped from outside, so the bound is lowered to nothing instead.
    limit, request_log.QUEUE_LINES = request_log.QUEUE_LINES, 0
    try:
        log.write(RequestRecord(request_id="r"))
    finally:
        request_log.QUEUE_LINES = limit
        log.close()
    assert drops == [1]


def test_a_record_that_is_no_json_is_dropped_alone(tmp_path: Path) -> None:
    drops: list[int] = []
    log = RequestLog(tmp_path / "log", lambda: drops.append(1))
    for name in ("a", "\ud800", "b"):
        log.write(RequestRecord(request_id="r", session_id=name))
    log.close()
    lines = (tmp_path / "log").read_bytes().splitlines()
    assert [orjson.loads(line)["session_id"] for line in lines] == ["a", "b"]
    assert len(drops) == 1


def test_without_a_path_nothing_happens() -> None:
    drops: list[int] = []
    log = RequestLog(None, lambda: drops.append(1))
    log.write(RequestRecord(request_id="r"))
    log.close()
    assert not drops


def ids(path: Path) -> list[str]:
    return [orjson.loads(line)["request_id"] for line in path.read_bytes().splitlines()]


def test_a_rotated_file_is_followed(tmp_path: Path) -> None:
    drops: list[int] = []
    path, moved = tmp_path / "log", tmp_path / "log.1"
    log = RequestLog(path, lambda: drops.append(1))
    log.write(RequestRecord(request_id="a"))
    until_true(lambda: path.stat().st_size > 0)
    path.rename(moved)
    log.write(RequestRecord(request_id="b"))
    until_true(path.exists)
    until_true(lambda: path.stat().st_size > 0)
    path.unlink()
    log.write(RequestRecord(request_id="c"))
    log.close()
    assert (ids(moved), ids(path), drops) == (["a"], ["c"], [])


def test_a_vanished_directory_drops_and_resumes(tmp_path: Path) -> None:
    drops: list[int] = []
    home = tmp_path / "logs"
    home.mkdir()
    log = RequestLog(home / "log", lambda: drops.append(1))
    home.rename(tmp_path / "away")
    log.write(RequestRecord(request_id="lost"))
    until_true(lambda: drops == [1])
    home.mkdir()
    log.write(RequestRecord(request_id="kept"))
    log.close()
    assert (ids(home / "log"), drops) == (["kept"], [1])


def test_a_disk_that_fills_up_holds_whole_lines(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for the disk: a write beyond it is cut short, then refused.

    A batch is written or dropped as one, so a shorter one may fit after a longer one did not.
    """
    code = f"""
import resource, signal
from pathlib import Path
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.request_log import RequestLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
drops = []
path = Path({str(tmp_path / "log")!r})
log = RequestLog(path, lambda: drops.append(1))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
for i in range(500):
    log.write(RequestRecord(request_id=str(i)))
while path.read_bytes().count(b'\\n') + len(drops) < 500:
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.write(RequestRecord(request_id="last"))
log.close()
print(len(drops))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=50)
    found = ids(tmp_path / "log")
    assert found[-1] == "last"
    assert len(found) + int(done.stdout) == 501
    assert found[:32] == [str(i) for i in range(32)]
    assert found[:-1] == sorted(set(found[:-1]), key=int)


def test_a_pipe_without_a_reader_drops_and_is_told_apart_from_a_slow_one(tmp_path: Path) -> None:
    drops: list[int] = []
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="fifo"):
        RequestLog(fifo, lambda: None)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    log = RequestLog(fifo, lambda: drops.append(1))
    log.write(RequestRecord(request_id="read"))
    seen = b""

    def has_line() -> bool:
        nonlocal seen
        with contextlib.suppress(BlockingIOError):
            seen += os.read(reader, 65536)
        return seen.endswith(b"\n")

    until_true(has_line)
    os.close(reader)
    log.write(RequestRecord(request_id="gone"))
    until_true(lambda: drops == [1])
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    seen = b""
    log.write(RequestRecord(request_id="again"))
    until_true(has_line)
    log.close()
    os.close(reader)
    assert (b'"again"' in seen, drops) == (True, [1])


async def test_requests_do_not_notice_a_full_disk(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, request_log="/dev/full") as (proxy, _):
        for _ in range(5):
            assert (await proxy.post(chat("x"))).status == 200
        await until(lambda: proxy.metric("request_log_dropped_total") == 5, "all counted")

"""The request log never makes a request wait, and says what it dropped."""

from __future__ import annotations

from pathlib import Path

import orjson

from proxy import reqlog
from proxy.core.record import RequestRecord
from proxy.reqlog import RequestLog

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
    limit, reqlog.QUEUE_LINES = reqlog.QUEUE_LINES, 0
    try:
        log.write(RequestRecord(request_id="r"))
    finally:
        reqlog.QUEUE_LINES = limit
        log.close()
    assert drops == [1]


def test_without_a_path_nothing_happens() -> None:
    drops: list[int] = []
    log = RequestLog(None, lambda: drops.append(1))
    log.write(RequestRecord(request_id="r"))
    log.close()
    assert not drops

"""The proxy's log joined by request id, even while it is still being written."""

import orjson
import pytest

from analysis.runs import join_proxy_log
from tests.support.runs import row


def append(path, *records):
    with path.open("ab") as file:
        for record in records:
            file.write(record if isinstance(record, bytes) else orjson.dumps(record) + b"\n")


def test_records_are_joined_and_times_become_differences(tmp_path):
    log = tmp_path / "p.jsonl"
    record = {
        "request_id": "a.run",
        "route_class": "HEAVY_P2P",
        "t_proxy_recv": 1e9,
        "t_prefill_sent": 1e9 + 1,
        "t_prefill_done": 1e9 + 3,
    }
    append(log, {"request_id": "a.earlier", "route_class": "WARM"}, record, b'{"half')
    rows = [row("a")]
    assert join_proxy_log(rows, log, lambda _s: None) == (0, None)
    assert rows[0]["route_class"] == "HEAVY_P2P"
    assert rows[0]["prefill_leg_s"] == 2.0
    assert rows[0]["proxy_ttft_s"] is None


def test_a_record_that_comes_late_is_waited_for(tmp_path):
    log = tmp_path / "p.jsonl"
    rows = [row("a"), row("b")]
    late = iter([{"request_id": "a.run", "isl_tokens": 7}, {"request_id": "b.run"}])
    assert join_proxy_log(rows, log, lambda _s: append(log, next(late))) == (0, None)
    assert rows[0]["isl_tokens"] == 7


def test_what_never_comes_is_counted(tmp_path):
    waits: list[float] = []
    log = tmp_path / "p.jsonl"
    log.touch()
    assert join_proxy_log([row("a")], log, waits.append) == (1, None)
    assert sum(waits) == pytest.approx(2.0)


def test_a_log_that_cannot_be_read_is_named(tmp_path):
    joined = join_proxy_log([row("a")], tmp_path / "none", lambda _s: None)
    assert joined.missing == 1
    assert joined.problem == (
        f"the proxy's log {tmp_path}/none cannot be read: No such file or directory"
    )

"""The record of a request: the log's keys, and the times made of its fields."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.telemetry.record import RequestRecord, move_times

LOG_KEYS = """
    request_id session_id turn model stream route_class offload_decision_reason policy
    prefill_instance decode_instance isl_tokens hit_tokens new_tokens new_tokens_prefill
    cached_tokens osl_tokens t_proxy_recv t_decided t_prefill_sent t_prefill_done t_decode_sent
    t_first_token t_done predicted_ttft_s predicted_transfer_s candidates outcome status error
    retries fallback
"""


def test_the_keys_that_users_read_are_there() -> None:
    assert set(LOG_KEYS.split()) <= {field.name for field in fields(RequestRecord)}


def test_what_did_not_happen_is_unknown() -> None:
    record = asdict(RequestRecord(request_id="r"))
    known = {key: value for key, value in record.items() if value is not None}
    assert known == {"request_id": "r", "endpoint": "", "t_proxy_recv": 0.0, "retries": 0}


@pytest.mark.parametrize(
    ("first_token", "done", "osl", "ttft_s", "e2e_s", "tpot_s"),
    [
        (102.0, 106.0, 5, 2.0, 6.0, 1.0),
        (102.0, 106.0, 2, 2.0, 6.0, 4.0),
        (102.0, 106.0, 1, 2.0, 6.0, None),
        (102.0, 106.0, 0, 2.0, 6.0, None),
        (102.0, 106.0, None, 2.0, 6.0, None),
        (102.0, None, 5, 2.0, None, None),
        (None, 106.0, 5, None, 6.0, None),
        (None, None, None, None, None, None),
        (100.0, 100.0, 5, 0.0, 0.0, 0.0),
    ],
)
def test_times(
    first_token: float | None,
    done: float | None,
    osl: int | None,
    ttft_s: float | None,
    e2e_s: float | None,
    tpot_s: float | None,
) -> None:
    record = RequestRecord(
        request_id="r", t_proxy_recv=100.0, t_first_token=first_token, t_done=done, osl_tokens=osl
    )
    assert (record.ttft_s(), record.e2e_s(), record.tpot_s()) == (ttft_s, e2e_s, tpot_s)


def test_prefill_and_transfer_are_those_of_an_offload_that_went_well() -> None:
    record = RequestRecord(request_id="r", t_decode_sent=101.0, t_first_token=103.0)
    assert (record.prefill_s(), record.transfer_s()) == (None, None), "colocated"
    record.t_prefill_sent = 100.0
    assert (record.prefill_s(), record.transfer_s()) == (None, None), "P never answered"
    record.t_prefill_done = 100.5
    assert (record.prefill_s(), record.transfer_s()) == (0.5, 2.0)
    record.fallback = "transfer_timeout"
    assert (record.prefill_s(), record.transfer_s()) == (0.5, None), "D computed it itself"


@given(
    times=st.lists(st.none() | st.floats(1e9, 4e9), min_size=7, max_size=7),
    drift_s=st.floats(-1e9, 1e9),
)
def test_moved_times_keep_their_order(times: list[float | None], drift_s: float) -> None:
    names = [f.name for f in fields(RequestRecord) if f.name.startswith("t_")][1:]
    record = RequestRecord(request_id="r", t_proxy_recv=1e9)
    for name, at in zip(names, times, strict=True):
        setattr(record, name, at)
    move_times(record, drift_s)
    moved = [getattr(record, name) for name in names]
    assert [t is None for t in moved] == [t is None for t in times]
    was = [t for t in times if t is not None]
    now = [t for t in moved if t is not None]
    assert all(
        (b - a) * (d - c) >= 0 for a, b, c, d in zip(was, was[1:], now, now[1:], strict=False)
    )

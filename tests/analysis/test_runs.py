"""The proxy's log joined by request id, even while it is still being written."""

import io
from dataclasses import fields

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from analysis.report.summary import summarise
from analysis.report.tables import print_report
from analysis.runs import RunError, join_proxy_log, read_rows, read_run, rows_of_log
from proxy.telemetry.record import RequestRecord
from tests.support.examples import examples
from tests.support.runs import row, run


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


def test_a_request_that_was_sent_again_has_its_last_record(tmp_path):
    """The log has one for each attempt, and the last is written after the others."""
    log = tmp_path / "p.jsonl"
    last = {"request_id": "a.run", "route_class": "MEDIUM"}
    append(log, {"request_id": "a.run", "outcome": "rejected", "route_class": "WARM"})
    rows = [row("a", attempts=2)]
    assert join_proxy_log(rows, log, lambda _s: append(log, last)) == (0, None)
    assert rows[0]["route_class"] == "MEDIUM"
    lost_on_the_way = [row("a", attempts=3)]
    assert join_proxy_log(lost_on_the_way, log, lambda _s: None) == (0, None)
    assert lost_on_the_way[0]["route_class"] == "MEDIUM"


TIMES = {"t_proxy_recv": 1e9, "t_decided": 1e9 + 1, "t_decode_sent": 1e9 + 1, "t_done": 1e9 + 7}


def test_the_log_alone_makes_rows(tmp_path):
    log = tmp_path / "p.jsonl"
    first = {"request_id": "a", "outcome": "ok", **TIMES, "t_first_token": 1e9 + 4, "osl_tokens": 4}
    later = {name: value + 5 for name, value in TIMES.items()}
    append(
        log,
        {"request_id": "b", "outcome": "rejected", "status": 503, **later},
        first | {"route_class": "WARM", "candidates": [{"ttft_s": 1}], "predicted_prefill_s": 2.0},
        {"request_id": "c", "outcome": None, **TIMES},
        {"request_id": "d", "outcome": "ok", **TIMES, "t_done": None},
        b"7\n",
        b'{"half',
    )
    rows, others = rows_of_log(log)
    assert others == 4
    assert [one["request_id"] for one in rows] == ["a", "b"]
    assert (rows[0]["sent_s"], rows[0]["first_token_s"], rows[0]["end_s"]) == (0.0, 4.0, 7.0)
    assert rows[0]["phases_s"] == {"decide": 1, "decode_wait": 0, "first_token": 3, "stream": 3}
    assert (rows[0]["completion_tokens"], rows[0]["predicted_prefill_s"]) == (4, 2.0)
    assert "candidates" not in rows[0]
    assert (rows[1]["outcome"], rows[1]["sent_s"], rows[1]["first_token_s"]) == (
        "rejected",
        5,
        None,
    )


HUGE = st.sampled_from([1e308, -1e308, 1e300, 10**18, -(2**63), 2**64 - 1, 1e16])
VALUES = (
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(0, 9) | st.text(max_size=3) | HUGE
)
ANY = VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(st.text(max_size=2), VALUES)
RECORD = {"request_id": "a", "outcome": "ok", "route_class": "WARM", **TIMES}
WRONG = st.dictionaries(st.sampled_from([field.name for field in fields(RequestRecord)]), ANY)


@pytest.mark.long
@pytest.mark.parametrize("name", [field.name for field in fields(RequestRecord)])
def test_a_number_out_of_range_costs_its_own_row(tmp_path, name):
    log = tmp_path / "wrong.jsonl"
    huge = [RECORD | {name: value} for value in (1e308, -1e308, 10**18, 2**64 - 1)]
    append(log, *huge * 3, RECORD)
    rows, skipped = rows_of_log(log)
    assert 1 <= len(rows) == 13 - skipped
    print_report(summarise({}, rows), Console(file=io.StringIO()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"end_s": 1e308},
        {"itl_s": [0.1, 1e308]},
        {"itl_s": [0.1, "x"]},
        {"itl_s": "x"},
        {"phases_s": {"decide": 1e308}},
        {"phases_s": {"decide": [1]}},
        {"phases_s": [1.0]},
        {"predicted_ttft_s": "x"},
        {"prompt_tokens": 10**18},
        {"attempts": 1e308},
    ],
)
def test_a_run_has_a_complaint_about_such_a_row(tmp_path, wrong):
    (tmp_path / "summary.json").write_bytes(b"{}")
    good = {"request_id": "b", "outcome": "ok", "sent_s": 2.0, "end_s": 3.0, "itl_s": [0.1]}
    good |= {"retry_waits_s": [1.0], "phases_s": {"decide": 1.0}, "first_token_s": None}
    append(tmp_path / "requests.jsonl", good, good | wrong)
    summary, rows = read_run(tmp_path, summarise)
    assert (len(rows), summary["rows_skipped"]) == (1, 1)
    with pytest.raises(RunError, match=r"jsonl:2: must be the row of a request"):
        read_rows(tmp_path / "requests.jsonl")


@pytest.mark.long
@settings(max_examples=examples(50))
@given(st.lists(WRONG, max_size=4))
def test_a_log_of_any_values_makes_a_summary_or_one_line(tmp_path_factory, records):
    log = tmp_path_factory.getbasetemp() / "wrong.jsonl"
    log.write_bytes(b"".join(orjson.dumps(RECORD | wrong) + b"\n" for wrong in records))
    try:
        rows, skipped = rows_of_log(log)
    except RunError:
        return
    assert len(rows) + skipped == len(records)
    summary = summarise({}, rows)
    assert summary["requests"]["sent"] == len(rows)
    print_report(summary, Console(file=io.StringIO()))


@pytest.mark.parametrize("summary", [b"{}", b'{"requests":5}', b'{"run_id":"x","planned":4}'])
def test_a_cut_run_has_the_rows_that_are_whole(tmp_path, summary):
    (tmp_path / "summary.json").write_bytes(summary)
    lines = [
        b'{"request_id":"b","outcome":"ok","sent_s":2.0,"end_s":3.0}',
        b'{"request_id":"a","outcome":"ok","sent_s":1.0,"end_s":3.0}',
        b'{"request_id":"c","outcome":"ok","sent_s":"x"}',
        b'{"request_id":"d","outcome":5}',
        b"[1]",
        b'{"req',
    ]
    (tmp_path / "requests.jsonl").write_bytes(b"\n".join(lines))
    found, rows = read_run(tmp_path, summarise)
    assert [row["request_id"] for row in rows] == ["a", "b"]
    assert found["requests"]["ok"] == 2
    assert "4 lines of requests.jsonl are not complete rows" in found["degraded"]


def test_a_whole_run_with_a_row_that_is_none_is_refused(tmp_path):
    (tmp_path / "summary.json").write_bytes(orjson.dumps(run(row("c"))))
    (tmp_path / "requests.jsonl").write_bytes(b'{"request_id":"c","outcome":"ok","sent_s":"x"}')
    with pytest.raises(RunError, match=r"jsonl:1: must be the row of a request"):
        read_run(tmp_path, summarise)

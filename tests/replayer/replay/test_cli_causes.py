"""A run says whose time it reports and why something failed."""

import pytest
from aiohttp import web

from analysis.cli import main as analyze
from replayer.replay.cli import main
from tests.support.replays import run
from tests.support.serving_thread import in_thread
from tests.support.sse_server import Engine


@pytest.mark.parametrize("more", [[], ["--model", "m"]])
def test_an_absent_target_is_one_line_and_status_2(trace, tmp_path, capsys, more):
    status = main([str(trace), "--target", "127.0.0.1:1", "--out", str(tmp_path / "o"), *more])
    error = capsys.readouterr().err
    assert status == 2
    reason = "cannot connect to 127.0.0.1:1: Connection refused"
    assert error == f"replay: --target http://127.0.0.1:1: {reason}\n"


async def nothing():
    return web.json_response({"data": []}, status=404)


def test_a_target_that_names_no_model_is_used_with_one_given(trace, tmp_path, capsys):
    engine = Engine()
    engine.routes["/v1/models"] = lambda _: nothing()
    with in_thread(engine):
        status = main([str(trace), "--target", engine.url, "--out", str(tmp_path / "o")])
        assert status == 2
        assert "names no model (status 404); give --model" in capsys.readouterr().err
        assert run(trace, engine, tmp_path, "--model", "m")[0] == 0


def test_what_the_server_said_is_counted_and_printed(trace, tmp_path, capsys):
    engine = Engine(plan={"s:0": "refuse"}, refusal=b'{"error":{"message":"no model nope"}}')
    with in_thread(engine):
        status, summary, rows = run(trace, engine, tmp_path)
    assert status == 1
    assert summary["errors"] == [
        {"outcome": "http_error", "status": 404, "message": "no model nope", "count": 1}
    ]
    assert rows["s:0"]["error"] == "no model nope"
    assert "1 x http_error 404: no model nope" in capsys.readouterr().out


def test_a_proxy_log_that_is_not_there_is_said(trace, tmp_path, capsys):
    log = str(tmp_path / "none.jsonl")
    with in_thread(Engine()) as engine:
        status, summary, _rows = run(trace, engine, tmp_path, "--proxy-log", log)
    assert status == 0
    assert f"the proxy's log {log} cannot be read: No such file or directory" in summary["degraded"]
    assert "degraded: the proxy's log" in capsys.readouterr().out


def test_the_report_is_in_the_targets_time_and_the_rows_are_as_measured(trace, tmp_path, capsys):
    with in_thread(Engine()) as engine:
        _status, summary, rows = run(trace, engine, tmp_path, "--time-scale", "60")
    assert summary["time_scale"] == 60.0
    waits = sorted((row["end_s"] - row["sent_s"]) * 60 for row in rows.values())
    assert summary["e2e_s"]["max"] == pytest.approx(waits[-1])
    gaps = sum(row["chunks"] - 1 for row in rows.values())
    assert summary["itl_s"]["count"] == gaps
    assert summary["duration_s"] == pytest.approx(summary["client"]["duration_s"] * 60)
    assert "measured x 60" in capsys.readouterr().out
    assert analyze(["report", str(tmp_path / "out")]) == 0
    assert "measured x 60" in capsys.readouterr().out
    assert "one second measured is 60 seconds" in (tmp_path / "out/report.html").read_text()


def test_refusals_and_retries_are_told(trace, tmp_path, capsys):
    """The founding strategy: what was refused on the way shows, though every request ends ok."""
    engine = Engine(rejections={"s:0": 2, "s:1": 1})
    with in_thread(engine):
        more = ("--retry-503", "backoff", "--time-scale", "100000", "--request-timeout", "0")
        status, summary, rows = run(trace, engine, tmp_path, *more)
    assert (status, summary["requests"]["ok"]) == (0, 5)
    refusals = summary["refusals"]
    assert refusals["waited_s"].pop("count") == 2
    assert 1 <= refusals.pop("waited_s")["mean"] < 5
    assert refusals == {
        "answers": 3, "requests": 2, "retries": 3, "ok_after_retry": 2, "given_up": 0,
    }  # fmt: skip
    assert (rows["s:0"]["refusals"], rows["s:0"]["attempts"]) == (2, 3)
    said = "3 answers with status 503 to 2 requests; 3 retries, 2 ok after them, 0 given up"
    assert said in capsys.readouterr().out
    assert analyze(["report", str(tmp_path / "out")]) == 0
    assert said in (tmp_path / "out/report.html").read_text()

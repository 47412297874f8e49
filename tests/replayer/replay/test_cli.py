"""The command as a whole: a trace in, requests on a socket, three files and an exit status out."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from bench.measuring.processes import Child
from replayer.replay.cli import main
from replayer.simulator.host import SimFleet
from tests.support.replays import run, session
from tests.support.serving_thread import in_thread
from tests.support.sse_server import Engine

SUMMARY_KEYS = {
    "trace",
    "target",
    "mode",
    "speedup",
    "duration_s",
    "requests",
    "input_tokens",
    "output_tokens",
    "throughput",
    "ttft_s",
    "ttft_s_failures_as_inf",
    "tpot_s",
    "itl_s",
    "e2e_s",
    "schedule_lag_s",
    "goodput",
    "by_route_class",
    "cache",
    "engine_cache",
    "degraded",
}


def test_a_whole_run(trace, tmp_path, capsys):
    with in_thread(Engine()) as engine:
        status, summary, rows = run(trace, engine, tmp_path, "--goodput", "ttft:60,e2e:60")
    assert status == 0
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["requests"] == {
        "sent": 5, "ok": 5, "rejected": 0, "failed": 0, "skipped": 0, "by_outcome": {"ok": 5},
    }  # fmt: skip
    assert summary["output_tokens"] == 15
    assert summary["cache"]["ideal_hit_ratio"] == pytest.approx((4 + 8 + 4) / (4 + 8 + 12 + 4 + 8))
    assert summary["goodput"]["ratio_of_sent"] == 1.0
    assert summary["by_route_class"]["WARM"]["requests"] == 5
    assert summary["model"] == "tiny"
    assert summary["engine_cache"]["combined_hit_ratio"] is None
    assert summary["engine_cache"]["unread"] == {engine.url: "GET /instances answers 404"}
    one = rows["s:2"]
    assert one["intended_s"] <= one["sent_s"] <= one["first_token_s"] <= one["end_s"]
    assert rows["s:0"]["end_s"] <= rows["s:1"]["intended_s"]
    assert "5 sent, 5 ok" in capsys.readouterr().out


def test_headers_are_safe_distinct_and_unique_to_the_run(trace, tmp_path):
    with in_thread(Engine()) as engine:
        run(trace, engine, tmp_path)
        first = {headers["X-Request-ID"] for headers, _body in engine.seen}
        run(trace, engine, tmp_path)
    sent = [headers["X-Request-ID"] for headers, _body in engine.seen]
    sessions = {headers["X-Session-ID"] for headers, _body in engine.seen}
    assert len(set(sent)) == len(sent) == 10
    assert any(re.fullmatch(r"s:2\.[0-9a-f]{8}", name) for name in first)
    assert len(sessions) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9._:-]+", name) for name in [*sent, *sessions])


def test_failures_are_counted_skip_what_follows_and_decide_the_status(trace, tmp_path):
    with in_thread(Engine(plan={"s:1": "close_mid"})) as engine:
        status, summary, rows = run(trace, engine, tmp_path)
        lenient, _summary, _rows = run(trace, engine, tmp_path, "--max-failures", "2")
    assert (status, lenient) == (1, 0)
    assert summary["requests"]["by_outcome"] == {"ok": 3, "disconnect_mid": 1, "skipped": 1}
    assert summary["requests"]["failed"] == 1
    assert summary["ttft_s"]["count"] == 3
    assert summary["ttft_s_failures_as_inf"]["count"] == 5
    assert summary["ttft_s_failures_as_inf"]["p90"] == "inf"
    assert (rows["s:2"]["outcome"], rows["s:2"].get("sent_s")) == ("skipped", None)


def test_rejections_are_their_own_kind(trace, tmp_path):
    with in_thread(Engine(rejections={"s:0": 1})) as engine:
        status, summary, _rows = run(trace, engine, tmp_path)
        engine.rejections["s:0"] = 1
        patient, _summary, rows = run(trace, engine, tmp_path, "--retry-503", "2")
    assert (status, patient) == (1, 0)
    assert (summary["requests"]["rejected"], summary["requests"]["failed"]) == (1, 0)
    assert rows["s:0"]["attempts"] == 2


def test_the_proxy_log_is_joined_by_request_id(trace, tmp_path):
    log = tmp_path / "proxy.jsonl"

    class LoggingEngine(Engine):
        async def answered(self, request):
            response = await super().answered(request)
            record = {
                "request_id": request.headers["X-Request-ID"],
                "route_class": "HEAVY_P2P",
                "offload_decision_reason": "p_idle_d_busy",
                "prefill_instance": "p",
                "isl_tokens": 10,
                "hit_tokens": 4,
                "t_proxy_recv": 100.0,
                "t_first_token": 100.25,
            }
            with log.open("ab") as file:
                file.write(orjson.dumps(record) + b"\n")
            return response

    with in_thread(LoggingEngine()) as engine:
        status, summary, rows = run(trace, engine, tmp_path, "--proxy-log", str(log))
    assert status == 0
    assert summary["offload_decision_reasons"] == {"p_idle_d_busy": 5}
    assert summary["by_route_class"].keys() == {"HEAVY_P2P"}
    assert summary["cache"]["predicted_hit_ratio"] == pytest.approx(0.4)
    assert summary["cache"]["external_hit_ratio"] is not None
    assert rows["s:0"]["proxy_ttft_s"] == pytest.approx(0.25)
    assert not any("proxy's log" in line for line in summary["degraded"])


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        (["--mode", "sessions", "--concurrency", "1"], 5),
        (["--sample-sessions", "1"], {2, 3}),
        (["--max-input", "4"], 2),
        (["--limit", "1"], 1),
        (["--endpoint", "completions"], 5),
        (["--endpoint", "completions", "--prompt-form", "ids"], 5),
        (["--chat-form", "flat", "--model", "m", "--save-text"], 5),
    ],
)
def test_options_that_change_what_is_sent(trace, tmp_path, more, sent):
    with in_thread(Engine()) as engine:
        status, summary, rows = run(trace, engine, tmp_path, *more)
    assert status == 0
    number = summary["requests"]["sent"]
    assert number in sent if isinstance(sent, set) else number == sent
    assert ("output_text" in next(iter(rows.values()))) == ("--save-text" in more)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.jsonl"], "none.jsonl: cannot be read: No such file or directory"),
        (["{trace}", "--speedup", "0"], "argument --speedup: must be a number > 0, not '0'"),
        (["{trace}", "--window", "5"], "argument --window: must be START:END in seconds"),
        (["{trace}", "--goodput", "tft:2"], "argument --goodput: must be like ttft:2,tpot:0.05"),
        (["{trace}", "--target", "ftp://x"], "argument --target: must be http(s)://HOST:PORT"),
        (["{trace}", "--window", "90:91", "--out", "{out}"], "the selection leaves no request"),
        (["{trace}", "--prompt-form", "ids"], "ids needs --endpoint completions"),
        (["{trace}", "--retry-503", "often"], "must be a number of retries or backoff"),
        (["{trace}", "--time-scale", "0"], "argument --time-scale: must be a number > 0"),
        (["{trace}", "--proxy-log", "{out}/no/log"], "--proxy-log: there is no folder {out}/no"),
        (["{trace}", "--proxy-log", "/"], "--proxy-log: / is a folder, not a file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, arguments, said):
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(b'{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}')
    places = {"trace": trace, "out": tmp_path / "out"}
    try:
        status = main([argument.format(**places) for argument in arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert said.format(**places) in error
    assert error.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "signs", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]]
)
def test_an_interrupted_run_writes_what_it_has(trace, tmp_path, signs):
    out = tmp_path / "out"
    with in_thread(Engine(plan={"s:1": "hang"})) as engine:
        command = [sys.executable, "-m", "replayer.replay.cli", str(trace), "--target", engine.url]
        options = ["--out", str(out), "--no-html", "--sample-sessions", "1", "--seed", "1"]
        with Child([*command, *options]) as process:
            wait_for(engine, "s:1")
            for sign in signs:
                process.send_signal(sign)
            assert process.wait() == 130
    summary = orjson.loads((out / "summary.json").read_bytes())
    assert summary["requests"]["by_outcome"] == {"ok": 1, "interrupted": 1}
    assert summary["degraded"] == ["interrupted after 2 of 3 requests"]


def wait_for(engine, name):
    """Wait, on the server's own news, until it has seen a request."""
    while not any(headers["X-Request-ID"].startswith(name) for headers, _ in list(engine.seen)):
        engine.news.wait(timeout=5)
        engine.news.clear()


@pytest.mark.long
def test_the_measuring_process_loads_no_tables_and_no_plots():
    heavy = "('pandas', 'plotly', 'numpy', 'analysis')"
    code = f"import sys, replayer.replay.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_against_a_simulated_engine_the_cache_hits_as_ideal(tmp_path):
    rows = [row for name in "abc" for row in session(name, 4, block=64)]
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))

    class Target:
        url = ""

    with in_thread(SimFleet(1, speed=100.0)) as fleet:
        target = Target()
        target.url = fleet.engines[0].url
        status, summary, rows_of_run = run(
            trace, target, tmp_path, "--mode", "sessions", "--concurrency", "2", "--seed", "0"
        )
        again, _summary, rows_again = run(trace, target, tmp_path, "--seed", "0")
    assert (status, again) == (0, 0)
    assert summary["requests"]["ok"] == 12
    assert summary["output_tokens"] == 36
    assert {row["completion_tokens"] for row in rows_of_run.values()} == {3}
    cache, counted = summary["cache"], summary["engine_cache"]
    looked_up = sum(row["prompt_tokens"] for row in rows_of_run.values())
    hit = sum(row["cached_tokens"] for row in rows_of_run.values())
    assert (counted["source"], counted["unread"]) == ("engines", {})
    assert (counted["looked_up_tokens"], counted["during"]["local_hits"]) == (looked_up, hit)
    assert counted["combined_hit_ratio"] == counted["local_hit_ratio"] == cache["engine_hit_ratio"]
    assert cache["engine_hit_ratio"] == pytest.approx(cache["ideal_hit_ratio"], abs=0.12)
    assert [row["output_digest"] for row in rows_of_run.values()] == [
        rows_again[name]["output_digest"] for name in rows_of_run
    ]


@pytest.mark.long
def test_the_page_needs_no_network(trace, tmp_path):
    out = tmp_path / "out"
    with in_thread(Engine()) as engine:
        assert main([str(trace), "--target", engine.url, "--out", str(out), "--no-progress"]) == 0
    page = Path(out / "report.html").read_text()
    assert "<script src=" not in page
    assert "TTFT over the run" in page

"""The access log: a line per request, text or JSON, on stdout or in a file; off costs nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import orjson
import pytest

from proxy.config.load import load
from proxy.config.sources import ConfigError
from proxy.core.placement.alternatives import PastChecks
from proxy.core.types import Outcome, PastCheck, Reject, RejectReason
from proxy.telemetry.access_log import AccessLog, as_json, as_text, fields
from proxy.telemetry.record import RequestRecord
from tests.support.harness import chat, proxied, until
from tests.support.waiting import until_true

ROOT = Path(__file__).parents[3]


def record(**given: object) -> RequestRecord:
    made = RequestRecord(request_id="r-1", endpoint="/v1/chat/completions")
    known: dict[str, object] = {
        "t_proxy_recv": 1_700_000_000.0,
        "t_first_token": 1_700_000_000.25,
        "t_done": 1_700_000_001.5,
        "tenant": "acme",
        "model": "sim-8b",
        "route_class": "WARM",
        "place": "home",
        "offload_decision_reason": "d_idle",
        "decode_instance": "a",
        "hit_tokens": 41_000,
        "isl_tokens": 43_000,
        "prompt_tokens": 43_210,
        "cached_tokens": 40_960,
        "osl_tokens": 128,
        "status": 200,
        "outcome": Outcome.OK,
    }
    for name, value in (known | given).items():
        setattr(made, name, value)
    return made


def test_a_line_of_text() -> None:
    assert as_text(record()).decode() == (
        "2023-11-14T22:13:21.500Z tenant=acme model=sim-8b path=/v1/chat/completions instance=a "
        'route=WARM reason="home 41k of 43k cached; d_idle" status=200 outcome=ok '
        "prompt_tokens=43210 cached_tokens=40960 output_tokens=128 ttft_s=0.25 duration_s=1.5 "
        "retries=0 id=r-1"
    )


def test_a_line_of_json_has_the_same_fields_and_null_for_what_is_unknown() -> None:
    line = orjson.loads(as_json(record(cached_tokens=None)))
    assert list(line) == list(fields(record()))
    assert (line["time"], line["cached_tokens"]) == ("2023-11-14T22:13:21.500Z", None)
    assert (line["ttft_s"], line["duration_s"], line["tenant"]) == (0.25, 1.5, "acme")


def test_a_refused_request_says_why() -> None:
    reject = Reject(
        RejectReason.QUEUE_FULL, 1, past=(PastCheck("a", (RejectReason.DECODE_BLOCKS,), 1.0),)
    )
    refused = record(
        candidates=PastChecks(reject), place=None, outcome=Outcome.REJECTED, error="queue_full"
    )
    assert fields(refused)["reason"] == "queue_full; decode_blocks 1 of 1"
    nobody = record(place=None, outcome=Outcome.REJECTED, error="no_instance")
    assert fields(nobody)["reason"] == "no_instance"


@pytest.mark.parametrize("text", ["a b", 'a"b', "a=b", "a\nb", "\u202eb", "\ud800", "\x1b[31m", ""])
def test_what_clients_choose_stays_one_printable_word(text: str) -> None:
    line = as_text(record(model=text, tenant=text)).decode()
    assert line.isprintable()
    assert len(re.findall(r" (\w+)=", re.sub(r'"(\\.|[^"\\])*"', '""', line))) == 15


def test_off_costs_no_thread_and_no_call(tmp_path: Path) -> None:
    before = threading.active_count()
    log = AccessLog(None, lambda: None, is_json=False)
    assert not log.is_on
    assert threading.active_count() == before


async def test_only_what_is_on_is_asked_for_each_request(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        telemetry = proxy.server.state.telemetry
        assert telemetry.logs == (telemetry.request_log,)


async def test_a_line_for_each_request_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    to_file = proxied(tmp_path, 1, access_log="json", access_log_file=str(path))
    async with to_file as (proxy, _):
        await proxy.post(chat("x"), headers={"X-Request-Id": "good"})
        await proxy.post(b"{", headers={"X-Request-Id": "bad"})
        await until(lambda: path.read_bytes().count(b"\n") == 2, "two lines")
        good, bad = (orjson.loads(line) for line in path.read_bytes().splitlines())
        assert (good["id"], good["status"], good["outcome"]) == ("good", 200, "ok")
        assert re.fullmatch(r"only \d+ of \d+ cached; below_threshold", good["reason"])
        assert good["duration_s"] >= good["ttft_s"] > 0
        assert good["output_tokens"] == 8
        assert (bad["id"], bad["status"], bad["outcome"]) == ("bad", 400, "bad_request")
        assert "JSON" in bad["error"]


def run(code: str, **kwargs: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, **kwargs)  # type: ignore[call-overload,no-any-return]


WRITES = """
from pathlib import Path
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.request_log import RequestLog
drops = []
log = RequestLog(Path("-"), lambda: drops.append(1))
for i in range(500):
    log.write(RequestRecord(request_id=f"r{i}", session_id="s" * 3000))
log.close()
import sys
sys.stderr.write(f"{len(drops)} {log.fault}")
"""


def test_the_request_log_on_stdout_is_whole_through_a_pipe() -> None:
    """Lines longer than what a pipe takes at once, in batches of more than it holds."""
    done = run(WRITES, capture_output=True)
    assert [orjson.loads(line)["request_id"] for line in done.stdout.splitlines()] == [
        f"r{i}" for i in range(500)
    ]
    assert done.stderr == b"0 None"


def test_a_full_disk_behind_stdout_is_said_and_counted() -> None:
    with open("/dev/full", "wb") as full:
        done = run(WRITES, stdout=full, stderr=subprocess.PIPE)
    said = b"request log: No space left on device; dropping lines until it can be written"
    assert done.stderr.startswith(said)
    assert done.stderr.splitlines()[-1].startswith(b"500 ('" + said)


def test_a_reader_that_does_not_read_holds_up_nothing() -> None:
    reader, writer = os.pipe()
    code = f"""
import os, threading
os.dup2({writer}, 1)
{WRITES.replace("log.close()", "until = threading.Event(); until.wait(1.5)")}
os._exit(0)
"""
    done = run(code, pass_fds=(writer,), stderr=subprocess.PIPE)
    assert b"its reader does not read; dropping lines" in done.stderr
    assert os.get_blocking(writer), "others who have it still write as before"
    os.close(reader)
    os.close(writer)


@pytest.mark.long
def test_a_closed_stdout_ends_the_start_with_its_option() -> None:
    command = [sys.executable, "-m", "proxy.cli", "--instances", "127.0.0.1:1", "--port", "0"]
    for options, named in (
        (["--request-log", "-"], "request_log = '-': Bad file descriptor"),
        (["--access-log", "text"], "-: Bad file descriptor"),
    ):
        shell = " ".join(["exec timeout 30", *command, *options, ">&-"])
        done = subprocess.run(["sh", "-c", shell], cwd=ROOT, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 1
        assert done.stderr.decode().strip() == f"cache-proxy: {named}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--access-log-file a.log", "has no effect with access_log = off"),
        ("--access-log text --request-log -", "access_log_file"),
        ("--access-log text --access-log-file a --request-log a", "request_log"),
        ("--access-log yes", "allowed: one of off, text, json"),
    ],
)
def test_logs_that_would_be_in_each_others_way_are_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match="access_log") as refused:
        load(["--instances", "gpu-1", *given.split()], {})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_renamed_file_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(path, lambda: None, is_json=False)
    log.write(record())
    until_true(lambda: path.stat().st_size > 0)
    path.rename(tmp_path / "old")
    log.write(record(request_id="r-2"))
    until_true(path.exists)
    until_true(lambda: path.stat().st_size > 0)
    log.close()
    assert path.read_text().endswith("id=r-2\n")

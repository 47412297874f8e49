"""The bench fails loudly: on a port that is not its peer's, and on events that did not arrive.

Windows last some milliseconds; nothing here looks at how fast anything was.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import orjson
import pytest

from bench import held
from bench.cost import cli, instructions
from bench.cost.result import Result
from bench.cost.sessions import fill_session_table
from bench.measuring.build import BenchError
from bench.measuring.peers import PEERS, MissingError, Peer, Running
from bench.measuring.processes import HOST, children, is_running
from bench.measuring.scenarios import SCENARIOS, Load
from bench.measuring.window import WrongProcessError
from tests.bench.conftest import TINY, Rig
from tests.support.waiting import until_true

LOSSY = Peer(
    command="{bin}/python " + str(Path(__file__).parent / "lossy_relay.py") + " {port} {urls}",
    settle_s=0.0,
)
OURS = replace(PEERS["ours-interpreted"], settle_s=0.0)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed for the tests; the compiled core takes a minute to make."""
    monkeypatch.setitem(PEERS, "ours", OURS)


def direct(rig: Rig) -> Running:
    return rig.site.start("direct", PEERS["direct"])


@pytest.mark.long
def test_everything_that_was_sent_arrives(rig: Rig) -> None:
    before = rig.bench.upstream.counts()
    window = rig.bench.measure(direct(rig), "tiny", TINY, 1)
    sent = rig.bench.upstream.counts().since(before)
    assert not window.faults
    assert window.requests > 0
    assert sent.events == sent.requests >= window.events > 0
    assert window.cpu_per_unit_s is not None
    assert window.lag_p50_s is not None


@pytest.mark.long
def test_through_the_proxy_too_and_its_loop_lag_is_read(rig: Rig) -> None:
    running = rig.site.start("ours", OURS)
    window = rig.bench.measure(running, "tiny", replace(TINY, measures_pss=True), 1)
    assert not window.faults
    assert window.events > 0
    assert window.loop_lag
    assert window.pss_bytes


def test_two_clients_are_counted_together(rig: Rig) -> None:
    beside = Load("2k_plain8", 2, None, warm_s=0.0, window_s=0.05, interval_ms=10)
    window = rig.bench.measure(direct(rig), "tiny", replace(TINY, beside=beside), 1)
    assert not window.faults


def test_paced_streams_are_read_to_their_end(rig: Rig) -> None:
    load = replace(TINY.load, body="2k_stream3", events=3, connections=8)
    scenario = replace(TINY, load=load, unit="event", pace_us=20_000)
    window = rig.bench.measure(direct(rig), "tiny", scenario, 1)
    assert not window.faults


def test_what_a_peer_asks_on_its_own_account_is_no_lost_request(rig: Rig) -> None:
    """vllm-router's cache_aware has every prompt tokenised by every engine first."""
    port = rig.bench.upstream.ports[0]
    before = rig.bench.upstream.counts()
    for path, key in (("/v1/chat/completions/render", "token_ids"), ("/tokenize", "tokens")):
        said = urllib.request.urlopen(f"http://{HOST}:{port}{path}", data=b'{"stream": true}')
        assert len(orjson.loads(said.read())[key]) == 5
    sent = rig.bench.upstream.counts().since(before)
    assert (sent.requests, sent.events, sent.side_requests) == (0, 0, 2)


def test_lost_events_are_found_though_the_answers_look_whole(rig: Rig) -> None:
    running = rig.site.start("lossy", LOSSY)
    window = rig.bench.measure(running, "tiny", TINY, 1)
    assert any(fault.startswith("events lost") for fault in window.faults)
    assert any(fault.startswith("miscounted") for fault in window.faults)


@contextmanager
def somebody_elses_server(*, shared: bool = False) -> Iterator[int]:
    """A server of this test's process, which is not what was started as the peer."""

    class Up(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            del args

    class Server(HTTPServer):
        def server_bind(self) -> None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
            super().server_bind()

    with Server((HOST, 0), Up) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def test_a_port_that_somebody_else_listens_on_gets_nothing(rig: Rig, tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = rig.site.children.start(sleeper, rig.site.cpus.peer, tmp_path)
    with somebody_elses_server() as port:
        running = Running("sleeper", Peer(command="sleep"), child, port)
        with pytest.raises(WrongProcessError, match=rf"wrong process: port {port} .*\(sleeper was"):
            rig.bench.measure(running, "tiny", TINY, 1)


def test_a_port_that_is_shared_with_somebody_else_gets_nothing(rig: Rig, tmp_path: Path) -> None:
    """Two listeners behind one port: the kernel would spread the load over both."""
    listen = (
        "import socket, sys, time; s = socket.socket();"
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1);"
        "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); print('up', flush=True);"
        "time.sleep(60)"
    )
    with somebody_elses_server(shared=True) as port:
        command = [sys.executable, "-c", listen, str(port)]
        child = rig.site.children.start(command, rig.site.cpus.peer, tmp_path)
        until_true(lambda: child.log or not child.is_alive)
        assert child.log == "up\n"
        running = Running("sharer", Peer(command="sharer"), child, port)
        with pytest.raises(WrongProcessError):
            rig.bench.measure(running, "tiny", TINY, 1)


def test_a_peer_that_ended_is_no_result(rig: Rig, tmp_path: Path) -> None:
    ended = rig.site.children.start(["/bin/true"], rig.site.cpus.peer, tmp_path)
    ended.wait()
    with pytest.raises(BenchError, match="gone has ended"):
        rig.bench.measure(Running("gone", LOSSY, ended, 1), "tiny", TINY, 1)


def test_a_missing_peer_says_how_to_get_it(rig: Rig) -> None:
    missing = Peer(command="no-such-proxy-here", package="no-such-proxy")
    with pytest.raises(MissingError, match=r"apt-get install .* no-such-proxy$"):
        rig.site.start("missing", missing)
    with pytest.raises(MissingError, match=r"installs some-router==1.0 with pip"):
        rig.site.start("missing", Peer(command="{venv}/bin/x", requirement="some-router==1.0"))


@pytest.mark.long
def test_every_session_is_in_the_table(rig: Rig) -> None:
    table = fill_session_table(rig.bench, rig.site, 300)
    assert table.sessions == 300
    assert table.pss_bytes > 0


def run_command(
    monkeypatch: pytest.MonkeyPatch, programs: Path, peers: dict[str, Peer], *options: str
) -> int:
    monkeypatch.setitem(SCENARIOS, "tiny", TINY)
    for name, peer in peers.items():
        monkeypatch.setitem(PEERS, name, peer)
    chosen = ("--peers", ",".join(peers), "--scenarios", "tiny", "--rounds", "1")
    return cli.main([*chosen, "--no-install", "--work", str(programs), *options])


def test_the_command_fails_when_events_were_lost(
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "result.json"
    peers = {"direct": PEERS["direct"], "lossy": LOSSY, "gone": Peer(command="no-such-proxy")}
    assert run_command(monkeypatch, programs, peers, "--json", str(out)) == 1
    said = capsys.readouterr()
    assert "bench: FAILED: lossy, tiny, round 1: events lost:" in said.err
    assert "direct, tiny" not in said.err
    assert "gone left out: not installed" in said.out
    result = Result.load(out)
    assert {window.peer for window in result.windows} == {"direct", "lossy"}
    assert not result.of("lossy", "tiny")


def test_the_command_fails_when_it_would_measure_somebody_else(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper = Peer(command="sleep 60", settle_s=0.0)
    with somebody_elses_server() as port:
        monkeypatch.setattr("bench.measuring.peers.free_ports", lambda count: [port] * count)
        assert run_command(monkeypatch, programs, {"sleeper": sleeper}) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"bench: FAILED: wrong process: port {port} ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ("valgrind", "--scenarios paced-c512: must be of plain-c32, ttft-c1, body400k-c8"),
        (None, "valgrind is not installed"),
    ],
)
def test_instructions_are_counted_of_what_can_be_counted(
    found: str | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("bench.cost.instructions.shutil.which", lambda name: found)
    assert instructions.main(["--scenarios", "paced-c512"]) == 1
    assert capsys.readouterr().err == f"bench: FAILED: {why}\n"


def test_cycles_are_instructions_and_what_misses_take() -> None:
    dump = "events: Ir Dr I1mr DLmr Bcm\n\nfn=f\n1 9 9\n\ntotals: 1000 300 7 2 "
    assert instructions.counts(dump) is None
    assert instructions.counts(f"{dump}3\n") == (1000, 1000 + 70 + 200 + 30)


def test_what_was_started_is_stopped(tmp_path: Path) -> None:
    with children() as started:
        shell = ["/bin/sh", "-c", "sleep 60 & wait"]
        child = started.start(shell, cpu=min(os.sched_getaffinity(0)), work=tmp_path)
        pids = until_true(lambda: len(found := child.pids) >= 2 and found)
    assert not [pid for pid in pids if is_running(pid)]


@pytest.mark.long
def test_a_load_that_is_held_loses_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "STREAM_EVENTS", 5)
    came = held.hold(rig.bench, rig.site, streams=4, idle=20, seconds=2.0)
    assert came.faults == ()
    assert came.events > 0
    assert came.asked >= 20
    assert came.lost == 0
    assert came.pss_bytes > 0

"""Memory of the proxy with many sessions: each one is a real request with a name of its own."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from bench.cost.result import SessionTable
from bench.measuring.build import BenchError
from bench.measuring.peers import PEERS, Site
from bench.measuring.processes import get, pss_bytes
from bench.measuring.scenarios import Load
from bench.measuring.window import Bench, faults, result_of

SCENARIO = "sessions"
WHAT = "PSS after 100,000 requests of as many sessions"
METRIC = "cache_proxy_sessions"
LIMIT_S = 240.0
_LOAD = Load("2k_plain8", 32, warm_s=0.0, window_s=LIMIT_S)


def fill_session_table(bench: Bench, site: Site, sessions: int) -> SessionTable:
    """Send one request per session through a proxy of its own; BenchError unless all are there."""
    ours = PEERS["ours"]
    named = tuple(header.replace("%C", "%N") for header in ours.headers)
    running = site.start("ours", replace(ours, headers=named), folder="ours-sessions")
    empty = pss_bytes(running.pids)
    before = bench.upstream.counts()
    told = result_of(running, bench.client(running, _LOAD, "-n", str(sessions)))
    wrong = list(faults([told["totals"]], bench.upstream.counts().since(before)))
    held = _sessions(get(running.port, "/metrics")[1].decode())
    if wrong or held != sessions:
        raise BenchError(f"{held} of {sessions} sessions are in the table; {'; '.join(wrong)}")
    table = SessionTable(held, pss_bytes(running.pids), empty)
    running.child.stop()
    return table


def _sessions(exposition: str) -> int:
    for family in text_string_to_metric_families(exposition):
        if family.name == METRIC:
            return int(family.samples[0].value)
    return 0

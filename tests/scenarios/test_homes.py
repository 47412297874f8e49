"""The log says where a session's home was when a request came, and whether it moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.telemetry.record import RequestRecord, note_route, note_route_again
from tests.proxy.core.routing.test_router import admitted, facts, router
from tests.support.harness import ANSWER, RawEngine, ServedProxy, chat, plain, proxied, says, words

GOOD, BOOM = says(ANSWER), says(plain(b"{}", "500 Internal Server Error"))
KEYS = ("home_instance", "decode_instance", "rehomed")


async def test_a_session_that_stays_and_one_that_a_failure_moves(tmp_path: Path) -> None:
    options: dict[str, Any] = {"offload_policy": "never", "kv_connector": "none"}
    async with RawEngine(GOOD, GOOD, BOOM) as a, RawEngine(GOOD) as b:
        instances = [f"a={a.address}", f"b={b.address}"]
        async with ServedProxy(tmp_path / "log", instances, health_interval=60, **options) as proxy:
            await proxy.up()
            for session in ("s", "s", None, "s", "s"):
                headers = {"X-Session-ID": session} if session else {}
                assert (await proxy.post(chat("x"), headers=headers)).status == 200
            async with proxy.http.get("/decisions?n=2") as response:
                decisions = await response.json()
            records = await proxy.records(5)
    assert [tuple(record[key] for key in KEYS) for record in records] == [
        (None, "a", None),
        ("a", "a", False),
        (None, "b", None),
        ("a", "b", True),
        ("b", "b", False),
    ]
    assert [record["retries"] for record in records] == [0, 0, 0, 1, 0]
    shown = decisions["decisions"] if isinstance(decisions, dict) else decisions
    assert {(d["home_instance"], d["rehomed"]) for d in shown} == {("a", True), ("b", False)}


async def test_an_offloaded_session_keeps_its_home(tmp_path: Path) -> None:
    """Its D stays for the reuse of its KV, wherever the prompt is computed."""
    async with proxied(
        tmp_path, warm_threshold=100, heavy_threshold=500, offload_policy="always"
    ) as (proxy, _):
        for turn in range(3):
            body = chat(words(1000, f"t{turn}"))
            await proxy.post(body, headers={"X-Session-ID": "s"})
        first, *later = await proxy.records(3)
    assert {record["route_class"] for record in (first, *later)} == {"HEAVY_P2P"}
    home = first["decode_instance"]
    assert {tuple(record[key] for key in KEYS) for record in later} == {(home, home, False)}


def test_the_home_is_that_of_the_first_decision() -> None:
    """A request that engines refuse and that waits again has given itself a home meanwhile."""
    made = router(2, offload_policy="never")
    record = RequestRecord(request_id="r")
    first = admitted(made, facts("s"))
    note_route(record, first)
    made.finish(first, 0.0)
    note_route_again(record, admitted(made, facts("s")))
    assert (record.home_instance, record.rehomed) == (None, None)


def test_a_home_whose_process_is_gone_is_none() -> None:
    made = router(2, offload_policy="never")
    first = admitted(made, facts("s"))
    made.finish(first, 0.0)
    made.known.events.restarted(first.decode.name, 0.0)
    again = admitted(made, facts("s"))
    assert (again.home, again.turn) == (None, 0)

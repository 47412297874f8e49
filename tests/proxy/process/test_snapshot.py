"""What a process tells the one that replaces it."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.orders import BatchOrder
from proxy.core.types import Instance, RequestFacts, RouterConfig
from proxy.process import snapshot
from replayer.simulator.host import SimFleet
from tests.support.harness import ServedProxy, addresses, chat, words


async def test_what_a_predecessor_knew(tmp_path: Path) -> None:
    """A session goes on where its KV is, and what that instance holds is known."""
    text = words(2000)
    async with SimFleet(3) as fleet:
        names = addresses(fleet)
        async with ServedProxy(tmp_path / "one", names) as one:
            await one.up()
            headers = {"X-Session-ID": "s"}
            for _ in range(2):
                assert (await one.post(chat(text), headers=headers)).status == 200
            first = (await one.records(2))[-1]
            ask = {"model": "sim-8b", "input": "x", "max_output_tokens": 2}
            made = [(await one.post(ask, "/v1/responses")).json["id"] for _ in range(6)]
            places = [record["decode_instance"] for record in (await one.records(8))[2:]]
            stored = list(zip(made, places, strict=True))
            step_s = one.router.known.latency.step_s(first["decode_instance"], 1000)
            left = await snapshot.leave(one.router.known, FleetControl())
        assert first["hit_tokens"] > 1000
        home = first["decode_instance"]
        fewer = [name for name in names if home in name] + ["other=127.0.0.1:1"]
        async with ServedProxy(tmp_path / "two", fewer) as two:
            snapshot.take(two.router.known, FleetControl(), left, time.monotonic())
            assert two.router.known.latency.step_s(home, 1000) == step_s
            answer = await two.post(chat(text), headers=headers)
            assert answer.status == 200, answer.body
            (second,) = await two.records(1)
            held, now_s = two.router.known.responses, time.monotonic()
            known = [key for key, _ in stored if held.holder(key, now_s)]
            assert known == [key for key, at in stored if at == home], "of the others nothing is"
            for key in known:
                async with two.http.get(f"/v1/responses/{key}") as response:
                    assert response.status == 200
        same = ("decode_instance", "isl_tokens")
        assert [second[key] for key in same] == [first[key] for key in same]
        # What the session's last turn was counted as is not handed over.
        assert abs(second["hit_tokens"] - first["hit_tokens"]) < 256
        assert second["turn"] == first["turn"] + 1


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"nonsense",
        b'{"form":2}',
        b'{"form":1}',
        b'{"form":1,"bytes_per_token":3}',
    ],
)
async def test_another_form_is_left_alone(
    text: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ServedProxy(tmp_path / "log", ["127.0.0.1:1"]) as proxy:
        snapshot.take(proxy.router.known, FleetControl(), io.BytesIO(text), 0.0)
        assert "the predecessor's snapshot is not used" in caplog.text


async def test_sessions_of_an_instance_that_is_elsewhere_now(tmp_path: Path) -> None:
    ratios = {"m": 3.0, "odd": "3", "none": None, "nil": 0, "huge": 1e300, "low": -1}
    lines: list[dict[str, Any]] = [{"form": snapshot.FORM, "seed": 0, "bytes_per_token": ratios}]
    urls = {"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2", "c": "http://127.0.0.1:3"}
    for name, url in urls.items():
        lines.append({"instance": name, "url": url, "start_s": None, "runs": [[1, 2**64 - 1]]})
    lines.append(
        {"sessions": [[f"of-{name}", name, 3, time.monotonic(), 0, None] for name in urls]}
    )
    async with ServedProxy(tmp_path / "log", ["a=127.0.0.1:1", "b=127.0.0.1:9"]) as proxy:
        file = io.BytesIO(b"\n".join(map(orjson.dumps, lines)))
        snapshot.take(proxy.router.known, FleetControl(), file, time.monotonic())
        router, now_s = proxy.router, time.monotonic()
        homes = [router.known.sessions.home(f"of-{name}", now_s) for name in urls]
        assert homes == ["a", None, None]
        assert [router.known.fleet.states.of(name).cache.blocks for name in urls] == [2, 0, 0]
        assert router.known.bytes_per_token.all() == {"m": 3.0}


def serving(*names: str) -> Router:
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000)))
    for name in names:
        router.known.add(Instance(name, f"http://{name}"))
    return router


async def test_a_title_takes_no_turn_of_a_session_that_was_taken_over() -> None:
    def asks(first: int, blocks: int) -> RequestFacts:
        return RequestFacts("m", "s", 256 * blocks, range(first, first + blocks), 256.0)

    old, new = serving("a"), serving("a")
    route = old.admit(asks(0, 20), 0.0)
    assert isinstance(route, Route)
    old.finish(route, 1.0)
    file = await snapshot.leave(old.known, FleetControl())
    snapshot.take(new.known, FleetControl(), file, 2.0)
    turns = []
    for facts in (asks(900, 2), asks(0, 22)):
        route = new.admit(facts, 3.0)
        assert isinstance(route, Route)
        turns.append((route.turn, route.home))
        new.finish(route, 4.0)
    assert turns == [(None, None), (1, "a")]


async def test_orders_hold_on_for_the_rest_of_their_time() -> None:
    before, after = FleetControl(), FleetControl()
    capped = BatchOrder(max_num_seqs=8, policy="largest_kv", ttl_s=60.0, reason="fan 3 is out")
    before.give({"a": 20, "gone": 20}, capped, "d1", 1000.0)
    before.give({"b": 20}, BatchOrder(target_celsius=75.0, ttl_s=600.0), "d2", 1000.0)
    before.give({"c": 20}, BatchOrder(force_evict=4, ttl_s=5.0), "d3", 1000.0)
    file = await snapshot.leave(serving("a", "b", "c", "gone").known, before)
    snapshot.take(serving("a", "b", "c").known, after, file, 1010.0)
    standing = after.status("a").order
    assert standing is not None
    assert (standing.order, standing.cap, standing.until_s) == (capped, 8, 1060.0)
    assert (standing.decision_id, after.status("a").limits.cap) == ("d1", 8)
    aimed = after.status("b").order
    assert aimed is not None
    assert (aimed.order.target_celsius, aimed.until_s, aimed.cap) == (75.0, 1600.0, None)
    assert after.status("c").order is None, "its time was over"
    assert after.status("gone").order is None
    assert (after.state("a"), after.state("c")) == ("MANUAL", "NORMAL")

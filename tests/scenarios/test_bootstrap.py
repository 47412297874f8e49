"""Bootstrap servers: found where none is given, and what is said of one that is of no use."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from replayer.simulator.host import SimFleet
from tests.support.harness import ServedProxy, chat, until, words

ALWAYS: dict[str, Any] = {
    "warm_threshold": 100,
    "heavy_threshold": 500,
    "offload_policy": "always",
}
FAST: dict[str, Any] = {"speed": 50.0, "tick": 0.0}


def peers(proxy: ServedProxy) -> tuple[float, float]:
    """Instances that may prefill for others, and those that can."""
    found: tuple[int, int] = proxy.router.known.kv_peers()
    for name, value in zip(("configured", "known"), found, strict=True):
        assert proxy.metric(f"kv_peers_{name}") == value
    return found


async def test_offloads_begin_where_a_bootstrap_server_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`--instances a,b` is enough: each is alone on its host, and both answer at the usual port."""
    caplog.set_level("INFO")
    async with SimFleet(1, **FAST) as here:
        port = here.engines[0].bootstrap_port
        async with SimFleet(1, host="127.0.0.2", bootstrap_port=port, **FAST) as there:
            urls = [here.engines[0].url, there.engines[0].url]
            options = ALWAYS | {"bootstrap_port": port}
            async with ServedProxy(tmp_path / "log", urls, **options) as proxy:
                await proxy.up()
                await until(lambda: peers(proxy) == (2, 2), "both are found")
                assert (await proxy.post(chat(words(2000)))).status == 200
                (record,) = await proxy.records(1)
                assert (record["route_class"], record["fallback"]) == ("HEAVY_P2P", None)
                async with proxy.http.get("/instances") as answer:
                    shown = {row["bootstrap_url"] for row in await answer.json()}
                assert shown == {e.bootstrap_url for e in (*here.engines, *there.engines)}
                told = [m for m in caplog.messages if m.endswith("offloads are on")]
                assert len(told) == 2
                await proxy.at_rest()


async def test_a_host_that_does_not_answer_at_the_usual_port_is_nothing_to_warn_of(
    tmp_path: Path,
) -> None:
    """As behind a firewall that drops what it does not know: no offload was asked for."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)  # and never accepts: connections hang once its queue is full
        port = silent.getsockname()[1]
        full = [socket.socket() for _ in range(4)]
        for one in full:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        async with SimFleet(1, **FAST) as fleet:
            options = {"bootstrap_port": port, "health_timeout": 0.2, "health_interval": 0.01}
            async with ServedProxy(tmp_path / "log", [fleet.engines[0].url], **options) as proxy:
                (member,) = proxy.router.known.fleet.members()
                await until(lambda: member.health.probes > 3, "asked")
                assert not any(proxy.server.state.instances.warnings.values())
        for one in full:
            one.close()


@pytest.mark.parametrize("second", ["127.0.0.1", "localhost"])
async def test_an_instance_that_shares_its_host_is_not_asked(tmp_path: Path, second: str) -> None:
    """The server at the usual port could be the other one's."""
    async with SimFleet(2, **FAST) as fleet:
        a, b = fleet.engines
        urls = [a.url, f"http://{second}:{b.port}"]
        async with ServedProxy(
            tmp_path / "log", urls, bootstrap_port=a.bootstrap_port, health_interval=0.01
        ) as proxy:
            members = proxy.router.known.fleet.members()
            await until(lambda: all(m.health.probes > 20 for m in members), "asked for a while")
            assert peers(proxy) == (0, 0)


async def test_one_that_gives_no_id_is_named_until_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In /health and in the log, once; the alert's metrics say how many are of use."""
    caplog.set_level("INFO")
    async with SimFleet(1, **FAST) as fleet:
        engine = fleet.engines[0]
        engine.faults.query = "empty"
        spec = f"a={engine.url};bootstrap={engine.bootstrap_url}"
        async with ServedProxy(tmp_path / "log", [spec]) as proxy:

            async def warnings() -> list[str]:
                async with proxy.http.get("/health") as answer:
                    told: list[str] = (await answer.json())["instances"]["a"]["warnings"]
                return told

            await until(warnings, "warned")
            url = engine.bootstrap_url
            assert await warnings() == [
                f"its bootstrap server {url} gives no engine id (it lists no engine): no offload "
                "to it succeeds"
            ]
            assert peers(proxy) == (1, 0)
            engine.faults.query = ""

            async def is_in_order() -> bool:
                return not await warnings()

            await until(is_in_order, "in order")
            assert peers(proxy) == (1, 1)
            logged = [m for m in caplog.messages if "bootstrap" in m]
            assert [m.rpartition(": ")[2] for m in logged] == [
                "no offload to it succeeds",
                "in order again",
            ]


async def test_one_that_never_answers_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While it is not asked for a time, because it failed so often, nothing else is said of it."""
    async with SimFleet(1, **FAST) as fleet:
        spec = f"a={fleet.engines[0].url};bootstrap=1"
        async with ServedProxy(tmp_path / "log", [spec], health_interval=0.01) as proxy:
            member = proxy.router.known.fleet.get("a")
            await until(lambda: member.health.probes > 30, "asked often")
            assert sum("gives no engine id" in m for m in caplog.messages) == 1
            assert peers(proxy) == (1, 0)

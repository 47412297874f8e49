"""The command finds engines behind a Kubernetes API, and goes on through all that happens to it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp

from replayer.simulator.host import SimEngine, SimFleet
from tests.support.certificates import Certificates
from tests.support.harness import chat, until
from tests.support.proxy_process import ProxyProcess, running
from tests.support.slices_api import SlicesApi, a_slice, account, endpoint

SIM: dict[str, Any] = {"speed": 50.0, "tick": 0.0}
OPTIONS = ("--discover", "k8s://inference/vllm", "--health-interval", "0.1")


def pods(name: str, engine: SimEngine, **state: bool) -> dict[str, Any]:
    """The slice of one engine: each has a port of its own here."""
    ports = [{"name": "http", "port": int(engine.url.rpartition(":")[2])}]
    return a_slice(name, endpoint(name, "127.0.0.1", **state), ports=ports)


class Seen:
    """What a proxy tells of its instances."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def instances(self) -> dict[str, Any]:
        async with aiohttp.request("GET", f"{self._url}/instances") as response:
            return {row["name"]: row for row in await response.json()}

    async def serves(self, *names: str) -> None:
        """Wait until exactly these are in the fleet, up and with no drain."""

        async def is_so() -> bool:
            rows = await self.instances()
            return rows.keys() == {*names} and all(
                row["is_up"] and row["models"] and not row["is_draining"] for row in rows.values()
            )

        await until(is_so, f"{names} serve")

    async def ask(self) -> str:
        body = chat("hello", stream=False, max_tokens=2)
        async with aiohttp.request("POST", f"{self._url}/v1/chat/completions", json=body) as got:
            assert got.status == 200, await got.text()
            return got.headers["X-Cache-Proxy-Instance"]

    async def get(self, path: str) -> str:
        async with aiohttp.request("GET", f"{self._url}{path}") as response:
            return await response.text()


async def handed_over(proxy: ProxyProcess) -> None:
    await until(lambda: "handed over" in proxy.log, "handed over")


async def test_engines_behind_an_api(tmp_path: Path) -> None:
    made = Certificates(tmp_path / "ca")
    async with SlicesApi(made.server("127.0.0.1")) as api, SimFleet(2, **SIM) as fleet:
        home = account(tmp_path / "account", ca=made.ca)
        one, two = fleet.engines
        api.put(pods("vllm-1", one))
        shell = (
            f"export KUBERNETES_SERVICE_HOST=127.0.0.1; export KUBERNETES_SERVICE_PORT={api.port}"
        )
        options = (*OPTIONS, "--discover-account", str(home), "--bootstrap-port", "none")
        async with running(*options, shell=shell) as proxy:
            seen = Seen(proxy.url)
            await seen.serves("vllm-1")
            assert await seen.ask() == "vllm-1"

            api.put(pods("vllm-2", two))
            await seen.serves("vllm-1", "vllm-2")
            rows = await seen.instances()
            assert {name: row["sources"] for name, row in rows.items()} == {
                "vllm-1": ["discovery"],
                "vllm-2": ["discovery"],
            }

            api.put(pods("vllm-1", one, terminating=True))
            await seen.serves("vllm-2")
            assert {await seen.ask() for _ in range(4)} == {"vllm-2"}

            await api.gone()
            await until(lambda: "the last set of 1 stays" in proxy.log, "a line with the cause")
            assert "discovery k8s://inference/vllm: " in await seen.get("/health")
            assert await seen.ask() == "vllm-2"
            proxy.send_signal(signal.SIGHUP)
            await until(lambda: "nothing has changed" in proxy.log, "reloaded")
            assert (await seen.instances()).keys() == {"vllm-2"}
            assert 'discovery_age_seconds{source="k8s://inference/vllm"}' in await seen.get(
                "/metrics"
            )

            api.put(pods("vllm-1", one))
            await api.back()
            await seen.serves("vllm-1", "vllm-2")
            before = await seen.instances()
            proxy.send_signal(signal.SIGUSR2)
            await handed_over(proxy)
            await seen.serves("vllm-1", "vllm-2")
            after = await seen.instances()
            assert {n: r["url"] for n, r in after.items()} == {
                n: r["url"] for n, r in before.items()
            }
            await asyncio.gather(*(seen.ask() for _ in range(4)))


async def test_outside_a_pod_it_does_not_start() -> None:
    with ProxyProcess(
        "--discover", "k8s://inference/vllm", shell="unset KUBERNETES_SERVICE_HOST"
    ) as p:
        assert await p.ended() == 2
        said = p.log.splitlines()
    assert said == [
        "cache-proxy: discover = 'k8s://inference/vllm': KUBERNETES_SERVICE_HOST and "
        "KUBERNETES_SERVICE_PORT do not name the API: is this a pod?"
    ]

"""Proxies, engines and a Prometheus behind TLS, with certificates of an own CA."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from planner import cli
from planner.config.options import PlannerOptions
from planner.core.types import COMPONENT
from planner.service import made, serve, validate
from planner.sources.counted import ISSUED
from planner.sources.reading import SourceError, fetch
from tests.planner.sources.test_prometheus import answer
from tests.planner.test_service import options
from tests.proxy.net.test_tls import over_tls, tunnel
from tests.support.certificates import Certificates
from tests.support.harness import RawEngine, plain, proxied, until

STEPS = b"vllm:iteration_tokens_total_count 5\n"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("ca"))


@asynccontextmanager
async def behind_tls(
    folder: Path, certs: Certificates, *, wants: bool = False
) -> AsyncIterator[dict[str, Any]]:
    """An engine, its proxy and a Prometheus, as options. `wants`: a client's certificate."""
    ca, own = (certs.ca if wants else None), certs.leaf("planner", "planner")
    shown: dict[str, Any] = {"instance_cert": own[0], "instance_key": own[1]} if wants else {}
    asks: dict[str, Any] = {"tls_client_ca": ca} if wants else {}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        engine, fake = await enter(RawEngine()), await enter(RawEngine())
        engine.gets["/metrics"] = plain(STEPS)
        fake.tells(answer((ISSUED, "a", 1)))
        port = await enter(tunnel(engine.port, certs.server("127.0.0.1", wants=ca)))
        prometheus = await enter(tunnel(fake.port, certs.server("127.0.0.1")))
        instances = [f"e0=https://127.0.0.1:{port}"]
        proxy, _ = await enter(over_tls(folder, certs, instances, **asks, **shown))
        yield {
            "proxies": proxy.server.url,
            "throughput_metrics_source": "prometheus",
            "prometheus": f"https://127.0.0.1:{prometheus}",
            **{f"{kind}_ca": certs.ca for kind in ("proxy", "instance", "prometheus")},
        }


def own(folder: Path, given: dict[str, Any]) -> PlannerOptions:
    return options(folder, **{"url" if name == "proxies" else name: v for name, v in given.items()})


async def test_what_a_private_ca_has_signed_is_read(tmp_path: Path, certs: Certificates) -> None:
    async with behind_tls(tmp_path, certs) as given:
        wanted = own(tmp_path, given)
        assert await validate(wanted) == []
        async with made(wanted) as (planner, _, proxies):
            assert await planner._live.look(1, 0.0, {}) is not None
            assert planner._live.unread == {}
            (member,) = proxies.members(COMPONENT)
            assert member.url.startswith("https://")


@pytest.mark.parametrize("missing", ["proxy", "prometheus"])
async def test_without_its_ca_a_proxy_or_prometheus_is_named(
    tmp_path: Path, certs: Certificates, missing: str
) -> None:
    async with behind_tls(tmp_path, certs) as given:
        (said, *_) = await validate(own(tmp_path, given | {f"{missing}_ca": None}))
    assert said.endswith(": its certificate is not trusted: unable to get local issuer certificate")
    assert "https://127.0.0.1:" in said


async def test_without_its_ca_the_log_names_the_engine(
    tmp_path: Path, certs: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with behind_tls(tmp_path, certs) as given, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(own(tmp_path, given | {"instance_ca": None})))
        unread = "1 engines are not read; e0: GET https://127.0.0.1:"
        (said,) = await until(lambda: [t for t in caplog.messages if t.startswith(unread)])
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
    assert said.endswith(": its certificate is not trusted: unable to get local issuer certificate")


async def test_whoever_asks_for_a_certificate_is_shown_one(
    tmp_path: Path, certs: Certificates
) -> None:
    cert, key = certs.leaf("planner", "planner")
    to_proxies = {"proxy_cert": cert, "proxy_key": key}
    to_engines = {"instance_cert": cert, "instance_key": key}
    async with behind_tls(tmp_path, certs, wants=True) as given:
        assert await validate(own(tmp_path, given | to_proxies | to_engines)) == []
        assert await validate(own(tmp_path, given | to_engines)) != []
        for shown, unread in ((to_proxies, ["e0"]), (to_proxies | to_engines, [])):
            async with made(own(tmp_path, given | shown)) as (planner, _, _):
                assert await planner._live.look(1, 0.0, {}) is not None
                assert list(planner._live.unread) == unread


async def test_an_address_without_tls_is_named(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _), aiohttp.ClientSession() as session:
        url = proxy.server.url.replace("http://", "https://")
        with pytest.raises(SourceError, match=rf"^GET {url}: no TLS: ") as caught:
            await fetch(session, "GET", url)
        assert "\n" not in str(caught.value)


FILES = ("proxy_ca", "proxy_cert", "instance_ca", "instance_cert", "prometheus_ca")


@pytest.mark.parametrize("command", ["run", "validate"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [None, b"no PEM", b"-----BEGIN CERTIFICATE-----\nx\n"])
def test_files_that_are_none_are_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    name: str,
    content: bytes | None,
) -> None:
    path = tmp_path / "x.pem"
    if content is not None:
        path.write_bytes(content)
    words = [command, "--proxies", "p:1", "--state-file", f"{tmp_path}/s"]
    assert cli.main([*words, f"--{name.replace('_', '-')}", str(path)]) == 2
    err = capsys.readouterr().err
    why = "No such file or directory" if content is None else "not a PEM file of the kind"
    assert err.startswith(f"cache-planner: {name} = '{path}': {why}")
    assert err.count("\n") == 1


def test_a_key_without_its_certificate_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "--proxies", "p:1", "--proxy-key", "k.pem"]) == 2
    err = capsys.readouterr().err
    assert "proxy_key = 'k.pem' (flag --proxy-key): it has no effect without proxy_cert" in err
    assert err.count("\n") == 1

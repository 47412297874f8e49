"""Discovery on `kmock`, somebody else's idea of what the Kubernetes API answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.config.values import DiscoverAt
from proxy.fleet.discovery.kubernetes import Api, Kubernetes, Times
from tests.proxy.fleet.discovery.conftest import Begins
from tests.support.harness import until
from tests.support.slices_api import NAMESPACE, PATH, SERVICE, a_slice, account, endpoint

library: Any = pytest.importorskip("kmock", reason="kmock is not installed")
SLICES = "discovery.k8s.io/v1/endpointslices"
AT = DiscoverAt("k8s", NAMESPACE, SERVICE)


@pytest.fixture
async def kmock() -> AsyncIterator[Any]:
    async with library.KubernetesEmulator() as emulator, library.Server(emulator):
        yield emulator


async def test_list_added_modified_deleted(kmock: Any, tmp_path: Path, discovering: Begins) -> None:
    kmock.objects[SLICES, NAMESPACE, "s"] = a_slice("s", endpoint("a", "10.0.0.1"))
    url = str(kmock.url).rstrip("/")
    source = Kubernetes(AT, Api(url, account(tmp_path / "account")), Times())
    async with (
        discovering({str(AT): source}) as found,
        aiohttp.ClientSession(url, raise_for_status=True) as http,
    ):
        assert found.fleet == "a"
        await until(lambda: len(kmock["watch"]) > 0, "a watch")
        await http.post(PATH, json=a_slice("t", endpoint("b", "10.0.0.2")))
        await found.becomes("a b")
        over = found.hold("b")
        leaves = [endpoint("b", "10.0.0.2", terminating=True)]
        await http.patch(f"{PATH}/t", json={"endpoints": leaves})
        await found.becomes("a b-")
        await http.delete(f"{PATH}/t")
        over()
        await found.becomes("a")
    assert len(kmock["list"]) == 2, "one before the watch, and one at the start"
    assert {request.headers["Authorization"] for request in kmock["list"]} == {"Bearer a-token"}

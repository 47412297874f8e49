"""A request leaves no reference cycle behind: the collector would cost more than a decision."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest

from proxy.core.routing.route import Route
from proxy.net.upstream.response import UpstreamResponse
from proxy.request.client_response import ClientResponse
from proxy.request.exchange import Exchange
from proxy.request.relay import Relay
from tests.support.harness import chat, proxied

OURS = (Exchange, Relay, ClientResponse, UpstreamResponse, Route)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_no_cycles(tmp_path: Path, stream: bool) -> None:
    async with proxied(tmp_path) as (proxy, _):
        body = chat("hello", stream=stream)
        assert (await proxy.post(body)).status == 200  # what is made once is there now
        await proxy.at_rest()
        gc.freeze()  # what other tests left is looked through no more
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(4):
                assert (await proxy.post(body)).status == 200
            await proxy.at_rest()
            gc.collect()
            left = Counter(type(thing).__name__ for thing in gc.garbage if isinstance(thing, OURS))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not left

"""Faults before the client's first byte: nobody notices, or one honest status."""

from __future__ import annotations

from typing import Any

from tests.chaos.rig import Floor
from tests.chaos.scripted import GOOD

SLOW_PROBES: dict[str, Any] = {"health_interval": 60.0}
"""Probes take no part: what traffic sees decides."""


async def test_f01_connection_refused(rig: Floor) -> None:
    async with rig([GOOD, GOOD], **SLOW_PROBES) as r:
        await r.links[0].accept("refuse")
        got = await r.ask()
        assert (got.status, got.text) == (200, "fine")
        record = await r.record()
        assert (record["outcome"], record["retries"]) == ("ok", 1)
        assert r.metric("upstream_retries_total", reason="connect") == 1
        assert r.is_up("i0"), "one failure ejects nobody"


async def test_f02_syn_black_hole(rig: Floor) -> None:
    async with rig([GOOD, GOOD], connect_timeout=0.2, **SLOW_PROBES) as r:
        await r.links[0].accept("swallow")
        got = await r.ask()
        assert (got.status, got.text) == (200, "fine")
        assert r.metric("upstream_retries_total", reason="connect") == 1

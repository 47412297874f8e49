"""What a long prefill does to a stream beside it: on its instance, and offloaded from there.

A ratio, printed: two engines share two cores here, so it says nothing of GPUs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import orjson

from tests.real_vllm.rig import COMPLETIONS, HEAVY, Pair, ask, ids
from tests.support.harness import ServedProxy

INTRUDER_TOKENS = 24_000
STREAM_TOKENS = 3000


async def test_offload_keeps_a_running_stream_going(
    tmp_path: Path, mooncake: Pair, figure: Callable[[str], None]
) -> None:
    """The class of the intruder is asserted, the gaps are not."""
    p99_s = {}
    for policy, expected in (("never", "HEAVY_COLO"), ("always", "HEAVY_P2P")):
        folder = tmp_path / policy
        folder.mkdir()
        options = HEAVY | {"offload_policy": policy, "hedge": False}
        async with mooncake.proxy(folder, **options) as proxy:
            await proxy.up()
            gaps = await _gaps(proxy, policy)
            records = await proxy.records(2)
            await proxy.at_rest()
        heavy = [r for r in records if r["isl_tokens"] == INTRUDER_TOKENS]
        assert [r["route_class"] for r in heavy] == [expected]
        beside = [r["decode_instance"] for r in records if r not in heavy]
        assert [r["decode_instance"] for r in heavy] == beside
        p99_s[policy] = sorted(gaps)[int(0.99 * (len(gaps) - 1))]
        await mooncake.at_rest()
    ratio = p99_s["never"] / p99_s["always"]
    figure(
        f"interference: the p99 gap of a stream beside a {INTRUDER_TOKENS}-token prompt is "
        f"{ratio:.1f} times as long colocated as offloaded"
    )


async def _gaps(proxy: ServedProxy, name: str) -> list[float]:
    """Gaps of the stream while the intruder waits for its answer, in seconds."""
    times: list[float] = []
    begun = asyncio.Event()
    headers = {"X-Session-ID": name, "Content-Type": "application/json"}

    async def stream() -> None:
        body = ask(COMPLETIONS, ids(50, name), stream=True, max_tokens=STREAM_TOKENS)
        async with proxy.http.post(COMPLETIONS, data=orjson.dumps(body), headers=headers) as got:
            async for _piece in got.content.iter_any():
                times.append(time.monotonic())
                begun.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(stream())
        await begun.wait()
        start_s = time.monotonic()
        intruder = ask(COMPLETIONS, ids(INTRUDER_TOKENS, f"{name}-i"), stream=False, max_tokens=2)
        answer = await proxy.post(intruder, COMPLETIONS, headers=headers)
        assert answer.status == 200, answer.body
        end_s = time.monotonic()
    return [b - a for a, b in pairwise(times) if a < end_s and b > start_s]

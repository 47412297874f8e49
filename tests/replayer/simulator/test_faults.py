"""The simulator's switches: each does what it says, and says what it does not know."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from replayer.simulator.faults import Faults
from replayer.simulator.host import SimFleet

BODY: dict[str, Any] = {"model": "sim-8b", "prompt": "a b c", "max_tokens": 50}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"nothing": 1}, "no such switch"),
        ({"pull": "maybe"}, "must be one of ok, hang, refuse"),
        ({"stream_tokens": -1}, "from 0 on"),
        ({"stream_tokens": "x"}, "from 0 on"),
    ],
)
def test_what_cannot_be_switched(values: dict[str, Any], says: str) -> None:
    faults = Faults()
    with pytest.raises(ValueError, match=says):
        faults.change(query="hang", **values)
    assert faults == Faults(), "all or nothing"


@pytest.mark.parametrize("how", ["close", "reset", "no_done"])
async def test_a_stream_that_breaks_off(how: str) -> None:
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet, aiohttp.ClientSession() as http:
        url = fleet.engines[0].url
        async with http.post(f"{url}/sim/faults", json={"stream": how, "stream_tokens": 3}) as got:
            assert (await got.json())["stream"] == how
        said = b""
        try:
            async with http.post(f"{url}/v1/completions", json=BODY | {"stream": True}) as got:
                async for piece in got.content.iter_any():
                    said += piece
            is_clean = True
        except aiohttp.ClientError:
            is_clean = False
        assert is_clean == (how == "no_done")
        assert b"[DONE]" not in said
        async with http.post(f"{url}/sim/faults", json={"stream": "x"}) as got:
            assert got.status == 400


async def test_what_goes_wrong_with_an_exporter() -> None:
    options: dict[str, Any] = {"thermal": True, "gpus": 2, "speed": 50.0}
    async with SimFleet(1, **options) as fleet, aiohttp.ClientSession() as http:
        engine = fleet.engines[0]
        url = f"{engine.url}/dcgm/metrics"

        async def said(**faults: Any) -> tuple[int, str]:
            engine.faults.change(**faults)
            async with http.get(url) as got:
                return got.status, await got.text()

        status, text = await said()
        assert status == 200
        assert text.count("DCGM_FI_DEV_GPU_TEMP{") == 2
        assert await said(sensor="frozen") == (200, text)
        assert await said(sensor="dropout") == (200, "")
        assert (await said(sensor="gone"))[0] == 503
        assert (await said(sensor="ok"))[1] != text
        plant = engine.plant
        await engine.restart()
        assert engine.plant is plant, "a restart does not cool its GPUs"
        assert (await said())[0] == 200


async def test_without_thermal_there_is_no_exporter() -> None:
    async with SimFleet(1) as fleet, aiohttp.ClientSession() as http:
        async with http.get(f"{fleet.engines[0].url}/dcgm/metrics") as got:
            assert got.status == 404

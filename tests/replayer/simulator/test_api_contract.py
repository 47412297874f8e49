"""The simulator answers as the recorded engine did."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from replayer.simulator.host import SimFleet
from tests.support import contract

OUR_OWN = "vllm:mooncake_"
"""In vLLM's source since 0.33; the recorded release does not export them yet."""
LAYOUT = "vllm:cache_config_info"


async def ask() -> dict[str, object]:
    async with SimFleet(1, speed=4.0, tick=0.0, max_model_len=32_768) as fleet:
        async with aiohttp.ClientSession() as http:
            url, model = fleet.engines[0].url, fleet.options.model
            return await contract.record(http, url, model)


@pytest.fixture(scope="module")
def simulated() -> dict[str, object]:
    return asyncio.run(ask())


@pytest.mark.parametrize("name", [case.name for case in contract.CASES])
def test_answers_have_the_recorded_form(name: str, simulated: dict[str, object]) -> None:
    assert not list(contract.differences(contract.load()[name], simulated[name]))


def test_metrics_have_recorded_names_and_labels(simulated: dict[str, object]) -> None:
    real, ours = contract.load()["metrics"], simulated["metrics"]
    assert isinstance(ours, dict)
    assert set(ours.pop(LAYOUT)) <= set(real[LAYOUT])
    exported = {name: labels for name, labels in ours.items() if not name.startswith(OUR_OWN)}
    assert exported == {name: real.get(name) for name in exported}

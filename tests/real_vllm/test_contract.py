"""The recorded contract is what the real engine does; `--record` writes it anew."""

from __future__ import annotations

import pytest

from tests.real_vllm.engines.fleet import MODEL
from tests.real_vllm.rig import Pair
from tests.support import contract


async def test_the_recording_is_true(mooncake: Pair, pytestconfig: pytest.Config) -> None:
    found = await contract.record(mooncake.http, mooncake.engines[0].url, MODEL)
    if pytestconfig.getoption("--record"):
        contract.save(found)
    assert found == contract.load()

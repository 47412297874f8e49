"""What every KV connector keeps to, whatever its engine needs."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.connectors import CONNECTORS
from proxy.core.connectors.base import KV_PARAMS, Connector, Edits
from proxy.core.types import Fallback
from tests.support.connector_legs import BODY, TRANSFER, answer


@pytest.mark.parametrize("name", CONNECTORS)
def test_contract_of_every_connector(name: str) -> None:
    """Never mutates the body; an unusable answer is a reason, not an exception."""
    connector, before = CONNECTORS[name], dict(BODY)
    edits = connector.prepare(TRANSFER, BODY)
    assert isinstance(edits, Edits)
    assert before == BODY
    assert not set(edits.put) & edits.drop
    garbage_: list[dict[str, Any]] = [{}, {"choices": None}, {"choices": [1]}, answer("stop")]
    for garbage in garbage_:
        assert isinstance(connector.after_prefill(TRANSFER, garbage), Fallback)
    assert connector.max_parallel >= 0
    assert connector.can_offload or not (connector.pins or connector.needs_engine_id)


@pytest.mark.parametrize("name", [n for n, c in CONNECTORS.items() if c.can_offload])
def test_every_prefill_leg_is_one_token_and_changes_no_prompt(name: str) -> None:
    edits = CONNECTORS[name].prepare(TRANSFER, BODY)
    fixed = {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, "ignore_eos": True}
    assert fixed.items() <= edits.put.items()
    assert {"stream_options", "min_tokens", "stop", "logprobs"} <= edits.drop
    changes_the_prompt = {"model", "messages", "tools", "cache_salt", "temperature"}
    assert not changes_the_prompt & (edits.drop | set(edits.put))
    if KV_PARAMS in edits.put:
        assert edits.put[KV_PARAMS]["do_remote_decode"] is True
        assert edits.put[KV_PARAMS]["do_remote_prefill"] is False


def test_who_needs_what() -> None:
    def facts(c: Connector) -> tuple[bool, bool, bool]:
        return c.needs_engine_id, c.pins, c.counts_moved

    assert {name: facts(c) for name, c in CONNECTORS.items() if c.can_offload} == {
        "mooncake": (True, True, True),
        "nixl": (False, True, False),
        "implicit": (False, False, True),
    }

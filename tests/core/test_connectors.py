"""What each KV connector puts on the two legs."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.connectors import CONNECTORS, KV_PARAMS, Edits, Mooncake, Transfer
from proxy.core.types import Fallback, Instance

P = Instance("p", "http://p:8000", "http://p:8998")
TRANSFER = Transfer("xfer-1", P, "engine-1")
BODY = {
    "model": "m",
    "messages": [],
    "tools": [],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 99,
    "min_tokens": 9,
    "stop": ["x"],
    "logprobs": True,
    "temperature": 0.5,
    "cache_salt": "s",
}


def answer(reason: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "finish_reason": reason}], KV_PARAMS: None}


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


def test_mooncake_prefill_leg() -> None:
    edits = Mooncake().prepare(TRANSFER, BODY)
    assert edits.put == {
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "ignore_eos": True,
        KV_PARAMS: {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": "xfer-1",
        },
    }
    assert {"stream_options", "min_tokens", "stop", "logprobs"} <= edits.drop
    changes_the_prompt = {"model", "messages", "tools", "cache_salt", "temperature"}
    assert not changes_the_prompt & (edits.drop | set(edits.put))


def test_mooncake_decode_leg() -> None:
    edits = Mooncake().after_prefill(TRANSFER, answer("length"))
    assert isinstance(edits, Edits)
    assert edits.put == {
        KV_PARAMS: {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": "http://p:8998",
            "remote_engine_id": "engine-1",
            "transfer_id": "xfer-1",
        }
    }
    assert not edits.drop


@pytest.mark.parametrize("reason", ["stop", "abort", "error", None])
def test_mooncake_needs_the_end_by_length(reason: str) -> None:
    assert Mooncake().after_prefill(TRANSFER, answer(reason)) is Fallback.P_FINISH_REASON


def test_mooncake_needs_the_engine_id() -> None:
    unknown = Transfer("xfer-1", P, None)
    assert Mooncake().after_prefill(unknown, answer("length")) is Fallback.ENGINE_ID_UNKNOWN

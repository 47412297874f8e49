"""What Mooncake's connector puts on the two legs."""

from __future__ import annotations

import pytest

from proxy.core.connectors.base import KV_PARAMS, Edits, Transfer
from proxy.core.connectors.mooncake import Mooncake
from proxy.core.types import Fallback
from tests.support.connector_legs import BODY, TRANSFER, P, answer


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

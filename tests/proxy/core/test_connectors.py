"""What each KV connector puts on the two legs."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.connectors import CONNECTORS
from proxy.core.connectors.base import KV_PARAMS, Connector, Edits, Transfer
from proxy.core.connectors.implicit import Implicit
from proxy.core.connectors.mooncake import Mooncake
from proxy.core.connectors.nixl import Nixl
from proxy.core.types import Fallback, Instance

P = Instance("p", "http://p:8000", "http://p:8998")
TRANSFER = Transfer("xfer-1", P, "engine-1", "r-p")
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


def told_by_p(**more: Any) -> dict[str, Any]:
    """What vLLM 0.32's NIXL connector answers, and something that a later one may add."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[12, 13, 14]],
        "remote_engine_id": "7c9e",
        "remote_request_id": "chatcmpl-r-p-1a2b",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": 96,
        "transfer_mode": "pull",
        "something_new": {"a": [1]},
    } | more


def nixl(**more: Any) -> Edits | Fallback:
    return Nixl().after_prefill(TRANSFER, answer("length") | {KV_PARAMS: told_by_p(**more)})


def test_nixl_hands_on_what_p_has_told() -> None:
    edits = nixl()
    assert isinstance(edits, Edits)
    assert (edits.put, edits.drop) == ({KV_PARAMS: told_by_p()}, frozenset())
    assert edits.request_id is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0", "::1"])
def test_nixl_p_that_does_not_know_its_address(host: str) -> None:
    edits = nixl(remote_host=host)
    assert isinstance(edits, Edits)
    assert edits.put[KV_PARAMS] == told_by_p(remote_host="p")


@pytest.mark.parametrize("blocks", [[], None, 0])
def test_nixl_p_that_kept_nothing(blocks: object) -> None:
    assert nixl(remote_block_ids=blocks) is Fallback.P_FINISH_REASON


def test_nixl_of_old_goes_by_the_request_id() -> None:
    """0.11: a flat list of blocks, no id of P's own for them."""
    edits = nixl(remote_request_id=None, remote_block_ids=[12, 13])
    assert isinstance(edits, Edits)
    assert edits.request_id == "r-p"
    assert edits.put[KV_PARAMS]["remote_block_ids"] == [12, 13]


def test_implicit_legs_carry_nothing() -> None:
    edits = Implicit().prepare(TRANSFER, BODY)
    assert KV_PARAMS not in edits.put
    assert Implicit().after_prefill(TRANSFER, answer("length")) == Edits()


def test_who_needs_what() -> None:
    def facts(c: Connector) -> tuple[bool, bool, bool]:
        return c.needs_engine_id, c.pins, c.counts_moved

    assert {name: facts(c) for name, c in CONNECTORS.items() if c.can_offload} == {
        "mooncake": (True, True, True),
        "nixl": (False, True, False),
        "implicit": (False, False, True),
    }


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

"""What NIXL's connector puts on the two legs."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.connectors.base import KV_PARAMS, Edits
from proxy.core.connectors.nixl import Nixl
from proxy.core.types import Fallback
from tests.support.connector_legs import TRANSFER, answer


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

"""vLLM's NixlConnector in its pull form: P tells what it holds, D fetches it from there.

What P answers is handed to D as it is: which keys there are depends on the release. Where the KV is
not to be had any more D computes the prompt itself (`kv_load_failure_policy: recompute`).

But where P has given the blocks up because no D came within its lease (30 s since 0.22; D extends
it from the moment it has the request), D would read whatever lies there now. So P's answer is
handed to D at once, only once, and never kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from proxy.core.connectors.base import KV_PARAMS, Edits, Transfer, prefill_edits
from proxy.core.types import Fallback

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
"""Where a P says it listens that was not told its address (VLLM_NIXL_SIDE_CHANNEL_HOST)."""
_ASK: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Nixl:
    """NixlConnector, every instance `kv_both`."""

    can_offload = True
    needs_engine_id = False
    pins = True
    max_parallel = 64
    counts_moved = False
    """D repeats what P had found in its cache."""

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """P computes, keeps the blocks, and tells where they are."""
        del transfer
        return prefill_edits(body, _ASK)

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """P's own words for D. None of them, or no blocks: P has kept nothing."""
        told = answer.get(KV_PARAMS)
        if not isinstance(told, Mapping) or not told.get("remote_block_ids"):
            return Fallback.P_FINISH_REASON
        params = {**told, "do_remote_prefill": True, "do_remote_decode": False}
        if told.get("remote_host") in LOOPBACK:
            params["remote_host"] = urlsplit(transfer.prefill.url).hostname
        # Up to 0.11 or so P knows its blocks by the id of its leg: D's must have the same.
        same_id = None if told.get("remote_request_id") else transfer.request_id
        return Edits({KV_PARAMS: params}, request_id=same_id)

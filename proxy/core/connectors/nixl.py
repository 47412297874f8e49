"""vLLM's NixlConnector in its pull form: P names its blocks, D fetches them.

P's parameters go to D unchanged, since their keys depend on the release. If the KV cannot be
fetched, D computes the prompt itself (`kv_load_failure_policy: recompute`).

P frees the blocks when no D has come within its lease (30 s since 0.22; D extends it from the
moment it has the request). D would then read whatever the blocks hold by then. So P's answer is
given to D at once, only once, and never kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from proxy.core.connectors.base import KV_PARAMS, Edits, Transfer, prefill_edits
from proxy.core.types import Fallback

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
"""Hosts that P names when its own address is not set (VLLM_NIXL_SIDE_CHANNEL_HOST)."""
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
    """D repeats the number of tokens that P had cached."""

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """P computes, keeps the blocks, and says where they are."""
        del transfer
        return prefill_edits(body, _ASK)

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """P's parameters for D. Without parameters or blocks, P has kept nothing."""
        params_of_p = answer.get(KV_PARAMS)
        if not isinstance(params_of_p, Mapping) or not params_of_p.get("remote_block_ids"):
            return Fallback.P_FINISH_REASON
        params = {**params_of_p, "do_remote_prefill": True, "do_remote_decode": False}
        if params_of_p.get("remote_host") in LOOPBACK:
            params["remote_host"] = urlsplit(transfer.prefill.url).hostname
        # Up to about 0.11 P finds its blocks by the id of its leg, so D's leg must have the same
        # id.
        same_id = None if params_of_p.get("remote_request_id") else transfer.request_id
        return Edits({KV_PARAMS: params}, request_id=same_id)

    def named_by_proxy(self, transfer: Transfer) -> Edits | None:
        """Return None: only P can name its blocks."""
        del transfer
        return None

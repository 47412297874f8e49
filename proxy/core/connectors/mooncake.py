"""vLLM's MooncakeConnector, since 0.16: the proxy names the transfer, P pushes when D asks.

The legs run one after the other: a decode leg that waits for a failed prefill would occupy one of
P's sender slots until the abort timeout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.core.connectors.base import (
    KV_PARAMS,
    Edits,
    Transfer,
    finished_by_length,
    prefill_edits,
)
from proxy.core.types import Fallback


class Mooncake:
    """MooncakeConnector, every instance `kv_both`: P pushes when D asks with P's engine id.

    P has 20 sender tasks (vLLM's num_workers 10, twice); `max_parallel` 16 leaves some for late
    transfers.
    """

    can_offload = True
    needs_engine_id = True
    pins = True
    max_parallel = 16
    counts_moved = True

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """P computes, keeps the blocks under the transfer id, and waits for D."""
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer.transfer_id,
        }
        return prefill_edits(body, params)

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """D's three values; none of them is from P's answer, but that must have ended by length."""
        if not finished_by_length(answer):
            return Fallback.P_FINISH_REASON
        return self.named_by_proxy(transfer) or Fallback.ENGINE_ID_UNKNOWN

    def named_by_proxy(self, transfer: Transfer) -> Edits | None:
        """D's three values; None without P's engine id or bootstrap server."""
        if transfer.engine_id is None or transfer.prefill.bootstrap_url is None:
            return None
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": transfer.prefill.bootstrap_url,
            "remote_engine_id": transfer.engine_id,
            "transfer_id": transfer.transfer_id,
        }
        return Edits({KV_PARAMS: params})

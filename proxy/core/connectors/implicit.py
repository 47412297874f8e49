"""Connectors for engines that share a KV store, and for engines without KV transfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.core.connectors.base import Edits, Transfer, finished_by_length, prefill_edits
from proxy.core.types import Fallback


class Implicit:
    """A shared store (MooncakeStore, Example, a shared LMCache): blocks are found by their hashes.

    Both legs carry only the prompt. Once P answers, the KV is in the store; nothing stays pinned,
    and a D that finds less computes the rest.
    """

    can_offload = True
    needs_engine_id = False
    pins = False
    max_parallel = 1 << 30
    counts_moved = True

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """P's leg, which fills the store."""
        del transfer
        return prefill_edits(body, None)

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """D gets the client's own body, unless P's answer ended by anything but length.

        In that case the store lacks the KV.
        """
        del transfer
        return Edits() if finished_by_length(answer) else Fallback.P_FINISH_REASON

    def named_by_proxy(self, transfer: Transfer) -> Edits | None:
        """Return None: nothing stays pinned."""
        del transfer
        return None


class NoConnector:
    """Instances without KV transfer: every prompt is computed on D."""

    can_offload = False
    needs_engine_id = False
    pins = False
    max_parallel = 0
    counts_moved = True

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """Never called, since the router does not offload with this connector."""
        del transfer, body
        return Edits()

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """Never called, since there is no hand-over."""
        del transfer, answer
        return Fallback.ENGINE_ID_UNKNOWN

    def named_by_proxy(self, transfer: Transfer) -> Edits | None:
        """Return None: there is no hand-over."""
        del transfer
        return None

"""Engines that find KV by themselves, in a store that they share, or that do not move any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.core.connectors.base import Edits, Transfer, finished_by_length, prefill_edits
from proxy.core.types import Fallback


class Implicit:
    """A shared store (MooncakeStore, Example, a shared LMCache): blocks are found by their hashes.

    Neither leg carries anything but the prompt: it is in the store once P answers;
    nothing stays pinned, and a D that finds less computes the rest.
    """

    can_offload = True
    needs_engine_id = False
    pins = False
    max_parallel = 1 << 30
    counts_moved = True

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """P computes the prompt, which fills the store."""
        del transfer
        return prefill_edits(body, None)

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """D gets the client's own body. Unless P's answer ended by length, the store lacks it."""
        del transfer
        return Edits() if finished_by_length(answer) else Fallback.P_FINISH_REASON


class NoConnector:
    """Instances without KV transfer: everything is computed where it decodes."""

    can_offload = False
    needs_engine_id = False
    pins = False
    max_parallel = 0
    counts_moved = True

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """The router never offloads with this connector; the body would go as it came."""
        del transfer, body
        return Edits()

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """There is nothing to hand over."""
        del transfer, answer
        return Fallback.ENGINE_ID_UNKNOWN

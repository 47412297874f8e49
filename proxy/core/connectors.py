"""KV connectors: what an offload adds to and takes from the two legs' bodies.

A driver is pure: it names fields, the shell splices them. Facts are those of vLLM's connectors
(MooncakeConnector since 0.16); both legs run one after the other, since a decode leg that waits
for a prefill that failed occupies one of P's sender slots until the abort timeout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.core.types import Fallback, Instance

KV_PARAMS = "kv_transfer_params"
"""The body field that steers a connector. Only the proxy sets it: from a client it could make an
engine fetch from any address, or hang."""

_DROP_ON_PREFILL = frozenset(
    {
        "stream_options",
        "best_of",
        "use_beam_search",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "echo",
        "stop",
        "stop_token_ids",
        "min_tokens",
        "repetition_detection",
        "thinking_token_budget",
    }
)


@dataclass(frozen=True, slots=True)
class Edits:
    """Top-level fields to set (JSON values) and to remove.

    `cached_ratio`: the part of the prompt that P says it had, where these come from its answer.
    """

    put: Mapping[str, Any] = field(default_factory=dict)
    drop: frozenset[str] = frozenset()
    cached_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """One hand-over of KV from `prefill`. `transfer_id` is never used for a second attempt."""

    transfer_id: str
    prefill: Instance
    engine_id: str | None


class Connector(Protocol):
    """What a KV connector must tell the proxy. `max_parallel` bounds transfers per P."""

    can_offload: bool
    needs_engine_id: bool
    max_parallel: int

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """Edits that make the client's body the prefill leg's."""
        ...

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """Edits for the decode leg, or why P's answer is of no use."""
        ...


def prefill_edits(body: Mapping[str, Any], params: Mapping[str, Any]) -> Edits:
    """One token, no stream, never ended by a stop: whatever changes the prompt's tokens stays."""
    put: dict[str, Any] = {"stream": False, "max_tokens": 1, "ignore_eos": True, KV_PARAMS: params}
    put |= {key: 1 for key in ("max_completion_tokens", "n") if body.get(key) is not None}
    return Edits(put, _DROP_ON_PREFILL)


def finished_by_length(answer: Mapping[str, Any]) -> bool:
    """Whether P kept its KV: it frees at once when the leg ends by EOS, stop or abort."""
    choices = answer.get("choices")
    return (
        isinstance(choices, list)
        and len(choices) == 1
        and isinstance(choices[0], dict)
        and choices[0].get("finish_reason") == "length"
    )


class Mooncake:
    """MooncakeConnector, every instance `kv_both`: P pushes when D asks with P's engine id.

    20 sender tasks serve one P (vLLM's num_workers 10, twice); 16 leave room for what is late.
    """

    can_offload = True
    needs_engine_id = True
    max_parallel = 16

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """P computes, keeps the blocks under the transfer id, and waits to be asked."""
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer.transfer_id,
        }
        return prefill_edits(body, params)

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """D needs three values, none of them from P's answer; but P must have ended by length."""
        if not finished_by_length(answer):
            return Fallback.P_FINISH_REASON
        if transfer.engine_id is None or transfer.prefill.bootstrap_url is None:
            return Fallback.ENGINE_ID_UNKNOWN
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": transfer.prefill.bootstrap_url,
            "remote_engine_id": transfer.engine_id,
            "transfer_id": transfer.transfer_id,
        }
        return Edits({KV_PARAMS: params})


class NoConnector:
    """Instances without KV transfer: everything is computed where it decodes."""

    can_offload = False
    needs_engine_id = False
    max_parallel = 0

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """The router never offloads with this connector; the body would go as it came."""
        del transfer, body
        return Edits()

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """There is nothing to hand over."""
        del transfer, answer
        return Fallback.ENGINE_ID_UNKNOWN


CONNECTORS: dict[str, Connector] = {"mooncake": Mooncake(), "none": NoConnector()}

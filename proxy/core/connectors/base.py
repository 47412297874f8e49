"""What every KV connector has in common: the prefill leg's body, and what a driver must tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.core.types import Fallback, Instance, TransferRules

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

    `cached_ratio`: the part of the prompt that P says it had, where these come from its answer;
    `request_id`: the X-Request-Id that the leg must have, where the connector goes by that.
    """

    put: Mapping[str, Any] = field(default_factory=dict)
    drop: frozenset[str] = frozenset()
    cached_ratio: float | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """One hand-over of KV from `prefill`. `transfer_id` is never used for a second attempt.

    `request_id`: the X-Request-Id of P's leg.
    """

    transfer_id: str
    prefill: Instance
    engine_id: str | None
    request_id: str = ""


class Connector(Protocol):
    """What a KV connector must tell the proxy.

    `needs_engine_id`: P must be asked for its engine's id, at its bootstrap server. `pins`: P keeps
    the prompt's blocks for D; `max_parallel` bounds how many such prompts one P has.
    `counts_moved`: D's `cached_tokens` include what came over.
    """

    can_offload: bool
    needs_engine_id: bool
    pins: bool
    max_parallel: int
    counts_moved: bool

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """Edits that make the client's body the prefill leg's."""
        ...

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """Edits for the decode leg, or why P's answer is of no use."""
        ...


def transfer_rules(connector: Connector) -> TransferRules:
    """What a decision must know of a connector."""
    return TransferRules(
        can_offload=connector.can_offload,
        needs_bootstrap=connector.needs_engine_id,
        pins=connector.pins,
        max_parallel=connector.max_parallel,
    )


def prefill_edits(body: Mapping[str, Any], params: Mapping[str, Any] | None) -> Edits:
    """One token, no stream, never ended by a stop: whatever changes the prompt's tokens stays."""
    put: dict[str, Any] = {"stream": False, "max_tokens": 1, "ignore_eos": True}
    if params is not None:
        put[KV_PARAMS] = params
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

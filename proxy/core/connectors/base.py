"""The interface of a KV connector, and the edits of a prefill leg that all connectors share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.core.types import Fallback, Instance, TransferRules

KV_PARAMS = "kv_transfer_params"
"""The body field that controls a connector. Only the proxy sets it: with it a client could make an
engine fetch from any address, or hang."""

DROP_ON_PREFILL = frozenset(
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
        # Each makes P's answer as long as the prompt, or longer.
        "return_token_ids",
        "return_prompt_text",
        "logprob_token_ids",
    }
)
"""Fields of which the prefill leg has no use, or which would end it early."""


@dataclass(frozen=True, slots=True)
class Edits:
    """Top-level fields of a body to set (JSON values) and to remove.

    `cached_ratio`: share of the prompt that P had cached, if these edits come from P's answer.
    `request_id`: the X-Request-Id that the leg must have, if the connector needs one.
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
    """The interface of a KV connector.

    `needs_engine_id`: D needs P's engine id, which P's bootstrap server tells. `pins`: P keeps the
    prompt's blocks for D; `max_parallel` bounds the number of such prompts per P. `counts_moved`:
    D's `cached_tokens` include the tokens transferred.
    """

    can_offload: bool
    needs_engine_id: bool
    pins: bool
    max_parallel: int
    counts_moved: bool

    def prepare(self, transfer: Transfer, body: Mapping[str, Any]) -> Edits:
        """Edits that turn the client's body into the prefill leg's."""
        ...

    def after_prefill(self, transfer: Transfer, answer: Mapping[str, Any]) -> Edits | Fallback:
        """Edits for the decode leg, or the reason that P's answer is unusable."""
        ...

    def named_by_proxy(self, transfer: Transfer) -> Edits | None:
        """Edits for a decode leg without P's answer; None if only P's answer names the KV."""
        ...


def transfer_rules(connector: Connector) -> TransferRules:
    """The part of a connector that a decision needs."""
    return TransferRules(
        can_offload=connector.can_offload,
        needs_bootstrap=connector.needs_engine_id,
        pins=connector.pins,
        max_parallel=connector.max_parallel,
    )


def prefill_edits(body: Mapping[str, Any], params: Mapping[str, Any] | None) -> Edits:
    """Edits for one token without a stream, not ended by a stop; the prompt stays the same."""
    put: dict[str, Any] = {"stream": False, "max_tokens": 1, "ignore_eos": True}
    if params is not None:
        put[KV_PARAMS] = params
    put |= {key: 1 for key in ("max_completion_tokens", "n") if body.get(key) is not None}
    return Edits(put, DROP_ON_PREFILL)


_FREED = frozenset({"stop", "abort", "error", "repetition", "content_filter"})
"""Finish reasons of a leg after which P frees the KV at once."""


def may_hold_kv(answer: Mapping[str, Any]) -> bool:
    """Whether P may keep the KV of a leg with this answer: it does not deny it.

    `tool_calls` may stand for an end by length.
    """
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    reason = choice.get("finish_reason") if isinstance(choice, dict) else None
    return not (isinstance(reason, str) and reason in _FREED)


def finished_by_length(answer: Mapping[str, Any]) -> bool:
    """Whether P kept its KV: it frees the KV at once if the leg ends by EOS, stop or abort."""
    choices = answer.get("choices")
    return (
        isinstance(choices, list)
        and len(choices) == 1
        and isinstance(choices[0], dict)
        and choices[0].get("finish_reason") == "length"
    )

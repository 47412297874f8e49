"""The record of one request: what the log line, the metrics and the analyses are made of.

Field names are the log's keys. Times are unix seconds (float), `None` where a phase did not happen.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.placement.alternatives import Options, Shadowed
from proxy.core.types import Outcome


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One line of the request log; filled while the request runs, written once at its end."""

    request_id: str
    session_id: str | None = None
    turn: int | None = None
    endpoint: str = ""
    tenant: str | None = None
    model: str | None = None
    stream: bool | None = None
    route_class: str | None = None
    offload_decision_reason: str | None = None
    policy: str | None = None
    prefill_instance: str | None = None
    decode_instance: str | None = None
    isl_tokens: int | None = None
    hit_tokens: int | None = None
    new_tokens: int | None = None
    new_tokens_prefill: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    osl_tokens: int | None = None
    t_proxy_recv: float = 0.0
    t_queued: float | None = None
    t_decided: float | None = None
    t_prefill_sent: float | None = None
    t_prefill_done: float | None = None
    t_decode_sent: float | None = None
    t_first_token: float | None = None
    t_done: float | None = None
    predicted_ttft_s: float | None = None
    predicted_ttft_bound_s: float | None = None
    predicted_prefill_s: float | None = None
    predicted_transfer_s: float | None = None
    candidates: Options | None = None
    shadow: Shadowed | None = None
    outcome: Outcome | None = None
    status: int | None = None
    error: str | None = None
    retries: int = 0
    fallback: str | None = None
    hedge: str | None = None
    limit: str | None = None
    """The last time limit that was met (prefill, transfer, ttft, idle, total), and its seconds."""
    limit_s: float | None = None

    def ttft_s(self) -> float | None:
        """Seconds from the proxy's receipt to the first token."""
        return None if self.t_first_token is None else self.t_first_token - self.t_proxy_recv

    def queue_s(self) -> float | None:
        """Seconds in the wait queue; None for a request that did not have to."""
        if self.t_queued is None or self.t_decided is None:
            return None
        return self.t_decided - self.t_queued

    def prefill_s(self) -> float | None:
        """Seconds of the prefill leg of an offload; None where P did not answer well."""
        if self.t_prefill_done is None or self.t_prefill_sent is None:
            return None
        return self.t_prefill_done - self.t_prefill_sent

    def transfer_s(self) -> float | None:
        """Seconds from P's answer to the first token that D made of its KV; None without one."""
        offloaded = self.t_prefill_done is not None and self.fallback is None
        if not offloaded or self.t_first_token is None or self.t_decode_sent is None:
            return None
        return self.t_first_token - self.t_decode_sent

    def e2e_s(self) -> float | None:
        """Seconds from the proxy's receipt to the last byte."""
        return None if self.t_done is None else self.t_done - self.t_proxy_recv

    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; undefined for fewer than two tokens."""
        if self.t_done is None or self.t_first_token is None or (self.osl_tokens or 0) < 2:
            return None
        return (self.t_done - self.t_first_token) / ((self.osl_tokens or 0) - 1)

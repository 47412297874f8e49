"""TTFT and TPOT targets of an answer, and whether it met them; goodput is the share that did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slo:
    """TTFT of `ttft_s` plus `per_new_token_s` for each new token, and `tpot_s` per output token."""

    ttft_s: float = 2.0
    per_new_token_s: float = 1e-4
    tpot_s: float = 0.05

    def ttft_limit_s(self, new_tokens: int) -> float:
        """The longest acceptable wait for the first token."""
        return self.ttft_s + self.per_new_token_s * new_tokens

    def keeps_ttft(self, ttft_s: float, new_tokens: int) -> bool:
        """Whether the first token came within the target."""
        return ttft_s <= self.ttft_limit_s(new_tokens)

    def keeps_tpot(self, tpot_s: float | None) -> bool:
        """Whether the output tokens came within the target; None (one token only) keeps it."""
        return tpot_s is None or tpot_s <= self.tpot_s

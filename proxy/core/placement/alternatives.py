"""The options that a decision had, with the price of each.

A decision only keeps references to what it has computed. The thread that writes the request log, or
`GET /decisions`, makes dictionaries of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from proxy.core.placement.candidates import Candidate
from proxy.core.types import Instance, Reason, Reject, RouteClass

COLOCATIONS_KEPT: Final = 16
OFFLOADS_KEPT: Final = 8
MOST_KEPT = COLOCATIONS_KEPT + OFFLOADS_KEPT


@dataclass(slots=True, init=False)
class Terms:
    """The weighted terms of an option's cost, in seconds."""

    ttft_s: float
    harm_s: float
    """Delay of the streams beside the computation."""
    behind_s: float
    """Delay of requests that arrive during the computation."""
    decode_s: float
    """The output's time on D."""
    next_s: float
    """The session's next turns on D."""
    memory_s: float
    """KV displaced and in use."""
    heat_s: float
    """Heat of the computation, if its instance is hot."""
    wait_s: float
    """Queue where the prompt is computed: a part of `ttft_s`."""

    def __init__(
        self,
        ttft_s: float,
        harm_s: float,
        behind_s: float,
        decode_s: float,
        next_s: float,
        memory_s: float,
        heat_s: float,
        wait_s: float,
    ) -> None:
        self.ttft_s, self.harm_s, self.behind_s, self.decode_s = ttft_s, harm_s, behind_s, decode_s
        self.next_s, self.memory_s, self.heat_s, self.wait_s = next_s, memory_s, heat_s, wait_s


@dataclass(slots=True, init=False)
class PricedOption:
    """One option of a decision, with its predicted TTFT and cost in seconds."""

    decode: Candidate
    """D."""
    prefill: PricedOption | None
    """The option of computing and decoding on P; None: D computes."""
    cost_s: float
    """Sum of the terms; nan for a policy without prices."""
    terms: Terms

    def __init__(
        self, decode: Candidate, prefill: PricedOption | None, cost_s: float, terms: Terms
    ) -> None:
        self.decode, self.prefill, self.cost_s, self.terms = decode, prefill, cost_s, terms


def unpriced(d: Candidate, ttft_s: float) -> PricedOption:
    """An option of a policy that does not price options."""
    nan = math.nan
    return PricedOption(d, None, nan, Terms(ttft_s, nan, nan, nan, nan, nan, nan, nan))


class Alternatives:
    """The options of one decision, a bounded number of each kind, the cheapest first.

    `decode` and `prefill`: D and P of the option that was taken.
    """

    __slots__ = ("_decode", "_prefill", "_priced")

    def __init__(
        self, priced: Sequence[PricedOption], decode: Instance, prefill: Instance | None
    ) -> None:
        self._priced = priced
        self._decode, self._prefill = decode, prefill

    def rows(self, most: int = MOST_KEPT) -> list[dict[str, object]]:
        """One JSON object per option, with the state of its D.

        Of more than `most` options the first ones; if the option taken is not among them, it
        replaces the last.
        """
        shown = list(self._priced[:most])
        if len(self._priced) > most > 0:
            taken = self._taken()
            if taken is not None and not any(option is taken for option in shown):
                shown[-1] = taken
        return [_row(option) for option in shown]

    def taken(self) -> dict[str, object] | None:
        """The row of the option taken; None if the policy has priced none."""
        option = self._taken()
        return None if option is None else _row(option)

    def gain_s(self, alone_on: str | None = None) -> float | None:
        """Seconds by which the option taken is cheaper than the best of one instance alone.

        `alone_on`: on this instance; None: on any other. Without prices the predicted TTFT counts.
        None where an offload was taken by a policy that prices no pairs.
        """
        taken = self._taken()
        if taken is None or (taken.prefill is None) != (self._prefill is None):
            return None
        for option in self._priced:
            if option is taken or option.prefill is not None:
                continue
            if alone_on is None or option.decode.instance.name == alone_on:
                priced_s = option.cost_s - taken.cost_s
                early_s = option.terms.ttft_s - taken.terms.ttft_s
                return priced_s if math.isfinite(priced_s) else early_s
        return None

    def _taken(self) -> PricedOption | None:
        """The option taken: the D with its P; if the policy prices no pairs, the D."""
        on_d = [option for option in self._priced if option.decode.instance is self._decode]
        for option in on_d:
            p = option.prefill
            if (p.decode.instance if p else None) is self._prefill:
                return option
        return on_d[0] if on_d else None


class PastChecks:
    """The instances that could have served a refused request, with their failed checks.

    At most COLOCATIONS_KEPT of them, the first to be free first. `why`: the refusal in short.
    """

    __slots__ = ("_past", "why")

    def __init__(self, reject: Reject) -> None:
        self._past = sorted(reject.past, key=lambda one: one.free_in_s)[:COLOCATIONS_KEPT]
        self.why = reject.why

    def rows(self, most: int = MOST_KEPT) -> list[dict[str, object]]:
        """One JSON object per instance."""
        return [
            {
                "instance": one.instance,
                "past": [str(check) for check in one.checks],
                "free_in_s": _seconds(one.free_in_s),
            }
            for one in self._past[:most]
        ]


def _row(option: PricedOption) -> dict[str, object]:
    d, p, terms = option.decode, option.prefill, option.terms
    row: dict[str, object] = {
        "instance": d.instance.name,
        "prefill": p.decode.instance.name if p else None,
        "ttft_s": _seconds(terms.ttft_s),
        "cost_s": _seconds(option.cost_s),
        "harm_s": _seconds(terms.harm_s),
        "behind_s": _seconds(terms.behind_s),
        "decode_s": _seconds(terms.decode_s),
        "next_s": _seconds(terms.next_s),
        "memory_s": _seconds(terms.memory_s),
        "heat_s": _seconds(terms.heat_s),
        "hit_tokens": d.hit_tokens,
        "new_tokens": d.new_tokens,
    }
    if p is not None:
        row["new_tokens_prefill"] = p.decode.new_tokens
        return row
    row["ongoing_tokens"] = d.load.ongoing_tokens
    row["prefill_tokens"] = d.load.prefill_tokens
    row["decode_tokens"] = d.load.decode_tokens
    row["kv_wait_s"] = _seconds(d.kv_wait_s)
    return row


def _seconds(value: float) -> float | None:
    """Rounded to 0.1 ms; `round` takes four times as long, and a line has about sixty numbers."""
    if not value:
        return 0.0
    return int(value * 10_000 + 0.5) / 10_000 if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Shadowed:
    """The shadow policy's choice; if it raised, only `policy` and `error` are set."""

    policy: str
    """`--shadow-policy` at the decision."""
    agrees: bool | None = None
    """Whether D and P are the same as the active policy's."""
    decode_instance: str | None = None
    """Its D."""
    prefill_instance: str | None = None
    """Its P; null for a colocation."""
    route_class: RouteClass | None = None
    """Its class, as `route_class`."""
    reason: Reason | None = None
    """Its reason, as `offload_decision_reason`."""
    predicted_ttft_s: float | None = None
    """Its predicted TTFT."""
    error: str | None = None
    """Its exception, if any; then all but this and `policy` is null."""

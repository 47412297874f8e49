"""Trace: one request's place in a trace, and what is noted of its legs while it runs.

It has ids and times only. Spans are made of it and of the record once the request is over.
"""

from __future__ import annotations

from random import getrandbits
from typing import Final

from proxy.core.types import Instance
from proxy.protocol.names.trace_parent import context_lines

PREFILL, DECODE, HEDGE, MOVE, WARM = "prefill", "decode", "hedge", "move", "warm"
"""The kinds of legs. MOVE continues a stream on another instance, WARM computes it there before."""
SUPERSEDED: Final = "superseded"
"""The result of a leg in whose place another one counts."""
MOST_LEGS: Final = 64
"""Legs noted of one request; further ones have no span."""
ID_BITS, TRACE_BITS = 64, 128


def new_id() -> str:
    """A span's id. Ids of traces are no secrets, so they need not be hard to guess."""
    return f"{getrandbits(ID_BITS) or 1:016x}"


class LegSpan:
    """One leg: its instance, and when it began and ended, in unix seconds.

    `source`: the instance whose KV it fetches. `ended_s`: None while nothing has ended it.
    `result`: why it ended before the request, as a kind of failure or SUPERSEDED; else None.
    """

    __slots__ = ("began_s", "ended_s", "instance", "kind", "result", "source", "span_id")

    def __init__(self, kind: str, instance: Instance, source: str | None, began_s: float) -> None:
        self.kind, self.instance, self.source, self.began_s = kind, instance, source, began_s
        self.span_id = new_id()
        self.ended_s: float | None = None
        self.result: str | None = None

    def end(self, now_s: float, result: str | None = None) -> None:
        """Note its end; the first one counts."""
        if self.ended_s is None:
            self.ended_s, self.result = now_s, result


class Trace:
    """A request's trace, parent and own span, and its legs.

    `state`: what vendors say of the trace, passed on as it came.
    """

    __slots__ = ("_has_answer", "is_sampled", "legs", "parent_id", "span_id", "state", "trace_id")

    def __init__(
        self, trace_id: str, parent_id: str | None, state: str, *, is_sampled: bool
    ) -> None:
        self.trace_id, self.parent_id, self.is_sampled = trace_id, parent_id, is_sampled
        self.state, self.span_id = state, new_id()
        self.legs: list[LegSpan] = []
        self._has_answer = False

    def begin(self, kind: str, instance: Instance, source: str | None, now_s: float) -> LegSpan:
        """A leg begins. One that is to answer takes the place of those before."""
        if kind == DECODE:
            if self._has_answer:
                kind = MOVE
            else:
                self.stop(now_s, SUPERSEDED)
        leg = LegSpan(kind, instance, source, now_s)
        if len(self.legs) < MOST_LEGS:
            self.legs.append(leg)
        return leg

    def lines(self, leg: LegSpan) -> bytes:
        """The header lines by which an instance's own spans become children of the leg."""
        return context_lines(self.trace_id, leg.span_id, self.state, is_sampled=self.is_sampled)

    def stop(self, now_s: float, result: str) -> None:
        """End all legs."""
        for leg in self.legs:
            leg.end(now_s, result)

    def answered(self, now_s: float) -> None:
        """The last leg's answer goes to the client; the others count no longer."""
        self._has_answer = True
        for leg in self.legs[:-1]:
            leg.end(now_s, SUPERSEDED)

    def move_times(self, drift_s: float) -> None:
        """Move all times by `drift_s`."""
        for leg in self.legs:
            leg.began_s += drift_s
            if leg.ended_s is not None:
                leg.ended_s += drift_s

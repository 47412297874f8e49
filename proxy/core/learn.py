"""What a request's course teaches the model of time, and what it occupies until then.

The router tells each step with its time; this module knows which of them say something. A prefill
counts only when it met no queue, a step time only over a whole answer.
"""

from __future__ import annotations

from proxy.core.latency import Latency
from proxy.core.types import Instance, Load, RequestFacts, Route


class Course:
    """Reservations and observations of requests, over one Latency."""

    def __init__(self, latency: Latency) -> None:
        self.latency = latency

    def reserve(
        self, route: Route, computing: Instance, hit_tokens: int, load: Load, now_s: float
    ) -> None:
        """Occupy the computing instance for as long as this prefill is predicted to take."""
        name, new = computing.name, max(1, route.prompt_tokens - hit_tokens)
        work_s = self.latency.prefill_s(
            name, new, hit_tokens, load.decode_requests, load.decode_tokens
        )
        route.reserved_s = now_s
        route.computes_tokens = new
        route.ran_alone = self.latency.wait_s(name, now_s) <= 0.0
        self.latency.begin(name, id(route.lease), work_s, now_s)

    def release(self, route: Route, now_s: float) -> None:
        """The prefill is over or given up; nothing is learned."""
        for instance in (route.prefill, route.decode):
            if instance is not None:
                self.latency.end(instance.name, id(route.lease), now_s)

    def prefill_done(self, route: Route, facts: RequestFacts, now_s: float) -> None:
        """P has answered."""
        if route.prefill is not None:
            self._computed(route, route.prefill, facts, now_s)
            route.handed_s = now_s

    def first_token(self, route: Route, facts: RequestFacts, now_s: float) -> None:
        """D has answered: after a transfer, or after computing."""
        route.first_token_s = now_s
        if route.prefill is None:
            self._computed(route, route.decode, facts, now_s)
        elif route.handed_s is not None:
            names = route.prefill.name, route.decode.name
            self.latency.observe_transfer(*names, route.new_tokens, now_s - route.handed_s)

    def _computed(
        self, route: Route, computing: Instance, facts: RequestFacts, now_s: float
    ) -> None:
        was_last = self.latency.end(computing.name, id(route.lease), now_s)
        if was_last and route.ran_alone:
            new = route.computes_tokens
            context = facts.prompt_tokens - new
            seconds = now_s - route.reserved_s
            self.latency.observe_prefill(computing.name, new, context, seconds)

    def finished(
        self, route: Route, kv_tokens: int, output_tokens: int | None, now_s: float
    ) -> None:
        """The answer is whole, beside `kv_tokens` of running streams, its own included."""
        if route.first_token_s is not None and output_tokens is not None and output_tokens > 1:
            seconds = (now_s - route.first_token_s) / (output_tokens - 1)
            self.latency.observe_step(route.decode.name, kv_tokens, seconds)

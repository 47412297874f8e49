"""Calls of a run to its observers: the router, a decision rule, an experiment.

An observer is an object with any of four methods:

- `on_prefill_done(route, facts, prefill_s, cached_tokens, now_s)`: P answered `prefill_s` after the
  leg was sent, having found `cached_tokens` of the prompt in its own cache;
- `on_first_token(route, facts, ttft_s, cached_tokens, now_s)`: D's first token, `ttft_s` after the
  decision; `cached_tokens` as vLLM reports them, KV from P included;
- `on_finish(route, facts, output_tokens, decode_s, now_s)`: the end of a request that succeeded,
  `decode_s` after its first token;
- `on_failed(route, facts, now_s)`: the client gave up, or nobody serves the request.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from proxy.core.routing.route import Route
from proxy.core.types import RequestFacts
from replayer.engine.types import SimRequest


class _Call(Protocol):
    def __call__(self, *values: Any) -> object: ...


class Hooks:
    """The hooks of all observers that have them."""

    def __init__(self, observers: Sequence[object]) -> None:
        self._prefill_done = _named(observers, "on_prefill_done")
        self._first_token = _named(observers, "on_first_token")
        self._finish = _named(observers, "on_finish")
        self._failed = _named(observers, "on_failed")

    def prefill_done(
        self, route: Route, facts: RequestFacts, leg: SimRequest, now_s: float
    ) -> None:
        """P's leg has succeeded."""
        for call in self._prefill_done:
            call(route, facts, now_s - leg.arrived_s, leg.local_hit_tokens, now_s)

    def first_token(
        self, route: Route, facts: RequestFacts, ttft_s: float, leg: SimRequest, now_s: float
    ) -> None:
        """The client got its first token."""
        for call in self._first_token:
            call(route, facts, ttft_s, leg.local_hit_tokens + leg.external_tokens, now_s)

    def finish(self, route: Route, facts: RequestFacts, leg: SimRequest, now_s: float) -> None:
        """The client got the end."""
        for call in self._finish:
            first_s = now_s if leg.first_token_s is None else leg.first_token_s
            call(route, facts, leg.output_tokens, now_s - first_s, now_s)

    def failed(self, route: Route, facts: RequestFacts, now_s: float) -> None:
        """The client gave up, or nobody serves the request."""
        for call in self._failed:
            call(route, facts, now_s)


def _named(observers: Sequence[object], name: str) -> list[_Call]:
    return [method for one in observers if (method := getattr(one, name, None)) is not None]

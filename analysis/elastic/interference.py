"""The cost of a long prompt for a running stream, in the engine model: gaps between tokens.

One engine decodes. The prompt comes to it as well, or to a second engine that hands its KV over.
The same was measured on real engines, so the model can be held against them
(docs/contribute/real-engines.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from analysis.measures import percentile
from replayer.engine.engine import Engine, deliver
from replayer.engine.types import EngineOptions, Event, Finished, Job, RemoteKv, SimRequest

PROMPT_TOKENS = 24_000
BATCHED_TOKENS = 2_048
"""Prompt, and token budget of a step, of the measurement on real engines."""
REAL_COLOCATED_P99_S = (0.151, 0.151)
REAL_OFFLOADED_P99_S = (0.0045, 0.022)
"""Lowest and highest p99 gap of the stream in the runs there."""
COMES_AT_S = 0.1
HAND_OVER = "prompt"


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between the stream's tokens while the prompt has no first token, and its TTFT."""

    p50_s: float
    p99_s: float
    ttft_s: float


def gaps_beside(options: EngineOptions, *, offloaded: bool) -> Gaps:
    """Run the stream and the prompt, token by token."""
    return _Pair(options, offloaded=offloaded).run()


class _Pair:
    """D with the stream, P idle. `leg`: the prompt's present leg, None before it comes."""

    def __init__(self, options: EngineOptions, *, offloaded: bool) -> None:
        self._d, self._p = Engine(options), Engine(options)
        self._engines = {"d": self._d, "p": self._p}
        self._offloaded = offloaded
        most = options.max_model_len - 1
        self._stream = self._d.submit(Job("stream", 1, (), most), 0.0)
        self._leg: SimRequest | None = None

    def run(self) -> Gaps:
        """Run until the prompt has its first token on D."""
        now_s, times_s, tokens = 0.0, [0.0], 0
        while True:
            self._settle(now_s)
            if self._stream.output_tokens > tokens:
                tokens = self._stream.output_tokens
                times_s.append(now_s)
            if self._leg is None and now_s >= COMES_AT_S:
                self._begin(now_s)
                times_s = [now_s]
            leg = self._leg
            if leg is not None and leg.job.send_as is None and leg.first_token_s is not None:
                return _gaps(times_s, now_s - times_s[0])
            now_s = min(self._d.next_step_s(), self._p.next_step_s())

    def _begin(self, now_s: float) -> None:
        send_as = HAND_OVER if self._offloaded else None
        engine = self._p if self._offloaded else self._d
        outputs = 1 if self._offloaded else 2
        job = Job("prompt", PROMPT_TOKENS, (), outputs, send_as=send_as)
        self._leg = engine.submit(job, now_s)

    def _settle(self, now_s: float) -> None:
        dirty = [self._d, self._p]
        while dirty:
            engine = dirty.pop()
            for event in engine.advance(now_s):
                dirty += self._follow(event, engine, now_s)

    def _follow(self, event: Event, engine: Engine, now_s: float) -> Sequence[Engine]:
        """Let an event have its effect; returns the engine that has something to do for it."""
        if isinstance(event, Finished) and event.request is self._leg and engine is self._p:
            fetch = RemoteKv("p", HAND_OVER)
            self._leg = self._d.submit(Job("prompt", PROMPT_TOKENS, (), 2, fetch=fetch), now_s)
            return (self._d,)
        other = deliver(event, engine, self._engines, now_s)
        return () if other is None else (other,)


def _gaps(times_s: Sequence[float], ttft_s: float) -> Gaps:
    gaps = sorted(after - before for before, after in pairwise(times_s))
    return Gaps(percentile(gaps, 50), percentile(gaps, 99), ttft_s)

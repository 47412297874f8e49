"""RequestRecord: one request's data for log and metrics, filled from its route and usage."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.placement.alternatives import Alternatives, PastChecks, Shadowed
from proxy.core.routing.route import Route
from proxy.core.types import Outcome, RequestFacts
from proxy.protocol.endpoints import Dialect
from proxy.protocol.streams.token_counts import told_counts
from proxy.telemetry.tracing.trace import Trace


@dataclass(slots=True, frozen=True)
class Migration:
    """One migration of a started stream, or the reason for none."""

    from_instance: str
    """The instance that the stream was on."""
    to_instance: str | None
    """The instance that continued the stream; null without one."""
    cause: str
    """Why the stream was to migrate: `lost`, `silent`, `abort`, `error`, `differs`, `drain` or
    `heat`."""
    ended: str
    """`moved`; or the reason that it did not migrate; or `left`: the client was gone first."""
    tokens_kept: int
    """Output tokens that the client had."""
    seconds: float
    """How long the client waited for the next instance's first event."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One line of the request log; filled while the request runs, written once at its end."""

    request_id: str
    """The client's `X-Request-Id`, or the proxy's."""
    session_id: str | None = None
    """The session's name. An id that may be the request's own counts once it has come back.
    Sub-agents: `session:agent`."""
    turn: int | None = None
    """Number of the request in its session, from 0. The number is used again if no engine computed
    the request. Null if it is not a turn: a title, a token count. Requests without a session name
    count in the conversation that their prompts continue."""
    endpoint: str = ""
    """The path of the request."""
    tenant: str | None = None
    """The tenant of the client's key; null without `--api-key`."""
    model: str | None = None
    """The requested model."""
    stream: bool | None = None
    """Whether the request asks for a stream."""
    route_class: str | None = None
    """Size of the request and where it was computed."""
    offload_decision_reason: str | None = None
    """Why the request was offloaded or colocated."""
    policy: str | None = None
    """`--offload-policy` at the decision."""
    prefill_instance: str | None = None
    """P; null where D computed the prompt from the start."""
    decode_instance: str | None = None
    """D, the last one asked."""
    place: str | None = None
    """Why D was chosen, as in `X-Cache-Proxy-Reason`."""
    home_instance: str | None = None
    """The session's home when the request came; null without a session, for a new session, and if
    the home's process is gone."""
    rehomed: bool | None = None
    """Whether the session's home moved to D; null without a home."""
    isl_tokens: int | None = None
    """Estimated tokens of the prompt."""
    hit_tokens: int | None = None
    """Prompt tokens predicted to be cached on D. After a retry on another instance this, the class
    and the predictions are those of the last attempt."""
    reachable_hit_tokens: int | None = None
    """The largest such prediction for an instance that the decision might have chosen."""
    new_tokens: int | None = None
    """Prompt tokens that D lacked: `isl_tokens` - `hit_tokens`."""
    new_tokens_prefill: int | None = None
    """Prompt tokens that P lacked; null without a P."""
    prompt_tokens: int | None = None
    """Prompt tokens as the engine counted them, cached ones included. This and the next two come
    from answers in one piece and from the last events of streams; of chats and completions with
    `stream_options.include_usage`."""
    cached_tokens: int | None = None
    """Prompt tokens that D had cached or received from P, as the engine counted them."""
    osl_tokens: int | None = None
    """Output tokens as the engine counted them."""
    t_proxy_recv: float = 0.0
    """When the request's head was complete."""
    t_queued: float | None = None
    """When the request last began to wait for an instance; null if it did not wait."""
    t_decided: float | None = None
    """When the request was placed or refused; the end of its wait."""
    t_prefill_sent: float | None = None
    """When the prefill leg was sent; null for a colocated request."""
    t_prefill_done: float | None = None
    """When P answered with KV for D."""
    t_decode_sent: float | None = None
    """When the last decode leg was sent."""
    t_first_token: float | None = None
    """When the first token came from D; null for an answer in one piece."""
    t_done: float | None = None
    """When the request was over."""
    predicted_ttft_s: float | None = None
    """Predicted TTFT of the decision."""
    predicted_ttft_bound_s: float | None = None
    """A later first token is late: `predicted_ttft_s` times the recent 95th percentile of realised
    / predicted."""
    predicted_prefill_s: float | None = None
    """Predicted seconds until the prompt is computed, queue included."""
    predicted_transfer_s: float | None = None
    """Predicted seconds of the KV transfer; null without a P."""
    candidates: Alternatives | PastChecks | None = None
    """The alternatives of the decision, see below; of a refused request the failed checks."""
    shadow: Shadowed | None = None
    """With `--shadow-policy`: that policy's decision, see below. It changes nothing."""
    outcome: Outcome | None = None
    """How the request ended."""
    status: int | None = None
    """The HTTP status; 499 where the client left."""
    error: str | None = None
    """The error in words; of a busy answer the reason."""
    retries: int = 0
    """Retries on the same or another instance."""
    first_failed_instance: str | None = None
    """The instance that failed first, P or D; null if none failed before the first byte."""
    first_failure: str | None = None
    """Why it failed: the kind, and the failure in words."""
    fallback: str | None = None
    """Why an offload ended colocated."""
    hedge: str | None = None
    """If P was late and D computed too: which was ready first, `peer` (P), `local` (D), or
    `none`."""
    migrations: list[Migration] | None = None
    """Migrations of the stream (`--migration-limit`), see below; null without any."""
    limit: str | None = None
    """The last time limit that was reached: `prefill`, `transfer`, `ttft`, `answer`, `idle` or
    `total`."""
    limit_s: float | None = None
    """Seconds of that limit."""
    trace: Trace | None = None
    """Id of its trace; null without `--otlp-endpoint`."""

    def ttft_s(self) -> float | None:
        """Seconds from the proxy's receipt to the first token."""
        return None if self.t_first_token is None else self.t_first_token - self.t_proxy_recv

    def predictable_ttft_s(self) -> float | None:
        """Seconds from the prediction to the first token.

        The prediction is made after the wait in the queue, and again for each retry, except a
        fallback to D.
        """
        ttft_s, sent_s = self.ttft_s(), self.t_decode_sent
        if ttft_s is None:
            return None
        if self.retries and self.fallback is None and sent_s is not None:
            return ttft_s - (sent_s - self.t_proxy_recv)
        return ttft_s - (self.queue_s() or 0.0)

    def compared_hits(self) -> tuple[int, float, float, int] | None:
        """Prompt tokens, and of them those that hit: reachable, chosen, and reported.

        Whole answers of one instance alone, whose engine tells. Predictions are scaled to the
        tokens that the engine counted.
        """
        prompt, reported, guessed = self.prompt_tokens, self.cached_tokens, self.isl_tokens
        if self.outcome is not Outcome.OK or self.prefill_instance or self.migrations:
            return None
        if not prompt or not guessed or reported is None or self.hit_tokens is None:
            return None
        scale, reachable = prompt / guessed, self.reachable_hit_tokens or 0
        return prompt, reachable * scale, self.hit_tokens * scale, min(reported, prompt)

    def queue_s(self) -> float | None:
        """Seconds in the wait queue; None for a request that did not wait."""
        if self.t_queued is None or self.t_decided is None:
            return None
        return self.t_decided - self.t_queued

    def prefill_s(self) -> float | None:
        """Seconds of the prefill leg of an offload; None if P gave no usable answer."""
        if self.t_prefill_done is None or self.t_prefill_sent is None:
            return None
        return self.t_prefill_done - self.t_prefill_sent

    def transfer_s(self) -> float | None:
        """Seconds from sending D's leg to the first token made of P's KV; None if there is none."""
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


FAILURE_CHARS = 300


def note_facts(record: RequestRecord, facts: RequestFacts) -> None:
    """Note session, model and estimated prompt length."""
    record.session_id, record.model = facts.session_id, facts.model or None
    record.isl_tokens = facts.prompt_tokens


def note_route(record: RequestRecord, route: Route) -> None:
    """Note the decision; the request's end is noted separately."""
    record.turn, record.policy = route.turn, route.policy
    record.home_instance, record.shadow = route.home, route.shadow
    if route.prefill is not None:
        record.prefill_instance = route.prefill.name
        record.new_tokens_prefill = route.new_tokens_prefill
    note_attempt(record, route)


def note_attempt(record: RequestRecord, route: Route) -> None:
    """Note what is expected of the present attempt, in place of the one before."""
    record.route_class, record.offload_decision_reason = route.route_class, route.reason
    record.place = route.place
    note_decode(record, route.decode.name)
    record.hit_tokens, record.new_tokens = route.hit_tokens, route.new_tokens
    record.reachable_hit_tokens = route.reachable_hit_tokens
    record.predicted_ttft_s = route.predicted_ttft_s
    record.predicted_transfer_s = route.predicted_transfer_s
    record.predicted_ttft_bound_s = route.predicted_ttft_bound_s
    record.predicted_prefill_s = route.predicted_prefill_s
    record.candidates = route.options


def note_decode(record: RequestRecord, name: str) -> None:
    """Note D, and whether the session has moved there from its home."""
    home = record.home_instance
    record.decode_instance = name
    record.rehomed = None if home is None else home != name


def note_served(record: RequestRecord, name: str) -> None:
    """Note D at the end; of a stream that nobody went on with, it is the one that lost it."""
    last = record.migrations[-1] if record.migrations else None
    note_decode(record, last.from_instance if last is not None and not last.to_instance else name)


def note_route_again(record: RequestRecord, route: Route) -> None:
    """Note the decision of a request that has waited again, in place of the one before.

    Its home is still where the session lived before the request came.
    """
    home = record.home_instance
    record.prefill_instance = record.new_tokens_prefill = record.fallback = record.hedge = None
    record.t_prefill_sent = record.t_prefill_done = record.t_decode_sent = None
    note_route(record, route)
    record.home_instance = home
    note_decode(record, route.decode.name)


def note_failure(record: RequestRecord, instance: str | None, why: str) -> None:
    """Note the first instance that failed, and why; the first call wins."""
    if record.first_failure is None:
        record.first_failed_instance = instance
        record.first_failure = why[:FAILURE_CHARS]


def note_end(
    record: RequestRecord, outcome: Outcome, status: int | None, error: str | None
) -> None:
    """Note how the request ended; the first call wins."""
    if record.outcome is None:
        record.outcome, record.status, record.error = outcome, status, error


def note_usage(
    record: RequestRecord, answer: bytes | None, dialect: Dialect, first_data: bytes = b""
) -> None:
    """Note the engine's own token counts, see `told_counts`."""
    told = told_counts(answer, dialect, first_data)
    record.prompt_tokens, record.cached_tokens, record.osl_tokens = told


_TIMES = tuple(name for name in RequestRecord.__dataclass_fields__ if name.startswith("t_"))


def move_times(record: RequestRecord, drift_s: float) -> None:
    """Move all times of a complete record by `drift_s`; durations stay."""
    for name in _TIMES:
        if (at := getattr(record, name)) is not None:
            setattr(record, name, at + drift_s)
    if record.trace is not None:
        record.trace.move_times(drift_s)


def outcome_of(status: int) -> Outcome:
    """The outcome of an answer that was relayed completely."""
    if status < 400:
        return Outcome.OK
    return Outcome.BAD_REQUEST if status < 500 else Outcome.UPSTREAM_ERROR


def phase(record: RequestRecord) -> str:
    """The phase that a request had reached."""
    if record.t_first_token is not None:
        return "decode"
    if record.t_decode_sent is not None:
        return "first_token"
    if record.t_prefill_sent is not None:
        return "prefill"
    is_queued = record.t_queued is not None and record.t_decided is None
    return "queue" if is_queued else "upload"

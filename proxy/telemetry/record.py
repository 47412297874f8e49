"""RequestRecord: one request's data for log and metrics, filled from its route and usage."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.placement.alternatives import Alternatives, PastChecks, Shadowed
from proxy.core.routing.route import Route
from proxy.core.types import Outcome, RequestFacts
from proxy.protocol.endpoints import Dialect
from proxy.protocol.streams.token_counts import told_counts


@dataclass(slots=True, frozen=True)
class Migration:
    """One move of a stream that had begun, or why there was none."""

    from_instance: str
    """The instance that was lost, or left."""
    to_instance: str | None
    """The one that went on; null where none did."""
    cause: str
    """Why it was to move: `lost`, `silent`, `abort`, `error`, `differs`, `drain` or `heat`."""
    ended: str
    """`moved`, why the stream did not go on elsewhere, or `left`: the client was gone first."""
    tokens_kept: int
    """Tokens of the output behind which it goes on."""
    seconds: float
    """How long the client waited for the next instance's first event."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One line of the request log; filled while the request runs, written once at its end."""

    request_id: str
    """The client's `X-Request-Id`, or the one that the proxy gave."""
    session_id: str | None = None
    """The session's name, if the request has one: an id that may be the request's own is one once
    it has come back. Of a sub-agent `session:agent`."""
    turn: int | None = None
    """Number of the request in its session, from 0. After a request that no engine computed the
    next one has the same number. Null where it is no turn: a title, a count of tokens. Requests
    without a name count in the conversation that their prompts go on with."""
    endpoint: str = ""
    """The path of the request."""
    tenant: str | None = None
    """The tenant of the client's key; null without `--api-key`."""
    model: str | None = None
    """The model that the request asks for."""
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
    """D, the last one that was asked."""
    place: str | None = None
    """Why D was chosen, as in `X-Cache-Proxy-Reason`."""
    home_instance: str | None = None
    """Where the session lived when the request came; null for a request without a session, for a
    new session, and where the process of its home is gone."""
    rehomed: bool | None = None
    """Whether the session moved from there to D, to stay; null without a home."""
    isl_tokens: int | None = None
    """Estimated tokens of the prompt."""
    hit_tokens: int | None = None
    """Tokens of the prompt that were believed cached on D when it was asked. After a repetition on
    another instance this, the class and what was predicted are those of the last attempt."""
    new_tokens: int | None = None
    """Tokens of the prompt that D lacked: `isl_tokens` less `hit_tokens`."""
    new_tokens_prefill: int | None = None
    """Tokens of the prompt that P lacked; null without a P."""
    prompt_tokens: int | None = None
    """Tokens of the prompt as the engine counted them, those from its cache included. This and the
    next two are read from answers in one piece and from the last events of streams, of chats and
    completions with `stream_options.include_usage`."""
    cached_tokens: int | None = None
    """Tokens of the prompt that D had cached or was handed, as the engine counted them."""
    osl_tokens: int | None = None
    """Tokens of the output as the engine counted them."""
    t_proxy_recv: float = 0.0
    """When the request's head had come."""
    t_queued: float | None = None
    """When the request began to wait for an instance, the last time; null where it did not."""
    t_decided: float | None = None
    """When the request was placed or refused; one that waited did so until then."""
    t_prefill_sent: float | None = None
    """When P was asked; null for a colocated request."""
    t_prefill_done: float | None = None
    """When P had answered with KV for D."""
    t_decode_sent: float | None = None
    """When D was asked, the last time."""
    t_first_token: float | None = None
    """When the first token came from D."""
    t_done: float | None = None
    """When the request was over."""
    predicted_ttft_s: float | None = None
    """Seconds to the first token, as the decision expected."""
    predicted_ttft_bound_s: float | None = None
    """A first token later than this is late: `predicted_ttft_s` times the 95th percentile of
    realised to predicted lately."""
    predicted_prefill_s: float | None = None
    """Seconds until the prompt is computed, queue included, as the decision expected."""
    predicted_transfer_s: float | None = None
    """Seconds to move the KV, as the decision expected; null without a P."""
    candidates: Alternatives | PastChecks | None = None
    """The options of the decision, see below; of a refused request the checks behind it."""
    shadow: Shadowed | None = None
    """With `--shadow-policy`: what that policy would have done, see below. It changes nothing."""
    outcome: Outcome | None = None
    """How the request ended."""
    status: int | None = None
    """The HTTP status; 499 where the client left."""
    error: str | None = None
    """What went wrong, in words; of a busy answer the reason."""
    retries: int = 0
    """Repetitions on the same or another instance."""
    first_failed_instance: str | None = None
    """The instance that failed first, P or D; null where none did before the first byte."""
    first_failure: str | None = None
    """Why it failed: the kind and, in words, what was seen."""
    fallback: str | None = None
    """Why an offload ended colocated."""
    hedge: str | None = None
    """Where P was late and D computed as well, which was ready first: `peer` (P), `local` (D), or
    `none`."""
    migrations: list[Migration] | None = None
    """Moves of the stream to other instances (`--migration-limit`), see below; null without any."""
    limit: str | None = None
    """The time limit that was met last: `prefill`, `transfer`, `ttft`, `answer`, `idle` or
    `total`."""
    limit_s: float | None = None
    """Seconds of that limit."""

    def ttft_s(self) -> float | None:
        """Seconds from the proxy's receipt to the first token."""
        return None if self.t_first_token is None else self.t_first_token - self.t_proxy_recv

    def predictable_ttft_s(self) -> float | None:
        """Seconds to the first token since its prediction was made.

        That is after the wait in the queue; and again for each repetition, unless it computes on D
        what was to be offloaded.
        """
        ttft_s, sent_s = self.ttft_s(), self.t_decode_sent
        if ttft_s is None:
            return None
        if self.retries and self.fallback is None and sent_s is not None:
            return ttft_s - (sent_s - self.t_proxy_recv)
        return ttft_s - (self.queue_s() or 0.0)

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
    """Note which instance failed first, and why; the first call wins."""
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
    """Move all times of a complete record by as much, so that every duration stays as it is."""
    for name in _TIMES:
        if (at := getattr(record, name)) is not None:
            setattr(record, name, at + drift_s)


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

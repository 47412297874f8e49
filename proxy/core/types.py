"""The core's values: facts of a request, loads and candidates, reasons, refusals, limits.

Token counts are estimates of the engine's tokens unless a name says `cached` or `reported`; `None`
means unknown.

Values are never changed. Types that a request makes several of are still not declared frozen, since
a frozen dataclass takes three times as long to make. Their `__init__` is written out, since a
dataclass's own stays interpreted in a compiled installation (setup.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

BYTES_PER_TOKEN_PRIOR = 4.0
"""Of prompts; typical of English and code in 100k-entry vocabularies; replaced by each model's own
ratio."""


class RouteClass(StrEnum):
    """Size of a request and where it is computed; scripts read these names."""

    WARM = "WARM"
    MEDIUM = "MEDIUM"
    HEAVY_P2P = "HEAVY_P2P"
    HEAVY_COLO = "HEAVY_COLO"


class Reason(StrEnum):
    """Why a request was offloaded or colocated; scripts read these names."""

    P_IDLE_D_BUSY = "p_idle_d_busy"
    P_OVERLOADED = "p_overloaded"
    D_IDLE = "d_idle"
    BELOW_THRESHOLD = "below_threshold"
    P_BUSIER_THAN_D = "p_busier_than_d"
    KV_PULL = "kv_pull"
    MARGIN = "margin"
    NO_PEER = "no_peer"
    PEER_PAST_THRESHOLD = "peer_past_threshold"
    """Every instance that could prefill is past a busy threshold, or its engine said that it is."""
    SPLIT_ROLES = "split_roles"
    """No instance passed all busy thresholds, but P those of prefill and D that of decode."""
    NO_CONNECTOR = "no_connector"
    NOT_OFFLOADABLE = "not_offloadable"
    POLICY_ALWAYS = "policy_always"
    POLICY_NEVER = "policy_never"
    NON_CACHED_TOKENS = "non_cached_tokens"
    POLICY_FAILED = "policy_failed"
    PREFILL_FAILED = "prefill_failed"
    TRANSFER_FAILED = "transfer_failed"


class Fallback(StrEnum):
    """Why an offload ended before the client's first byte; the request is then colocated."""

    P_REFUSED = "p_refused"
    P_ERROR = "p_error"
    P_TIMEOUT = "p_timeout"
    P_LATE = "p_late"
    P_FINISH_REASON = "p_finish_reason"
    P_GONE = "p_gone"
    KV_PARAMS = "kv_params"
    ENGINE_ID_UNKNOWN = "engine_id_unknown"
    TRANSFER_TIMEOUT = "transfer_timeout"
    D_FAILED = "d_failed"


class FailureKind(StrEnum):
    """How an instance failed before its answer's first byte."""

    CONNECT = "connect"
    """The connection was refused: nobody listens."""
    UNREACHABLE = "unreachable"
    """No connection, though nobody refused it: not in time, no route, no address, no TLS."""
    RESET = "reset"
    BUSY = "busy"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    LATE = "late"
    """No first token within the limit scaled by the prediction: another instance may be asked."""
    MALFORMED = "malformed"
    REDIRECT = "redirect"
    """The answer is a redirection, which is never followed: any instance would give the same."""
    PEER_GONE = "peer_gone"
    WENT_DOWN = "went_down"
    NO_MODEL = "no_model"
    """A 404 that says, in words that a client may have chosen, that the model is not served."""
    NO_ROOM = "no_room"
    """The proxy has no socket left; the instance is not at fault."""


class RejectReason(StrEnum):
    """Why a request was refused."""

    DECODE_BLOCKS = "decode_blocks"
    PREFILL_TOKENS = "prefill_tokens"
    PREFILL_FRAC = "prefill_frac"
    UPSTREAM_BUSY = "upstream_busy"
    NO_INSTANCE = "no_instance"
    HOLDER_DOWN = "holder_down"
    """The one instance that holds what the request is about may not be used now."""
    QUEUE_FULL = "queue_full"
    QUEUE_DEADLINE = "queue_deadline"
    QUEUE_TIMEOUT = "queue_timeout"
    DRAINING = "draining"
    MEMORY = "memory"


class Outcome(StrEnum):
    """The terminal state of a request."""

    OK = "ok"
    REJECTED = "rejected"
    CLIENT_GONE = "client_gone"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    UPSTREAM_TRUNCATED = "upstream_truncated"
    BAD_REQUEST = "bad_request"
    PROXY_STOPPED = "proxy_stopped"


@dataclass(frozen=True, slots=True)
class Instance:
    """One addressed vLLM server. `bootstrap_url`: the bootstrap server of its KV connector."""

    name: str
    url: str
    bootstrap_url: str | None = None


@dataclass(slots=True, init=False)
class RequestFacts:
    """What a decision needs to know of a request.

    `prompt_tokens` is the estimated ISL; `block_hashes` chain over blocks of the prompt, each
    standing for `block_tokens` tokens; `offloadable` is false where the two legs of an offload
    could not give the same answer as one request (n > 1, echo, several prompts, one output token,
    ...). `holder`: the only instance that can serve it, as it holds the response that it is about.
    """

    model: str
    session_id: str | None
    prompt_tokens: int
    block_hashes: Sequence[int]
    block_tokens: float
    offloadable: bool
    tenant: str
    holder: str | None

    def __init__(
        self,
        model: str,
        session_id: str | None,
        prompt_tokens: int,
        block_hashes: Sequence[int],
        block_tokens: float,
        offloadable: bool = True,
        tenant: str = "",
        holder: str | None = None,
    ) -> None:
        self.model = model
        self.session_id = session_id
        self.prompt_tokens = prompt_tokens
        self.block_hashes = block_hashes
        self.block_tokens = block_tokens
        self.offloadable = offloadable
        self.tenant = tenant
        self.holder = holder

    def hit_tokens(self, hit_blocks: int) -> int:
        """Tokens in the first `hit_blocks` blocks, at most all but one of the prompt."""
        return max(0, min(round(hit_blocks * self.block_tokens), self.prompt_tokens - 1))


@dataclass(slots=True, init=False)
class Load:
    """One instance's ongoing tokens at one moment, from this proxy's own leases.

    `prefill_tokens`: new tokens of requests without a first token yet; `inbound_tokens`: KV that a
    prefill instance will hand over; `decode_tokens`: context of running streams; `pinned_tokens`:
    KV held for a peer until it is fetched (not work, so not in `ongoing_tokens`).
    """

    prefill_tokens: int
    prefill_requests: int
    inbound_tokens: int
    inbound_requests: int
    decode_tokens: int
    decode_requests: int
    pinned_tokens: int
    pinned_requests: int
    ongoing_tokens: int = field(init=False, compare=False)
    """Prefill backlog plus the KV of running and inbound requests."""
    held_tokens: int = field(init=False, compare=False)
    """Ongoing tokens plus pinned tokens."""

    def __init__(
        self,
        prefill_tokens: int = 0,
        prefill_requests: int = 0,
        inbound_tokens: int = 0,
        inbound_requests: int = 0,
        decode_tokens: int = 0,
        decode_requests: int = 0,
        pinned_tokens: int = 0,
        pinned_requests: int = 0,
    ) -> None:
        self.prefill_tokens, self.prefill_requests = prefill_tokens, prefill_requests
        self.inbound_tokens, self.inbound_requests = inbound_tokens, inbound_requests
        self.decode_tokens, self.decode_requests = decode_tokens, decode_requests
        self.pinned_tokens, self.pinned_requests = pinned_tokens, pinned_requests
        self.ongoing_tokens = prefill_tokens + inbound_tokens + decode_tokens
        self.held_tokens = self.ongoing_tokens + pinned_tokens

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not (self.ongoing_tokens or self.pinned_tokens)


NONE_UNRELEASED = (0, 0)
"""No hand-over, no tokens: `Candidate.unreleased` of nearly every instance."""


@dataclass(slots=True, init=False)
class Candidate:
    """One instance as a decision sees it; `last_placed` numbers placements, 0 for never.

    `kv_full`: share of its KV cache that is running or reusable, 0..1; `kv_wait_s`: seconds until
    running streams will have freed enough for this prompt; `kv_tokens`: size of its cache, None
    while unknown; `unreleased`: number of broken hand-overs whose KV it may still hold, and their
    tokens.
    """

    instance: Instance
    load: Load
    hit_tokens: int
    new_tokens: int
    sessions: int
    last_placed: int
    kv_full: float
    kv_wait_s: float
    kv_tokens: int | None
    unreleased: tuple[int, int]

    def __init__(
        self,
        instance: Instance,
        load: Load,
        hit_tokens: int,
        new_tokens: int,
        sessions: int = 0,
        last_placed: int = 0,
        kv_full: float = 0.0,
        kv_wait_s: float = 0.0,
        kv_tokens: int | None = None,
        unreleased: tuple[int, int] = NONE_UNRELEASED,
    ) -> None:
        self.instance = instance
        self.load = load
        self.hit_tokens = hit_tokens
        self.new_tokens = new_tokens
        self.sessions = sessions
        self.last_placed = last_placed
        self.kv_full = kv_full
        self.kv_wait_s = kv_wait_s
        self.kv_tokens = kv_tokens
        self.unreleased = unreleased


@dataclass(frozen=True, slots=True)
class Reject:
    """No instance may take the request now. `retry_after_s` is a prediction, in whole seconds.

    `wait_s` is that prediction before rounding, 0 if there is none; `drain_tps`: prompt tokens per
    second that the model's instances are assumed to take in.
    """

    reason: RejectReason
    retry_after_s: int
    wait_s: float = field(default=0.0, compare=False)
    drain_tps: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class TransferRules:
    """What the KV connector allows a decision: whether to offload at all, and to which P.

    `needs_bootstrap`: P must have a bootstrap server; `pins`: P keeps the prompt's blocks for D, of
    `max_parallel` prompts at most.
    """

    can_offload: bool
    needs_bootstrap: bool
    pins: bool
    max_parallel: int


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The three busy thresholds; None switches a check off.

    KV blocks as a ratio 0..1, prefill in tokens, and prefill as a multiple of the step's budget.
    """

    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None

    def merged(self, changes: Mapping[str, float | int | None]) -> Thresholds:
        """A copy with the given fields overwritten."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def over(self, others: Thresholds) -> Thresholds:
        """A copy in which what is not set here is as in `others`."""
        blocks = self.active_decode_blocks_threshold
        tokens = self.active_prefill_tokens_threshold
        frac = self.active_prefill_tokens_threshold_frac
        return Thresholds(
            others.active_decode_blocks_threshold if blocks is None else blocks,
            others.active_prefill_tokens_threshold if tokens is None else tokens,
            others.active_prefill_tokens_threshold_frac if frac is None else frac,
        )


OFF = Thresholds()
THRESHOLD_FIELDS = tuple(f.name for f in fields(Thresholds))

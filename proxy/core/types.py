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
from typing import Final, NamedTuple

BYTES_PER_TOKEN_PRIOR: Final = 4.0
"""Of prompts; typical of English and code in 100k-entry vocabularies; replaced by each model's own
ratio."""
MEDIA_PRIOR = {"image": 100.0, "audio": 200.0, "video": 1000.0, "file": 1000.0}
"""Tokens of an image, a sound, ... before an answer has told; a small picture, half a minute."""
UNIT_TOKENS: Final = 16
"""Token ids of one unit of a prompt's chain of ids: the largest size that divides the blocks of
nearly all engines."""


class RouteClass(StrEnum):
    """Size of a request and where it is computed; scripts read these names."""

    WARM = "WARM"
    """Fewer new tokens than `--warm-threshold`; computed on D."""
    MEDIUM = "MEDIUM"
    """Between the two thresholds; computed on D."""
    HEAVY_P2P = "HEAVY_P2P"
    """`--heavy-threshold` new tokens or more, computed on P (an offload)."""
    HEAVY_COLO = "HEAVY_COLO"
    """As many, computed on D (colocated); also an offload that fell back to D."""


class Reason(StrEnum):
    """Why a request was offloaded or colocated; scripts read these names."""

    P_IDLE_D_BUSY = "p_idle_d_busy"
    """Offloaded: D decodes, and P has less to do; with `cost`: the pair of P and D is cheapest."""
    P_OVERLOADED = "p_overloaded"
    """Colocated: P has too much to do. With `cost`: each peer that could prefill has a queue of
    over 4 s. With `seed-cost`: the offload would pay if P were idle. With `seed-heuristic`: P
    carries less than D, but over 1.5 times the mean; the emptiest of all instances never does, so
    this is seen only where not every instance may prefill."""
    D_IDLE = "d_idle"
    """Colocated: D decodes nothing that a prefill could hold up."""
    BELOW_THRESHOLD = "below_threshold"
    """Colocated: fewer new tokens than an offload is considered for (WARM, MEDIUM; with
    `threshold`: `--offload-non-cached-tokens`)."""
    P_BUSIER_THAN_D = "p_busier_than_d"
    """Colocated, `seed-heuristic`: P carries as many ongoing tokens as D or more."""
    KV_PULL = "kv_pull"
    """Offloaded, `cost`: P has most of the prompt cached, mostly as the old home."""
    MARGIN = "margin"
    """Colocated: an offload would not win by enough; with `cost` by 15 %, with `seed-cost` not
    with an idle P either."""
    NO_PEER = "no_peer"
    """Colocated: no other free instance can prefill. It needs a bootstrap server where the
    connector has one, and room to pin the KV."""
    PEER_PAST_THRESHOLD = "peer_past_threshold"
    """Colocated: every instance that could prefill is past a busy threshold, or its engine said
    that it is."""
    SPLIT_ROLES = "split_roles"
    """Offloaded: no instance passed all busy thresholds, but P those of prefill and D that of
    decode."""
    NO_CONNECTOR = "no_connector"
    """Colocated: `--kv-connector none`."""
    NOT_OFFLOADABLE = "not_offloadable"
    """Colocated: two legs could answer this request differently (several prompts, `n` above 1,
    `echo`, one output token, ...)."""
    POLICY_ALWAYS = "policy_always"
    """Offloaded: `--offload-policy always`."""
    POLICY_NEVER = "policy_never"
    """Colocated: `--offload-policy never`."""
    NON_CACHED_TOKENS = "non_cached_tokens"
    """Offloaded, `threshold`: prompt and new tokens both reach `--offload-non-cached-tokens`."""
    POLICY_FAILED = "policy_failed"
    """Colocated: the policy raised an exception, so the request was placed by load."""
    PREFILL_FAILED = "prefill_failed"
    """An offload that ended colocated: P gave no KV; `fallback` says why."""
    TRANSFER_FAILED = "transfer_failed"
    """An offload that ended colocated: D could not fetch the KV; `fallback` says why."""


class Place(StrEnum):
    """Why D, and no other instance; scripts read these names."""

    HOME = "home"
    """D is where the session lives."""
    HOME_LEFT = "home_left"
    """The session's home might have been chosen; D is the better place now."""
    HOME_AWAY = "home_away"
    """The session's home may not be chosen: it is past a check, out, or drains."""
    PREFIX = "prefix"
    """No home; of those that may be chosen, none has more of the prompt cached than D."""
    LOAD = "load"
    """No home; D has the least to do, or the lowest price: what is cached did not decide."""
    ONLY = "only"
    """No home; no other instance may be chosen."""
    HOLDER = "holder"
    """D holds the stored response that the request is about."""
    RETRY = "retry"
    """Another instance has failed before; `first_failed_instance` in the request log names it."""


class Fallback(StrEnum):
    """Why an offload ended before the client's first byte; the request is then colocated."""

    P_REFUSED = "p_refused"
    """No connection to P could be made."""
    P_ERROR = "p_error"
    """P failed in another way: a reset, an error status, an answer that is no JSON or too long."""
    P_TIMEOUT = "p_timeout"
    """P took longer than the limit of its leg, `--prefill-timeout` at most."""
    P_LATE = "p_late"
    """D had computed the prompt itself before P was ready (a hedge)."""
    P_FINISH_REASON = "p_finish_reason"
    """P ended its leg otherwise than by its one token."""
    P_GONE = "p_gone"
    """P went down while it computed, or while D fetched from it."""
    KV_PARAMS = "kv_params"
    """P's answer names no KV that D could fetch."""
    ENGINE_ID_UNKNOWN = "engine_id_unknown"
    """P's bootstrap server does not tell the id of its engine."""
    TRANSFER_TIMEOUT = "transfer_timeout"
    """D had no first token in time after P was ready, `--transfer-timeout` at most."""
    D_FAILED = "d_failed"
    """D failed with the KV of P, and was asked to compute the prompt itself."""


class FailureKind(StrEnum):
    """How an instance failed before its answer's first byte."""

    CONNECT = "connect"
    """The connection was refused: nobody listens."""
    UNREACHABLE = "unreachable"
    """No connection, though nobody refused it: not in time, no route, no address, no TLS."""
    RESET = "reset"
    """A connection without an answer: reset or closed by the instance."""
    BUSY = "busy"
    """The instance says that it is at capacity: 429, 503 or 529."""
    SERVER_ERROR = "server_error"
    """Any other 5xx, or a stream whose first event is a server error."""
    TIMEOUT = "timeout"
    """No first token within `--ttft-timeout`."""
    LATE = "late"
    """No first token within the limit scaled by the prediction: another instance may be asked."""
    MALFORMED = "malformed"
    """The answer is no HTTP."""
    REDIRECT = "redirect"
    """The answer is a redirection, which is never followed: any instance would give the same."""
    PEER_GONE = "peer_gone"
    """P went down while D fetched from it."""
    WENT_DOWN = "went_down"
    """The instance was ejected or removed while the request waited there."""
    NO_MODEL = "no_model"
    """A 404 that says, in words that a client may have chosen, that the model is not served."""
    TOO_LONG = "too_long"
    """A 400 that says that the context is too short, while an instance with a longer one is up."""
    NO_ROOM = "no_room"
    """The proxy has no socket left; the instance is not at fault."""
    HOLLOW = "hollow"
    """An answer that serves nobody: a refusal, a success with nothing in it, an end by `abort` or
    `error`."""
    KEY_REFUSED = "key_refused"
    """A 401 or 403 although the proxy sends its own key, `--instance-api-key`."""


class RejectReason(StrEnum):
    """Why a request was refused."""

    DECODE_BLOCKS = "decode_blocks"
    """Every instance is busy, the first to be free is past `--active-decode-blocks-threshold`."""
    PREFILL_TOKENS = "prefill_tokens"
    """Every instance is busy, the first to be free is past `--active-prefill-tokens-threshold`."""
    PREFILL_FRAC = "prefill_frac"
    """Every instance is busy, the first to be free is past
    `--active-prefill-tokens-threshold-frac`."""
    UPSTREAM_BUSY = "upstream_busy"
    """Every instance is busy, the first to be free says so itself."""
    HEAT_CAP = "heat_cap"
    """Every instance is busy, the first to be free is hot: it has as many requests as thermal
    control allows, or takes none."""
    NO_INSTANCE = "no_instance"
    """No instance that serves the model is up."""
    ASLEEP = "asleep"
    """Every instance that serves the model and is up sleeps or is paused, as its engine says."""
    HOLDER_DOWN = "holder_down"
    """The one instance that holds what the request is about may not be used now."""
    QUEUE_FULL = "queue_full"
    """The wait queue has no room for the request, or gave its place to another tenant."""
    QUEUE_DEADLINE = "queue_deadline"
    """The predicted wait is longer than `--max-queue-seconds`."""
    QUEUE_TIMEOUT = "queue_timeout"
    """The request has waited for `--max-queue-seconds`."""
    DRAINING = "draining"
    """The proxy stops while the request waits."""
    MEMORY = "memory"
    """The proxy is near `--max-memory-bytes`."""


NOBODY = frozenset({RejectReason.NO_INSTANCE, RejectReason.ASLEEP})
"""Refusals for lack of any instance: to wait in the queue would be of no use."""


class MoveCause(StrEnum):
    """Why a stream that has begun is to go on elsewhere."""

    LOST = "lost"
    """The connection to its instance broke, or brought no HTTP, or the stream had no end."""
    SILENT = "silent"
    """Its instance was silent for its idle limit (`--idle-timeout` at most)."""
    ABORT = "abort"
    """The engine terminates: the finish reason `abort`."""
    ERROR = "error"
    """The engine failed: an error event, or the finish reason `error`."""
    DIFFERS = "differs"
    """The instance that went on generated other text than the client has."""
    DRAIN = "drain"
    """Its instance is to be left: `DELETE /instances/{name}?drain=true&mode=migrate`."""
    HEAT = "heat"
    """Its instance is too hot: thermal control, or an operator's order, has it leave."""


PLANNED = (MoveCause.DRAIN, MoveCause.HEAT)
"""Moves of streams that run on where they are until another instance goes on with them."""


class Unmoved(StrEnum):
    """Why a stream that was begun does not go on elsewhere (`--migration-limit`)."""

    STRUCTURED = "structured"
    """The output has to fit a grammar, which would begin anew: `response_format`,
    `structured_outputs`, `guided_*`."""
    TOOLS = "tools"
    """The request has tools and no `tool_choice` of `none`: the parser of a call would begin
    anew."""
    REASONING = "reasoning"
    """A reasoning parser is at work, or its budget is set: where it is cannot be handed on. Or a
    chat has no text yet, and others have begun with reasoning."""
    CHOICES = "choices"
    """Several answers or prompts: `n`, `best_of`, a list of prompts."""
    BEAM = "beam"
    """Beam search: its beams are on the lost instance."""
    LOGPROBS = "logprobs"
    """Log probabilities are asked for, which the two APIs write in different forms."""
    ECHO = "echo"
    """The prompt is a part of the answer."""
    EMBEDS = "embeds"
    """The prompt is not made of tokens: `prompt_embeds`."""
    MEDIA = "media"
    """The prompt has more than text in it, or the answer has: token ids do not stand for it."""
    STORED = "stored"
    """The answer is stored on its instance."""
    SEED = "seed"
    """Sampling with a `seed`: its random numbers would begin anew. Not at temperature 0."""
    PENALTIES = "penalties"
    """Rules that count only what one request has generated: `presence_penalty`,
    `frequency_penalty`, `bad_words`, `repetition_detection`."""
    PLUGINS = "plugins"
    """Logits processors and other plug-ins of the engine may have a state: `vllm_xargs`."""
    STOP_INCLUDED = "stop_included"
    """Stop strings that are passed on as they grow (`include_stop_str_in_output`), or beside
    `return_token_ids`: what the engine has seen of one is not known."""
    UNKNOWN_FIELD = "unknown_field"
    """The request has a field that the proxy does not know, and that may change the answer."""
    NO_IDS = "no_ids"
    """The engine did not tell the ids of all tokens."""
    TOO_LONG = "too_long"
    """Prompt and output are over `--migration-max-seq-len`."""
    MEMORY = "memory"
    """The memory for token ids is used up."""
    FINISHED = "finished"
    """The answer has its finish reason: only what follows it was lost."""
    LIMIT = "limit"
    """`--migration-limit` moves were tried."""
    TIME = "time"
    """The rest of `--total-timeout` is shorter than the move would take, or a stream that is to
    leave stood still for a second."""
    NO_INSTANCE = "no_instance"
    """No other instance may take it now."""
    DIFFERS = "differs"
    """The other instance generated other text than the client has."""


class Outcome(StrEnum):
    """The terminal state of a request."""

    OK = "ok"
    """The client has the whole answer, of a status below 400."""
    REJECTED = "rejected"
    """The client got a busy answer; `error` is the reason."""
    CLIENT_GONE = "client_gone"
    """The client left, or read nothing for too long, before the end."""
    UPSTREAM_ERROR = "upstream_error"
    """The instances failed, or answered with a 5xx."""
    UPSTREAM_TIMEOUT = "upstream_timeout"
    """An instance, or all of the request, took longer than a limit."""
    UPSTREAM_TRUNCATED = "upstream_truncated"
    """The answer broke off after its first byte."""
    BAD_REQUEST = "bad_request"
    """The request was at fault: a 4xx, of the proxy or an engine."""
    PROXY_STOPPED = "proxy_stopped"
    """The proxy stopped, and its drain time was over."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One addressed vLLM server. `bootstrap_url`: the bootstrap server of its KV connector.

    `has_thermal_plugin`: its engine keeps a cap of running requests that it is told.
    """

    name: str
    url: str
    bootstrap_url: str | None = None
    has_thermal_plugin: bool = False


@dataclass(slots=True, init=False)
class RequestFacts:
    """What a decision needs to know of a request.

    `prompt_tokens` is the estimated ISL; `block_hashes` chain over blocks of the prompt, each
    standing for `block_tokens` tokens; `offloadable` is false where the two legs of an offload
    could not give the same answer as one request (n > 1, echo, several prompts, one output token,
    ...). `holder`: the only instance that can serve it, as it holds the response that it is about.
    `units` chain over units of the prompt's token ids; empty where the client sent text. `ends`:
    hashes of the prompt up to the ends of its messages; empty where it has none. `part_tokens`: by
    which a cached prefix goes on beyond its last whole block, on average; 0 where prompts are alike
    up to the end of a block. `media`: of each image, sound, ... the place in blocks and its tokens.
    `client`: the kind of client that asks. `estimate` is `prompt_tokens` before it was corrected by
    what the session's last prompt was counted as, `scale` the factor between the two.
    `beyond_tokens`: an instance with a context of so many tokens has refused it as too long.
    `own_id`: an id that may be this request's own, and names a session once it has come back.
    `takes_turn`: whether a prompt is computed, so that it can be a turn. `tails`: what the last
    messages said up to the last of `ends`, whatever stands before them; 0 where too little.
    """

    model: str
    session_id: str | None
    prompt_tokens: int
    block_hashes: Sequence[int]
    block_tokens: float
    offloadable: bool
    tenant: str
    holder: str | None
    units: Sequence[int]
    ends: Sequence[int]
    part_tokens: float
    media: Sequence[tuple[float, int]]
    client: str
    estimate: int = field(init=False, compare=False)
    scale: float = field(init=False, compare=False)
    beyond_tokens: int
    own_id: str | None
    takes_turn: bool
    tails: Sequence[int]

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
        units: Sequence[int] = (),
        ends: Sequence[int] = (),
        part_tokens: float = 0.0,
        media: Sequence[tuple[float, int]] = (),
        client: str = "",
        beyond_tokens: int = 0,
        own_id: str | None = None,
        takes_turn: bool = True,
        tails: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.session_id = session_id
        self.prompt_tokens = prompt_tokens
        self.block_hashes = block_hashes
        self.block_tokens = block_tokens
        self.offloadable = offloadable
        self.tenant = tenant
        self.holder = holder
        self.units = units
        self.ends = ends
        self.part_tokens = part_tokens
        self.media = media
        self.client = client
        self.estimate = prompt_tokens
        self.scale = 1.0
        self.beyond_tokens = beyond_tokens
        self.own_id = own_id
        self.takes_turn = takes_turn
        self.tails = tails

    def hit_tokens(self, hit_blocks: int) -> int:
        """Expected tokens of a cached prefix of so many whole blocks, at most all but one."""
        if not hit_blocks:
            return 0
        tokens = int((hit_blocks * self.block_tokens + self.part_tokens) * self.scale + 0.5)
        if self.media:
            tokens += sum([each for at, each in self.media if at < hit_blocks])
        return max(0, min(tokens, self.prompt_tokens - 1))

    def blocks_of(self, tokens: float) -> float:
        """Blocks of the prompt that its first `tokens` tokens are; the reverse of `hit_tokens`."""
        block_tokens = self.block_tokens * self.scale
        for at, each in self.media:
            if tokens <= at * block_tokens:
                break
            tokens = max(at * block_tokens, tokens - each)
        return tokens / block_tokens


@dataclass(slots=True, init=False)
class Load:
    """One instance's ongoing tokens at one moment, from this proxy's own leases.

    `prefill_tokens`: new tokens of requests without a first token yet; `inbound_tokens`: KV that a
    prefill instance will hand over; `decode_tokens`: context of running streams; `pinned_tokens`:
    KV held for a peer until it is fetched (not work, so not in `ongoing_tokens`); `shared_tokens`:
    those of `decode_tokens` that other sessions' prompts begin with as well, such as a system
    prompt; `cached_tokens`: what the requests of `prefill_tokens` found in the cache, beyond what
    running streams share with them.
    """

    prefill_tokens: int
    prefill_requests: int
    inbound_tokens: int
    inbound_requests: int
    decode_tokens: int
    decode_requests: int
    pinned_tokens: int
    pinned_requests: int
    shared_tokens: int
    shared_requests: int
    cached_tokens: int
    ongoing_tokens: int = field(init=False, compare=False)
    """Prefill backlog plus the KV of running and inbound requests."""
    held_tokens: int = field(init=False, compare=False)
    """KV in use: ongoing, pinned and cached tokens, but of what streams share one copy only."""
    shared_once_tokens: int = field(init=False, compare=False)
    """Mean length of what streams share, which a prompt that begins with it needs no room for."""

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
        shared_tokens: int = 0,
        shared_requests: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        self.prefill_tokens, self.prefill_requests = prefill_tokens, prefill_requests
        self.inbound_tokens, self.inbound_requests = inbound_tokens, inbound_requests
        self.decode_tokens, self.decode_requests = decode_tokens, decode_requests
        self.pinned_tokens, self.pinned_requests = pinned_tokens, pinned_requests
        self.ongoing_tokens = prefill_tokens + inbound_tokens + decode_tokens
        self.shared_tokens, self.shared_requests = shared_tokens, shared_requests
        self.cached_tokens = cached_tokens
        once = self.shared_once_tokens = shared_tokens // shared_requests if shared_requests else 0
        held_tokens = self.ongoing_tokens + pinned_tokens + cached_tokens
        self.held_tokens = held_tokens - shared_tokens + once

    @property
    def running_requests(self) -> int:
        """Requests that are computed or decoded there, or will be: all but pinned KV."""
        return self.prefill_requests + self.inbound_requests + self.decode_requests

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
    tokens; `helps`: it may prefill for others, as far as its heat allows; `key_tokens`: the hit
    that the prompt's key predicts, where `hit_tokens` is believed instead (`core.kvcache.trust`).
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
    helps: bool
    key_tokens: int

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
        helps: bool = True,
        key_tokens: int | None = None,
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
        self.helps = helps
        self.key_tokens = hit_tokens if key_tokens is None else key_tokens


class PastCheck(NamedTuple):
    """One instance that could not take a request: the checks that it is past, at least one.

    `free_in_s`: seconds until it is predicted to be past none.
    """

    instance: str
    checks: tuple[RejectReason, ...]
    free_in_s: float


@dataclass(frozen=True, slots=True)
class Reject:
    """No instance may take the request now. `retry_after_s` is a prediction, in whole seconds.

    `wait_s` is that prediction before rounding, 0 if there is none; `drain_tps`: prompt tokens per
    second that the model's instances are assumed to take in. `past`: the instances that could serve
    `model`, all of them busy; none where that is not why. It stays beside a `reason` of the queue.
    """

    reason: RejectReason
    retry_after_s: int
    wait_s: float = field(default=0.0, compare=False)
    drain_tps: float = field(default=0.0, compare=False)
    past: tuple[PastCheck, ...] = field(default=(), compare=False)
    model: str = field(default="", compare=False)

    @property
    def check(self) -> RejectReason | None:
        """The check behind the refusal: that of the first instance to be free. None: there is none.

        The queue's own reasons say only how a wait ended, or why there was none.
        """
        if not self.past:
            return None
        return min(self.past, key=lambda one: one.free_in_s).checks[0]

    @property
    def why(self) -> str:
        """The reason, and how many instances are past the check behind it."""
        check = self.check
        if check is None:
            return str(self.reason)
        count = sum([check in one.checks for one in self.past])
        return f"{self.reason}; {check} {count} of {len(self.past)}"


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


NO_OFFLOADS = TransferRules(False, False, False, 0)
"""Of a request that is placed where it will be computed as well."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The core's part of the options; names and units are those of the command line."""

    prefill_throughput: float
    warm_threshold: int = 1500
    heavy_threshold: int = 8192
    placement: str = "affinity"
    offload_policy: str = "cost"
    offload_non_cached_tokens: int = 512
    shadow_policy: str | None = None
    kv_connector: str = "mooncake"
    kv_transfer_time_s: float = 0.5
    tpot_slo_s: float = 0.05
    prefill_timeout_s: float = 120.0
    kv_pin_timeout_s: float = 480.0
    hedge: bool = True
    session_ttl_s: float = 3600.0
    max_sessions: int = 100_000
    prefix_cache_bytes: int = 256 << 20
    max_num_batched_tokens: int = 8192
    slow_start_s: float = 30.0
    thresholds: Thresholds = field(default_factory=Thresholds)

"""The core's values: facts of a request, loads and candidates, reasons, refusals, limits.

Token counts are estimates of the engine's tokens unless a name says `cached` or `reported`; `None`
means unknown.

Values never change. Frequent types are not frozen dataclasses, which take three times as long to
make. Their `__init__` is written out: a dataclass's own stays interpreted when compiled (setup.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Final, NamedTuple

BYTES_PER_TOKEN_PRIOR: Final = 4.0
"""Bytes per token of prompts, typical of English and code in 100k-entry vocabularies; replaced by
each model's own ratio."""
MEDIA_PRIOR = {"image": 100.0, "audio": 200.0, "video": 1000.0, "file": 1000.0}
"""Tokens of an image, a sound, ... before an answer has counted them; a small picture, half a
minute."""
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
    """`--heavy-threshold` new tokens or more, computed on D; also an offload that fell back to
    D."""


class Reason(StrEnum):
    """Why a request was offloaded or colocated; scripts read these names."""

    P_IDLE_D_BUSY = "p_idle_d_busy"
    """Offloaded: D decodes, and P has less load. With `cost`: this pair of P and D is cheapest."""
    P_OVERLOADED = "p_overloaded"
    """Colocated: P has too much load. With `cost`: every possible P has a queue of over 4 s. With
    `seed-cost`: the offload would win if P were idle. With `seed-heuristic`: P has less load than
    D, but over 1.5 times the mean. That happens only when some instances cannot prefill."""
    D_IDLE = "d_idle"
    """Colocated: D decodes nothing that a prefill could delay."""
    BELOW_THRESHOLD = "below_threshold"
    """Colocated: too few new tokens for an offload (WARM, MEDIUM; with `threshold`:
    `--offload-non-cached-tokens`)."""
    P_BUSIER_THAN_D = "p_busier_than_d"
    """Colocated, `seed-heuristic`: P has at least as many ongoing tokens as D."""
    KV_PULL = "kv_pull"
    """Offloaded, `cost`: P has most of the prompt cached, usually as the old home."""
    MARGIN = "margin"
    """Colocated: an offload would gain too little. With `cost`: less than 15 %. With `seed-cost`:
    even if P were idle."""
    NO_PEER = "no_peer"
    """Colocated: no other free instance can prefill. P needs room to pin the KV, and a bootstrap
    server if the connector uses one."""
    PEER_PAST_THRESHOLD = "peer_past_threshold"
    """Colocated: every possible P is above a busy threshold, or its engine reports that it is
    busy."""
    SPLIT_ROLES = "split_roles"
    """Offloaded: no instance is below all busy thresholds, but P is below those of prefill and D
    below that of decode."""
    NO_CONNECTOR = "no_connector"
    """Colocated: `--kv-connector none`."""
    NOT_OFFLOADABLE = "not_offloadable"
    """Colocated: two legs could give another answer (several prompts, `n` above 1, `echo`, one
    output token, ...)."""
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
    """Why D was chosen; scripts read these names."""

    HOME = "home"
    """D is where the session lives."""
    HOME_LEFT = "home_left"
    """The session's home could be chosen, but D is better now."""
    HOME_AWAY = "home_away"
    """The session's home cannot be chosen: it is busy, ejected, or drains."""
    PREFIX = "prefix"
    """No home; no eligible instance has more of the prompt cached than D."""
    LOAD = "load"
    """No home; D has the least load or the lowest price. Cached tokens did not decide."""
    ONLY = "only"
    """No home; no other instance is eligible."""
    HOLDER = "holder"
    """D holds the stored response that the request is about."""
    RETRY = "retry"
    """Another instance has failed before; `first_failed_instance` in the request log names it."""


class Fallback(StrEnum):
    """Why an offload ended before the client's first byte; the request is then colocated."""

    P_REFUSED = "p_refused"
    """No connection to P could be made."""
    P_ERROR = "p_error"
    """P failed in another way: a reset, an error status, an answer that is not JSON or too long."""
    P_TIMEOUT = "p_timeout"
    """P took longer than the limit of its leg, `--prefill-timeout` at most."""
    P_LATE = "p_late"
    """D had computed the prompt itself before P was ready (a hedge)."""
    P_FINISH_REASON = "p_finish_reason"
    """P ended its leg with another finish reason than its one token."""
    P_GONE = "p_gone"
    """P went down while it computed, or while D fetched from it."""
    KV_PARAMS = "kv_params"
    """P's answer names no KV that D could fetch."""
    ENGINE_ID_UNKNOWN = "engine_id_unknown"
    """P's bootstrap server does not report its engine id."""
    TRANSFER_TIMEOUT = "transfer_timeout"
    """D had no first token in time after P was ready, `--transfer-timeout` at most."""
    D_FAILED = "d_failed"
    """D failed with P's KV and then computed the prompt itself."""


class FailureKind(StrEnum):
    """How an instance failed before its answer's first byte."""

    CONNECT = "connect"
    """The connection was refused: no server listens."""
    UNREACHABLE = "unreachable"
    """No connection: timeout, no route, no address, or no TLS."""
    RESET = "reset"
    """The instance reset or closed the connection without an answer."""
    BUSY = "busy"
    """The instance reports that it is at capacity: 429, 503 or 529."""
    SERVER_ERROR = "server_error"
    """Any other 5xx, or a stream whose first event is a server error."""
    TIMEOUT = "timeout"
    """No first token within `--ttft-timeout`."""
    LATE = "late"
    """No first token within the limit scaled by the prediction; another instance may be tried."""
    MALFORMED = "malformed"
    """The answer is not HTTP, or its beginning is the largest of too many."""
    REDIRECT = "redirect"
    """The answer is a redirect. It is never followed: any instance would give the same."""
    PEER_GONE = "peer_gone"
    """P went down while D fetched from it."""
    WENT_DOWN = "went_down"
    """The instance was ejected or removed while the request waited there."""
    NO_MODEL = "no_model"
    """A 404 whose text, which a client may have chosen, reports that the model is not served."""
    TOO_LONG = "too_long"
    """A 400 that reports a too short context, while an instance with a longer one is up."""
    NO_ROOM = "no_room"
    """The proxy has no socket left; the instance is not at fault."""
    HOLLOW = "hollow"
    """An answer without use: a refusal, a success without content, an end by `abort` or `error`."""
    KEY_REFUSED = "key_refused"
    """A 401 or 403 although the proxy sends its own key, `--instance-api-key`."""


class RejectReason(StrEnum):
    """Why a request was refused."""

    DECODE_BLOCKS = "decode_blocks"
    """Every instance is busy; the first to be free is above `--active-decode-blocks-threshold`."""
    PREFILL_TOKENS = "prefill_tokens"
    """Every instance is busy; the first to be free is above `--active-prefill-tokens-threshold`."""
    PREFILL_FRAC = "prefill_frac"
    """Every instance is busy; the first to be free is above
    `--active-prefill-tokens-threshold-frac`."""
    UPSTREAM_BUSY = "upstream_busy"
    """Every instance is busy; the first to be free reports it itself."""
    HEAT_CAP = "heat_cap"
    """Every instance is busy; the first to be free is hot: thermal control allows it no further
    request."""
    TTFT_SLO = "ttft_slo"
    """With `--late refuse`: wherever it went, the request's first token would be late, and on the
    first instance to be free because of the prompts before it."""
    TPOT_SLO = "tpot_slo"
    """With `--late refuse`: every instance would be late, and the first to be free with the tokens
    of its running streams."""
    NO_INSTANCE = "no_instance"
    """No instance that serves the model is up."""
    ASLEEP = "asleep"
    """Every instance that serves the model and is up is asleep or paused, as its engine reports."""
    HOLDER_DOWN = "holder_down"
    """The only instance that holds the stored response cannot be used now."""
    QUEUE_FULL = "queue_full"
    """The wait queue is full, or gave the request's place to another tenant."""
    QUEUE_DEADLINE = "queue_deadline"
    """The predicted wait is longer than `--max-queue-seconds`, or than `--late refuse` allows."""
    QUEUE_TIMEOUT = "queue_timeout"
    """The request waited for `--max-queue-seconds`, or as long as `--late refuse` allows."""
    DRAINING = "draining"
    """The proxy stopped while the request waited."""
    MEMORY = "memory"
    """The proxy is near `--max-memory-bytes`, or bodies without an answer have their part of it."""


NOBODY = frozenset({RejectReason.NO_INSTANCE, RejectReason.ASLEEP})
"""Refusals for lack of any instance: waiting in the queue would not help."""


class MoveCause(StrEnum):
    """Why a started stream is to migrate."""

    LOST = "lost"
    """The connection to its instance broke, or sent no HTTP, or the stream had no end marker."""
    SILENT = "silent"
    """Its instance was silent for its idle limit (`--idle-timeout` at most)."""
    ABORT = "abort"
    """The engine stops: finish reason `abort`."""
    ERROR = "error"
    """The engine failed: an error event, or finish reason `error`."""
    DIFFERS = "differs"
    """The next instance generated other text than the client has."""
    DRAIN = "drain"
    """Its instance drains: `DELETE /instances/{name}?drain=true&mode=migrate`."""
    HEAT = "heat"
    """Its instance is too hot: thermal control or an operator's order evicts it."""


PLANNED = (MoveCause.DRAIN, MoveCause.HEAT)
"""Migrations of streams that continue on their instance until the next one takes over."""


class Unmoved(StrEnum):
    """Why a started stream does not migrate (`--migration-limit`)."""

    STRUCTURED = "structured"
    """The output follows a grammar, whose state would be lost: `response_format`,
    `structured_outputs`, `guided_*`."""
    TOOLS = "tools"
    """The request has tools and no `tool_choice` of `none`: the tool-call parser would lose its
    state."""
    REASONING = "reasoning"
    """A reasoning parser or budget is in use: its state cannot be handed on. Or a chat has no text
    yet, and others have begun with reasoning."""
    CHOICES = "choices"
    """Several answers or prompts: `n`, `best_of`, a list of prompts."""
    BEAM = "beam"
    """Beam search: its beams are on the lost instance."""
    LOGPROBS = "logprobs"
    """Log probabilities are requested; the two APIs write them in different forms."""
    ECHO = "echo"
    """The prompt is a part of the answer."""
    EMBEDS = "embeds"
    """The prompt is not tokens: `prompt_embeds`."""
    MEDIA = "media"
    """The prompt or the answer has more than text: token ids do not cover it."""
    STORED = "stored"
    """The answer is stored on its instance."""
    SEED = "seed"
    """Sampling with a `seed`: its random numbers would start again. Not at temperature 0."""
    PENALTIES = "penalties"
    """Rules that count only what one request has generated: `presence_penalty`,
    `frequency_penalty`, `bad_words`, `repetition_detection`."""
    PLUGINS = "plugins"
    """Logits processors and other engine plug-ins may have a state: `vllm_xargs`."""
    STOP_INCLUDED = "stop_included"
    """Stop strings with `include_stop_str_in_output` or `return_token_ids`: how much of a stop
    string the engine has seen is unknown."""
    UNKNOWN_FIELD = "unknown_field"
    """The request has an unknown field that may change the answer."""
    NO_IDS = "no_ids"
    """The engine did not report the ids of all tokens, or of more than there can be."""
    TOO_LONG = "too_long"
    """Prompt and output are over `--migration-max-seq-len`."""
    MEMORY = "memory"
    """The memory for token ids is used up."""
    FINISHED = "finished"
    """The answer has its finish reason: only the events after it were lost."""
    LIMIT = "limit"
    """`--migration-limit` migrations were tried."""
    TIME = "time"
    """The rest of `--total-timeout` is too short for a migration, a stream to be evicted stood
    still for a second, or a lost one waited 300 s for its turn."""
    NO_INSTANCE = "no_instance"
    """No other instance can take it now."""
    DIFFERS = "differs"
    """The next instance generated other text than the client has."""


class Outcome(StrEnum):
    """The terminal state of a request."""

    OK = "ok"
    """The client has the whole answer, with a status below 400."""
    REJECTED = "rejected"
    """The client got a busy answer; `error` is the reason."""
    CLIENT_GONE = "client_gone"
    """The client left before the end, or read nothing for too long."""
    UPSTREAM_ERROR = "upstream_error"
    """The instances failed, or answered with a 5xx."""
    UPSTREAM_TIMEOUT = "upstream_timeout"
    """An instance, or the whole request, took longer than a limit."""
    UPSTREAM_TRUNCATED = "upstream_truncated"
    """The answer broke off after its first byte."""
    BAD_REQUEST = "bad_request"
    """The request was at fault: a 4xx by the proxy or an engine."""
    PROXY_STOPPED = "proxy_stopped"
    """The proxy stopped, and its drain time was over."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One addressed vLLM server."""

    name: str
    url: str
    bootstrap_url: str | None = None
    """Bootstrap server of its KV connector."""
    has_thermal_plugin: bool = False
    """Its engine enforces the cap of running requests that it is sent."""


@dataclass(slots=True, init=False)
class RequestFacts:
    """The facts of a request that a decision needs."""

    model: str
    session_id: str | None
    prompt_tokens: int
    """Estimated ISL."""
    block_hashes: Sequence[int]
    """Chained hashes of the prompt's blocks."""
    block_tokens: float
    """Tokens of a block."""
    offloadable: bool
    """False if two legs could give another answer than one request (n > 1, echo, several prompts,
    one output token, ...)."""
    tenant: str
    holder: str | None
    """The only instance that can serve the request, since it holds the stored response."""
    units: Sequence[int]
    """Chained hashes over units of the prompt's token ids; empty for text."""
    ends: Sequence[int]
    """Hashes of the prompt up to the ends of its messages; empty without messages."""
    part_tokens: float
    """Mean tokens of a cached prefix after its last whole block; 0 if prompts part at the end of a
    block."""
    media: Sequence[tuple[float, int]]
    """Place in blocks and tokens of images, sounds, ...; those of one kind in a block together."""
    client: str
    """The kind of client."""
    estimate: int = field(init=False, compare=False)
    """`prompt_tokens` before the correction by the engine's count of the session's last prompt."""
    scale: float = field(init=False, compare=False)
    """Factor of that correction."""
    refused_until_s: dict[str, float] | None = field(init=False, compare=False)
    """Until when each instance that has answered it with "busy" is busy for it; None: none has."""
    beyond_tokens: int
    """Context length of an instance that refused the request as too long."""
    own_id: str | None
    """An id that may be this request's own; it names a session once it has come back."""
    takes_turn: bool
    """Whether a prompt is computed, so that it can be a turn."""
    tails: Sequence[int]
    """Hashes of the last messages alone, up to the last of `ends`; 0 where they are too short."""

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
        self.refused_until_s = None

    @property
    def asker(self) -> str:
        """Whose request it is: its tenant's, or else its session's; empty where neither is told."""
        return self.tenant or self.session_id or ""

    def refuse(self, name: str, until_s: float) -> None:
        """An instance has said that it is busy: for this request it is, until then."""
        if self.refused_until_s is None:
            self.refused_until_s = {}
        self.refused_until_s[name] = until_s

    def alone_until_s(self, now_s: float) -> float | None:
        """Until when it waits alone, as instances have refused it; None: it does not."""
        if self.refused_until_s is None:
            return None
        return min([s for s in self.refused_until_s.values() if s > now_s], default=None)

    def hit_tokens(self, hit_blocks: int) -> int:
        """Expected tokens of a cached prefix of `hit_blocks` whole blocks; at most all but one."""
        if not hit_blocks:
            return 0
        tokens = int((hit_blocks * self.block_tokens + self.part_tokens) * self.scale + 0.5)
        if self.media:
            tokens += sum([each for at, each in self.media if at < hit_blocks])
        return max(0, min(tokens, self.prompt_tokens - 1))

    def blocks_of(self, tokens: float) -> float:
        """Number of blocks in the prompt's first `tokens` tokens; the inverse of `hit_tokens`."""
        block_tokens = self.block_tokens * self.scale
        for at, each in self.media:
            if tokens <= at * block_tokens:
                break
            tokens = max(at * block_tokens, tokens - each)
        return tokens / block_tokens


@dataclass(slots=True, init=False)
class Load:
    """One instance's ongoing tokens at one moment, from this proxy's own leases."""

    prefill_tokens: int
    """New tokens of requests before their first token."""
    prefill_requests: int
    inbound_tokens: int
    """KV that a prefill server will hand over."""
    inbound_requests: int
    decode_tokens: int
    """Context of running streams."""
    decode_requests: int
    pinned_tokens: int
    """KV held for a peer until it is fetched; it is not work, so not in `ongoing_tokens`."""
    pinned_requests: int
    shared_tokens: int
    """Part of `decode_tokens` that other sessions' prompts begin with too, such as a system
    prompt."""
    shared_requests: int
    cached_tokens: int
    """Cached tokens of the requests of `prefill_tokens`, except those shared with running
    streams."""
    ongoing_tokens: int = field(init=False, compare=False)
    """Prefill backlog plus the KV of running and inbound requests."""
    held_tokens: int = field(init=False, compare=False)
    """KV in use: ongoing, pinned and cached tokens; shared tokens count once."""
    shared_once_tokens: int = field(init=False, compare=False)
    """Mean length of the prefix that streams share; a prompt that begins with it needs no room for
    it."""

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
        """Number of requests being prefilled or decoded, or inbound: all but pinned KV."""
        return self.prefill_requests + self.inbound_requests + self.decode_requests

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not (self.ongoing_tokens or self.pinned_tokens)


NONE_UNRELEASED = (0, 0)
"""No hand-over, no tokens: `Candidate.unreleased` of nearly every instance."""


class PastCheck(NamedTuple):
    """A busy instance with the checks that it fails, at least one."""

    instance: str
    checks: tuple[RejectReason, ...]
    free_in_s: float
    """Predicted seconds until it fails none."""


@dataclass(frozen=True, slots=True)
class Reject:
    """A refusal: no instance can take the request now."""

    reason: RejectReason
    retry_after_s: int
    """Predicted wait in whole seconds."""
    wait_s: float = field(default=0.0, compare=False)
    """That prediction before rounding, 0 if there is none."""
    drain_tps: float = field(default=0.0, compare=False)
    """Assumed prompt tokens per second of the model's instances."""
    past: tuple[PastCheck, ...] = field(default=(), compare=False)
    """Instances that could serve `model`, all of them busy; empty if that is not the reason. Kept
    beside a `reason` of the queue."""
    model: str = field(default="", compare=False)
    is_own: bool = field(default=False, compare=False)
    """An instance refuses this client's requests as busy, and is open to others."""

    @property
    def check(self) -> RejectReason | None:
        """The check of the instance that will be free first; None without one.

        The queue's own reasons only tell how a wait ended, or why there was none.
        """
        if not self.past:
            return None
        return min(self.past, key=lambda one: one.free_in_s).checks[0]

    @property
    def why(self) -> str:
        """The reason, and the number of instances that fail the check behind it."""
        check = self.check
        if check is None:
            return str(self.reason)
        count = sum([check in one.checks for one in self.past])
        return f"{self.reason}; {check} {count} of {len(self.past)}"


@dataclass(frozen=True, slots=True)
class TransferRules:
    """Limits of the KV connector: whether to offload at all, and to which P."""

    can_offload: bool
    needs_bootstrap: bool
    """P must have a bootstrap server."""
    pins: bool
    """P keeps the prompt's blocks for D."""
    max_parallel: int
    """Most prompts whose blocks P keeps at once."""


NO_OFFLOADS = TransferRules(False, False, False, 0)
"""Rules for a request that is computed where it is placed."""


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
        """A copy with unset thresholds taken from `others`."""
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
    ttft_slo_s: float = 2.0
    tpot_slo_s: float = 0.05
    late: str = "serve"
    prefill_timeout_s: float = 120.0
    kv_pin_timeout_s: float = 480.0
    hedge: bool = True
    session_ttl_s: float = 3600.0
    max_sessions: int = 100_000
    prefix_cache_bytes: int = 256 << 20
    max_num_batched_tokens: int = 8192
    slow_start_s: float = 30.0
    thresholds: Thresholds = field(default_factory=Thresholds)

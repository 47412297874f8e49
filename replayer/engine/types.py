"""Types of the engine model: options, jobs, the state of a request, events.

All times are engine seconds on the driver's clock; all lengths are tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from replayer.engine.costs import IntakeCost, StepCost, TransferCost
from replayer.engine.kvcache import Holding

FinishReason = Literal["length", "stop", "abort", "error"]
NULL_BLOCKS = 1
"""Blocks that vLLM's pool counts and reports but never uses: its first block is a placeholder."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Size and speed of one engine; the defaults stand for an 8B model on one 80 GB H100.

    24,576 blocks of 16 tokens are 393,216 tokens = 48 GiB of KV at 128 KiB per token, the rest
    of 80 GB after 16 GB of weights, activations and vLLM's 10 % reserve. Token budget and sequence
    cap are vLLM's defaults for an API server on this GPU. 480 s and 20 slots are Mooncake's
    VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT and 2 x num_workers; a receiver waits 60 s longer.
    """

    block_size: int = 16
    num_blocks: int = 24_576
    max_num_batched_tokens: int = 8_192
    max_num_seqs: int = 256
    max_model_len: int = 131_072
    step: StepCost = field(default_factory=StepCost)
    transfer: TransferCost = field(default_factory=TransferCost)
    intake: IntakeCost = field(default_factory=IntakeCost)
    sender_slots: int = 20
    abort_timeout_s: float = 480.0
    receive_grace_s: float = 60.0
    recompute_failed_loads: bool = True
    reads_anything: bool = False
    """Receivers read the sender's memory (NIXL) instead of asking it to send (Mooncake)."""
    warm_up_steps: int = 0
    warm_up_factor: float = 1.0
    """A fresh engine's first prefill steps take so many times as long: kernels are compiled and
    tuned at their first use."""

    def __post_init__(self) -> None:
        """Refuse sizes with which a valid request could never run."""
        if self.max_model_len > self.num_blocks * self.block_size:
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the KV cache: "
                f"{self.num_blocks} blocks of {self.block_size} tokens"
            )

    def alone_s(self, prompt_tokens: int) -> float:
        """Seconds to the first token of a prompt of which nothing is cached, on an idle engine."""
        step, steps = self.step, -(-prompt_tokens // self.max_num_batched_tokens)
        whole_s = step.step_s(prompt_tokens, prompt_tokens * prompt_tokens / 2, 0, 0, firsts=1)
        each_s = step.a0 + step.prefill_s
        return self.intake.delay_s(prompt_tokens) + whole_s + (steps - 1) * each_s


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """The source of a decode leg's KV: engine, transfer, and address over HTTP."""

    engine_id: str
    transfer_id: str
    bootstrap_url: str = ""


def no_output_hashes(_output_tokens: int) -> Sequence[int]:
    """Return no hashes, for a job whose generated blocks no later request can hit."""
    return ()


@dataclass(slots=True)
class Job:
    """One request as the engine sees it.

    `block_hashes` has one chained hash per full prompt block, at the engine's block size.
    `output_hashes(n)` returns the hashes of the blocks completed by the first n output tokens; it
    is called once, when the request releases its blocks. `token_ids(start, stop)` returns ids of
    prompt and output, None where nobody knows them. Without output tokens (an embedding) only the
    prompt is computed. `send_as` makes it a prefill leg whose KV
    is kept for that transfer id, `fetch` a decode leg that waits for another engine's KV. `way_s`:
    what it takes to reach the engine, beside the engine's own intake.
    """

    request_id: str
    prompt_tokens: int
    block_hashes: Sequence[int]
    output_tokens: int
    finish_reason: Literal["length", "stop"] = "length"
    output_hashes: Callable[[int], Sequence[int]] = no_output_hashes
    token_ids: Callable[[int, int], list[int]] | None = None
    send_as: str | None = None
    fetch: RemoteKv | None = None
    way_s: float = 0.0


@dataclass(slots=True, eq=False)
class SimRequest:
    """The state of one request; drivers read it, only the engine writes it."""

    job: Job
    arrived_s: float
    hashes: Sequence[int]
    known_tokens: int
    """Prompt and output so far."""
    holding: Holding = field(default_factory=Holding)
    computed_tokens: int = 0
    """Tokens whose KV is in place."""
    hashed_blocks: int = 0
    room_tokens: int = 0
    """Capacity of the held blocks."""
    output_tokens: int = 0
    local_hit_tokens: int = 0
    """Prefix hit at the first scheduling."""
    external_tokens: int = 0
    """Tokens that another engine or a store delivered."""
    sent_tokens: int = 0
    """Tokens pulled from this engine."""
    preemptions: int = 0
    fetch_pending: bool = False
    fetch_tokens: int = 0
    """End of the part of the prompt that another engine or a store was to deliver."""
    refused_at_release: int | None = None
    """The pool's release count when it last had no room for the request."""
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    """When its last token came, where `Iterations` counts."""
    finished_s: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def prompt_computed_tokens(self) -> int:
        """Prompt tokens that this engine computed itself."""
        return self.job.prompt_tokens - self.local_hit_tokens - self.external_tokens


@dataclass(slots=True)
class Counters:
    """Totals of an engine since its start, in tokens unless the name says otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    prompt_computed: int = 0
    prompt_local_hits: int = 0
    prompt_external: int = 0
    generated: int = 0
    preemptions: int = 0
    failed_receives: int = 0
    steps: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: {"length": 0, "stop": 0, "abort": 0, "error": 0}
    )


@dataclass(frozen=True, slots=True)
class Pull:
    """A request for `tokens` of KV under `transfer_id`; `receiver` is returned in PullServed."""

    transfer_id: str
    tokens: int
    receiver: object


@dataclass(slots=True)
class FirstToken:
    """A request produced its first output token."""

    at_s: float
    request: SimRequest


@dataclass(slots=True)
class Finished:
    """The end of a request; a prefill leg's blocks may stay pinned (see Unpinned)."""

    at_s: float
    request: SimRequest


@dataclass(frozen=True, slots=True)
class PullWanted:
    """A decode leg waits for `tokens` of KV from `remote`, until `Engine.pull_done` is called."""

    at_s: float
    request: SimRequest
    remote: RemoteKv
    tokens: int


@dataclass(frozen=True, slots=True)
class PullServed:
    """This engine has answered a pull; `ok`: the KV was delivered completely."""

    at_s: float
    pull: Pull
    ok: bool


@dataclass(frozen=True, slots=True)
class Unpinned:
    """A prefill leg's KV was pulled (`request.sent_tokens` > 0), refused or timed out."""

    at_s: float
    request: SimRequest


Event = FirstToken | Finished | PullWanted | PullServed | Unpinned

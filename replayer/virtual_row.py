"""What a virtual run tells of each request, and of the whole. Times in virtual seconds."""

import math
from dataclasses import dataclass, field

from replayer.sim_cost import IntakeCost
from replayer.sim_types import EngineOptions


@dataclass(frozen=True, slots=True)
class VirtualOptions:
    """The fleet and the client. One engine per entry of `engines`.

    `timeout_s`: the client gives up when no first token has come; `prefill_timeout_s` and
    `transfer_timeout_s` are the proxy's own. `estimate_factor` is the proxy's count of prompt
    tokens over the engine's. A Reject is retried after its Retry-After unless `retry_rejects` is
    off; then it is a failure. `until_s` cuts the run: what has not ended by then has no `end_s`,
    what has not begun has no row. `proxy`: from the client's sending to the decision.
    """

    engines: tuple[EngineOptions, ...]
    block_tokens: int
    timeout_s: float = 60.0
    prefill_timeout_s: float = 120.0
    transfer_timeout_s: float = 30.0
    scrape_interval_s: float = 2.0
    estimate_factor: float = 1.0
    retry_rejects: bool = True
    until_s: float = math.inf
    proxy: IntakeCost = field(default_factory=IntakeCost)
    model: str = "sim"


@dataclass(slots=True)
class VirtualRow:
    """One request. `arrival_s`: when the client sent it first; `outcome`: ok, rejected, timeout.

    `moved_tokens` is KV that crossed between instances; `computed_tokens` what P and D prefilled.
    `hedge`: who won, local or peer, where D computed as well because P was late.
    """

    index: int
    session_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    new_tokens: int
    ttft_s: float | None = None
    end_s: float | None = None
    outcome: str = "ok"
    route_class: str = ""
    reason: str = ""
    decode: str = ""
    prefill: str | None = None
    predicted_ttft_s: float | None = None
    estimated_new_tokens: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    computed_tokens: int = 0
    moved_tokens: int = 0
    rejects: int = 0
    fallback: str | None = None
    hedge: str | None = None

    @property
    def e2e_s(self) -> float | None:
        """Seconds from sending to the last token; None for a request that failed."""
        return None if self.end_s is None else self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two."""
        if self.end_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.arrival_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(slots=True)
class VirtualRun:
    """All rows in the order of the load; counters over all engines."""

    rows: list[VirtualRow]
    makespan_s: float = 0.0
    preemptions: int = 0
    evicted_blocks: int = 0
    drift: int = 0
    moved_bytes: int = 0
    used_ratio: list[float] = field(default_factory=list)

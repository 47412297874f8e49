"""The requests of a virtual run while they live: what they wait for, where they are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from proxy.core.routing.route import Route
from proxy.core.types import RequestFacts
from replayer.sim_types import Job, RemoteKv, SimRequest
from replayer.virtual_plan import Planned
from replayer.virtual_row import VirtualOptions, VirtualRow


class Kind(IntEnum):
    """What is due: a request (again), the end of a client's or the proxy's patience, a scrape."""

    ARRIVAL = 0
    GIVE_UP = 1
    LEG_LATE = 2
    SCRAPE = 3
    PREFILL_LATE = 4


@dataclass(slots=True, eq=False)
class Live:
    """A request between arrival and end; `leg` is what an engine now works on for it.

    `hedge`: the same on D, while P is late.
    """

    index: int
    row: VirtualRow
    facts: RequestFacts
    route: Route | None = None
    admitted_s: float = 0.0
    leg: SimRequest | None = None
    engine: int = 0
    prefilling: bool = False
    legs: int = 0
    hedge: SimRequest | None = None
    charged_tokens: int = 0

    @property
    def transfer_id(self) -> str:
        """Names the one hand-over that a request has."""
        return f"xfer-{self.index}"


@dataclass(slots=True)
class Waits:
    """Which requests of the load wait for how many others."""

    planned: Sequence[Planned]
    open: list[int] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    followers: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, one in enumerate(self.planned):
            self.open.append(len(one.wait_for))
            self.ready_s.append(one.earliest_s)
            for other in one.wait_for:
                self.followers.setdefault(other, []).append(index)

    def ended(self, index: int, now_s: float) -> list[int]:
        """Note an end; gives the requests that may now start, at their `ready_s`."""
        free = []
        for other in self.followers.pop(index, ()):
            self.open[other] -= 1
            self.ready_s[other] = max(self.ready_s[other], now_s + self.planned[other].delay_s)
            if not self.open[other]:
                free.append(other)
        return free


def facts_of(planned: Planned, options: VirtualOptions) -> RequestFacts:
    """The request as the proxy's estimates have it."""
    turn, factor = planned.turn, options.estimate_factor * planned.estimate_factor
    return RequestFacts(
        model=options.model,
        session_id=planned.session_id,
        prompt_tokens=max(1, round(turn.prompt_tokens * factor)),
        block_hashes=planned.hashes(),
        block_tokens=options.block_tokens * factor,
        offloadable=turn.output_tokens > 1,
    )


def new_row(index: int, planned: Planned, now_s: float) -> VirtualRow:
    """The row of a request that has just been sent."""
    turn = planned.turn
    return VirtualRow(
        index, planned.session_id, now_s, turn.prompt_tokens, turn.output_tokens, turn.new_tokens
    )


def job_of(
    live: Live, output_tokens: int, *, send_as: str | None = None, fetch: RemoteKv | None = None
) -> Job:
    """The request as an engine sees it: a prefill leg, a leg that fetches, or the whole."""
    return Job(
        request_id=f"{live.index}.{live.legs}",
        prompt_tokens=live.row.prompt_tokens,
        block_hashes=live.facts.block_hashes,
        output_tokens=output_tokens,
        send_as=send_as,
        fetch=fetch,
    )

"""What a request's flow tells its driver: effects, what comes next, and the values in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, Generic, TypeVar

from proxy.core.fleet.health import Change
from proxy.core.types import FailureKind, Fallback, Instance, Unmoved

ANSWER = "answer"
"""The option of the limit on an answer in one piece: `--answer-timeout`."""


class IllegalStepError(Exception):
    """A driver reported an event that cannot come in the flow's state."""


@dataclass(slots=True, init=False)
class LegLimit:
    """Time limit of a leg to its first event."""

    option: str
    """The command line option that holds the cap, without `--` and `-timeout`."""
    seconds: float
    """The limit. If below `cap_s`, it counts only while another instance could be tried."""
    cap_s: float
    """The limit without an alternative: the rest of `whole_s` after earlier attempts."""
    whole_s: float
    """The option's value."""
    silence_s: float
    """Longest silence of an answer in one piece once it has begun."""

    def __init__(
        self,
        option: str,
        seconds: float,
        cap_s: float,
        whole_s: float | None = None,
        silence_s: float = math.inf,
    ) -> None:
        self.option, self.seconds, self.cap_s = option, seconds, cap_s
        self.whole_s = cap_s if whole_s is None else whole_s
        self.silence_s = silence_s

    @property
    def kind(self) -> FailureKind:
        """The failure kind of a leg that reached this limit."""
        return FailureKind.LATE if self.seconds < self.cap_s else FailureKind.TIMEOUT


@dataclass(frozen=True, slots=True)
class LegCaps:
    """The options that cap legs: `--ttft-`, `--prefill-`, `--transfer-` and `--idle-timeout`.

    `moves`: `--migration-limit`, how many legs may go on with a stream that has begun. `answer_s`:
    `--answer-timeout`, which stands in for `ttft_s` where the answer comes in one piece.
    """

    ttft_s: float
    prefill_s: float
    transfer_s: float
    idle_s: float
    moves: int = 0
    answer_s: float = math.inf


class LegFailure:
    """The failure of a leg; `busy_s`: the pause that an engine at capacity asked for.

    `status`: of the engine's answer, also inside of a 200; None where it gave none.
    """

    __slots__ = ("busy_s", "detail", "kind", "status")

    def __init__(
        self,
        kind: FailureKind,
        detail: str = "",
        busy_s: float = 1.0,
        status: int | None = None,
    ) -> None:
        self.kind, self.detail, self.busy_s, self.status = kind, detail, busy_s, status


class ReleaseResult(StrEnum):
    """The result for KV on P that will not be fetched."""

    RELEASED = "released"
    """P was told to free it."""
    FAILED = "failed"
    """No instance could be reached, or the instance asked did not refuse the leg."""
    STRANDED = "stranded"
    """No instance could be asked, or the KV had no name."""
    UNKNOWN = "unknown"
    """A leg ended without an answer while P may have had the KV."""


class LeftKv(Enum):
    """KV that a prefill leg without a usable answer may have left on P."""

    NONE = "none"
    NAMED = "named"
    """KV that the driver can name, so that it can be released."""
    UNNAMED = "unnamed"
    """KV that only P's answer would have named."""


@dataclass(slots=True)
class SendPrefill:
    """Ask P to compute the prompt and keep its KV. It is late at `hedge_at_s` (inf: never)."""

    instance: Instance
    limit: LegLimit
    hedge_at_s: float


@dataclass(slots=True, init=False)
class SendDecode:
    """Ask D; with `fetch_from` it pulls that instance's KV, without it computes the prompt.

    `is_repeat`: another attempt may have reached an engine under the request's own id. `warms`: a
    stream is to move there, and its prompt takes long: it runs on where it is until D has begun,
    and is moved then (`RequestFlow.move_again`). Otherwise it stands still meanwhile.
    """

    instance: Instance
    fetch_from: Instance | None
    limit: LegLimit
    is_repeat: bool
    warms: bool

    def __init__(
        self,
        instance: Instance,
        fetch_from: Instance | None,
        limit: LegLimit,
        *,
        is_repeat: bool,
        warms: bool = False,
    ) -> None:
        self.instance, self.fetch_from = instance, fetch_from
        self.limit, self.is_repeat, self.warms = limit, is_repeat, warms


@dataclass(slots=True)
class SendHedge:
    """Ask D to compute the prompt beside P, whose leg goes on."""

    instance: Instance
    limit: LegLimit


@dataclass(slots=True)
class AwaitHedge:
    """P's leg has failed: what D computes already is now the decode leg."""


@dataclass(slots=True)
class CancelHedge:
    """P has answered first: end what D computes."""


@dataclass(slots=True)
class CancelPrefill:
    """D has answered first: end P's leg."""


@dataclass(slots=True)
class HangUpPrefill:
    """Half-close the connection to P: it stops, or what it still answers is heard.

    Where that cannot be done, end the leg.
    """


@dataclass(slots=True)
class KeepDecode:
    """The client has left while D fetches: let D begin, end its leg, report LEFT_DECODE_OVER.

    A D that is cut earlier never tells P to free the KV.
    """


@dataclass(slots=True)
class CancelDecode:
    """End D's leg, of which D has seen nothing."""


@dataclass(slots=True)
class ReleaseKv:
    """Free KV on P that will not be fetched, by one of `ask`; then report the result.

    An engine that refuses a decode leg tells its P to let go (vLLM since 0.22). `ask`: names, the
    most likely first; the next one where one cannot be reached.
    """

    prefill: Instance
    ask: list[str]


@dataclass(slots=True)
class KvUnreleased:
    """P may hold KV that will not be fetched, and no instance can be asked: for counters."""

    result: ReleaseResult


@dataclass(slots=True)
class Pause:
    """Wait, then report PAUSE_OVER."""

    seconds: float


@dataclass(slots=True)
class GiveUp:
    """Nothing is left to try: the client gets the last failure."""


@dataclass(slots=True)
class NotMoved:
    """A started stream does not migrate: it stays on its instance, or ends."""

    why: Unmoved


@dataclass(slots=True)
class FellBack:
    """The offload has ended, D computes; for counters, and to forget what P said of itself."""

    why: Fallback
    prefill: Instance | None


@dataclass(slots=True)
class HedgeEnded:
    """The end of a hedge; `winner`: "peer" (P), "local" (D), or "none" if D's attempt failed."""

    winner: str


@dataclass(slots=True)
class Retried:
    """Another attempt begins, after a failure of this kind."""

    kind: FailureKind


@dataclass(slots=True)
class RetryRefused:
    """The budget for repetitions is used up."""


@dataclass(slots=True)
class InstanceFailed:
    """A failure counted against an instance; `change`: its consequence, if any."""

    name: str
    change: Change | None
    detail: str


Effect = (
    CancelHedge
    | CancelPrefill
    | ReleaseKv
    | KvUnreleased
    | FellBack
    | HedgeEnded
    | Retried
    | RetryRefused
    | InstanceFailed
)
"""What a driver does at once, and goes on: an event may have any number of them."""
NO_EFFECTS: Final[Sequence[Effect]] = ()
Leg = SendPrefill | SendDecode
"""The first leg of a request."""
Retry = SendDecode | Pause | GiveUp
"""What comes after a decode leg that has failed."""
Move = SendDecode | NotMoved
"""What comes of a stream that is to go on elsewhere."""
Then = TypeVar("Then", covariant=True)


class Step(Generic[Then]):
    """The flow's answer to an event that ends a leg: what is done now, and what comes then.

    An event that cannot have both returns the one: its effects, or what comes next.
    """

    __slots__ = ("effects", "next")

    def __init__(self, effects: Sequence[Effect], then: Then) -> None:
        self.effects = effects
        """Performed at once, in this order. None of them has an answer."""
        self.next = then
        """The one thing that the request then waits for, or its end."""

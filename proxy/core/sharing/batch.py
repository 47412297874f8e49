"""The form of what one replica tells the others: rows of absolute values, and events.

A replica is a proxy process that takes requests. Only it writes its rows, one per instance, and the
newest one counts. So a batch that is lost is repaired by the next that has the row. An event of a
prompt in a cache, or of a session's turn, is told once. What a lost one would have said is not
known then. That its use or turn has ended is, by the list of those that are open. Times are ages at
the batch's writing, as no two replicas have the same clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from proxy.core.accounts.lease import Numbers

MOST_HASHES: Final = 1 << 14
"""Hashes of all prompts in a batch, 128 KiB; of a longer prompt the first ones are told."""
MOST_EVENTS, MOST_TURNS = 512, 256
"""What more there is comes in the next batch."""
MOST_OPEN: Final = 1 << 13
"""Uses, and turns, of one replica that are open."""
MOST_NAME: Final = 256
"""Bytes of a session's or tenant's name; what has a longer one is not told."""
MOST_PREFILLS, ALL_PREFILLS = 64, 2048
"""Prefills of a row, and of a batch; the later ones of a longer queue are told as one."""
NOTHING: Final = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""The numbers of an instance on which a replica has nothing."""


class Prefill(NamedTuple):
    """A reserved prefill. `key`: its writer's, which nobody else reads a meaning into.

    The last of a row may stand for several, by the sum of their work; another sum has another key.
    """

    key: tuple[int, int]
    work_s: float
    share_s: float
    age_s: float


class Row(NamedTuple):
    """What a replica has on an instance.

    `numbers`: of its own leases. `prefills`: those that it has reserved there. `recent`,
    `recent_s`, `recent_age_s`: how many it had lately, and for how long they kept the instance
    busy. `turn_age_s`: since the last of these prefills ended that was the next in order there.
    """

    name: str
    numbers: Numbers
    prefills: tuple[Prefill, ...]
    recent: float
    recent_s: float
    recent_age_s: float
    turn_age_s: float


class Course(IntEnum):
    """What has happened to a prompt in a cache, as `core.kvcache.reuse` has it."""

    BEGUN = 0
    RECEIVED = 1
    COMPUTED = 2
    REPORTED = 3
    RELEASED = 4
    ENDED = 5


class Prompt(NamedTuple):
    """A prompt as far as caches are concerned, on the instance `name`."""

    name: str
    hashes: Sequence[int]
    block_tokens: float
    tokens: int
    tenant: str


class Event(NamedTuple):
    """What has happened to a use, which its writer has numbered.

    `prompt`: of one that begins. `amount`: cached ratio as REPORTED, tokens of the answer as
    RELEASED.
    """

    course: Course
    use: int
    prompt: Prompt | None
    amount: float


class Turn(NamedTuple):
    """A session's turn, which its writer has numbered: placed, moved, or over.

    `key`: the session's, where the turn is placed, else empty. `name`: the instance where it is
    now, empty once it is over. `tokens`: of its prompt, or at the end of its context; None where it
    failed. `shared_tokens`: that others had there.
    """

    number: int
    key: str
    name: str
    tokens: int | None
    shared_tokens: int
    tenant: str


class Batch(NamedTuple):
    """What a replica has to say at one moment; its `number` counts its batches.

    `is_whole`: it has a row of every instance on which its writer has something, and in `uses` and
    `running` the numbers of all uses and turns that are open. `is_gone`: its writer's last one.
    """

    writer: str
    number: int
    rows: tuple[Row, ...]
    events: tuple[Event, ...]
    turns: tuple[Turn, ...]
    is_whole: bool
    uses: tuple[int, ...]
    running: tuple[int, ...]
    is_gone: bool = False

    @property
    def has_news(self) -> bool:
        """Whether it says more than that its writer is there."""
        return bool(self.events or self.turns) or not self.is_whole

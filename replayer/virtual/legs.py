"""Runs the legs of a recorded run on engine models, without a router.

Engine and sending time of every leg are the log's, so that a wrong prediction does not cause
further ones. `analysis.check` fits the engines' constants with this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from replayer.engine.engine import Engine, deliver
from replayer.engine.types import EngineOptions, Job, RemoteKv, SimRequest


@dataclass(frozen=True, slots=True)
class RecordedLeg:
    """A request to one engine, by its number in the fleet.

    `sends` and `fetches` are ids of a hand-over; `fetches_from` is the number of its sender.
    """

    engine: int
    sent_s: float
    prompt_tokens: int
    blocks: tuple[int, ...]
    output_tokens: int
    sends: str | None = None
    fetches: str | None = None
    fetches_from: int | None = None

    def job(self, name: str) -> Job:
        """Make the engine's job for this leg."""
        fetch = None
        if self.fetches is not None:
            fetch = RemoteKv(str(self.fetches_from), self.fetches)
        return Job(
            request_id=name,
            prompt_tokens=self.prompt_tokens,
            block_hashes=self.blocks,
            output_tokens=self.output_tokens,
            send_as=self.sends,
            fetch=fetch,
        )


def run_legs(legs: Sequence[RecordedLeg], engines: Sequence[EngineOptions]) -> list[SimRequest]:
    """Run every leg to its end, in virtual time; returns their final states in the same order."""
    fleet = [Engine(one) for one in engines]
    by_name = {str(number): engine for number, engine in enumerate(fleet)}
    place = {engine: number for number, engine in enumerate(fleet)}
    due_s = [math.inf] * len(fleet)
    order = sorted(range(len(legs)), key=lambda at: legs[at].sent_s)
    made: dict[int, SimRequest] = {}
    at = 0
    while True:
        next_s = legs[order[at]].sent_s if at < len(order) else math.inf
        now_s = min(next_s, *due_s)
        if now_s == math.inf:
            return [made[number] for number in range(len(legs))]
        dirty = {number for number, one_s in enumerate(due_s) if one_s <= now_s}
        while at < len(order) and legs[order[at]].sent_s <= now_s:
            leg = legs[order[at]]
            made[order[at]] = fleet[leg.engine].submit(leg.job(str(order[at])), now_s)
            dirty.add(leg.engine)
            at += 1
        while dirty:
            number = dirty.pop()
            for event in fleet[number].advance(now_s):
                other = deliver(event, fleet[number], by_name, now_s)
                if other is not None:
                    dirty.add(place[other])
            due_s[number] = fleet[number].next_event_s()

"""Carries pulls between engine models of one process, for virtual time and tests.

The wire itself takes no time here: what a transfer costs is the sender's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from replayer.engine import Engine
from replayer.sim_types import Event, Pull, PullServed, PullWanted, SimRequest


@dataclass(frozen=True, slots=True)
class _Receiver:
    engine: Engine
    request: SimRequest


def deliver(
    event: Event, source: Engine, engines: Mapping[str, Engine], now_s: float
) -> Engine | None:
    """Pass an event of `source` on to the engine it concerns, and return that engine.

    `engines` maps engine ids to the living engines; asking one that is not there fails at once, as
    when its bootstrap server refuses. Returns None for events that concern nobody else.
    """
    match event:
        case PullWanted():
            sender = engines.get(event.remote.engine_id)
            if sender is None:
                source.pull_done(event.request, now_s, ok=False)
                return source
            receiver = _Receiver(source, event.request)
            sender.pull(Pull(event.remote.transfer_id, event.tokens, receiver), now_s)
            return sender
        case PullServed(pull=Pull(receiver=_Receiver() as to)):
            to.engine.pull_done(to.request, now_s, ok=event.ok)
            return to.engine
        case _:
            return None

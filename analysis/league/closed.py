"""A closed loop of sessions as a load of the league: a fixed number at a time and in total.

It is the load of a comparison on running engines: every system answers the same requests, and a
slow one takes longer for them. Its sessions are short, so that a run ends within minutes. They have
only their first turns and shorter answers; sub-agents are separate sessions; sessions with a very
long prompt are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from replayer.arguments import InputError, names, positive_count
from replayer.trace.loaders import TraceRequest, read_trace
from replayer.virtual.load import LeftOut, Source, as_source

REGIME = "closed"
TURNS, OUTPUT_TOKENS, LONGEST_PROMPT_TOKENS = 12, 400, 200_000
"""Kept parts of a session: its first turns, each answer's first tokens; no longer prompts."""
KV_TOKENS = 262_144
HORIZON_S = 150.0
"""In the place of a load's horizon, for engines that join during it; most runs take longer."""


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """`sessions` at a time, `units` of them in all."""

    sessions: int
    units: int


LOADS = {"low": ClosedLoad(8, 16), "mid": ClosedLoad(12, 24), "high": ClosedLoad(20, 40)}


def closed_loads(text: str) -> tuple[ClosedLoad, ...]:
    """Read loads comma separated: a name of LOADS, or SESSIONS/UNITS."""
    found = tuple(_closed_load(name) for name in names(text))
    if not found:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(LOADS)} or SESSIONS/UNITS")
    return found


def _closed_load(name: str) -> ClosedLoad:
    if name in LOADS:
        return LOADS[name]
    sessions, slash, units = name.partition("/")
    if not slash:
        raise argparse.ArgumentTypeError(
            f"must be of {', '.join(LOADS)} or SESSIONS/UNITS, not {name!r}"
        )
    return ClosedLoad(positive_count(sessions), positive_count(units))


def closed_source(path: Path, block_tokens: int | None, kv_tokens: int) -> Source:
    """Read a trace's sessions, cut as the module says; a session has room in an engine's KV."""
    sessions: dict[str, list[TraceRequest]] = {}
    for request in read_trace(path):
        if request.session_id is None:
            raise InputError(f"{path}: must have sessions (session_id) for a closed loop")
        sessions.setdefault(request.session_id, []).append(request)
    most = min(LONGEST_PROMPT_TOKENS, kv_tokens - OUTPUT_TOKENS)
    heads = [turns[:TURNS] for turns in sessions.values()]
    kept = [head for head in heads if _longest(head) <= most]
    lost = [head for head in heads if _longest(head) > most]
    if not kept:
        raise InputError(f"{path}: must have a session whose prompts have at most {most:,} tokens")
    left_out = LeftOut(
        sum(len(head) for head in lost), len(lost), min(map(_longest, lost), default=0)
    )
    source = as_source([turn for head in kept for turn in _alone(head)], block_tokens)
    return replace(source, left_out=left_out)


def _longest(head: Iterable[TraceRequest]) -> int:
    return max(request.input_tokens or 1 for request in head)


def _alone(head: list[TraceRequest]) -> list[TraceRequest]:
    """A session's turns, each waiting for the one before it only."""
    waits: list[tuple[str, ...]] = [()]
    waits += [(before.request_id,) for before, _turn in pairwise(head)]
    return [
        replace(
            turn,
            wait_for=wait_for,
            parent_session_id=None,
            output_tokens=min(turn.output_tokens, OUTPUT_TOKENS),
        )
        for turn, wait_for in zip(head, waits, strict=True)
    ]

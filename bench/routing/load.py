"""The work of a run: fleet shapes, loads, and the sessions that a seed draws from a trace.

A load is a closed loop of fixed work: so many sessions at a time, twice as many in all, each with
its first turns. All systems answer the same requests of a seed. `low` fits the fleet's KV if it is
placed evenly, `high` does not, `mid` nearly does; so the loads are scaled by the fleet's KV, not by
its number of engines.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from bench.routing.engine import BLOCK_TOKENS
from bench.routing.environments import RoutingError
from replayer.trace.loaders import TraceRequest, block_ids, read_trace

TRACE = Path(str(files("replayer") / "data" / "agentic_sessions.trace.jsonl.gz"))
TURNS = 12
OUTPUT_TOKENS = 400
"""Longest answer; longer ones are cut."""
LONGEST_PROMPT = 200_000
ROOM_TOKENS = 1_024
"""What a prompt leaves of an engine's KV at least: for its answer, and a token per message."""
THINK_CAP_S = 10.0
SESSIONS_AT_A_TIME = {"low": 8, "mid": 12, "high": 20}
"""Of a fleet with REFERENCE_KV_TOKENS."""
REFERENCE_KV_TOKENS = 4 * 262_144
TOTAL_RATIO = 2
LEAST_OUTPUT = 2
"""An answer of one token has no time per output token."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A fleet of equal engines."""

    name: str
    engines: int
    kv_tokens: int

    @property
    def fleet_kv_tokens(self) -> int:
        """KV of all engines, in whole blocks."""
        return self.engines * (self.kv_tokens // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def longest_prompt(self) -> int:
        """Longest prompt of a session that takes part."""
        return min(LONGEST_PROMPT, self.kv_tokens - ROOM_TOKENS)


SHAPES = {shape.name: shape for shape in (Shape("4x262k", 4, 262_144), Shape("8x166k", 8, 166_000))}


def shape_of(text: str) -> Shape:
    """Read a shape: a name of SHAPES, or ENGINESxTOKENS; raises RoutingError."""
    if text in SHAPES:
        return SHAPES[text]
    found = re.fullmatch(r"(\d{1,3})x(\d{4,9})", text)
    if found is None or int(found[1]) < 1 or int(found[2]) < 2 * ROOM_TOKENS:
        raise RoutingError(
            f"--shapes: must be of {', '.join(SHAPES)}, or engines x KV tokens of each such as "
            f"2x131072 (at least {2 * ROOM_TOKENS} tokens), not {text!r}"
        )
    return Shape(text, int(found[1]), int(found[2]))


def sessions_at_a_time(load: str, shape: Shape) -> int:
    """The sessions that a load has at a time on a fleet; at least one."""
    sessions = SESSIONS_AT_A_TIME[load]
    return max(1, round(sessions * shape.fleet_kv_tokens / REFERENCE_KV_TOKENS))


@dataclass(frozen=True, slots=True)
class Work:
    """The sessions of a run in the order in which they begin, as requests of a trace.

    Blocks have new ids, from 0 on. `left_out`: sessions of the trace with a prompt that is too
    long.
    """

    at_a_time: int
    sessions: tuple[tuple[TraceRequest, ...], ...]
    left_out: int

    @property
    def requests(self) -> list[TraceRequest]:
        """All requests, session by session."""
        return [request for session in self.sessions for request in session]


class Sessions:
    """The sessions of a trace with their first turns; a request without a session is one."""

    def __init__(self, path: Path) -> None:
        """Read the trace; raises TraceError, and RoutingError where prompts have no length."""
        self._path = path
        self._sessions: dict[str, list[TraceRequest]] = {}
        for request in read_trace(path):
            if request.input_tokens is None or not request.runs:
                raise RoutingError(
                    f"{path}:{request.line}: must have input_length, not a literal prompt"
                )
            name = request.session_id or request.request_id
            turns = self._sessions.setdefault(name, [])
            if len(turns) < TURNS:
                turns.append(request)
        owners = Counter(
            block
            for turns in self._sessions.values()
            for block in {block for turn in turns for block in block_ids(turn.runs)}
        )
        self._common = {block for block, sessions in owners.items() if sessions > 1}

    def draw(self, shape: Shape, load: str, seed: int, *, turns: int = TURNS) -> Work:
        """Draw the sessions of a run; where there are too few they come again as copies.

        A copy shares with the others only the blocks that several sessions of the trace share.
        """
        fit = [
            name
            for name, requests in self._sessions.items()
            if max(request.input_tokens or 0 for request in requests) <= shape.longest_prompt
        ]
        if not fit:
            raise RoutingError(
                f"{self._path}: no session stays within {shape.longest_prompt} tokens per prompt"
            )
        at_a_time = sessions_at_a_time(load, shape)
        draw, ids = random.Random(seed), _Ids(self._common)
        chosen: list[tuple[TraceRequest, ...]] = []
        total = TOTAL_RATIO * at_a_time
        for copy in range(-(-total // len(fit))):
            draw.shuffle(fit)
            for name in fit[: total - len(chosen)]:
                rows = self._sessions[name][:turns]
                chosen.append(tuple(_row(name, copy, n, row, ids) for n, row in enumerate(rows)))
        return Work(at_a_time, tuple(chosen), len(self._sessions) - len(fit))


class _Ids:
    """New block ids: one per block that is common, one per block and copy of any other."""

    def __init__(self, common: set[int]) -> None:
        self._common = common
        self._known: dict[tuple[int, int], int] = {}

    def runs(self, blocks: Iterable[int], copy: int) -> tuple[tuple[int, int], ...]:
        """The new ids of a prompt's blocks, as runs."""
        known, common = self._known, self._common
        found: list[tuple[int, int]] = []
        for block in blocks:
            new = known.setdefault((0 if block in common else copy, block), len(known))
            if found and sum(found[-1]) == new:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((new, 1))
        return tuple(found)


def _row(name: str, copy: int, turn: int, request: TraceRequest, ids: _Ids) -> TraceRequest:
    session = f"{name}#{copy}" if copy else name
    return replace(
        request,
        request_id=f"{session}:{turn}",
        session_id=session,
        parent_session_id=None,
        turn=turn,
        wait_for=(f"{session}:{turn - 1}",) if turn else (),
        output_tokens=max(LEAST_OUTPUT, min(request.output_tokens, OUTPUT_TOKENS)),
        delay_s=_think_s(request) if turn else None,
        runs=ids.runs(block_ids(request.runs), copy),
    )


def _think_s(request: TraceRequest) -> float:
    return min(request.delay_s or 0.0, THINK_CAP_S)


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Write requests as a trace that `replay` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"".join(orjson.dumps(_fields(r), option=orjson.OPT_APPEND_NEWLINE) for r in requests)
    )


def _fields(request: TraceRequest) -> dict[str, Any]:
    when = {"timestamp": 0.0} if not request.turn else {"delay": (request.delay_s or 0.0) * 1e3}
    return {
        "session_id": request.session_id,
        "turn": request.turn,
        "block_size": request.block_tokens,
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_runs": request.runs,
        **when,
    }

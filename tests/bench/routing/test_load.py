"""The work of a run: who is drawn, what copies share, what the client is given."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.routing.environments import RoutingError
from bench.routing.load import (
    SHAPES,
    THINK_CAP_S,
    TRACE,
    Sessions,
    Shape,
    sessions_at_a_time,
    shape_of,
    write_trace,
)
from replayer.replay.plan import ideal_ratio
from replayer.trace.loaders import TraceRequest, block_ids, read_trace, shared_blocks

SMALL, LARGE = SHAPES["4x262k"], SHAPES["8x166k"]
ONE = Shape("one", 1, 131_072)
"""One session at a time at a low load, two in all."""


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def row(session: str, turn: int, blocks: list[int], **more: object) -> dict[str, object]:
    given = {"session_id": session, "turn": turn, "block_size": 64, "output_length": 9}
    return given | {"input_length": 64 * len(blocks), "hash_ids": blocks} | more


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    """Three sessions that share block 1."""
    return Sessions(
        write(
            tmp_path / "t.jsonl",
            row("a", 0, [1, 2, 3]),
            row("a", 1, [1, 2, 4, 5], delay=90_000.0, output_length=900),
            row("b", 0, [1, 7]),
            row("c", 0, [1, 8, 9], input_length=130, output_length=1),
        )
    )


def test_loads_are_scaled_by_the_fleets_kv() -> None:
    assert [sessions_at_a_time(load, SMALL) for load in ("low", "mid", "high")] == [8, 12, 20]
    assert [sessions_at_a_time(load, LARGE) for load in ("low", "mid", "high")] == [10, 15, 25]
    assert sessions_at_a_time("low", Shape("tiny", 1, 4_096)) == 1


def test_a_shape_is_a_name_or_two_numbers() -> None:
    assert shape_of("8x166k") is LARGE
    assert shape_of("2x131072") == Shape("2x131072", 2, 131_072)
    for wrong in ("", "4x", "0x131072", "2x100", "x", "4x262K"):
        with pytest.raises(RoutingError, match="--shapes: must be of 4x262k, 8x166k"):
            shape_of(wrong)


@pytest.mark.long
def test_the_packaged_trace_has_enough_sessions_for_every_load() -> None:
    sessions = Sessions(TRACE)
    for shape in SHAPES.values():
        work = sessions.draw(shape, "high", 1)
        names = [session[0].session_id for session in work.sessions]
        assert len(set(names)) == len(names) == 2 * sessions_at_a_time("high", shape)
        assert not any("#" in str(name) for name in names)
        longest = max(request.input_tokens or 0 for request in work.requests)
        assert longest <= shape.longest_prompt
        assert 0.8 < (ideal_ratio(work.requests) or 0.0) < 0.95


def test_a_seed_says_who_is_drawn(sessions: Sessions) -> None:
    assert sessions.draw(ONE, "low", 1) == sessions.draw(ONE, "low", 1)
    drawn = {
        tuple(session[0].session_id for session in sessions.draw(ONE, "low", seed).sessions)
        for seed in range(20)
    }
    assert len(drawn) > 3


def test_turns_answers_and_pauses_are_cut(sessions: Sessions) -> None:
    work = sessions.draw(SMALL, "low", 1)
    by_id = {request.request_id: request for request in work.requests}
    assert (by_id["a:1"].output_tokens, by_id["a:1"].delay_s) == (400, THINK_CAP_S)
    assert by_id["a:1"].wait_for == ("a:0",)
    assert by_id["c:0"].output_tokens == 2
    assert all(len(s) == 1 for s in sessions.draw(SMALL, "low", 1, turns=1).sessions)


def test_copies_share_what_sessions_share_and_no_more(sessions: Sessions) -> None:
    work = sessions.draw(SMALL, "low", 1)
    assert len(work.sessions) == 16
    copies = [s[0] for s in work.sessions if str(s[0].session_id).startswith("b")]
    assert len({copy.session_id for copy in copies}) == len(copies) > 4
    for one, other in combinations(copies, 2):
        assert len(set(block_ids(one.runs)) & set(block_ids(other.runs))) == 1


def test_sessions_with_a_prompt_that_is_too_long_are_left_out(sessions: Sessions) -> None:
    work = sessions.draw(Shape("tiny", 1, 1_024 + 200), "low", 1)
    assert {session[0].session_id for session in work.sessions} <= {"b", "c", "b#1", "c#1"}
    assert work.left_out == 1
    with pytest.raises(RoutingError, match="no session stays within 64 tokens"):
        sessions.draw(Shape("tiny", 1, 1_024 + 64), "low", 1)


def test_a_prompt_without_length_is_refused(tmp_path: Path) -> None:
    literal = {"session_id": "a", "prompt": "the", "output_length": 2}
    with pytest.raises(RoutingError, match=r"t\.jsonl:1: must have input_length"):
        Sessions(write(tmp_path / "t.jsonl", literal))


def prefixes(requests: list[TraceRequest]) -> list[int]:
    return [shared_blocks(one.runs, other.runs) for one, other in combinations(requests, 2)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), min_size=1, max_size=5))
def test_new_ids_share_the_same_prefixes(tmp_path: Path, chains: list[list[str]]) -> None:
    """Blocks are nodes of a prefix tree, as in every trace: an id stands for its whole chain."""
    known: dict[tuple[str, ...], int] = {}
    rows = []
    for number, chain in enumerate(chains):
        nodes = [tuple(chain[: end + 1]) for end in range(len(chain))]
        blocks = [known.setdefault(node, 10 + 3 * len(known)) for node in nodes]
        rows.append(row(f"s{number}", 0, blocks))
    path = write(tmp_path / "t.jsonl", *rows)
    recorded = {request.session_id: request for request in read_trace(path)}
    work = Sessions(path).draw(SMALL, "low", 3)
    fresh = [request for request in work.requests if "#" not in str(request.session_id)]
    assert prefixes(fresh) == prefixes([recorded[request.session_id] for request in fresh])


def test_the_client_reads_what_was_drawn(sessions: Sessions, tmp_path: Path) -> None:
    work = sessions.draw(SMALL, "low", 2)
    write_trace(tmp_path / "out" / "t.jsonl", work.requests)
    read = list(read_trace(tmp_path / "out" / "t.jsonl"))
    for one, other in zip(work.requests, read, strict=True):
        assert (one.request_id, one.wait_for, one.delay_s) == (
            other.request_id,
            other.wait_for,
            other.delay_s,
        )
        assert (one.input_tokens, one.output_tokens) == (other.input_tokens, other.output_tokens)
        assert block_ids(one.runs) == block_ids(other.runs)

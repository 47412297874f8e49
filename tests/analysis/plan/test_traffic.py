"""Loads as requests of a virtual run."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.plan.traffic import load_of, of_trace, planned, thinned
from replayer.arguments import InputError
from replayer.loads.load import Load, Request, Turn
from replayer.trace.rows import TraceError
from tests.analysis.plan.runs_for_tests import load
from tests.support.examples import examples


def sessions(*lengths: int) -> Load:
    """Sessions of so many turns each; a turn waits 2 s for the one before it."""
    requests = [
        Request(
            float(number),
            512 * (turn + 1) + 7,
            10,
            [100 * number + block for block in range(turn + 2)],
            Turn(
                f"{number}.{turn}",
                str(number),
                f"s{number}",
                ((f"{number}.{turn - 1}", 2.0),) if turn else (),
            ),
        )
        for number, length in enumerate(lengths)
        for turn in range(length)
    ]
    return Load(name="x", seed=1, requests=requests, end_s=60.0)


def test_a_turn_waits_for_its_place_in_the_load_and_knows_what_is_new() -> None:
    found = planned(sessions(2, 1))
    assert [one.wait_for for one in found] == [(), (0,), ()]
    assert [one.delay_s for one in found] == [0.0, 2.0, 0.0]
    assert [one.session_id for one in found] == ["s0", "s0", "s1"]
    assert [one.turn.blocks for one in found] == [(1,), (1, 2), (101,)], "whole blocks, none is 0"
    assert [one.turn.new_tokens for one in found] == [519, 519, 519]


def test_single_requests_are_sessions_of_their_own() -> None:
    found = planned(load(0.5, 3.0))
    assert [(one.session_id, one.earliest_s) for one in found] == [("0", 0.5), ("1", 3.0)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 12))
@settings(max_examples=examples(20))
def test_thinned_loads_share_nothing_and_lack_nothing(lengths: list[int], keep: int) -> None:
    whole = sessions(*lengths)
    parts: list[Request] = []
    keep = min(keep, len(lengths))
    for seed in range(keep):
        part = thinned(whole, keep, seed)
        parts += part.requests
        for one in part.requests:
            assert one.turn is not None
            names = {other.turn.request for other in part.requests if other.turn is not None}
            assert all(name in names for name, _ in one.turn.after), "sessions stay whole"
    assert len(parts) == len(whole.requests)
    assert {id(one) for one in parts} == {id(one) for one in whole.requests}


def test_what_leaves_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="--thin: must be at most 2 for x, not 3"):
        thinned(sessions(1, 1), 3, 0)


def written(path: Path, *rows: dict[str, object]) -> Path:
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return path


def row(at_ms: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": 1024, "output_length": 5, "hash_ids": ids}


def test_a_trace_has_its_own_arrivals(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", row(4000, [1, 2]), row(6500, [3, 4]))
    found = load_of(str(path), 7, None, 1)
    assert [one.at_s for one in found.requests] == [0.0, 2.5]
    assert (found.name, found.end_s, found.block_tokens) == ("t.jsonl", 3.5, 512)


def test_what_cannot_be_played_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", row(0, [1, 2]), row(0, [3, 4]))
    with pytest.raises(InputError, match=r"t\.jsonl: must have times of arrival"):
        of_trace(path)
    with pytest.raises(TraceError, match="nothing"):
        of_trace(tmp_path / "nothing")
    with pytest.raises(InputError, match="azure-code: needs AzureLLM"):
        load_of("azure-code", 1, None, 1)

"""Recorded loads: the file is found, times and lengths stay close to the record."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from replayer.loads import make, recorded
from tests.bench.planner.runs_for_tests import written

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,1000,10
2023-11-16 18:00:10.5000000,2000,20
2023-11-16 18:50:00.0000000,9,9
"""


def test_a_trace_is_found_packed_or_not(tmp_path: Path) -> None:
    assert recorded.found(tmp_path, recorded.MOONCAKE) is None
    path = tmp_path / "deep" / f"{recorded.MOONCAKE}.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(b"{}\n"))
    assert recorded.found(tmp_path, recorded.MOONCAKE) == path


def test_azure_keeps_arrivals_and_scales_lengths(tmp_path: Path) -> None:
    written(tmp_path / recorded.AZURE_CODE, AZURE)
    load = make("azure-code", 1, tmp_path)
    first, second = load.requests  # the third is later than the part that is used
    assert 0 <= first.at_s < 0.5
    assert 10.5 <= second.at_s < 11.0
    assert first.input_tokens == pytest.approx(3000, rel=0.02)
    assert set(first.blocks).isdisjoint(second.blocks)
    packed = tmp_path / "packed" / f"{recorded.AZURE_CODE}.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(AZURE.encode()))
    assert make("azure-code", 1, packed.parent).requests == load.requests
    assert make("azure-code", 2, tmp_path).requests != load.requests


def test_mooncake_keeps_blocks(tmp_path: Path) -> None:
    row = {"timestamp": 3000, "input_length": 700, "output_length": 50, "hash_ids": [4, 5]}
    written(tmp_path / recorded.MOONCAKE, json.dumps(row) + "\n")
    (request,) = make("mooncake", 1, tmp_path).requests
    assert 2.0 <= request.at_s < 4.0
    assert request.blocks == [4, 5]


def test_the_clock_of_a_day_is_slow_at_night() -> None:
    clock = recorded.day_clock(3540.0)
    assert clock(0.0) == 0.0
    assert clock(3539.999) == pytest.approx(2880.0, abs=0.01)
    assert clock(1770.0) == pytest.approx(1440.0, abs=1.0)
    assert clock(100.0) > 100.0 * 2880 / 3540  # in the morning little happens in long
    times = [clock(float(at_s)) for at_s in range(0, 3540, 10)]
    assert times == sorted(times)


def agent_row(name: str, **rest: object) -> str:
    row = {"request_id": name, "session_id": "s", "input_length": 2000, "output_length": 5000}
    row |= {"hash_ids": list(range(31)), "block_size": 64, **rest}
    return json.dumps(row) + "\n"


def test_copies_of_a_session_have_their_own_blocks(tmp_path: Path) -> None:
    rows = agent_row("s:0") + agent_row("s:1", delay=90_000.0, wait_for=["s:0"])
    too_long = agent_row("t:0", session_id="t", input_length=120_000)
    written(tmp_path / recorded.AGENTIC, rows + too_long)
    requests = make("agentic", 1, tmp_path).requests
    assert len(requests) == 2 * recorded.AGENT_COPIES
    first, second, other = requests[:3]
    assert len(first.blocks) == 4  # of 512 tokens
    assert first.blocks == second.blocks
    assert set(first.blocks).isdisjoint(other.blocks)
    assert first.output_tokens == recorded.AGENT_OUTPUT_TOKENS
    assert second.turn is not None
    assert first.turn is not None
    assert second.turn.after == ((first.turn.request, recorded.AGENT_WAIT_S),)

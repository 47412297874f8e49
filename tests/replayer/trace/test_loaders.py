"""Trace files: what is read, what is filled in, and what is refused with file, line and field."""

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.trace.loaders import LOADERS, PRIVATE_ID, block_ids, read_trace, shared_blocks
from replayer.trace.rows import Row, TraceError

SAMPLE = Path(__file__).parents[3] / "replayer" / "data" / "agentic_sample.trace.jsonl.gz"

EXAMPLES = {
    "mooncake": {"timestamp": 27482, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]},
    "superset": {
        "session_id": "s",
        "turn": 0,
        "timestamp": 27482,
        "input_length": 600,
        "output_length": 5,
        "hash_runs": [[46, 2]],
    },
}


def write(path: Path, *rows: dict[str, Any] | bytes) -> Path:
    lines = [row if isinstance(row, bytes) else orjson.dumps(row) for row in rows]
    path.write_bytes(b"\n".join(lines))
    return path


@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_claims_and_reads_its_own_rows(name, tmp_path):
    row = EXAMPLES[name]
    (request,) = read_trace(write(tmp_path / "t.jsonl", row))
    assert next(n for n, loader in LOADERS.items() if loader.claims(row)) == name
    assert request.arrival_s == pytest.approx(27.482)
    assert (request.input_tokens, request.output_tokens, request.block_tokens) == (600, 5, 512)
    assert block_ids(request.runs) == [46, 47]


@given(st.lists(st.integers(0, 40), max_size=40))
def test_runs_say_the_same_as_ids(ids):
    single = [[block, 1] for block in ids]
    one, other = Row("t", 1, {"hash_ids": ids}).runs(), Row("t", 1, {"hash_runs": single}).runs()
    assert one is not None
    assert one == other
    assert block_ids(one) == ids


@given(st.lists(st.integers(0, 9), max_size=9), st.lists(st.integers(0, 9), max_size=9))
def test_shared_blocks_is_the_common_prefix(one, other):
    def runs(ids):
        found: list[tuple[int, int]] = []
        for block in ids:
            if found and sum(found[-1]) == block:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((block, 1))
        return tuple(found)

    same = [a == b for a, b in zip(one, other, strict=False)]
    assert shared_blocks(runs(one), runs(other)) == [*same, False].index(False)


def test_gzip_is_seen_from_the_content_not_the_name(tmp_path):
    plain = write(tmp_path / "a", EXAMPLES["mooncake"])
    zipped = tmp_path / "b.jsonl"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_trace(plain)) == list(read_trace(zipped))


def test_a_session_fills_in_turns_ids_and_dependencies(tmp_path):
    row = {"session_id": "s", "input_length": 2, "output_length": 1, "block_size": 2}
    path = write(
        tmp_path / "t.jsonl",
        row | {"timestamp": 5, "hash_ids": [1]},
        row | {"hash_ids": [1], "delay": 30, "tool_wait_ms": 20},
        row | {"hash_ids": [1], "wait_for": ["s:0"], "request_id": "own", "colour": "red"},
    )
    first, second, third = read_trace(path)
    assert [r.request_id for r in (first, second, third)] == ["s:0", "s:1", "own"]
    assert (first.wait_for, second.wait_for, third.wait_for) == ((), ("s:0",), ("s:0",))
    assert (second.arrival_s, second.delay_s, second.turn) == (None, 0.05, 1)
    assert third.extra == {"colour": "red"}


@pytest.mark.parametrize("place", ["first line", "beside"])
def test_the_file_can_say_its_block_size(tmp_path, place):
    meta = {"trace": {"block_size": 4}}
    row = {"timestamp": 0, "input_length": 7, "output_length": 1, "hash_ids": [1, 2]}
    path = tmp_path / "t.jsonl"
    if place == "beside":
        write(tmp_path / "t.jsonl.meta.json", meta)
        write(path, row)
    else:
        write(path, meta, row)
    (request,) = read_trace(path)
    assert request.block_tokens == 4


def test_ids_local_to_sessions_are_kept_apart_and_shared_with_sub_agents(tmp_path):
    row = {"input_length": 1, "output_length": 1, "hash_ids": [7], "block_size": 1}
    path = write(
        tmp_path / "t.jsonl",
        {"trace": {"hash_scope": "session"}},
        row | {"session_id": "a"},
        row | {"session_id": "b"},
        row | {"session_id": "a/agent", "parent_session_id": "a"},
    )
    a, b, agent = (request.runs for request in read_trace(path))
    assert a == agent
    assert a != b


def test_blocks_without_an_id_are_private(tmp_path):
    row = {"timestamp": 0, "input_length": 5, "output_length": 1, "block_size": 4}
    one, other, third = read_trace(
        write(tmp_path / "t.jsonl", row | {"hash_ids": [1]}, row | {"hash_ids": [1]}, row)
    )
    assert shared_blocks(one.runs, other.runs) == 1
    assert len(block_ids(one.runs)) == len(block_ids(third.runs)) == 2
    assert min(block_ids(third.runs)) >= PRIVATE_ID


def test_literal_content_needs_no_length(tmp_path):
    (request,) = read_trace(
        write(tmp_path / "t.jsonl", {"prompt": "say it", "output_length": 3, "timestamp": 0})
    )
    assert (request.prompt, request.input_tokens, request.runs) == ("say it", None, ())


GOOD = {"session_id": "s", "input_length": 5, "output_length": 1, "hash_ids": [1], "timestamp": 0}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"input_length": "five"}, 'input_length: must be an integer >= 1, not "five"'),
        ({"input_length": True}, "input_length: must be an integer >= 1, not true"),
        ({"input_length": None}, "input_length: must be an integer >= 1, not missing"),
        ({"output_length": 0}, "output_length: must be an integer >= 1, not 0"),
        ({"timestamp": -3}, "timestamp: must be a number >= 0, not -3"),
        ({"delay": "soon"}, 'delay: must be a number >= 0, not "soon"'),
        ({"hash_ids": [1, "x"]}, "hash_ids: must be a list of integers 0..2^64-1"),
        ({"hash_ids": [-1]}, "hash_ids: must be a list of integers 0..2^64-1"),
        ({"hash_ids": [1, 2, 3]}, "hash_ids: must be 1 ids for input_length 5 in blocks of 512"),
        ({"hash_ids": None, "hash_runs": [[1]]}, "hash_runs: must be a list of [first id >= 0"),
        ({"hash_runs": [[1, 1]]}, "hash_runs: must be absent where hash_ids is given"),
        ({"session_id": 5}, "session_id: must be a non-empty string, not 5"),
        ({"wait_for": "s:0"}, "wait_for: must be a list of strings"),
        ({"wait_for": ["nobody"]}, "wait_for: must name requests of this file, not 'nobody'"),
        ({"messages": []}, "messages: must be a non-empty list of objects, not []"),
        ({"request_id": "s:0"}, "request_id: must be unique ('s:0' came before), not \"s:0\""),
        ({"block_size": 0}, "block_size: must be an integer >= 1, not 0"),
    ],
)
def test_a_bad_field_is_named_with_file_line_and_what_is_allowed(tmp_path, bad, said):
    path = write(tmp_path / "t.jsonl", GOOD, GOOD | bad)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}:2: {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no rows"),
        (b"{not json", ":1: line: must be one JSON object"),
        (b"[1]", ":1: line: must be one JSON object"),
        (b'{"x":1}', ":1: format: must be one of superset, mooncake"),
        (b'{"trace":{"cumulative":false}}\n{}', "cumulative: must be true"),
        (b'{"trace":{"time_unit":"s"}}\n{}', 'time_unit: must be "ms"'),
        (b'{"trace":{"hash_scope":"x"}}\n{}', 'hash_scope: must be "global" or "session"'),
        (b'{"trace":5}\n{}', "trace: must be an object"),
        (b"\x1f\x8bnot gzip", "cannot be read"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, content, said):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.jsonl") as caught:
        list(read_trace(path))
    assert said in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        list(read_trace(tmp_path / "none"))


def test_deltas_are_recognised_unless_the_file_says_otherwise(tmp_path):
    rows = [GOOD | {"hash_ids": [turn, 90 + turn], "input_length": 1024} for turn in range(4)]
    with pytest.raises(TraceError, match=r"3 of 3 later turns share no block.*deltas"):
        list(read_trace(write(tmp_path / "a.jsonl", *rows)))
    meta = {"trace": {"cumulative": True}}
    assert len(list(read_trace(write(tmp_path / "b.jsonl", meta, *rows)))) == 4


def test_the_shipped_sample_holds_what_its_maker_wrote():
    requests = list(read_trace(SAMPLE))
    assert len(requests) == 227
    assert len({request.session_id for request in requests}) == 24
    assert sum(request.input_tokens or 0 for request in requests) == 7_960_383
    assert sum(request.output_tokens for request in requests) == 80_057
    assert all(one.line < other.line for one, other in pairwise(requests))
    assert SAMPLE.stat().st_size < 40_000

"""Trace files: what is read, what is filled in, and what is refused with file, line and field."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.trace.loaders import LOADERS, PRIVATE_ID, block_ids, read_trace, shared_blocks
from replayer.trace.rows import Row, TraceError
from tests.support.traces import EXAMPLES, GOOD, SAMPLE, write


@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_claims_and_reads_its_own_rows(name, tmp_path):
    row = EXAMPLES[name]
    (request,) = read_trace(write(tmp_path / "t.jsonl", row))
    assert next(n for n, loader in LOADERS.items() if loader.claims(row)) == name
    block_tokens = 16 if name == "bailian" else 512
    sizes = (request.input_tokens, request.output_tokens, request.block_tokens)
    assert sizes == (600, 5, block_tokens)
    if name == "bailian":
        assert block_ids(request.runs) == EXAMPLES[name]["hash_ids"]
    elif name in ("mooncake", "superset"):
        assert request.arrival_s == pytest.approx(27.482)
        assert block_ids(request.runs) == [46, 47]
    else:
        assert not request.names_blocks


def test_rows_of_sessions_behind_one_without_are_not_read_as_single_requests(tmp_path):
    first, later = dict(EXAMPLES["mooncake"]), EXAMPLES["mooncake"] | {"session_id": "s"}
    path = write(tmp_path / "t.jsonl", first, later)
    with pytest.raises(TraceError, match=r"t\.jsonl:2: session_id: .* give --format superset"):
        list(read_trace(path))
    assert [one.session_id for one in read_trace(path, "superset")] == [None, "s"]
    assert len(list(read_trace(path, "mooncake"))) == 2


def test_tables_are_read_with_times_from_their_first_row(tmp_path):
    lines = [b"TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [b"2023-11-16 18:17:03.9799600,4808,10", b"2023-11-16 18:17:05.2319600,3180,8", b""]
    azure = list(read_trace(write(tmp_path / "a.csv", *lines)))
    assert [one.arrival_s for one in azure] == pytest.approx([0.0, 1.252])
    assert [(one.input_tokens, one.output_tokens) for one in azure] == [(4808, 10), (3180, 8)]
    assert len({block for one in azure for block in block_ids(one.runs)}) == 10 + 7
    lines = [b"num_prefill_tokens,num_decode_tokens,pd_ratio", b"3772,54,69.85"]
    (vidur,) = read_trace(write(tmp_path / "v.csv", *lines))
    assert (vidur.arrival_s, vidur.input_tokens, vidur.output_tokens) == (None, 3772, 54)


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

"""Trace files as rows: what is refused with file, line and field."""

import gzip

import pytest

from replayer.trace.loaders import read_trace
from replayer.trace.rows import TraceError
from tests.support.traces import EXAMPLES, GOOD, write


def test_gzip_is_seen_from_the_content_not_the_name(tmp_path):
    plain = write(tmp_path / "a", EXAMPLES["mooncake"])
    zipped = tmp_path / "b.jsonl"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_trace(plain)) == list(read_trace(zipped))


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
        (b'{"session_id":"s","requests":[]}', ":1: format: must be one of superset, mooncake"),
        (b'{"trace":{"cumulative":false}}\n{}', "cumulative: must be true"),
        (b'{"trace":{"time_unit":"s"}}\n{}', 'time_unit: must be "ms"'),
        (b'{"trace":{"hash_scope":"x"}}\n{}', 'hash_scope: must be "global" or "session"'),
        (b'{"trace":5}\n{}', "trace: must be an object"),
        (b"ContextTokens,GeneratedTokens\n1", ":2: line: must have 2 columns, not 1"),
        (b"a,b\n1,2", ":2: format: must be one of superset, mooncake"),
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,5,5",
            ':2: TIMESTAMP: must be a date and time as in 2023-11-16 18:17:03.97, not "noon"',
        ),
        (b"ContextTokens,TIMESTAMP\nmany,2023-11-16", "ContextTokens: must be an integer >= 1"),
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

"""Trace files as rows: what is refused with file, line and field."""

import gzip

import orjson
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
        ({"output_length": -1}, "output_length: must be an integer >= 0, not -1"),
        ({"output_length": None}, "output_length: must be an integer >= 0, not missing"),
        ({"timestamp": -3}, "timestamp: must be a number >= 0, not -3"),
        ({"delay": "soon"}, 'delay: must be a number >= 0, not "soon"'),
        ({"hash_ids": [1, "x"]}, "hash_ids: must be a list of integers 0..2^64-1"),
        ({"hash_ids": [-1]}, "hash_ids: must be a list of integers 0..2^64-1"),
        ({"hash_ids": [1, 2, 3]}, "hash_ids: must be 1 ids for input_length 5 in blocks of 512"),
        ({"hash_ids": None, "hash_runs": [[1]]}, "hash_runs: must be a list of [first id >= 0"),
        ({"hash_runs": [[1, 1]]}, "hash_runs: must be absent where hash_ids is given"),
        ({"session_id": ""}, 'session_id: must be a non-empty string or a whole number, not ""'),
        (
            {"session_id": True},
            "session_id: must be a non-empty string or a whole number, not true",
        ),
        ({"session_id": 1.5}, "session_id: must be a non-empty string or a whole number, not 1.5"),
        ({"request_id": []}, "request_id: must be a non-empty string or a whole number, not []"),
        ({"wait_for": "s:0"}, "wait_for: must be a list of strings or whole numbers"),
        ({"wait_for": [None]}, "wait_for: must be a list of strings or whole numbers"),
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
        ('{"timestamp":0}'.encode("utf-16"), "must be UTF-8, not UTF-16"),
        (b'a,b\n"' + b"x" * 200_000 + b'",1', ":2: line: must have 2 columns, not 0"),
        (b"\xef\xbb\xbf", "no rows"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, content, said):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.jsonl") as caught:
        list(read_trace(path))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("row", "fits"),
    [
        ({"input_length": 40, "hash_ids": [1, 2, 3]}, "16"),
        ({"input_length": 1000, "hash_ids": list(range(62))}, "16"),
        ({"input_length": 100, "hash_ids": list(range(100))}, "1"),
        ({"input_length": 5000, "hash_ids": [1, 2, 3]}, "2048"),
        ({"input_length": 40, "hash_runs": [[1, 3]]}, "16"),
        ({"input_length": 40, "hash_ids": list(range(99))}, "N"),
    ],
)
def test_ids_of_blocks_of_another_size_are_told_how_to_say_it(tmp_path, row, fits):
    row = {"timestamp": 0, "output_length": 1} | row
    path = write(tmp_path / "t.jsonl", row)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    said = f'{{"trace":{{"block_size":{fits}}}}}'
    assert f"{said} as the first line, or block_size in each row" in str(caught.value)
    if fits != "N":
        (request,) = read_trace(write(tmp_path / "said.jsonl", said.encode(), row))
        assert request.block_tokens == int(fits)


MARK = b"\xef\xbb\xbf"
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,700,9\n"


@pytest.mark.parametrize(
    "content",
    [
        MARK + AZURE,
        AZURE.replace(b"\n", b"\r\n"),
        AZURE.replace(b",", b";"),
        AZURE.replace(b",", b"\t"),
        AZURE.replace(b",", b", "),
        b'"TIMESTAMP","ContextTokens","GeneratedTokens"\n"2024-05-10 00:00:00+00:00","700","9"\n',
        MARK
        + b'TIMESTAMP,"ContextTokens",GeneratedTokens\n2024-05-10 00:00:00+00:00," 700 ",9.0\n',
        gzip.compress(MARK + AZURE, mtime=0),
    ],
)
def test_a_table_may_be_written_as_spreadsheets_do(tmp_path, content):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    (request,) = read_trace(path)
    assert (request.input_tokens, request.output_tokens, request.arrival_s) == (700, 9, 0.0)


def test_a_mark_at_the_beginning_is_no_part_of_the_first_row(tmp_path):
    write(tmp_path / "t.jsonl.meta.json", MARK + b'{"trace":{"block_size":16}}')
    for content in (MARK + b"\n", MARK):
        path = write(tmp_path / "t.jsonl", content + orjson.dumps(EXAMPLES["vidur"]))
        (request,) = read_trace(path)
        assert (request.input_tokens, request.block_tokens) == (600, 16)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_request_without_output_is_sent_for_one_token(tmp_path, name):
    row = EXAMPLES[name]
    fields = {"output_length", "GeneratedTokens", "num_decode_tokens", "Response tokens"}
    later = {"turn": 1, "chat_id": 2}
    failed = row | dict.fromkeys(fields & row.keys(), 0)
    failed |= {field: value for field, value in later.items() if field in row}
    read = read_trace(write(tmp_path / "t.jsonl", row, failed))
    assert [request.output_tokens for request in read] == [5, 1]


def test_what_is_named_by_a_number_is_named_by_its_digits(tmp_path):
    row = {"input_length": 5, "output_length": 1}
    first, second, third = read_trace(
        write(
            tmp_path / "t.jsonl",
            row | {"session_id": 7, "timestamp": 0, "request_id": 1},
            row | {"session_id": 7.0},
            row | {"session_id": "8", "parent_session_id": 7, "wait_for": [1, "7:1"]},
        )
    )
    assert (first.session_id, first.request_id) == (second.session_id, "1") == ("7", "1")
    assert (second.request_id, second.wait_for) == ("7:1", ("1",))
    assert (third.parent_session_id, third.wait_for) == ("7", ("1", "7:1"))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        list(read_trace(tmp_path / "none"))

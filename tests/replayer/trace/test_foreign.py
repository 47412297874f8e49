"""Files of other tools: read, or refused by the name of what was seen, with a row as an example."""

import gzip

import orjson
import pytest

from replayer.replay.cli import main
from replayer.trace.loaders import block_ids, read_trace
from replayer.trace.rows import TraceError
from tests.support.traces import write

BURST = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def test_burstgpt_is_read_in_seconds_and_a_failed_request_is_one_token(tmp_path):
    lines = [BURST, b"5.0,ChatGPT,472,18,490,Conversation log", b"45,GPT-4,1087,0,1087,API log"]
    one, other = read_trace(write(tmp_path / "b.csv", *lines))
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in (one, other)] == [
        (5.0, 472, 18),
        (45.0, 1087, 1),
    ]
    assert not set(block_ids(one.runs)) & set(block_ids(other.runs))


def test_newer_burstgpt_columns_are_no_obstacle(tmp_path):
    head = BURST.replace(b"Model", b"Session ID,Elapsed time,Model")
    (one,) = read_trace(write(tmp_path / "b.csv", head, b"5,3,1.5,GPT-4,10,2,12,Conversation log"))
    assert (one.input_tokens, one.output_tokens) == (10, 2)


def test_bailian_is_in_seconds_and_blocks_of_16_and_turns_wait_for_their_parents(tmp_path):
    rows = [
        {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 20,
         "output_length": 3, "type": "text", "turn": 1, "hash_ids": [7, 8]},
        {"chat_id": 160, "parent_chat_id": 159, "timestamp": 70.5, "input_length": 36,
         "output_length": 3, "type": "text", "turn": 2, "hash_ids": [7, 8, 9]},
    ]  # fmt: skip
    one, other = read_trace(write(tmp_path / "b.jsonl", *rows))
    assert (one.arrival_s, one.block_tokens, one.wait_for) == (61.114, 16, ())
    assert (other.request_id, other.wait_for) == ("160", ("159",))
    assert other.turn == 1


def test_a_parent_that_is_not_in_the_file_is_no_obstacle(tmp_path):
    row = {"chat_id": 5, "parent_chat_id": 4, "timestamp": 1.0, "input_length": 5,
           "output_length": 1, "type": "text", "turn": 2, "hash_ids": [7]}  # fmt: skip
    (one,) = read_trace(write(tmp_path / "b.jsonl", row))
    assert one.wait_for == ()


@pytest.mark.parametrize(
    ("row", "messages", "prompt", "output"),
    [
        ({"text_input": "hello", "output_length": 7}, None, "hello", 7),
        ({"payload": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}},
         ({"role": "user", "content": "x"},), None, 9),
        ({"payload": {"prompt": "x", "max_tokens": 9}, "output_length": 4}, None, "x", 4),
        ({"payload": {"prompt": "x", "max_completion_tokens": 5}}, None, "x", 5),
    ],
)  # fmt: skip
def test_aiperfs_literal_rows(tmp_path, row, messages, prompt, output):
    (one,) = read_trace(write(tmp_path / "a.jsonl", {"timestamp": 3000, **row}))
    assert (one.messages, one.prompt, one.output_tokens) == (messages, prompt, output)
    assert (one.arrival_s, one.extra) == (3.0, {})


def test_a_table_may_have_the_fields_of_a_row(tmp_path):
    lines = [
        b"timestamp,session_id,input_length,output_length,hash_ids",
        b'0,a,600,2,"[1, 2]"',
        b'5,a,1100,2,"[1,2,3]"',
    ]
    one, other = read_trace(write(tmp_path / "t.csv", *lines))
    assert (one.runs, other.runs) == (((1, 2),), ((1, 3),))
    assert other.wait_for == (one.request_id,)


SHARE = [{"id": "a", "conversations": [{"from": "human", "value": "hi"}]}]
VLLM = {"date": "20260101", "backend": "vllm", "model_id": "m", "tokenizer_id": "m",
        "num_prompts": 2, "request_throughput": 1.0, "input_lens": [1, 2]}  # fmt: skip
AIPERF = {"metadata": {"session_num": 0, "x_request_id": "u", "request_start_ns": 1}, "metrics": {}}
SEEN = {
    "ShareGPT": [
        orjson.dumps(SHARE),
        orjson.dumps(SHARE, option=orjson.OPT_INDENT_2),
        orjson.dumps(SHARE[0]),
        orjson.dumps(SHARE * 300_000),
        gzip.compress(orjson.dumps(SHARE)),
    ],
    "a result of vllm bench": [orjson.dumps(VLLM), orjson.dumps(VLLM, option=orjson.OPT_INDENT_2)],
    "AIPerf's records": [orjson.dumps(AIPERF)],
    "AIPerf's turns": [
        b'{"session_id":"a","turns":[{"text":"hi","delay":5}]}',
        b'{"text":"hello"}',
        b'{"data":[{"session_id":"a","payloads":[{"messages":[]}]}]}',
    ],
    "kv-cache-tester's": [
        b'{"id":"a","models":["m"],"block_size":64,"hash_id_scope":"local","requests":[]}',
    ],
    "TraceLab's": [
        b'{"session_id":"c","round_index":0,"input_tokens_total":5,"newly_append_tokens":5}',
    ],
    "Dynamo's agentic trace": [
        b'{"schema":"dynamo.agentic_mooncake","version":2,"block_size":64}',
    ],
    "a batch of OpenAI's": [b'{"custom_id":"a","method":"POST","url":"/v1/x","body":{}}'],
    "a JSON array": [b'[{"a":1}]', b'[\n{"timestamp":0}\n]'],
    "fields x, y": [b'{"x":1,"y":2}'],
    "fields a, b c": [b"a,b c\n1,2"],
}


@pytest.mark.parametrize(
    ("name", "at"), [(name, at) for name, all_ in SEEN.items() for at in range(len(all_))]
)
def test_what_cannot_be_read_is_named_with_an_example(tmp_path, capsys, name, at):
    path = tmp_path / "t.json"
    path.write_bytes(SEEN[name][at])
    assert main([str(path), "--out", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert f"not {name}" in error
    assert error.endswith(
        'a row is like {"timestamp":0,"input_length":1000,"output_length":100,"hash_ids":[1,2]}\n'
    )
    assert error.count("\n") == 1
    assert len(error) < 600


@pytest.mark.parametrize("payload", [b"5", b"[]", b'{"x":1}', b'{"messages":5}'])
def test_a_payload_without_text_is_refused(tmp_path, payload):
    row = b'{"timestamp":0,"output_length":1,"payload":' + payload + b"}"
    with pytest.raises(TraceError, match=r"payload|messages|input_length"):
        list(read_trace(write(tmp_path / "a.jsonl", row)))

"""What is kept of a body: of any JSON that an engine takes, here and in another process."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.body import PLUGINS, Members, Unfit
from proxy.protocol.examined import (
    SALT,
    Examined,
    Task,
    examine,
    examine_large,
    packed,
    unpacked,
)
from proxy.protocol.prompt.facts import MOST_VALUES, MOST_VALUES_SMALL

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions", "/v1/messages", "/v1/responses")
HALF = rb"\ud83d"
ODD = {
    "half of a pair": rb'{"model":"m","messages":[{"role":"user","content":"$ ls \ud83d"}]}',
    "the other half": rb'{"model":"m","input":"\ude00 and on"}',
    "halves in the wrong order": rb'{"model":"m","prompt":"\ude00\ud83d"}',
    "half in a member's name": rb'{"model":"m","metadata":{"\ud83d":1}}',
    "half in a name of the body": rb'{"model":"m","x\ud83d":1}',
    "half in the model": rb'{"model":"m\ud83d","prompt":"x"}',
    "half in a session's name": rb'{"session_id":"s\ud83d","metadata":{"session_id":"\ud83d"}}',
    "half in the salt's place": rb'{"user":"\ud83d","prompt_cache_key":"\ud83d"}',
    "half as bytes": b'{"model":"m","prompt":"\xed\xa0\xbd"}',
    "half in the last answer": (
        rb'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"\ud83d"},'
        rb'{"role":"user","content":"b"}]}'
    ),
    "half in a stream's parameter": rb'{"stream":true,"prompt":"x","stop":["\ud83d"]}',
    "not a number": b'{"model":"m","metadata":{"score":NaN,"session_id":NaN}}',
    "infinities": b'{"tools":[{"max":Infinity,"min":-Infinity}],"input":[1,1e999]}',
    "64 bits and more": rb'{"seed":18446744073709551616,"priority":-9223372036854775809,"x":[NaN]}',
    "many digits": b'{"metadata":{"n":' + b"9" * 400 + b"}}",
    "a byte order mark": b'\xef\xbb\xbf{"model":"m","prompt":"x"}',
    "a name twice": rb'{"model":"a","model":"m\ud83d","model":"m"}',
}


def task_of(raw: bytes, path: str = CHAT, *, plans: bool = True, salt: str | None = None) -> Task:
    return Task(path, raw, is_object=True, salt=salt, plans=plans)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ODD)
def test_what_engines_parse_is_taken_here_and_in_another_process(name: str, path: str) -> None:
    assert isinstance(json.loads(ODD[name]), dict), "as an engine parses it"
    here = examine(task_of(ODD[name], path), MOST_VALUES_SMALL)
    assert isinstance(here, Examined)
    there = examine_large(task_of(ODD[name], path))
    assert isinstance(there, Examined)
    told = unpacked(packed(there))
    assert isinstance(told, Examined)
    for one in (there, told):
        assert (one.fields, one.session) == (here.fields, here.session)
        assert (one.prompt.model, one.prompt.hashes) == (here.prompt.model, here.prompt.hashes)
    orjson.dumps([here.fields, here.session, here.prompt.model, here.prompt.answer])


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (rb'{"a":"\ud83"}', "not valid JSON"),
        (b'{"a":nan}', "not valid JSON"),
        (b'{"a":"\xff"}', "not valid JSON"),
        (b'{"a":"\x00"}', "not valid JSON"),
        (b"{'a':1}", "not valid JSON"),
        (b'{"a":1,}', "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"a":NaN,"b":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper than 128"),
        (b'{"a":[NaN],"b":' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 128"),
        (rb'{"cache_salt":"\ud83d"}', "cache_salt"),
        (b"NaN", "must be a JSON object"),
        (b'{"temperature":NaN}', "temperature: must be a finite number"),
        (b'{"top_p":-Infinity}', "top_p: must be a finite number"),
        (b'{"max_tokens":1e999}', "max_tokens: must be a finite number"),
        (b'{"seed":' + b"9" * 400 + b"}", "seed: must be a finite number"),
        (rb'{"x\ud83d":NaN}', "body: each parameter: must be a finite number"),
    ],
)
def test_what_engines_refuse_or_would_choke_on_stays_refused(raw: bytes, words: str) -> None:
    found = examine(task_of(raw), MOST_VALUES)
    assert isinstance(found, Unfit)
    assert words in found.message


def test_a_long_one_that_is_parsed_slowly_is_left_to_another_process() -> None:
    raw = b'{"prompt":"%s"}' % (b"x" * (1 << 16) + HALF)
    assert examine(task_of(raw), MOST_VALUES_SMALL) is None
    assert isinstance(examine_large(task_of(raw)), Examined)
    assert isinstance(examine(task_of(raw.replace(HALF, b"")), MOST_VALUES_SMALL), Examined)


def chat_of(*messages: dict[str, Any]) -> Task:
    return task_of(orjson.dumps({"model": "m", "messages": messages}))


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": parts}


TEXT_PART = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
MANY = {
    "messages": chat_of(*[said(TEXT_PART)] * 2100),
    "parts": chat_of(said(*[TEXT_PART] * 4100)),
    "images": chat_of(said(*[IMAGE] * 2100)),
    "calls": chat_of({"role": "assistant", "tool_calls": [CALL] * 850}),
}


@pytest.mark.parametrize("kind", MANY)
def test_a_prompt_of_many_values_is_left_to_another_process(kind: str) -> None:
    assert examine(MANY[kind], MOST_VALUES_SMALL) is None
    assert isinstance(examine_large(MANY[kind]), Examined)


def test_what_an_agent_sends_is_read_at_once() -> None:
    """A few hundred turns, each with a call and its result."""
    turn: dict[str, Any] = {"role": "assistant", "content": [TEXT_PART], "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c", "content": "b" * 1000}
    agent = chat_of(*[turn, result] * 400)
    assert isinstance(examine(agent, MOST_VALUES_SMALL), Examined)


def test_the_key_of_a_text_does_not_depend_on_what_stands_elsewhere() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "long " * 2_000}]}
    plain = examine(task_of(orjson.dumps(body)), MOST_VALUES)
    odd = examine(
        task_of(json.dumps({"metadata": {"title": "\ud83d"}} | body).encode()), MOST_VALUES
    )
    assert isinstance(plain, Examined)
    assert isinstance(odd, Examined)
    assert odd.prompt.hashes == plain.prompt.hashes != []


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS)
def test_thousands_of_short_messages_are_taken(path: str) -> None:
    turns = [{"role": "user", "content": f"turn {i}"} for i in range(40_000)]
    raw = orjson.dumps({"model": "m", "max_tokens": 9, "messages": turns, "input": turns})
    if path == "/v1/responses":
        raw = orjson.dumps({"model": "m", "input": turns})
    elif path != "/v1/completions":
        raw = orjson.dumps({"model": "m", "max_tokens": 9, "messages": turns})
    assert isinstance(examine_large(task_of(raw, path)), Examined)


def test_steering_fields_are_taken_out_of_what_only_engines_parse() -> None:
    odd = rb'"do_remote_\ud83d":1,"\u006bv_transfer_params":{},"x":[NaN],"a\ud83d":"\ud83d"'
    raw = b'{"vllm_xargs":{"kv_transfer_params":"{}","keep":"\\ud83d"},' + odd + b"}"
    found = examine(task_of(raw), MOST_VALUES)
    assert isinstance(found, Examined)
    assert json.loads(found.put[PLUGINS]) == {"keep": "\ud83d"}
    edited = json.loads(Members(raw).edited(found.put, found.drop).raw)
    assert edited.keys() == {"x", "a\ud83d", PLUGINS}


texts = st.text(st.characters(codec=None), max_size=8) | st.sampled_from(["\ud83d", "x\ude00"])
values = st.recursive(
    texts | st.integers() | st.floats() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
members_of = st.dictionaries(
    st.sampled_from(["model", "messages", "prompt", "input", "tools", "max_tokens", "stream"])
    | st.sampled_from(["session_id", "metadata", "user", "n", "priority", "stop", PLUGINS])
    | st.sampled_from(["do_remote_\ud83d", "kv_transfer_params", "truncate_prompt_tokens"])
    | texts,
    values,
    max_size=6,
)


@given(members_of, st.sampled_from(PATHS), st.sampled_from([None, "salt"]))
def test_whatever_pythons_json_writes_is_taken_and_edited_member_by_member(
    body: dict[str, Any], path: str, salt: str | None
) -> None:
    raw = json.dumps(body).encode()
    found = examine(task_of(raw, path, salt=salt), MOST_VALUES)
    if any(isinstance(value, float) and not math.isfinite(value) for value in body.values()):
        assert isinstance(found, Unfit)
        return
    assert isinstance(found, Examined)
    orjson.dumps([found.fields, found.session, found.prompt.model, found.prompt.answer, found.drop])
    there = examine_large(task_of(raw, path, salt=salt))
    assert isinstance(there, Examined)
    told = unpacked(packed(there))
    assert isinstance(told, Examined)
    edited = json.loads(Members(raw, told.spans).edited(told.put, told.drop).raw)
    assert "kv_transfer_params" not in edited
    kept = {
        key: value
        for key, value in json.loads(raw).items()
        if key in edited and key not in told.put
    }
    assert json.dumps({key: edited[key] for key in kept}) == json.dumps(kept)


SPELLED = (
    rb'"cache_salt":"theirs"',
    rb'"\u0063ache_s\u0061lt":null',
    rb'"cache_salt ":1',
    rb'"do_remote_x":1',
    rb'"vllm_xargs":{"kv_transfer_params":1}',
    rb'"a":"\"cache_salt\":1"',
    rb'"a":{"cache_salt":1}',
)


@given(st.lists(st.sampled_from(SPELLED), max_size=4), st.sampled_from([b"", b" ", b"\n\t"]))
def test_a_salt_is_put_in_front_only_where_the_client_has_none(
    members: list[bytes], blank: bytes
) -> None:
    raw = blank + b"{" + blank + b",".join(members) + b"}"
    found, own = examine(task_of(raw, salt="ours"), MOST_VALUES), json.loads(raw)
    if isinstance(found, Unfit):
        return  # a salt that is none
    assert isinstance(found, Examined)
    is_edited = bool(found.drop) or "vllm_xargs" in own
    assert found.is_new == (bool(own) and "cache_salt" not in own and not is_edited)
    if found.is_new:
        told = json.loads(Members(raw).with_first(SALT, found.put[SALT]).raw)
        assert told == own | {"cache_salt": "ours"}

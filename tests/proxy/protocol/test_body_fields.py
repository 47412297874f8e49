"""No shape of a body brings a steering field to its top level; all the rest stays as it was."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.protocol.body import (
    MAX_FIELDS,
    PLUGINS,
    complaint,
    members,
    steering_keys,
)
from proxy.protocol.prompt.facts import MOST_VALUES, prompt_bytes, prompt_facts
from proxy.protocol.streams.parse_cost import MAX_DEPTH, is_deep
from tests.proxy.protocol.prompt.test_facts import COMPLETIONS, json_values
from tests.support.examined import facts_of, splice
from tests.support.examples import examples

SHAPES = 1000
NAMES = (
    "kv_transfer_params",
    "ec_transfer_params",
    "do_remote_prefill",
    "do_remote_decode",
    "data_parallel_rank",
)
INNOCENT = (
    "model",
    "messages",
    "stream",
    "x",
    "kv",
    "kv_transfer_params_",
    "extra_body",
    "\\u0061",
)
VALUES = (
    '{"do_remote_prefill":true,"remote_bootstrap_addr":"http://169.254.169.254"}',
    "null",
    "[1,[2,{}]]",
    '"}],{"',
    "1e3",
    '{"kv_transfer_params":{"a":"\\""}}',
)


def spelled(name: str, chance: random.Random) -> str:
    """A key with some characters escaped or in the other case."""
    out = []
    for char in name:
        other = char.swapcase() if chance.random() < 0.1 else char
        out.append(f"\\u{ord(other):04{chance.choice('xX')}}" if chance.random() < 0.2 else other)
    return "".join(out)


def shape(index: int) -> str:
    """One JSON object: steering keys among others, several times, spelled and spaced at random."""
    chance = random.Random(index)
    rows = []
    for _ in range(chance.randint(1, 6)):
        steers = chance.random() < 0.6
        name = chance.choice(NAMES if steers else INNOCENT)
        key = spelled(name, chance) if steers else name
        rows.append((key, chance.choice(VALUES)))
    blank = chance.choice(("", " ", "\n\t", "  "))
    inner = f",{blank}".join(f'"{key}"{blank}:{blank}{value}' for key, value in rows)
    return f"{blank}{{{blank}{inner}{blank}}}{blank}"


def pairs(text: bytes) -> list[tuple[str, Any]]:
    """Top-level members in order, duplicates kept."""
    found: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
    return found


def steers(key: str) -> bool:
    return key.lower() in NAMES


@pytest.mark.parametrize("start", range(0, SHAPES, 100))
def test_a_thousand_shapes(start: int) -> None:
    for index in range(start, start + 100):
        raw = shape(index).encode()
        left = splice(raw, {}, steering_keys(orjson.loads(raw)))
        assert pairs(left) == [pair for pair in pairs(raw) if not steers(pair[0])], raw


def test_every_other_member_keeps_its_bytes() -> None:
    raw = b'{ "seed" : 123456789012345678901, "KV_transfer_Params":{}, "t":1.50e+1 ,"x":"\\u0061"}'
    left = splice(raw, {}, steering_keys(orjson.loads(raw)))
    assert left == b'{"seed" : 123456789012345678901,"t":1.50e+1,"x":"\\u0061"}'


def test_nothing_to_take_out_costs_nothing() -> None:
    assert steering_keys({"model": "a", "messages": [], "stream": True}) == []
    assert steering_keys({"model": "a", "something_else": 1}) == []


def as_json(value: Any) -> bytes:
    """Integers of any size, as clients may write them; what is no JSON as null."""
    text = json.dumps(value, allow_nan=True).replace("NaN", "null")
    return text.replace("-Infinity", "null").replace("Infinity", "null").encode()


@settings(max_examples=examples(60))
@given(st.dictionaries(st.text(max_size=8) | st.sampled_from(NAMES), json_values, max_size=5))
def test_a_body_is_judged_whatever_it_holds(body: dict[str, Any]) -> None:
    raw = as_json(body)
    parsed = orjson.loads(raw)
    complaint(parsed, raw)
    left = orjson.loads(splice(raw, {}, steering_keys(parsed)))
    assert not any(steers(key) for key in left)
    assert [key for key, _, _ in members(raw)] == list(parsed)


@given(
    json_values, json_values, st.sampled_from(["prompt", "messages", "model", "n", "max_tokens"])
)
def test_the_facts_are_found_whatever_it_holds(one: Any, other: Any, key: str) -> None:
    body = orjson.loads(as_json({key: one, "input": other, "metadata": other, "stop": one}))
    for endpoint in ("/v1/chat/completions", "/v1/completions", "/v1/x"):
        facts = facts_of(endpoint, body, {"X-Session-ID": "\udcff"})
        assert facts.prompt_tokens >= 1
        orjson.dumps(facts.session_id)


@pytest.mark.parametrize("ids", [[0, -1], [1, [2]]])
def test_a_list_that_is_no_ids_is_looked_at_in_bounds(ids: list[Any]) -> None:
    assert prompt_facts("/v1/completions", {"prompt": ids * 700_000}) is None
    assert facts_of("/v1/completions", {"prompt": ids * 10}).prompt_tokens >= 1


@given(json_values, st.integers(0, 40))
def test_values_are_counted_whatever_holds_them(value: Any, most: int) -> None:
    """A list of token ids is one value; any other list and its values are all counted."""

    def count(item: Any) -> int:
        if isinstance(item, dict):
            if item.get("type") == "text" and isinstance(item.get("text"), str):
                return 2
            return 1 + sum(1 + count(inner) for inner in item.values())
        if isinstance(item, list) and not is_ids(item):
            return 1 + sum(map(count, item))
        return 1

    def is_ids(item: list[Any]) -> bool:
        return bool(item) and all(isinstance(i, int) and 0 <= i < 1 << 32 for i in item)

    body, values = {"prompt": value}, 0 if value is None else count(value)
    assert (prompt_bytes(COMPLETIONS, body, most) is None) == (values > most)
    assert prompt_bytes(COMPLETIONS, body, MOST_VALUES) is not None


def nested(depth: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value, 2] if kind is list else {"a": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
def test_depth(kind: type) -> None:
    assert not is_deep({"a": nested(MAX_DEPTH - 1, kind)}, b"")
    assert is_deep({"a": nested(MAX_DEPTH, kind)}, b"")
    for depth in (MAX_DEPTH + 1, 1000):
        body = {"x": nested(depth, kind)}
        unfit = complaint(body, orjson.dumps({"x": None}) + b"[" * depth)
        assert unfit is not None
        assert "nested" in unfit.message


def test_depth_hides_behind_no_number_of_ids() -> None:
    for depth in (MAX_DEPTH - 2, MAX_DEPTH + 1):
        body = {"prompt": [[1] * 70_000, nested(depth, list)], "user": "a" * 5000}
        assert (complaint(body, orjson.dumps(body)) is not None) == (depth > MAX_DEPTH)


def test_fields_have_a_limit() -> None:
    many = dict.fromkeys(map(str, range(MAX_FIELDS)), 1)
    for name, fields in ((None, many), (PLUGINS, {PLUGINS: many})):
        assert complaint(fields, b"") is None
        many["one more"] = 1
        unfit = complaint(fields, b"")
        assert unfit is not None
        assert unfit.param == name
        del many["one more"]


@pytest.mark.parametrize("salt", ["", "a/b", "a@b", "a\\b", "a\0b", "a\nb", "x" * 129, 1, [], {}])
def test_a_salt_that_ended_engines(salt: Any) -> None:
    unfit = complaint({"cache_salt": salt}, b"")
    assert unfit is not None
    assert unfit.param == "cache_salt"


@pytest.mark.parametrize("salt", ["tenant-1", "x" * 128, "Zürich", None])
def test_a_salt_as_engines_take_it(salt: Any) -> None:
    assert complaint({"cache_salt": salt}, b"") is None

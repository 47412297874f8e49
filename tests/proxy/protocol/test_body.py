"""Splicing: the same object as parse, change, write; and every other byte as it came."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.body import MAX_FIELDS, MOST_PLACES, Members, members
from tests.support.examined import splice

KEYS = ("a", "b", "kv_transfer_params", "max_tokens", "é", "\n", "n", '"', "\\", "😀", "")
keys = st.sampled_from(KEYS)
blanks = st.text(" \t\r\n", max_size=3)
texts = st.text(max_size=8) | st.sampled_from(
    ['{"a":1}', "],[", '\\"', ",", "\\", "😀", "\x7f\x00"]
)
numbers = st.sampled_from(["0", "-0.0", "1", "1.0", "1e3", "1E+3", "12345678901234567890123456789"])


@st.composite
def escaped(draw: st.DrawFn, text: str) -> str:
    """A JSON string of `text`, each character written in any way that JSON allows."""

    def spelled(char: str) -> str:
        units = char.encode("utf-16-be", "surrogatepass")
        code = "".join(rf"\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
        plain = orjson.dumps(char).decode()[1:-1]
        ways = [plain, code, code.replace(code[2:], code[2:].upper()) if len(code) == 6 else code]
        return draw(st.sampled_from([*ways, r"\/"] if char == "/" else ways))

    return '"' + "".join(spelled(char) for char in text) + '"'


def spelled_list(items: list[str]) -> str:
    return f"[{','.join(items)}]"


values = st.recursive(
    st.sampled_from(["null", "true", "false"]) | numbers | texts.flatmap(escaped),
    lambda inner: (
        st.lists(inner, max_size=3).map(spelled_list)
        | st.lists(st.tuples(keys.flatmap(escaped), inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f"{k} : {v}" for k, v in pairs) + "}"
        )
    ),
    max_leaves=8,
)


@st.composite
def objects(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, str]]]:
    """A JSON object as bytes, and its members as (key, value as written)."""
    written, found = [], []
    for key in draw(st.lists(keys, max_size=6)):
        name, value = draw(escaped(key)), draw(values)
        found.append((key, value))
        b = [draw(blanks) for _ in range(4)]
        written.append(f"{b[0]}{name}{b[1]}:{b[2]}{value}{b[3]}")
    outer = draw(blanks)
    body = outer + "{" + (",".join(written) or outer) + "}" + outer
    return body.encode(), found


class TestAnyObject:
    @pytest.mark.long
    @given(objects(), st.dictionaries(st.sampled_from(["a", "n", "new"]), values), st.sets(keys))
    def test_it_equals_parse_change_write(
        self, made: tuple[bytes, list[Any]], put: dict[str, str], drop: set[str]
    ) -> None:
        body, _ = made
        spliced = splice(body, {key: value.encode() for key, value in put.items()}, drop)
        kept = {k: v for k, v in orjson.loads(body).items() if k not in drop}
        assert orjson.loads(spliced) == {**kept, **{k: orjson.loads(v) for k, v in put.items()}}

    @given(objects(), st.sets(keys))
    def test_what_stays_stays_to_the_byte_and_in_order(
        self, made: tuple[bytes, list[tuple[str, str]]], drop: set[str]
    ) -> None:
        body, found = made
        spliced = splice(body, {}, drop)
        kept = [(key, value) for key, value in found if key not in drop]
        spans = [(key, spliced[start:end]) for key, start, end in members(spliced)]
        assert [key for key, _ in spans] == [key for key, _ in kept]
        for (_, span), (_, value) in zip(spans, kept, strict=True):
            assert span in body
            assert span.endswith(value.encode())


KV = "kv_transfer_params"


@pytest.mark.parametrize(
    ("body", "put", "drop", "expected"),
    [
        (b"{}", {}, {KV}, b"{}"),
        (b" { } ", {}, {KV}, b"{}"),
        (b"{}", {"a": b"1"}, (), b'{"a":1}'),
        (b'{"a":1}', {}, {"a"}, b"{}"),
        (b'{"a":1,"b":2}', {}, {"a"}, b'{"b":2}'),
        (b'{"a":1,"b":2}', {}, {"b"}, b'{"a":1}'),
        (b'{"a":1,"b":2}', {"a": b"3"}, (), b'{"b":2,"a":3}'),
        (b'{"a":1,"b":2,"a":3}', {}, {"a"}, b'{"b":2}'),
        (b'{"a":1,"b":2,"a":3}', {"a": b"4"}, (), b'{"b":2,"a":4}'),
        (b'{"\\u006bv_transfer_params":{},"b":2}', {}, {KV}, b'{"b":2}'),
        (b'{"\\u006Bv\\u005ftransfer_params":[1,2],"b":2}', {}, {KV}, b'{"b":2}'),
        (b'{"b":{"kv_transfer_params":1}}', {}, {KV}, b'{"b":{"kv_transfer_params":1}}'),
        (b'{"b":"kv_transfer_params"}', {}, {KV}, b'{"b":"kv_transfer_params"}'),
        (b'{"\\n":1,"n":2}', {}, {"n"}, b'{"\\n":1}'),
        (b'{"a":[],"b":[[1],[2,3]],"c":4}', {}, {"b"}, b'{"a":[],"c":4}'),
        (b'{"a":"]}","b":[{"c":["]"]}, 1]}', {}, {"a"}, b'{"b":[{"c":["]"]}, 1]}'),
    ],
    ids=repr,
)
def test_examples(body: bytes, put: dict[str, bytes], drop: set[str], expected: bytes) -> None:
    assert splice(body, put, drop) == expected


def test_numbers_are_not_rewritten() -> None:
    numbers = b'"big":123456789012345678901234567890,"one":1.0,"e":1E+02,"z":-0'
    assert splice(b"{" + numbers + b',"gone":1}', {}, {"gone"}) == b"{" + numbers + b"}"


@pytest.mark.parametrize("deep", [b"[" * 1000 + b"]" * 1000, b'{"a":' * 500 + b"1" + b"}" * 500])
def test_depth_is_no_danger(deep: bytes) -> None:
    assert splice(b'{"deep":' + deep + b',"gone":1}', {}, {"gone"}) == b'{"deep":' + deep + b"}"


def test_many_escapes_are_no_danger() -> None:
    text = b'"' + b'\\"\\\\\\n' * 100_000 + b'"'
    assert splice(b'{"text":' + text + b',"gone":1}', {}, {"gone"}) == b'{"text":' + text + b"}"


@pytest.mark.parametrize("is_known", [False, True])
def test_a_member_in_front(is_known: bool) -> None:
    given = Members(b' {"a":[1, 2],"b":"x"}')
    if is_known:
        assert given.spans
    made = given.with_first("new", b"true")
    assert made.raw == b' {"new":true,"a":[1, 2],"b":"x"}'
    assert made.spans == list(members(made.raw))


def test_the_places_of_many_members_are_not_kept() -> None:
    """A body of 24 KB kept 470 KiB of them until its answer."""
    few, many = (Members(b'{"x":1,%s"z":0}' % (b'"k":0,' * n)) for n in (9, MAX_FIELDS - 2))
    tracemalloc.start()
    try:
        bodies = [body.edited({"x": b"2"}) for body in (few, many) for _ in range(100)]
        for body in bodies:
            assert body.spans[-1][0] == "x"
        bodies += [few, many]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < sum(sys.getsizeof(body.raw) for body in bodies) + 100 * MOST_PLACES * 240
    assert all(body.raw.endswith((b'"z":0,"x":2}', b'"z":0}')) for body in bodies)

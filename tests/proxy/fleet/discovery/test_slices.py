"""EndpointSlices as instances: names, ports, states, and what no API should say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.values import InstanceSpec
from proxy.fleet.discovery.base import MOST_FOUND, DiscoveryError
from proxy.fleet.discovery.slices import MOST_SLICES, Lines, OutdatedError, Slices
from tests.support.slices_api import HTTP, a_slice, endpoint

AS_WRITTEN = Path(__file__).parent / "data/slices.json"
"""A list with all members that a control plane writes, in its order."""
GOOD = endpoint("a", "10.0.0.1")
BOOTSTRAP = {"name": "bootstrap", "port": 8998, "protocol": "TCP"}


def listed(*slices: Any, **meta: Any) -> Slices:
    found = Slices()
    found.replace({"metadata": {"resourceVersion": "7"} | meta, "items": [*slices]})
    return found


def told(slices: Slices) -> tuple[list[str], list[str]]:
    found = slices.found()
    return [str(spec) for spec in found.instances], sorted(found.leaving)


def test_a_list_as_a_control_plane_writes_it() -> None:
    slices = Slices()
    slices.replace(orjson.loads(AS_WRITTEN.read_bytes()))
    assert told(slices) == (
        [
            "vllm-6c9d7b5f4-4x8zq=http://10.244.1.17:8000;bootstrap=http://10.244.1.17:8998",
            "vllm-6c9d7b5f4-h2k7n=http://10.244.2.9:8000;bootstrap=http://10.244.2.9:8998",
        ],
        ["vllm-6c9d7b5f4-nn5wd", "vllm-6c9d7b5f4-t6c2r"],
    )
    assert slices.version == "48211"


@pytest.mark.parametrize(
    ("ports", "instance"),
    [
        (HTTP, "a=http://10.0.0.1:8000"),
        ([{"port": 9000}], "a=http://10.0.0.1:9000"),
        ([{"name": "grpc", "port": 50051}, *HTTP], "a=http://10.0.0.1:8000"),
        ([{"name": "https", "port": 8443}], "a=https://10.0.0.1:8443"),
        ([{"name": "api", "port": 1, "appProtocol": "https"}], "a=https://10.0.0.1:1"),
        ([BOOTSTRAP, *HTTP], "a=http://10.0.0.1:8000;bootstrap=http://10.0.0.1:8998"),
        ([{"name": "u", "port": 2, "protocol": "UDP"}, *HTTP], "a=http://10.0.0.1:8000"),
    ],
)
def test_ports(ports: Any, instance: str) -> None:
    assert told(listed(a_slice("s", endpoint("a", "10.0.0.1"), ports=ports))) == ([instance], [])


def test_an_endpoint_without_a_pod_is_named_by_its_address() -> None:
    bare = {"addresses": ["10.0.0.1"]}
    long = endpoint("p" * 65, "10.0.0.2")
    six = a_slice("s", {"addresses": ["fd00::1"]}, kind="IPv6")
    assert told(listed(a_slice("s", bare, long)))[0] == [
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
    ]
    assert told(listed(six))[0] == ["http://[fd00::1]:8000"]


def test_states_of_one_endpoint_in_several_slices() -> None:
    ready, leaves = endpoint("a", "10.0.0.1"), endpoint("a", "10.0.0.1", terminating=True)
    late = endpoint("a", "10.0.0.1", ready=False)
    assert told(listed(a_slice("s", ready), a_slice("t", leaves))) == ([], ["a"])
    assert told(listed(a_slice("s", late), a_slice("t", ready)))[1] == []
    assert told(listed(a_slice("s", late))) == ([], ["a"])
    assert told(listed(a_slice("s", leaves | {"conditions": {"terminating": True}}))) == ([], ["a"])


def test_a_pod_with_addresses_of_both_kinds_is_one_instance() -> None:
    four = a_slice("s", endpoint("a", "10.0.0.1"))
    six = a_slice("t", endpoint("a", "fd00::1"), kind="IPv6")
    assert told(listed(six, four)) == (["a=http://10.0.0.1:8000"], [])
    assert told(listed(six, a_slice("s"))) == (["a=http://[fd00::1]:8000"], [])
    assert told(listed(a_slice("n", {"addresses": ["a.example"]}, kind="FQDN"))) == ([], [])


def test_events() -> None:
    slices = listed(a_slice("s", endpoint("a", "10.0.0.1")))
    second = a_slice("t", endpoint("b", "10.0.0.2"))
    second["metadata"]["resourceVersion"] = "8"
    slices.apply({"type": "ADDED", "object": second})
    assert len(slices.found().instances) == 2
    assert slices.version == "8"
    leaving = a_slice("s", endpoint("a", "10.0.0.1", terminating=True))
    slices.apply({"type": "MODIFIED", "object": leaving})
    assert told(slices) == (["b=http://10.0.0.2:8000"], ["a"])
    slices.apply({"type": "DELETED", "object": second})
    slices.apply({"type": "DELETED", "object": second})
    slices.apply({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "12"}}})
    assert told(slices) == ([], ["a"])
    assert slices.version == "12"


def test_an_event_says_whether_it_changes_a_slice() -> None:
    one, mark = a_slice("s", GOOD), {"metadata": {"resourceVersion": "12"}}
    slices = listed(one)
    for kind, told, is_news in (
        ("BOOKMARK", mark, False),
        ("MODIFIED", one, False),
        ("MODIFIED", a_slice("s", GOOD, endpoint("b", "10.0.0.2")), True),
        ("ADDED", a_slice("t"), True),
        ("DELETED", one, True),
        ("DELETED", one, False),
    ):
        assert slices.apply({"type": kind, "object": told}) is is_news


def test_too_many_are_refused_before_one_is_read() -> None:
    many = a_slice("s", *[{"addresses": ["no address"]}] * (MOST_FOUND + 1))
    with pytest.raises(DiscoveryError, match="more than 256 slices or 1024 endpoints"):
        Slices().replace({"metadata": {}, "items": [many]})
    with pytest.raises(DiscoveryError, match="more than 256 slices or 1024 endpoints"):
        Slices().apply({"type": "ADDED", "object": many})


def test_errors_in_a_watch() -> None:
    gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
    with pytest.raises(OutdatedError):
        listed().apply({"type": "ERROR", "object": gone})
    with pytest.raises(DiscoveryError, match="ends with an error 500: it is broken"):
        listed().apply({"type": "ERROR", "object": {"code": 500, "message": "it is\nbroken"}})


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"metadata": {}, "items": None},
        {"metadata": {"continue": "more"}, "items": []},
        {"metadata": {"resourceVersion": 7}, "items": []},
        {"metadata": {"resourceVersion": "1\r\nX: 1"}, "items": []},
        {"metadata": {}, "items": [7]},
        {"metadata": {}, "items": [{"metadata": {"name": "s"}}]},
        {"metadata": {}, "items": [a_slice("s", GOOD, ports=())]},
        {"metadata": {}, "items": [a_slice("s", GOOD, ports=[{"name": "http", "port": 70000}])]},
        {"metadata": {}, "items": [a_slice("s", GOOD, ports=[{"name": "http", "port": True}])]},
        {
            "metadata": {},
            "items": [a_slice("s", GOOD, ports=[{"name": n, "port": 1} for n in "ab"])],
        },
        {"metadata": {}, "items": [a_slice("s", {"addresses": []})]},
        {"metadata": {}, "items": [a_slice("s", {"addresses": ["engine.example"]})]},
        {"metadata": {}, "items": [a_slice("s", {"addresses": [7]})]},
        {"metadata": {}, "items": [a_slice("s", {"addresses": ["fd00::1"]})]},
        {"metadata": {}, "items": [a_slice("s", GOOD, kind="IPv6")]},
        *(
            {"metadata": {}, "items": [a_slice("s", {"addresses": [one]}, kind="IPv6")]}
            for one in ("fe80::1%eth0", "2001:db8::1%]", "2001:db8::1%]@1", "fd00::1%\n", "::1%a/b")
        ),
        {"metadata": {}, "items": [a_slice("s" * 254)]},
        {"metadata": {}, "items": [a_slice("s", GOOD | {"conditions": 1})]},
        {"metadata": {}, "items": [a_slice("s") | {"endpoints": 1}]},
        {"metadata": {}, "items": [a_slice(f"s{n}") for n in range(MOST_SLICES + 1)]},
        {"metadata": {}, "items": [a_slice("s", *[GOOD] * (MOST_FOUND + 1))]},
    ],
)
def test_a_document_of_another_form_changes_nothing(document: Any) -> None:
    slices = listed(a_slice("old", endpoint("b", "10.0.0.9")))
    with pytest.raises(DiscoveryError):
        slices.replace(document)
    assert told(slices) == (["b=http://10.0.0.9:8000"], [])
    assert slices.version == "7"


@pytest.mark.parametrize(
    "event",
    [
        None,
        {"type": 1, "object": {}},
        {"type": "ADDED"},
        {"type": "OTHER", "object": {}},
        {"type": "ADDED", "object": a_slice("s", *[GOOD] * (MOST_FOUND + 1))},
        {"type": "DELETED", "object": {"metadata": {}}},
    ],
)
def test_an_event_of_another_form(event: Any) -> None:
    with pytest.raises(DiscoveryError):
        listed().apply(event)


def test_lines_come_in_any_pieces() -> None:
    whole = b'{"a":1}\n\n{"b":2}\n{"c"'
    for size in range(1, len(whole) + 1):
        lines = Lines(64)
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert [line for p in pieces for line in lines.feed(p)] == [b'{"a":1}', b'{"b":2}']
        assert lines.feed(b":3}\n") == [b'{"c":3}']


@pytest.mark.parametrize("data", [b"x" * 9, b"x" * 9 + b"\n", b"a\n" + b"x" * 9])
def test_a_line_has_a_limit(data: bytes) -> None:
    with pytest.raises(DiscoveryError, match="more than 8 bytes"):
        Lines(8).feed(data)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    yield path
    members = enumerate(node) if isinstance(node, list) else ()
    for key, value in node.items() if isinstance(node, dict) else members:
        yield from places(value, (*path, key))


def put(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at a path."""
    if not path:
        return value
    copy = node.copy()
    copy[path[0]] = put(node[path[0]], path[1:], value)
    return copy


WRITTEN = orjson.loads(AS_WRITTEN.read_bytes())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from([*places(WRITTEN)]), JSON)
def test_whatever_an_api_says_is_an_instance_or_an_error(path: tuple[Any, ...], value: Any) -> None:
    document = put(WRITTEN, path, value)
    slices = Slices()
    with suppress(DiscoveryError):
        slices.replace(document)
    with suppress(DiscoveryError, OutdatedError):
        slices.apply({"type": "MODIFIED", "object": document})
    for spec in slices.found().instances:
        ip_address(urlsplit(spec.url).hostname or "")
        assert InstanceSpec.parse(str(spec)) == spec

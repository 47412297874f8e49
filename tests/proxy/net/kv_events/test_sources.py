"""What `/kv_event_sources` says, of engines with one rank and several."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.net.kv_events.sources import Source, SourcesError, read_sources

TOLD: dict[str, Any] = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5558",
    "topic": "kv",
    "buffer_steps": 10000,
}


def read(told: Any) -> dict[int, Source]:
    return read_sources(orjson.dumps(told), "10.0.0.7")


def test_each_rank_has_its_own_ports_on_the_instances_host() -> None:
    second = TOLD | {"endpoint": "tcp://172.17.0.2:40001", "replay_endpoint": None, "topic": None}
    assert read({"0": TOLD, "1": second}) == {
        0: Source("10.0.0.7", 5557, 5558, b"kv"),
        1: Source("10.0.0.7", 40001, None),
    }


def test_an_engine_without_events() -> None:
    off = TOLD | {"enable_kv_cache_events": False}
    assert read({}) == read({"0": off}) == read({"0": TOLD | {"publisher": "null"}}) == {}
    assert read({"data": [{"id": "m"}]}) == {}


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/events", "inproc://x", "tcp://*:0", "", None, 5])
def test_what_cannot_be_reached_is_said(endpoint: Any) -> None:
    with pytest.raises(SourcesError, match="is not tcp://HOST:PORT"):
        read({"0": TOLD | {"endpoint": endpoint}})


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b"7"])
def test_what_is_no_answer(body: bytes) -> None:
    with pytest.raises(SourcesError):
        read_sources(body, "h")

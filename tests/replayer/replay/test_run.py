"""What a run asks of its target before it begins, and how a trace's ids travel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.answers import MOST_BYTES
from replayer.replay.client import open_session
from replayer.replay.options import ReplayOptions, parse_options
from replayer.replay.run import HEADER_CHARS, TargetError, header_safe, model_of
from tests.support.told_engine import ToldEngine, endless

MODELS = "http://target:8000/v1/models"


def options(tmp_path: Path, *more: str) -> ReplayOptions:
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(b"")
    return parse_options([str(trace), "--target", "http://target:8000", *more])


async def model(tmp_path: Path, *more: str) -> str:
    async with aiohttp.ClientSession() as session:
        return (await model_of(session, options(tmp_path, *more)))[0]


async def test_the_targets_first_model_is_asked_for(answers: Any, tmp_path: Path) -> None:
    answers.get(MODELS, payload={"data": [{"id": "a"}, {"id": "b"}]})
    assert await model(tmp_path, "--api-key", "sk-1") == "a"
    [call] = next(iter(answers.requests.values()))
    assert call.kwargs["headers"] == {"Authorization": "Bearer sk-1"}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"status": 401, "body": b"no"}, "status 401"),
        ({"payload": {"data": []}}, "status 200"),
        ({"payload": {"data": [{}]}}, "status 200"),
        ({"payload": ["a"]}, "status 200"),
        ({"payload": {"data": [{"id": 5}]}}, "status 200"),
        ({"payload": {"data": [{"id": "a" * 1000}]}}, "status 200"),
        ({"body": b'{"data":[{"id":"\\ud800"}]}'}, "status 200"),
        ({"body": b'{"data":' + b"[" * 100_000}, "status 200"),
        ({"body": b'{"data":[{"id":"\xff"}]}'}, "status 200"),
        ({"exception": UnicodeError("label too long")}, "label too long"),
        ({"exception": TimeoutError()}, "no answer in time"),
        ({"exception": aiohttp.ClientPayloadError()}, "the answer broke off before its end"),
    ],
)
async def test_a_target_that_names_no_model(
    answers: Any, tmp_path: Path, said: dict[str, Any], reason: str
) -> None:
    """A run ends before it begins, unless the model was given."""
    answers.get(MODELS, **said, repeat=True)
    with pytest.raises(TargetError, match=rf"names no model \({reason}\); give --model"):
        await model(tmp_path)
    assert await model(tmp_path, "--model", "mine") == "mine"


async def test_models_without_an_end_are_none(tmp_path: Path) -> None:
    engine = ToldEngine()
    engine.routes["/v1/models"] = endless(b" " * 1000)
    async with engine, open_session() as session:
        there = options(tmp_path, "--target", engine.url)
        with pytest.raises(TargetError, match=rf"names no model \(over {MOST_BYTES} bytes\)"):
            await model_of(session, there)


async def test_a_target_that_is_not_there_ends_a_run_with_any_model(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(b"")
    there = parse_options([str(trace), "--target", "http://127.0.0.1:1", "--model", "mine"])
    async with aiohttp.ClientSession() as session:
        with pytest.raises(TargetError, match=r"127\.0\.0\.1:1: Connection refused"):
            await model_of(session, there)


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_ids_in_headers_are_ascii_bounded_and_distinct(one: str, other: str) -> None:
    safe = header_safe(one)
    assert safe.isascii()
    assert safe.isprintable()
    assert " " not in safe
    assert len(safe) <= HEADER_CHARS + 9
    assert (safe == header_safe(other)) == (one == other)

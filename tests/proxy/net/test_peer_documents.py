"""Documents of peers: refused before they are parsed, where that would take long."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import orjson
import pytest

from proxy.net.peer_documents import (
    LINE_BYTES,
    LOOP_SHARE,
    MOST_LINES,
    MOST_WANTED,
    PAUSE_S,
    SKIP_BYTES,
    TURN_BYTES,
    WANTED_BYTES,
    TooMuchError,
    in_turns,
    read_json,
    sample_of,
    wanted_lines,
)

MIB = 1 << 20
COSTLY = {
    "empty objects": b"[" + b"{}," * 300_000 + b"1]",
    "empty arrays": b"[" + b"[]," * 300_000 + b"1]",
    "objects": b"[" + b'{"a":1},' * 120_000 + b"1]",
    "names": b"{" + b",".join(b'"k%d":1' % n for n in range(80_000)) + b"}",
    "numbers": b"[" + b"1," * 500_000 + b"1]",
    "short texts": b"[" + b'"a",' * 60_000 + b"1]",
    "escaped texts": b"[" + b'"\\n",' * 60_000 + b"1]",
    "texts of other letters": b"[" + '"éè",'.encode() * 60_000 + b"1]",
    "token ids": orjson.dumps(list(range(100_000))),
    "long numbers": b"[" + b"1.7e-301," * 100_000 + b"1]",
    "nested arrays": b"[" + b"[[[]]]," * 20_000 + b"1]",
    "deep arrays": b"[" * 200 + b"]" * 200,
    "deep objects": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "names and texts": b"[" + b'{"a":"b"},' * 15_000 + b"1]",
}
PERMISSION = {
    "id": f"modelperm-{'f' * 32}",
    "object": "model_permission",
    "created": 1795176000,
    **dict.fromkeys(("allow_create_engine", "allow_sampling", "allow_logprobs"), True),
    **dict.fromkeys(("allow_search_indices", "allow_view", "allow_fine_tuning"), False),
    "organization": "*",
    "group": None,
    "is_blocking": False,
}
CARD = {
    "object": "model",
    "created": 1795176000,
    "owned_by": "vllm",
    "root": "/models/adapters/lora-adapter-1000",
    "parent": "meta-llama/Llama-3.1-70B-Instruct",
    "max_model_len": None,
    "permission": [PERMISSION],
}
"""An adapter, as vLLM lists it."""


@pytest.mark.long
@pytest.mark.parametrize("kind", COSTLY)
def test_what_is_costly_is_not_parsed(kind: str) -> None:
    assert orjson.loads(COSTLY[kind])
    with pytest.raises(TooMuchError):
        read_json(COSTLY[kind])


@pytest.mark.parametrize(
    "value",
    [
        {"data": [{"id": f"lora-adapter-{n}"} | CARD for n in range(1000)]},
        {"remote_block_ids": list(range(65_536))},
        {"text": "a" * MIB},
    ],
)
def test_what_honest_engines_send_is_read(value: object) -> None:
    assert read_json(orjson.dumps(value)) == value


def kept(exposition: bytes) -> list[bytes]:
    return [line for line in wanted_lines(exposition, (b"a",)) if line is not None]


def test_of_lines_only_those_that_are_wanted_and_short_are_kept() -> None:
    long = b"a{" + b"x" * LINE_BYTES + b"} 1"
    assert kept(b"a 1\nb 2\n%b\nab 3\na 4" % long) == [b"a 1", b"ab 3"]
    assert len(kept(b"a 1\n" * 10_000)) == MOST_WANTED
    assert kept(b"a 1\n" + b"\n" * MOST_LINES) == []
    wide = b"a" * LINE_BYTES + b"\n"
    assert len(kept(wide * 1000)) == WANTED_BYTES // LINE_BYTES


@pytest.mark.parametrize(
    "line", [b"a" * LINE_BYTES, b"a" * 100, b"a", b"b", b"b" * LINE_BYTES, b""]
)
def test_a_turn_is_short_whatever_its_lines_are(line: bytes) -> None:
    lines = in_a_turn = 0
    for found in wanted_lines((line + b"\n") * 1500, (b"a",)):
        in_a_turn = 0 if found is None else in_a_turn + len(found)
        lines += found is None
        assert in_a_turn <= TURN_BYTES + LINE_BYTES
    assert lines >= 1500 * SKIP_BYTES // TURN_BYTES, "lines that are skipped count too"


async def test_other_tasks_run_between_the_turns_of_a_parser() -> None:
    ran: list[str] = []

    def parser() -> Generator[None, None, str]:
        ran.append("first")
        yield
        ran.append("second")
        return "value"

    async def other() -> None:
        ran.append("other")

    async with asyncio.TaskGroup() as group:
        parsing = group.create_task(in_turns(parser()))
        group.create_task(other())
    assert (ran, parsing.result()) == (["first", "other", "second"], "value")


async def test_a_document_that_costs_much_is_parsed_the_more_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside any turn the event loop has the rest of its time, however long the turn takes."""
    spent, slept = 0.0, 0.0
    costs = [0.0, 0.00001, 0.0005, 0.005]

    def parser() -> Generator[None, None, None]:
        nonlocal spent
        for cost in costs:
            spent += cost
            yield

    async def sleep(pause_s: float) -> None:
        nonlocal slept
        slept += pause_s
        assert pause_s >= PAUSE_S
        assert spent <= LOOP_SHARE * (spent + slept) + 1e-9

    monkeypatch.setattr("time.thread_time", lambda: spent)
    monkeypatch.setattr("asyncio.sleep", sleep)
    await in_turns(parser())
    assert slept >= sum(costs) / LOOP_SHARE - sum(costs)


@pytest.mark.parametrize(
    ("line", "labels"),
    [
        (b'a{x="1",y="2"} 3', {"x": "1", "y": "2"}),
        (rb'a{x="}{\"",y=","} 3', {"x": '}{"', "y": ","}),
        (rb'a{x="\n\\",} 3 17', {"x": "\n\\"}),
        (b'a { x = "1" } 3', {"x": "1"}),
        (b'a{x="} 3', None),
        (b'a{x="1"', None),
        (b'a{x="1} 3', None),
    ],
)
def test_labels_are_read_as_they_are_quoted(line: bytes, labels: dict[str, str] | None) -> None:
    sample = sample_of(line)
    assert (sample and dict(sample.labels)) == labels
    assert sample is None or sample.value == 3.0

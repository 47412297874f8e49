"""A stream that is cut at each byte of its wire goes on with nothing lost and nothing doubled.

The engines here are scripts, so that the bytes are known: a chat's answer is cut once, or twice,
and whoever is asked to go on generates the rest.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.scenarios.test_migration import CHAT, Told, stream, told
from tests.support.harness import STREAM_HEAD, RawEngine, ServedProxy, chat, chunk

EVERY = 1 if int(os.environ.get("MIGRATION_CUTS", "0")) >= 1000 else 17
"""`make migration` cuts at each byte, other runs at some of them."""
PROMPT = [7, 8, 9]
WORDS = ["one ", "two\n", 'the "third" ', "\u00e9\u00e8 ", "\U0001f600 ", "six"]
FIRST_ID = 100
"""Of the tokens: one for each word."""
AGAIN = 150
"""Bytes of the second instance's wire after which it is lost too."""


def data(**members: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(members)


def as_chat(number: int) -> bytes:
    is_last = number == len(WORDS) - 1
    choice = {"index": 0, "delta": {"content": WORDS[number]}, "logprobs": None}
    choice |= {"finish_reason": "length" if is_last else None, "token_ids": [FIRST_ID + number]}
    return data(id="chatcmpl-1", object="chat.completion.chunk", created=1, choices=[choice])


def usage(prompt: int, output: int) -> dict[str, int]:
    total = prompt + output
    return {"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": output}


def chat_wire() -> bytes:
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
    events = [data(**head, choices=[role], prompt_token_ids=PROMPT)]
    events += [as_chat(number) for number in range(len(WORDS))]
    events += [data(**head, choices=[], usage=usage(len(PROMPT), len(WORDS)))]
    return STREAM_HEAD + b"".join(map(chunk, [*events, b"data: [DONE]\n\n"])) + b"0\r\n\r\n"


def rest_wire(known: int) -> bytes:
    """A completion that generates what follows the first `known` words."""
    events = []
    for number in range(known, len(WORDS)):
        reason = "length" if number == len(WORDS) - 1 else None
        choice = {"index": 0, "text": WORDS[number], "logprobs": None, "finish_reason": reason}
        choice |= {"token_ids": [FIRST_ID + number], "prompt_token_ids": None}
        events.append(data(id="cmpl-2", object="text_completion", created=2, choices=[choice]))
    counts = usage(len(PROMPT) + known, len(WORDS) - known)
    events += [data(id="cmpl-2", created=2, choices=[], usage=counts), b"data: [DONE]\n\n"]
    return STREAM_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"


WIRE = chat_wire()


def place(at: int) -> str:
    """Of a cut before this byte: what part of the wire it is in."""
    sent = WIRE[:at]
    if at < len(STREAM_HEAD):
        return "head"
    if b"[DONE]" in sent:
        return "end"
    if b'"usage"' in sent:
        return "usage"
    if sent.endswith((b"\n\n", b"\n\n\r\n")) or at == len(STREAM_HEAD):
        return "between events"
    part = sent[sent.rfind(b"data: ") :]
    if not part.startswith(b"data: ") or b"\n\n" in part:
        return "chunk size"
    return "token ids" if b'ids":[' in part and not part.endswith((b"]", b"}", b"\n")) else "event"


FIRST_OF = {place(at): at for at in range(len(WIRE) - 1, len(STREAM_HEAD), -1)}
"""The first byte of each part behind the head."""


class Engines:
    """Scripts of both instances: the next answers are cut after so many bytes."""

    def __init__(self) -> None:
        self.cuts: list[int] = []
        self.engines: list[RawEngine] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the request that came last, of any instance."""
        body = orjson.loads(self.last.pop())
        wire = WIRE
        if "messages" not in body:
            assert body["prompt"][: len(PROMPT)] == PROMPT
            generated = body["prompt"][len(PROMPT) :]
            assert generated == list(range(FIRST_ID, FIRST_ID + len(generated)))
            assert body["max_tokens"] == len(WORDS) - len(generated)
            wire = rest_wire(len(generated))
        at = self.cuts.pop(0) if self.cuts else len(wire)
        writer.write(wire[:at])
        await writer.drain()
        if at < len(wire):
            raise ConnectionError

    @property
    def last(self) -> list[bytes]:
        return next(engine.posts for engine in self.engines if engine.posts)


@pytest.mark.parametrize("losses", [1, 2])
async def test_at_each_byte(tmp_path: Path, losses: int) -> None:
    engines, places, ended = Engines(), Counter[str](), Counter[str]()
    body = chat("go on", max_tokens=len(WORDS), return_token_ids=None)
    options = {"kv_connector": "none", "migration_limit": 3, "health_interval": 60.0}
    async with AsyncExitStack() as stack:
        for _ in range(losses + 1):
            engines.engines.append(await stack.enter_async_context(RawEngine(engines.answer)))
        where = [engine.address for engine in engines.engines]
        async with ServedProxy(tmp_path / "log", where, **options) as proxy:
            await proxy.up()
            whole = told(await stream(proxy, CHAT, body))
            assert whole.text == "".join(WORDS)
            cuts = {*range(len(STREAM_HEAD), len(WIRE), EVERY), *FIRST_OF.values()}
            for at in sorted(cuts):
                for member in proxy.router.known.fleet.members():
                    member.health.renew(proxy.server.state.clock.now_s())
                engines.cuts = [at, len(STREAM_HEAD) + AGAIN][:losses]
                check(told(await stream(proxy, CHAT, body)), whole)
                places[place(at)] += 1
            for record in await proxy.records(len(cuts) + 1):
                ended.update(row["ended"] for row in record["migrations"] or ())
            await proxy.at_rest()
            assert proxy.server.state.in_flight.trails.taken_bytes == 0
    assert set(places) == {"event", "token ids", "between events", "chunk size", "usage", "end"}
    assert set(ended) <= {"moved", "finished"}
    assert ended["moved"] > len(cuts) / 2


def check(got: Told, whole: Told) -> None:
    """Nothing is lost and nothing doubled; only what follows the last token may be missing."""
    assert (got.text, got.ids, got.roles) == (whole.text, whole.ids, whole.roles)
    assert got.reasons == ["length"]
    if got.error is None:
        assert got.is_done
        assert got.usage == whole.usage
    else:
        assert (got.error, got.is_done) == ("engine_lost", False)

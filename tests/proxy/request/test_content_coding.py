"""Compressed bodies: what an engine gets of them, and what they may cost."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.errors import (
    CONTENT_CODINGS,
    BadRequestError,
    BodyTooLargeError,
    UnsupportedEncodingError,
)
from proxy.request import content_coding
from proxy.request.content_coding import (
    AT_ONCE,
    FEED_BYTES,
    SHORT_BYTES,
    STEP_BYTES,
    Unpacking,
    coding_of,
)
from tests.support.harness import (
    RawEngine,
    ServedProxy,
    chat,
    plain,
    proxied,
    says,
    stands_still,
    until,
    words,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


MOST_BYTES = 1 << 20
Pack = Callable[[bytes], bytes]


def bare(data: bytes) -> bytes:
    """Deflate without zlib's head, as some clients take the name."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def streamed(data: bytes) -> bytes:
    """A zstd frame that does not tell its size."""
    packer = zstd.ZstdCompressor()
    return packer.compress(data) + packer.flush()


def hard(data: bytes) -> bytes:
    """The largest window that the body's size allows."""
    return zstd.compress(data, 22)


def as_it_is(data: bytes) -> bytes:
    """A zstd frame of stored blocks."""
    frame = bytearray(b"\x28\xb5\x2f\xfd\x00\x58")
    pieces = [data[at : at + 65_536] for at in range(0, len(data), 65_536)] or [b""]
    for number, piece in enumerate(pieces, 1):
        frame += (len(piece) << 3 | (number == len(pieces))).to_bytes(3, "little") + piece
    return bytes(frame)


PACKS: dict[str, tuple[str, Pack]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip stored": ("gzip", lambda data: gzip.compress(data, 0)),
    "x-gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", bare),
    "zstd": ("zstd", zstd.compress),
    "zstd without a size": ("zstd", streamed),
    "zstd at its hardest": ("zstd", hard),
    "zstd stored": ("zstd", as_it_is),
}


def unpacked(raw: bytes, coding: str, most_bytes: int = MOST_BYTES) -> bytes:
    return asyncio.run(Unpacking().plain(raw, coding, most_bytes))


@pytest.mark.long
@pytest.mark.parametrize("name", PACKS)
@given(st.binary(max_size=200))
def test_what_was_packed_comes_out(name: str, data: bytes) -> None:
    coding, pack = PACKS[name]
    assert unpacked(pack(data), coding) == data


@pytest.mark.long
@pytest.mark.parametrize("name", PACKS)
def test_it_does_not_matter_where_the_steps_end(name: str) -> None:
    coding, pack = PACKS[name]
    ends = SHORT_BYTES, STEP_BYTES, 2 * STEP_BYTES, 3 * STEP_BYTES
    sizes = [*range(20), *(end + off for end in ends for off in (-1, 0, 1))]
    for data in (
        b"".join(str(n).encode() for n in range(100_000)),
        *(b"a" * size for size in sizes),
    ):
        assert unpacked(pack(data), coding) == data


@pytest.mark.long
@pytest.mark.parametrize("name", PACKS)
def test_a_body_may_be_as_long_as_a_plain_one(name: str) -> None:
    coding, pack = PACKS[name]
    assert len(unpacked(pack(b"a" * MOST_BYTES), coding)) == MOST_BYTES
    for more in (1, 8 * MOST_BYTES):
        with pytest.raises(BodyTooLargeError, match=f"over {MOST_BYTES} bytes when unpacked"):
            unpacked(pack(b"a" * (MOST_BYTES + more)), coding)


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd"])
def test_of_a_bomb_no_more_is_unpacked_than_is_allowed(name: str) -> None:
    coding, pack = PACKS[name]
    bomb = pack(b"a" * 20_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError):
            unpacked(bomb, coding)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MOST_BYTES + 4 * STEP_BYTES


def test_a_zstd_window_over_the_limit_is_refused() -> None:
    frame = bytearray(as_it_is(b"{}"))
    frame[5] = (31 - 10) << 3  # 2 GiB
    with pytest.raises(BadRequestError, match="not one whole zstd stream"):
        unpacked(bytes(frame), "zstd")


@pytest.mark.parametrize("name", PACKS)
def test_what_is_not_one_whole_stream_is_refused(name: str) -> None:
    coding, pack = PACKS[name]
    long = pack(b"".join(str(n).encode() for n in range(40_000)))
    assert len(long) > FEED_BYTES
    for whole in (pack(b'{"a":1}'), long):
        twice, longer = whole + whole, whole + b"\n"
        cut = (whole[:at] for at in (1, 2, 4, len(whole) // 2, len(whole) - 1))
        for broken in (twice, longer, b"\xff\xff" + whole, b"\xff" * 100, *cut):
            with pytest.raises(BadRequestError, match=f"not one whole {coding} stream"):
                unpacked(broken, coding)


@given(st.sampled_from(sorted(PACKS)), st.binary(max_size=100), st.integers(0), st.binary())
def test_no_bytes_raise_anything_else(name: str, data: bytes, at: int, more: bytes) -> None:
    coding, pack = PACKS[name]
    packed = pack(data)
    at %= len(packed)
    for raw in (packed[:at] + more + packed[at + 1 :], more or b"x"):
        with suppress(BadRequestError):
            assert len(unpacked(raw, coding)) <= MOST_BYTES


@pytest.mark.parametrize(
    ("fields", "coding"),
    [
        ([], None),
        ([""], None),
        (["identity"], None),
        (["identity, identity"], None),
        (["GZip"], "gzip"),
        ([" x-gzip "], "gzip"),
        (["deflate"], "deflate"),
        (["zstd, identity"], "zstd"),
        (["identity", "zstd"], "zstd"),
    ],
)
def test_one_layer_of_a_known_coding(fields: list[str], coding: str | None) -> None:
    assert coding_of(fields) == coding


@pytest.mark.parametrize(
    "fields",
    [["br"], ["gzip, gzip"], ["gzip", "zstd"], ["compress"], ["gzip;q=1"], ["*"], ["aws-chunked"]],
)
def test_any_other_is_refused_with_what_is_taken(fields: list[str]) -> None:
    with pytest.raises(UnsupportedEncodingError, match="zstd, gzip, deflate") as refused:
        coding_of(fields)
    assert refused.value.fields == {"Accept-Encoding": ", ".join(CONTENT_CODINGS)}


class Slow:
    """A decompressor without an end, which stands until it `may_go_on`."""

    eof, unused_data, unconsumed_tail = False, b"", b"x"

    def __init__(self) -> None:
        self.may_go_on, self.steps = threading.Event(), 0

    def decompress(self, data: bytes, max_length: int) -> bytes:
        self.steps += 1
        assert self.may_go_on.wait(30.0)
        return b"a" * max_length


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    """What bodies of the coding gzip are unpacked by."""
    slow = Slow()
    monkeypatch.setitem(content_coding._CODINGS, "gzip", lambda raw, most: slow)
    return slow


async def test_a_client_that_leaves_stops_its_thread(slow: Slow) -> None:
    task = asyncio.create_task(Unpacking().plain(b"x" * (FEED_BYTES + 1), "gzip", 1 << 40))
    await until(lambda: slow.steps == 1, "its thread unpacks")
    task.cancel()
    await asyncio.wait({task})
    slow.may_go_on.set()
    assert task.cancelled()
    assert await stands_still(lambda: slow.steps) == 1


async def test_bodies_that_wait_for_a_thread_are_kept_packed(slow: Slow) -> None:
    """What the first steps made of 800 such bodies of 1 KiB took 1.0 to 2.6 GiB."""
    unpacking, bomb = Unpacking(), streamed(b"a" * (MOST_BYTES // 2))
    body = b"x" * (FEED_BYTES + 1)
    async with asyncio.TaskGroup() as tasks:
        busy = [
            tasks.create_task(unpacking.plain(body, "gzip", MOST_BYTES)) for _ in range(AT_ONCE)
        ]
        await until(lambda: slow.steps == AT_ONCE, "all threads unpack")
        tracemalloc.start()
        try:
            waiting = [
                tasks.create_task(unpacking.plain(bomb, "zstd", MOST_BYTES)) for _ in range(100)
            ]
            await asyncio.sleep(0)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert not any(task.done() for task in waiting)
        assert kept < 100 * SHORT_BYTES / 8
        for task in busy:
            task.cancel()
        slow.may_go_on.set()
        for task in waiting:
            assert len(await task) == MOST_BYTES // 2


HEADERS = {"Content-Type": "application/json"}
PATHS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi " * 2_000}]},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "x" * 400_000}]},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": ["a" * 900_000]},
}


@pytest.mark.parametrize("name", PACKS)
async def test_an_engine_gets_the_plain_body(tmp_path: Path, name: str) -> None:
    coding, pack = PACKS[name]
    coding = "x-gzip" if name == "x-gzip" else coding
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            for path, fields in PATHS.items():
                body = orjson.dumps({"model": "m", **fields})
                answer = await proxy.post(pack(body), path, headers={"Content-Encoding": coding})
                assert answer.status == 200, path
                assert engine.posts[-1] == body, path
                head = engine.post_heads[-1].lower()
                assert b"content-encoding" not in head, path
                assert f"content-length: {len(body)}\r\n".encode() in head, path
            assert len(engine.posts) == len(PATHS)
            await proxy.at_rest()


async def test_an_upload_and_a_chunked_body_are_unpacked_as_well(tmp_path: Path) -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
        + b"[" * 300_000
        + b"\r\n--b--"
    )
    packed = gzip.compress(form)

    async def pieces() -> Any:
        for at in range(0, len(packed), 100):
            yield packed[at : at + 100]

    headers = {"Content-Type": "multipart/form-data; boundary=b", "Content-Encoding": "gzip"}
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            for data in (packed, pieces()):
                path = "/v1/audio/transcriptions"
                async with proxy.http.post(path, data=data, headers=headers) as answer:
                    assert answer.status == 200
            assert engine.posts == [form, form]


async def test_a_packed_prompt_has_the_key_of_the_plain_one(tmp_path: Path) -> None:
    body = orjson.dumps(chat(words(2_000), stream=False))
    async with proxied(tmp_path, 2) as (proxy, _):
        assert (await proxy.post(body)).status == 200
        packed = zstd.compress(body)
        assert (await proxy.post(packed, headers={"Content-Encoding": "zstd"})).status == 200
        first, second = await proxy.records(2)
        assert first["hit_tokens"] == 0
        assert second["decode_instance"] == first["decode_instance"]
        assert second["hit_tokens"] > 0.9 * second["isl_tokens"]


async def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    body = b'{"model":"m","input":"x"}'
    nests = b'{"model":"m","input":"x","y":[' + b"[]," * 300_000 + b"1]}"
    cases = [
        ("br", body, 415, "Content-Encoding: must be one of zstd, gzip, deflate"),
        ("gzip, zstd", gzip.compress(zstd.compress(body)), 415, "in one layer"),
        ("zstd", body, 400, "body: not one whole zstd stream"),
        ("gzip", gzip.compress(body) * 2, 400, "something follows its end"),
        ("gzip", gzip.compress(b"x" * 2_000_000), 413, "(--max-body-bytes)"),
        ("gzip", gzip.compress(b"{"), 400, "not valid JSON"),
        ("gzip", gzip.compress(nests), 400, "body: over 262144 of [ and {"),
    ]
    own: dict[str, Any] = {"kv_connector": "none", "max_body_bytes": MOST_BYTES}
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **own) as proxy:
            for coding, data, status, said in cases:
                answer = await proxy.post(
                    data, "/v1/responses", headers={"Content-Encoding": coding}
                )
                assert (answer.status, said in json.loads(answer.body)["error"]["message"]) == (
                    status,
                    True,
                ), answer.body
                told = answer.headers.get("Accept-Encoding")
                assert told == ("zstd, gzip, deflate" if status == 415 else None)
            assert not engine.posts
            assert (await proxy.post(body, "/v1/responses")).status == 200

"""Every bus of BUSES does the same: order, positions, own batches, what is left after a failure."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import redis.asyncio as redis_py

from proxy.net.bus import BUSES
from proxy.net.bus import redis as redis_bus
from proxy.net.bus.base import MOST_BYTES, READ_AT_ONCE, Bus, BusError
from tests.support.harness import WAIT_S
from tests.support.redis_server import NEEDED, RedisServer

ROOT = Path(__file__).parents[4]
STREAM = "cache-proxy:{test}:1:log"
Opens = Callable[[], Bus]


@pytest.fixture(params=[pytest.param("redis", marks=NEEDED), "memory"])
async def opens(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Opens]:
    """Makes another reader of one stream, which a busy machine does not hurry."""
    monkeypatch.setitem(redis_bus._OURS, "socket_timeout", WAIT_S)
    monkeypatch.setattr(redis_bus, "EXCHANGE_S", WAIT_S)
    made: list[Bus] = []

    def open_one(url: str = f"memory://{id(made)}") -> Bus:
        made.append(BUSES[request.param](url, STREAM))
        return made[-1]

    if request.param == "memory":
        yield open_one
        return
    async with RedisServer() as server:
        yield lambda: open_one(server.url)
        for bus in made:
            await bus.close()


def test_there_are_no_other_buses() -> None:
    assert set(BUSES) == {"redis", "memory"}


async def test_every_reader_gets_all_batches_in_order_its_own_too(opens: Opens) -> None:
    one, other = opens(), opens()
    assert await one.exchange(b"1") == ([b"1"], True)
    assert await other.exchange(b"2") == ([b"1", b"2"], True)
    assert await one.exchange(None) == ([b"2"], True)
    assert await one.exchange(None) == ([], True)
    assert await other.exchange(b"\x00\xff\r\n") == ([b"\x00\xff\r\n"], True)


async def test_many_batches_are_read_in_slices(opens: Opens) -> None:
    one, other = opens(), opens()
    for number in range(READ_AT_ONCE + 2):
        await one.exchange(b"%d" % number)
    first = await other.exchange(None)
    assert (len(first.batches), first.is_all) == (READ_AT_ONCE, False)
    rest = await other.exchange(None)
    assert rest == ([b"%d" % READ_AT_ONCE, b"%d" % (READ_AT_ONCE + 1)], True)


async def test_reading_starts_again_at_the_last_own_batch(opens: Opens) -> None:
    one, other = opens(), opens()
    for batch in (b"1", b"2"):
        await one.exchange(batch)
    await other.exchange(b"3")
    one.start_again()
    assert await one.exchange(None) == ([b"2", b"3"], True)


async def test_a_bus_that_was_closed_goes_on_where_it_was(opens: Opens) -> None:
    one, other = opens(), opens()
    await one.exchange(b"1")
    await one.close()
    await other.exchange(b"2")
    assert await one.exchange(b"3") == ([b"2", b"3"], True)


@pytest.mark.parametrize("url", ["redis://h:port", "redis://h?no_such_option=1", "unix:///s?db=x"])
def test_a_url_that_redis_cannot_have_is_one_line_without_it(url: str) -> None:
    with pytest.raises(ValueError, match=r"^the URL has a part that is not one of a Redis URL$"):
        BUSES["redis"](url, STREAM)


@NEEDED
@pytest.mark.parametrize("name", ["ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"])
def test_a_file_for_tls_is_a_regular_one(tmp_path: Path, name: str) -> None:
    fifo, regular = tmp_path / "fifo", tmp_path / "file"
    os.mkfifo(fifo)
    regular.write_text("x")
    for path in (fifo, Path("/dev/zero"), tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=f"{name} in the URL must be a file"):
            BUSES["redis"](f"rediss://127.0.0.1:1?{name}={path}", STREAM)
    BUSES["redis"](f"rediss://127.0.0.1:1?{name}={regular}", STREAM)


async def test_a_server_that_is_gone_is_a_bus_error_and_found_again() -> None:
    async with RedisServer() as server:
        bus = BUSES["redis"](server.url, STREAM)
        await bus.exchange(b"1")
        server.kill()
        for _ in range(2):
            with pytest.raises(BusError):
                await bus.exchange(b"2")
        await server.start()
        await bus.exchange(b"3")
        bus.start_again()
        assert await bus.exchange(None) == ([b"3"], True)
        await bus.close()


@NEEDED
async def test_what_the_server_refuses_is_named_and_heals() -> None:
    async with RedisServer() as server, redis_py.Redis.from_url(server.url, protocol=2) as admin:
        bus = BUSES["redis"](server.url, STREAM)
        await bus.exchange(b"1")
        await admin.config_set("maxmemory", 1)
        with pytest.raises(BusError, match="maxmemory"):
            await bus.exchange(b"2")
        await admin.config_set("maxmemory", 0)
        assert (await bus.exchange(b"3")).batches[-1] == b"3"
        await admin.set(STREAM, "not a stream")
        with pytest.raises(BusError, match="wrong kind of value"):
            await bus.exchange(b"4")
        await admin.delete(STREAM)
        await bus.exchange(b"5")
        await bus.close()


async def test_an_answer_that_never_comes_is_a_bus_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        bus = BUSES["redis"](f"redis://:hidden@127.0.0.1:{silent.getsockname()[1]}", STREAM)
        with pytest.raises(BusError) as caught:
            await bus.exchange(b"1")
        await bus.close()
    assert "hidden" not in str(caught.value)


@NEEDED
async def test_what_is_old_is_trimmed_while_the_servers_clock_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids stand still at the highest, so they do not tell what is old."""
    now_s = 0.0
    monkeypatch.setattr(redis_bus, "monotonic", lambda: now_s)
    async with RedisServer() as server:
        client = redis_py.Redis.from_url(server.url, protocol=2)
        await client.xadd(STREAM, {"b": "z"}, id="7258118400000-0")
        bus = BUSES["redis"](server.url, STREAM)
        for _ in range(600):
            now_s += 0.5
            await bus.exchange(b"1")
        assert await client.xlen(STREAM) < 120 + 200, "a minute, and what a node of the stream has"
        await client.delete(STREAM)
        await bus.exchange(b"1")
        bus.start_again()
        for _ in range(150):
            now_s += 0.5
            await bus.exchange(b"1")
        assert await client.xlen(STREAM) > 120, "another log with lower ids is not trimmed by those"
        await bus.close()
        await client.aclose()


@pytest.mark.parametrize(
    "says",
    [
        b"-ERR unknown command 'AUTH', with args beginning with: 'me' 'hidden-too:' \r\n",
        b"-NOPE hidden-too: me hidden-too:\r\n",
    ],
)
async def test_a_server_that_repeats_the_password_is_not_quoted(says: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while await reader.read(4096):
                writer.write(says)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        bus = BUSES["redis"](f"redis://me:hidden-too%3A@127.0.0.1:{port}", STREAM)
        with pytest.raises(BusError) as caught:
            await bus.exchange(b"1")
        await bus.close()
    told = str(caught.value)
    assert "***" in told
    assert not {"hidden", "'me'"} & {*told.replace("-", " ").split()}
    assert "hidden" not in told


ENTRY = b"*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$3\r\n%s\r\n*2\r\n$1\r\nb\r\n$1\r\nz\r\n"


FIELD = b"*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nb\r\n%s"


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff\xfe\x00",
        b"*1\r\n" * 5000,
        b"+OK\r\n+OK\r\n",
        b":5\r\n:6\r\n",
        b"-ERR \x1b[31m\r\n-ERR\r\n",
        b"$-1\r\n*-1\r\n",
        b"$3\r\nabc\r\n" + ENTRY % b"1-1",
        b"$3\r\n1-1\r\n" + ENTRY % b"x-y",
        b"$3\r\n1-1\r\n*1\r\n*2\r\n$1\r\ns\r\n*1\r\n$3\r\n1-1\r\n",
        b"$3\r\n1-1\r\n" + FIELD % b":200000000000\r\n",
        b"$3\r\n1-1\r\n" + FIELD % b"$-1\r\n",
        b"$3\r\n1-1\r\n" + FIELD % b"*1\r\n:1\r\n",
        b"$3\r\n1-1\r\n" + b"*1\r\n" * 20_000 + b":1\r\n",
        b"$3\r\n1-1\r\n$-7\r\n",
        b"$3\r\n1-1\r\n*1\r\n*2\r\n$1\r\ns\r\n*17\r\n" + 17 * (b"*2\r\n$3\r\n1-1\r\n*0\r\n"),
        b"",
    ],
    ids=lambda says: repr(says)[:30],
)
async def test_what_is_no_answer_of_redis_is_a_bus_error(says: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while says and await reader.read(4096):
                writer.write(says)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        bus = BUSES["redis"](f"redis://127.0.0.1:{port}", STREAM)
        for _ in range(2):
            with pytest.raises(BusError) as caught:
                await bus.exchange(b"1")
            assert str(caught.value).isprintable()
            bus.start_again()
        await bus.close()


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"*100000000\r\n", b"*0\r\n" * 4096),
        (b"*100000000\r\n", b":1\r\n" * 4096),
        (b"$%d\r\n" % (1 << 40), b"x" * 65536),
        (b"*100\r\n", b"$1048576\r\n" + b"x" * (1 << 20) + b"\r\n"),
        (b"+", b"x" * 65536),
    ],
    ids=["empty arrays", "numbers", "a long string", "many strings", "a line"],
)
async def test_an_answer_without_an_end_is_given_up(
    head: bytes, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_bus, "EXCHANGE_S", WAIT_S)
    most, sent = 4 * redis_bus.BYTES_MAX, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with suppress(OSError):
            await reader.read(4096)
            writer.write(head)
            while sent < most:
                writer.write(part)
                sent += len(part)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        bus = BUSES["redis"](f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", STREAM)
        with pytest.raises(BusError, match="not one of Redis"):
            await bus.exchange(None)
        await bus.close()
    assert sent < most


@NEEDED
async def test_as_many_batches_as_there_may_be_at_once_are_read() -> None:
    async with RedisServer() as server:
        one, other = BUSES["redis"](server.url, STREAM), BUSES["redis"](server.url, STREAM)
        for _ in range(READ_AT_ONCE):
            await one.exchange(b"x" * MOST_BYTES)
        heard = await other.exchange(None)
        assert [len(batch) for batch in heard.batches] == [MOST_BYTES] * READ_AT_ONCE
        await one.close()
        await other.close()


@NEEDED
async def test_the_rights_that_the_page_names_are_enough() -> None:
    rights = "~cache-proxy:* +xadd +xread"
    assert rights in (ROOT / "docs/deploy/replicas.md").read_text("utf-8")
    async with RedisServer() as server, redis_py.Redis.from_url(server.url, protocol=2) as admin:
        await admin.execute_command("ACL", "SETUSER", "replica", "on", ">pw", *rights.split())
        bus = BUSES["redis"](server.url.replace("unix://", "unix://replica:pw@"), STREAM)
        assert await bus.exchange(b"1") == ([b"1"], True)
        await admin.execute_command("ACL", "SETUSER", "replica", "-xadd")
        with pytest.raises(BusError, match="permission"):
            await bus.exchange(b"2")
        await bus.close()
        wrong = BUSES["redis"](server.url.replace("unix://", "unix://replica:other@"), STREAM)
        with pytest.raises(BusError) as caught:
            await wrong.exchange(b"3")
        assert "other" not in str(caught.value)
        await wrong.close()


async def test_a_name_that_hangs_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt would leave a call in the pool of threads that looks up all names."""
    released, asked = threading.Event(), []

    def hang(host: str, *_args: object, **_more: object) -> None:
        asked.append(host)
        released.wait(WAIT_S)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(redis_bus, "SOCKET_S", 0.05)
    bus = BUSES["redis"]("redis://:hidden@slow.test:1", STREAM)
    for _ in range(3):
        with pytest.raises(BusError, match="its name has no answer within"):
            await bus.exchange(b"1")
    assert asked == ["slow.test"]
    released.set()
    monkeypatch.setattr(redis_bus, "SOCKET_S", WAIT_S)
    with pytest.raises(BusError, match="not known"):
        await bus.exchange(b"1")
    await bus.close()


@NEEDED
async def test_over_a_link_that_carries_few_batches_all_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each connection ends after the bytes of two batches, as one ends that is too slow."""
    monkeypatch.setitem(redis_bus._OURS, "socket_timeout", WAIT_S)
    monkeypatch.setattr(redis_bus, "EXCHANGE_S", WAIT_S)
    batches = [b"%d" % number * 10_000 for number in range(10)]
    async with RedisServer() as server, narrow(server, 25_000) as port:
        writer = BUSES["redis"](server.url, STREAM)
        for batch in batches:
            await writer.exchange(batch)
        bus = BUSES["redis"](f"redis://127.0.0.1:{port}", STREAM)
        heard: list[bytes] = []
        failures = 0
        while len(heard) < len(batches) and failures < 100:
            try:
                heard += (await bus.exchange(None)).batches
            except BusError:
                failures += 1
        assert heard == batches
        await bus.close()
        await writer.close()


@NEEDED
@pytest.mark.parametrize("odd", [{b"f%d" % n: b"v" for n in range(200)}, {b"b": b"z" * (18 << 20)}])
async def test_an_entry_that_is_no_batch_is_passed_over(
    odd: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may write there. Who reads and who comes later hear each other again."""
    monkeypatch.setitem(redis_bus._OURS, "socket_timeout", WAIT_S)
    monkeypatch.setattr(redis_bus, "EXCHANGE_S", WAIT_S)
    async with RedisServer() as server, redis_py.Redis.from_url(server.url, protocol=2) as admin:
        one = BUSES["redis"](server.url, STREAM)
        await one.exchange(b"1")
        await admin.xadd(STREAM, odd)  # type: ignore[arg-type]
        said: list[str] = []
        late = BUSES["redis"](server.url, STREAM)
        for bus, own in ((one, b"2"), (late, b"3")):
            heard: list[bytes] = []
            while own not in heard:
                try:
                    heard += (await bus.exchange(own)).batches
                except BusError as error:
                    said.append(str(error))
                assert len(said) < 20
        assert (await one.exchange(None)).batches[-1:] == [b"3"]
        assert said.count(f"an entry of {STREAM} is no batch, and is passed over") == 2
        await late.close()
        await one.close()


@asynccontextmanager
async def narrow(server: RedisServer, most: int) -> AsyncIterator[int]:
    """A port to a server, whose connections end after so many bytes of its answers."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int) -> None:
        with suppress(OSError):
            while most > 0 and (data := await reader.read(min(most, 1 << 16))):
                writer.write(data)
                await writer.drain()
                most -= len(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server, from_server = await asyncio.open_unix_connection(server.socket)
        await asyncio.gather(carry(reader, from_server, 1 << 30), carry(to_server, writer, most))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as relay:
        yield relay.sockets[0].getsockname()[1]

"""Where the proxy may be made to connect, and what a name may turn into."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from proxy.config.values import InstanceSpec
from proxy.core.types import Instance
from proxy.net.addresses import (
    GOOD_S,
    LOOK_UPS,
    MOST_ADDRESSES,
    TTL_S,
    ForbiddenAddressError,
    LookUps,
    Resolver,
    check,
    party,
)
from proxy.net.upstream.client import Upstream
from proxy.net.upstream.pool import ConnectOptions
from proxy.protocol.errors import UpstreamFailure
from tests.support.admin import call
from tests.support.harness import WAIT_S, RawEngine, ServedProxy, plain, proxied, says

LIST = Path(__file__).parent / "data" / "forbidden_instances.txt"
FORBIDDEN = [x for x in LIST.read_text().splitlines() if x and not x.startswith("#")]


async def test_no_forbidden_address_is_taken_in(tmp_path: Path) -> None:
    assert len(FORBIDDEN) >= 60
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        async with proxied(tmp_path, 1) as (proxy, _):
            members = len(proxy.router.known.fleet.members())
            own = proxy.server.url.rpartition(":")[2]
            for text in FORBIDDEN:
                where = text.replace("OWN", own).replace("FREE", str(free.getsockname()[1]))
                status, answer = await call(proxy, "POST", "/instances", {"instance": where})
                assert status == 400, where
                assert answer["error"]["message"].startswith("instance: "), where
                assert "word" not in answer["error"]["message"]
            assert len(proxy.router.known.fleet.members()) == members


@pytest.mark.parametrize(
    ("allowed", "where", "is_taken"),
    [
        (None, "127.0.0.1:9", True),
        (None, "127.0.0.2:9", False),
        (None, "localhost:9", True),
        ("127.0.0.0/8", "127.0.0.2:9", True),
        ("127.0.0.0/8", "127.0.0.2:9;bootstrap=9", True),
        ("127.0.0.0/8", "127.0.0.2:9;bootstrap=http://10.0.0.1:9", False),
        ("127.0.0.0/8", "127.0.0.2:9;dcgm=9", True),
        ("127.0.0.0/8", "127.0.0.2:9;dcgm=http://10.0.0.1:9/metrics", False),
        ("127.0.0.0/8", "127.0.0.2:9;http-json=https://169.254.169.254/latest/", False),
        ("127.0.0.0/8", "127.0.0.2:9;file=/etc/passwd", False),
        ("127.0.0.0/8", "127.0.0.2:9;simulated=75", True),
        ("10.0.0.0/8", "127.0.0.1:9", False),
        ("10.0.0.0/8,::1/128", "[::1]:9", True),
        ("0.0.0.0/0,::/0", "169.254.169.254:80", False),
        ("0.0.0.0/0,::/0", "[::ffff:10.0.0.1]:9", False),
        ("0.0.0.0/0,::/0", "[64:ff9b::7f00:1]:9", False),
        ("0.0.0.0/0,::/0", "100.100.100.200:80", False),
        ("0.0.0.0/0,::/0", "[fd00:ec2::254]:80", False),
        ("0.0.0.0/0,::/0", "10.9.8.7:9", True),
    ],
)
async def test_the_networks_decide(
    tmp_path: Path, allowed: str | None, where: str, is_taken: bool
) -> None:
    async with RawEngine(says(b"")) as engine:
        options = {"allow_cidr": allowed, "connect_timeout": 0.2, "health_interval": 60}
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            status, _ = await call(proxy, "POST", "/instances", {"instance": where})
            assert status == (201 if is_taken else 400)


class Names:
    """A name service by script, and the time."""

    def __init__(self, **answers: Sequence[str]) -> None:
        self.answers: dict[str, Sequence[str]] = dict(answers)
        self.now_s = 0.0
        self.asked = 0
        self.is_hanging = False

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        if self.is_hanging:
            await asyncio.Event().wait()
        if host not in self.answers:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return self.answers[host]

    def resolver(self) -> Resolver:
        return Resolver(self, lambda: self.now_s)


async def test_an_answer_is_kept_then_asked_for_again() -> None:
    names = Names(a=["10.0.0.1"])
    resolver = names.resolver()
    assert await resolver.addresses("a", 1) == ("10.0.0.1",)
    names.answers["a"] = ["10.0.0.2", "10.0.0.3"]
    names.now_s = TTL_S - 0.1
    assert await resolver.addresses("a", 1) == ("10.0.0.1",)
    names.now_s = TTL_S
    assert await resolver.addresses("a", 1) == ("10.0.0.2", "10.0.0.3")
    assert names.asked == 2
    assert await resolver.addresses("10.0.0.9", 1) == ("10.0.0.9",)
    assert names.asked == 2, "an address is no name"


@pytest.mark.parametrize("failure", ["unknown", "hangs", "metadata", "loopback", "mapped", "empty"])
async def test_the_last_good_answer_is_kept_for_a_while(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.net.addresses.ANSWER_S", 0.05)
    names = Names(a=["10.0.0.1"])
    resolver = names.resolver()
    await resolver.addresses("a", 1)
    bad = {"metadata": "169.254.169.254", "loopback": "127.0.0.1", "mapped": "::ffff:10.0.0.1"}
    if failure == "hangs":
        names.is_hanging = True
    elif failure == "unknown":
        del names.answers["a"]
    else:
        names.answers["a"] = [bad[failure]] if failure in bad else []
    for names.now_s in (TTL_S, TTL_S + 0.1, GOOD_S - 0.1):
        assert await resolver.addresses("a", 1) == ("10.0.0.1",)
    assert names.asked == 3, "not for every connection"
    names.now_s = GOOD_S + TTL_S
    with pytest.raises(UpstreamFailure, match="no address"):
        await resolver.addresses("a", 1)
    if failure in ("metadata", "loopback", "mapped", "empty", "unknown"):
        with pytest.raises(UpstreamFailure):
            await resolver.addresses("a", 1)
    names.is_hanging = False
    names.answers["a"] = ["10.0.0.4"]
    assert await resolver.addresses("a", 1) == ("10.0.0.4",)


async def test_of_thousands_of_addresses_the_first_are_used() -> None:
    many = [f"fd00::{n:x}" for n in range(1, 4000)]

    async def look_up(host: str, port: int) -> Sequence[str]:
        del host, port
        return many

    resolver = Resolver(look_up)
    assert await resolver.addresses("engine", 1) == tuple(many[:MOST_ADDRESSES])
    assert len(resolver.several("engine")) == MOST_ADDRESSES


async def test_a_slow_name_server_is_waited_for_where_nothing_is_known_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.net.addresses.ANSWER_S", 0.05)
    names = Names(a=["10.0.0.1"])
    resolver = names.resolver()
    await resolver.addresses("a", 1)
    names.now_s, names.is_hanging = GOOD_S + TTL_S, True
    with pytest.raises(UpstreamFailure, match="no address"):
        await resolver.addresses("a", 1)
    asked = asyncio.create_task(resolver.addresses("a", 1))
    done, _ = await asyncio.wait({asked}, timeout=0.2)
    assert not done, "it is waited for longer than for one whose name is known"
    asked.cancel()


async def test_a_name_that_was_let_in_stays_within_its_networks() -> None:
    names = Names(a=["10.0.0.1"], b=["10.1.0.1"], c=["10.0.0.1", "169.254.169.254"])
    resolver = names.resolver()
    spec, home = InstanceSpec.parse("http://a:80"), [InstanceSpec.parse("http://10.0.0.1:1")]
    await check(spec, None, home, {8000}, resolver)
    for other in ("http://b:80", "http://c:80", "http://nobody:80"):
        with pytest.raises(ForbiddenAddressError):
            await check(InstanceSpec.parse(other), None, home, {8000}, resolver)
    names.now_s, names.answers["a"] = TTL_S, ["10.0.0.2"]
    assert await resolver.addresses("a", 80) == ("10.0.0.1",), "outside: the old one stays"
    names.now_s = GOOD_S + TTL_S
    for _ in range(2):
        with pytest.raises(UpstreamFailure):
            await resolver.addresses("a", 80)


async def test_what_is_known_of_a_name_leaves_with_its_last_instance(tmp_path: Path) -> None:
    async with RawEngine(says(b"")) as engine:
        options = {"allow_cidr": "127.0.0.0/8,::1/128"}
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            resolver = proxy.server.state.instances.connect_options.resolver
            for name in ("a=localhost:9", "b=localhost:10"):
                assert (await call(proxy, "POST", "/instances", {"instance": name}))[0] == 201
            for name, is_known in (("a", True), ("b", False)):
                assert (await call(proxy, "DELETE", f"/instances/{name}"))[0] == 200
                assert resolver.knows("localhost") == is_known
                assert ("localhost" in resolver._fences) == is_known


async def test_the_next_address_is_tried() -> None:
    async with RawEngine(says(b"")) as engine:
        ways = ConnectOptions()
        ways.resolver = Names(a=["127.0.0.2", "127.0.0.1"]).resolver()
        upstream = Upstream(Instance("a", f"http://a:{engine.port}"), 2.0, connect_options=ways)
        assert b"sim-8b" in await upstream.get("/v1/models", 2.0)
        await upstream.close()


async def test_a_redirect_is_not_followed_and_probes_are_bounded() -> None:
    asked: list[bytes] = []
    big = b"x" * (1 << 20)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split()[1])
        moved = plain(b"", "302 Found", "Location: http://169.254.169.254/\r\n")
        writer.write(moved if asked[-1] == b"/moved" else plain(big))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        at = server.sockets[0].getsockname()[1]
        upstream = Upstream(Instance("a", f"http://127.0.0.1:{at}"), 2.0)
        with pytest.raises(UpstreamFailure, match="302"):
            await upstream.get("/moved", 2.0)
        assert len(await upstream.get("/health", 2.0)) == 64 << 10
        await upstream.close()
    assert asked == [b"/moved", b"/health"]


@pytest.mark.parametrize(
    ("found", "several"),
    [
        (["10.0.0.1"], []),
        (["10.0.0.1", "10.0.0.1"], []),
        (["10.0.0.2", "10.0.0.1"], ["10.0.0.1", "10.0.0.2"]),
        (["127.0.0.1", "::1"], []),
        (["fd00::2", "10.0.0.1", "fd00::1"], ["fd00::1", "fd00::2"]),
    ],
)
async def test_a_name_with_several_addresses_of_a_kind(
    found: list[str], several: list[str]
) -> None:
    async def look_up(host: str, port: int) -> Sequence[str]:
        return found

    resolver = Resolver(look_up)
    assert resolver.several("gpu.test") == [], "it was not asked for yet"
    await resolver.addresses("gpu.test", 8000)
    assert resolver.several("gpu.test") == several
    assert resolver.several("10.0.0.1") == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::1", "::/64"),
        ("", ""),
        ("unix:", "unix:"),
    ],
)
def test_a_subscriber_is_one_party(address: str, expected: str) -> None:
    assert party(address) == expected


class Hanging:
    """`socket.getaddrinfo`, which has no answer of some names until it is `released`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.released = threading.Event()

    def __call__(self, host: str, port: int | None, **_more: int) -> list[tuple[object, ...]]:
        self.asked.append(host)
        if host.startswith("slow"):
            self.released.wait(WAIT_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    names = Hanging()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    yield names
    names.released.set()


async def test_names_without_an_answer_hold_up_no_other_name(hanging: Hanging) -> None:
    look_up = LookUps()
    slow = [f"slow{number}" for number in range(LOOK_UPS - 1)]
    waiting = [asyncio.create_task(look_up(host, 1)) for host in slow for _ in range(3)]
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    assert await look_up("fast", 1) == ["127.0.0.1"]
    waiting.append(asyncio.create_task(look_up("slow", 1)))
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="earlier calls"):
        await look_up("fast", 1)
    assert sorted(hanging.asked) == sorted([*slow, "fast", "slow"])
    hanging.released.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert found.count(["127.0.0.1"]) == len(waiting) - len(waiting[:-1:2])
    assert await look_up("slow", 1) == ["127.0.0.1"]


async def test_a_name_that_is_not_known_fails_for_all_who_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_args: object, **_more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    look_up = LookUps()
    found = await asyncio.gather(*[look_up("x", 1) for _ in range(3)], return_exceptions=True)
    assert all(isinstance(one, OSError) and "not known" in str(one) for one in found)

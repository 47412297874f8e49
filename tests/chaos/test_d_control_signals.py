"""What the proxy is told about its instances is wrong: it must not be believed for long."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.admin.endpoints import MODELS_TIMEOUT_S
from proxy.core import is_compiled
from proxy.core.accounts import engine_reports
from proxy.core.admission import gate
from proxy.core.admission.gate import ANY_MODEL
from proxy.core.placement import rules
from proxy.net import addresses, timeouts
from proxy.net.kv_events import zmtp
from tests.chaos.client import Got, request
from tests.chaos.command import command
from tests.chaos.invariants import holds, samples
from tests.chaos.rig import MODEL, SLOW_PROBES, Floor
from tests.support.harness import (
    ANSWER,
    DONE,
    GOOD,
    STREAM_HEAD,
    WAIT_S,
    RawEngine,
    Script,
    ServedProxy,
    apart,
    chat,
    chunk,
    event,
    plain,
    says,
    stalls,
    until,
    words,
)

CONFIG = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1\n'
USED = b'vllm:kv_cache_usage_perc{engine="0"} %s\n'
QUICK: dict[str, Any] = {"scrape_interval": 0.05}


def is_fine(got: Got) -> bool:
    return got.status == 200 and got.is_clean and got.text == "fine"


ODD_METRICS: dict[str, bytes] = {
    "NaN": CONFIG + USED % b"NaN",
    "Inf": CONFIG + USED % b"+Inf",
    "negative": CONFIG + USED % b"-3",
    "above one": CONFIG + USED % b"17",
    "missing": b"# nothing\n",
    "renamed": CONFIG + b"vllm:new_name_of_usage 0.99\n",
    "twice": CONFIG + (USED % b"0.1") * 2,
    "odd size": b'vllm:cache_config_info{block_size="-16",num_gpu_blocks="1e30"} 1\n',
    "no numbers": CONFIG + USED % b"full" + b"vllm:num_requests_running {} many\n",
    "counters": b"vllm:prefix_cache_queries_total NaN\nvllm:prefix_cache_hits_total Inf\n"
    b"vllm:num_requests_running NaN\nvllm:num_requests_waiting -Inf\n",
    "bytes": bytes(range(256)) * 100,
}


@pytest.mark.parametrize("what", ODD_METRICS)
async def test_f59_odd_metrics(rig: Floor, what: str) -> None:
    engine = RawEngine()
    engine.gets["/metrics"] = plain(ODD_METRICS[what])
    async with rig([engine], active_decode_blocks_threshold=0.9, **QUICK) as r:
        scrapes = len(r.links[0].asked)
        await until(lambda: len(r.links[0].asked) > scrapes + 6, "it was read a few times")
        assert all([is_fine(await r.ask(f"prompt {i}")) for i in range(3)])
        told = [(n, v) for n, _, v in samples(r.exposition) if n.endswith(("_ratio", "_running"))]
        assert all(v == v and abs(v) < 1e12 for _, v in told), "no NaN, no Inf is passed on"


def endless(piece: bytes, pause_s: float, sent: list[int]) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def pieces() -> Iterator[bytes]:
            while True:
                yield piece
                sent[0] += len(piece)

        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        await apart(writer, pieces(), pause_s)

    return script


@pytest.mark.parametrize("how", ["50 MB", "drips"])
async def test_f60_metrics_without_end(rig: Floor, how: str) -> None:
    sent = [0]
    engine = RawEngine()
    line = b"vllm:some_series_that_is_long 1.0\n"
    script = endless(line * 2000, 0, sent) if how == "50 MB" else endless(b"v", 0.01, sent)
    engine.gets["/metrics"] = script
    async with rig([engine], scrape_interval=60.0, health_timeout=1.0) as r:
        await until(lambda: sent[0], "it is read")
        assert is_fine(await r.ask())
        await until(lambda: len(engine.connections) <= 2, "it is given up")
        assert sent[0] < 12 << 20, "the cap, and what the kernel buffers"
        assert r.is_up("i0")


@pytest.mark.skipif(is_compiled(), reason="it sets a constant of what is compiled")
async def test_f61_frozen_metrics(rig: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of a full cache that never changes: believed for a while, then flagged."""
    engine = RawEngine()
    engine.gets["/metrics"] = plain(CONFIG + USED % b"0.99")
    limits: dict[str, Any] = {"active_decode_blocks_threshold": 0.9, "max_queue": 0}
    async with rig([engine], **limits, **QUICK) as r:
        await until(lambda: r.metric("kv_cache_usage_ratio", upstream="i0") == 0.99, "reported")
        assert (await r.ask()).status == 503
        assert r.metric("engine_report_frozen", upstream="i0") == 0
        monkeypatch.setattr(engine_reports, "IN_USE_S", 0.2)
        await until(lambda: r.metric("engine_report_frozen", upstream="i0") == 1, "flagged")
        assert is_fine(await r.ask()), "our own counters decide"
        monkeypatch.setattr(
            engine_reports, "IN_USE_S", 60.0
        )  # once flagged, only a new report ends it
        assert r.metric("engine_report_frozen", upstream="i0") == 1
        engine.gets["/metrics"] = plain(CONFIG + USED % b"0.98")
        await until(lambda: r.metric("engine_report_frozen", upstream="i0") == 0, "it moves again")
        assert (await r.ask()).status == 503
        is_asked = asyncio.Event()

        async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            is_asked.set()
            await reader.read()
            raise ConnectionError

        engine.gets["/metrics"] = hangs
        async with asyncio.timeout(WAIT_S):
            await is_asked.wait()  # what was answered before is read by now
        monkeypatch.setattr(gate, "STALE_S", 0.1)
        await until(
            lambda: not r.router.known.busy("i0", ANY_MODEL, r.state.clock.now_s()), "too old"
        )
        assert is_fine(await r.ask())
        engine.gets["/metrics"] = plain(CONFIG)  # else a scrape is under way at nearly all times


async def test_f61_answers_that_no_report_shows(
    rig: Floor, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RawEngine()
    engine.gets["/metrics"] = plain(CONFIG + USED % b"0")
    monkeypatch.setattr(engine_reports, "FROZEN_S", 0.1)
    async with rig([engine], **QUICK) as r:
        await until(lambda: r.metric("kv_cache_usage_ratio", upstream="i0") == 0, "reported")
        asked = len(r.links[0].asked)
        await until(lambda: len(r.links[0].asked) > asked + 4, "scraped a few times")
        assert r.metric("engine_report_frozen", upstream="i0") == 0, "an idle engine may rest"
        assert all([is_fine(await r.ask()) for _ in range(engine_reports.ANSWERS)])
        await until(lambda: r.metric("engine_report_frozen", upstream="i0") == 1, "flagged")


async def test_f62_healthy_but_hanging(rig: Floor) -> None:
    async with rig([stalls(), GOOD, GOOD], ttft_timeout=0.15) as r:
        answers = [await r.ask(f"prompt {i}") for i in range(30)]
        assert len(r.links[0].posts) <= 6, "traffic's word wins"
        assert all(is_fine(got) for got in answers[-8:])


async def test_f63_unhealthy_but_working(rig: Floor) -> None:
    sick = [RawEngine(), RawEngine()]
    async with rig(sick) as r:
        for engine in sick:
            engine.gets["/health"] = plain(b"", "500 Oops")
        probes = len(r.links[0].asked)
        await until(lambda: len(r.links[0].asked) > probes + 12, "probed a few times")
        assert all([is_fine(await r.ask(f"prompt {i}")) for i in range(6)])


async def test_f64_flapping_health(rig: Floor) -> None:
    asked = 0

    async def flaps(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        bad = (asked // 3) % 2 == 1
        writer.write(plain(b"", "500 Oops" if bad else "200 OK"))

    engine = RawEngine()
    async with rig([engine, GOOD], health_interval=0.02) as r:
        engine.gets["/health"] = flaps
        seen = [True]

        def is_probed_enough() -> bool:
            if r.is_up("i0") is not seen[-1]:
                seen.append(not seen[-1])
            return asked >= 40

        await until(is_probed_enough, "probed a few times")
        assert len(seen) <= 3, "two changes within ten seconds"
        assert is_fine(await r.ask())


def told(cached: int) -> Script:
    usage = (
        b'data: {"choices":[],"usage":{"prompt_tokens":2000,"completion_tokens":8,'
        b'"prompt_tokens_details":{"cached_tokens":%d}}}\n\n' % cached
    )
    return says(STREAM_HEAD + chunk(event("fine")) + chunk(usage) + DONE)


async def test_f65_index_and_cache_disagree(rig: Floor) -> None:
    """One prompt that is lost may be read in another way; a second one shows an eviction."""
    answers = [told(cached) for cached in (0, 0, 0, 0, 1990)]
    async with rig([RawEngine(*answers)], **SLOW_PROBES) as r:
        held: list[int] = []
        for text in "ababa":
            assert (await r.ask(words(1000, text))).text == "fine"
            await r.records(len(held) + 1)
            held.append(r.router.known.fleet.states.of("i0").cache.blocks)
        assert held[3] < held[2] == held[1], "what was used before both is lost as well"
        hits = [record["hit_tokens"] for record in await r.records(5)]
        assert hits[0] == 0 < hits[2]


def counted(prompt: int, output: int, events: int = 3) -> Script:
    """A stream of so many events with content, and what the engine says of it."""
    usage = b'{"prompt_tokens":%d,"completion_tokens":%d}' % (prompt, output)
    pieces = b"".join(chunk(event("fine")) for _ in range(events))
    last = chunk(b'data: {"choices":[],"usage":%s}\n\n' % usage)
    return says(STREAM_HEAD + pieces + last + DONE)


@pytest.mark.parametrize("factor", [0.1, 2.5])
async def test_f111_prompt_tokens_wrongly_counted(rig: Floor, factor: float) -> None:
    """A prompt has 1,000 tokens of 4 bytes; one engine counts a tenth, or two and a half times."""
    engines = [RawEngine(counted(round(1000 * each), 3)) for each in (factor, 1, 1)]
    async with rig(engines, **SLOW_PROBES) as r:
        asked = 0
        while not r.router.known.is_usage_doubted("i0"):
            assert asked < 300, "doubted after 32 answers of it"
            batch = range(asked, asked := asked + 12)
            each = [r.ask(words(330, f"{i:04}"), headers={"X-Session-ID": f"{i}"}) for i in batch]
            assert all(got.is_clean for got in await asyncio.gather(*each))
        records = await r.records(asked)
        assert all(900 < record["isl_tokens"] < 1100 for record in records[24:])
        assert [r.metric("engine_usage_doubted", upstream=f"i{i}") for i in range(3)] == [1, 0, 0]
        async with r.proxy.http.get(r.proxy.server.admin_url + "/instances") as response:
            doubted = {one["name"]: one["usage_doubted"] for one in await response.json()}
        assert doubted == {"calm": False, "i0": True, "i1": False, "i2": False}
        for i in range(10):
            await r.ask(words(330, f"more{i}"))
        lines = [line for line in r.log.lines if "its reported usage is" in line]
        assert len(lines) == 1
        assert "instance i0: its reported usage is ignored" in lines[0]


@pytest.mark.parametrize(
    ("output", "events", "is_learned"),
    [
        (3, 3, True),
        (5, 3, True),
        (100_000_000, 3, False),
        (60, 3, False),
        (65, 60, False),
        (2, 60, False),
    ],
)
async def test_f112_output_tokens_wrongly_counted(
    rig: Floor, output: int, events: int, is_learned: bool
) -> None:
    async with rig([counted(300, output, events)], **SLOW_PROBES) as r:
        assert (await r.ask(max_tokens=64)).is_clean
        assert (await r.record())["osl_tokens"] == output
        assert bool(len(r.router.known.latency.of("i0").step.residuals)) is is_learned


async def test_f66_the_wall_clock_jumps(rig: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(timeouts, "DRIFT_EVERY_S", 0.0)
    async with rig([GOOD], session_ttl=60.0) as r:
        begun_s = real_ns() / 1e9
        for years in (10, -10, 0):
            moved_s = years * 31_557_600
            monkeypatch.setattr(time, "time", lambda s=moved_s: real() + s)
            monkeypatch.setattr(time, "time_ns", lambda s=moved_s: real_ns() + s * 10**9)
            for _ in range(3):
                assert is_fine(await r.ask(headers={"X-Session-ID": "s"}))
        monkeypatch.undo()
        records = await r.records(9)
        spans = [record["t_done"] - record["t_proxy_recv"] for record in records]
        assert all(0 <= span < 30 for span in spans)
        for at, record in enumerate(records):
            jumped_s = (10, -10, 0)[at // 3] * 31_557_600
            assert abs(record["t_done"] - begun_s - jumped_s) < 60, "the log follows the clock"
        assert [record["turn"] for record in records] == list(range(9)), "the session lives on"


TROUBLES = (
    *("NXDOMAIN", "169.254.169.254", "0.0.0.0", "::ffff:169.254.169.254", "224.0.0.1"),
    *("127.0.0.2 169.254.169.254", "", "slow"),
)
"""Answers of a name server that nobody follows; two addresses in one answer, one of them bad."""


class NameServer:
    """What `socket.getaddrinfo` says of one name, and when."""

    def __init__(self) -> None:
        self.answer = "127.0.0.1"
        self.given: set[str] = set()
        self.is_slow_over = threading.Event()
        self._look_up = socket.getaddrinfo

    def __call__(self, host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host not in ("engine.test", b"engine.test"):
            return self._look_up(host, port, *args, **more)
        answer = self.answer
        self.given.add(answer)
        if answer == "NXDOMAIN":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if answer == "slow":
            self.is_slow_over.wait(WAIT_S)  # in a thread of the resolver
            answer = "127.0.0.2"
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", at)
            for one in answer.split()
            for at in [(one, port)]
        ]


async def led_astray(log: Path, names: NameServer) -> dict[str, str]:
    """What is served when the name server says this and that."""
    old = RawEngine()
    new = RawEngine(says(ANSWER.replace(b"fine", b"new!")), host="127.0.0.2")
    options: dict[str, Any] = {"kv_connector": "none", "scrape_interval": 60.0}
    options["health_interval"] = 60.0
    async with old:
        new.port = old.port
        async with new, ServedProxy(log, [f"e=http://engine.test:{old.port}"], **options) as proxy:
            await proxy.up()

            async def asked_with(answer: str) -> str:
                """What is served with this answer; on a new connection."""
                names.answer = answer
                for writer in [*old.connections, *new.connections]:
                    writer.close()
                pool = proxy.server.state.instances.by_name["e"]._pool
                await until(lambda: not pool._idle, "nothing is kept")
                return (await proxy.post(chat("a"))).text

            served = {trouble: await asked_with(trouble) for trouble in ("127.0.0.1", *TROUBLES)}
            addresses.ANSWER_S = 10.0  # undone with the patch that made it small
            names.is_slow_over.set()
            served["127.0.0.2"] = await asked_with("127.0.0.2")
            await proxy.at_rest()
            holds("I1", proxy.router.known.ledger.drift() == 0, "drift")
    return served


def test_f67_dns(rig: Floor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On asyncio's own loop, whose resolver can be led astray; every answer is old at once."""
    names = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    monkeypatch.setattr(addresses, "TTL_S", 0.0)
    monkeypatch.setattr(addresses, "ANSWER_S", 0.1)
    served = asyncio.run(led_astray(tmp_path / "log", names))
    kept = dict.fromkeys(("127.0.0.1", *TROUBLES), "fine")
    assert served == kept | {"127.0.0.2": "new!"}
    assert names.given == set(served), "each answer was asked for"
    rig.checked += 1


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyError, RecursionError, AttributeError])
async def test_f68_a_policy_raises(
    rig: Floor, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def broken(*args: Any, **more: Any) -> Any:
        raise kind("a policy's bug")

    monkeypatch.setitem(rules.OFFLOAD_RULES, "threshold", broken)
    options: dict[str, Any] = {
        "offload_policy": "threshold",
        "heavy_threshold": 100,
        "warm_threshold": 10,
    }
    async with rig([GOOD, GOOD], boots=True, **options, **SLOW_PROBES) as r:
        assert all([is_fine(await r.ask(words(500, str(i)))) for i in range(4)])
        said = {"decision": "colocate", "reason": "policy_failed"}
        assert r.metric("offload_decisions_total", **said) == 4
        assert {len(link.posts) for link in r.links} == {2}, "by load: one after the other"


async def test_f103_an_added_instance_is_not_ready_yet(rig: Floor) -> None:
    starting = RawEngine()
    starting.gets["/health"] = stalls()
    in_turn: dict[str, Any] = {"placement": "round-robin", "offload_policy": "never"}
    async with starting, rig([GOOD], **in_turn) as r:
        admin, http = r.proxy.server.admin_url, r.proxy.http
        body = {"instance": f"new={starting.address}"}
        async with http.post(f"{admin}/instances", json=body) as added:
            said = await added.json()
            assert (added.status, said["is_up"], said["state"]) == (201, False, "probing")
        assert all([is_fine(await r.ask(f"prompt {i}")) for i in range(8)])
        assert not starting.posts, "it has not answered a probe"
        starting.gets["/health"] = plain(b"")
        for writer in list(starting.connections):
            writer.transport.abort()
        await until(
            lambda: r.router.known.fleet.get("new").models is not None, "it has answered one"
        )
        assert all([is_fine(await r.ask(f"prompt {i}")) for i in range(8)])
        assert len(starting.posts) == 4


WANTED = b"vllm:num_requests_running"
HEAVY: dict[str, tuple[str, bytes]] = {
    "a line of labels": (
        "/metrics",
        WANTED + b"{" + b",".join(b'a%d=""' % n for n in range(140_000)) + b"} 1\n",
    ),
    "escaped quotes": ("/metrics", (WANTED + b'{a="' + b'\\"' * 200_000 + b'"} 1\n') * 2),
    "plain lines": ("/metrics", (WANTED + b" 1\n") * 38_000),
    "empty lines": ("/metrics", b"\n" * (1 << 20)),
    "the worst that is read": ("/metrics", (WANTED + b'{a="' + b"b" * 200 + b'"} 1\n') * 4_000),
    "models without end": ("/v1/models", b'{"data":[' + b'{"a":1},' * 130_000 + b"{}]}"),
    "models in names": (
        "/v1/models",
        b'{"data":[{"id":"m"' + b"".join(b',"k%d":1' % n for n in range(80_000)) + b"}]}",
    ),
}


@pytest.mark.parametrize("what", HEAVY)
async def test_f131_a_heavy_document(rig: Floor, what: str) -> None:
    """The invariant that no turn of the loop computes for long is what this is about."""
    path, document = HEAVY[what]
    engine = RawEngine()
    async with rig([engine, GOOD], scrape_interval=0.2, health_interval=0.2) as r:
        engine.gets[path] = plain(document)
        seen = len(r.links[0].asked)
        for number in range(4):
            assert is_fine(await r.ask(f"prompt {number}"))
            assert (await r.raw(request(None, {}, "/v1/models", "GET"))).status == 200
            await asyncio.sleep(0.1)
        await until(lambda: len(r.links[0].asked) > seen + 2, "it was read")


@pytest.mark.parametrize("how", ["deep", "hangs", "huge"])
async def test_f133_one_engines_list_of_models(rig: Floor, how: str) -> None:
    """It costs its own cards at most, and no other client's time."""
    nest = b'{"a":' * 300 + b"1" + b"}" * 300
    card = b'{"id":"deep","x":%b,"max_model_len":77,"y":"kept"}' % nest
    odd: dict[str, bytes | Script] = {
        "deep": plain(b'{"data":[{"id":"%s"},%b]}' % (MODEL.encode(), card)),
        "hangs": stalls(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
        "huge": plain(b'{"data":[' + b'{"id":"x"},' * 60_000 + b"{}]}"),
    }
    engine = RawEngine()
    async with rig([engine, GOOD, GOOD], **SLOW_PROBES) as r:
        engine.gets["/v1/models"] = odd[how]
        for _ in range(3):
            begun_s = asyncio.get_running_loop().time()
            got = await r.raw(request(None, {}, "/v1/models", "GET"))
            assert asyncio.get_running_loop().time() - begun_s < MODELS_TIMEOUT_S
            assert got.status == 200
            cards = {card["id"]: card for card in got.json["data"]}
            assert MODEL in cards
            assert "deep" not in cards, "a document that is nested so deep is not believed"


async def test_f156_one_engines_card_names_a_base(rig: Floor) -> None:
    """The base has a threshold that any prompt is past while another one is computed."""
    free = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await free.wait()
        await GOOD(reader, writer)

    engines = [RawEngine(waits) for _ in range(3)]
    cards = b'{"data":[{"id":"%s"},{"id":"base"}]}' % MODEL.encode()
    evil = b'{"data":[{"id":"%s","parent":"base"}]}' % MODEL.encode()
    for engine in engines:
        engine.gets["/v1/models"] = plain(cards)
    engines[2].gets["/v1/models"] = plain(evil)
    async with rig(engines, max_queue=0, **SLOW_PROBES) as r:
        await until(lambda: r.router.known.fleet.serves("base"), "their models are known")
        url = f"{r.proxy.server.admin_url}/busy_threshold"
        limit = {"model": "base", "active_prefill_tokens_threshold": 5}
        async with r.proxy.http.post(url, json=limit) as answer:
            assert answer.status == 200
        asked = [asyncio.create_task(r.ask(f"prompt {n} " + words(40))) for n in range(9)]
        try:
            await until(lambda: sum(e.busy for e in engines) == len(asked), "all have an engine")
            assert engines[2].busy <= 1, "on the instance that says so it holds"
        finally:
            free.set()
        assert all([is_fine(await one) for one in asked])


def publishes(payload: bytes) -> Script:
    """A publisher of KV events that sends this batch again and again."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(zmtp.GREETING + zmtp.ready("PUB"))
        number = 0
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(zmtp.message([b"", number.to_bytes(8, "big"), payload]))
                await writer.drain()
                number += 1
                await asyncio.sleep(0.001)
        writer.close()

    return script


def batch_of(value: bytes, size: int) -> bytes:
    count = size // len(value)
    return b"\x93\xcb" + bytes(8) + b"\xdd" + count.to_bytes(4, "big") + value * count + b"\x00"


BATCHES = {
    "8 MiB of maps": batch_of(b"\x80", 8_000_000),
    "1 MiB of maps": batch_of(b"\x80", 1_000_000),
    "events of no type": batch_of(b"\x81\xa1x\xb0" + b"y" * 16, 900_000),
    "255 KiB of maps": batch_of(b"\x80", 255 << 10),
    "15 KiB of events": batch_of(b"\x81\xa4type\xb0AllBlocksCleared", 15 << 10),
}


@pytest.mark.parametrize("what", BATCHES)
async def test_f134_batches_of_kv_events(rig: Floor, tmp_path: Path, what: str) -> None:
    server = await asyncio.start_server(publishes(BATCHES[what]), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, RawEngine(GOOD) as engine:
        events = f"tcp://{{host}}:{port}"
        async with command(tmp_path, [engine.address], "--kv-events", events) as proxy:
            await proxy.up(1)
            before, most = proxy.rss_bytes, 0
            for number in range(15):
                assert is_fine(await proxy.ask(f"{number}"))
                most = max(most, proxy.rss_bytes - before)
                await asyncio.sleep(0.1)
    assert most <= 64 << 20, f"{most >> 20} MiB beside them"
    rig.checked += 1

"""The figures that are counts: keep-alive races, lost streams, retries, breakers, hand-overs."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.measures import percentile
from proxy.core.fleet import health
from tests.chaos import figures
from tests.chaos.client import Got, connect, request
from tests.chaos.command import command
from tests.chaos.rig import SLOW_PROBES, Floor, Rig
from tests.chaos.test_a_before_first_byte import REFUSED
from tests.chaos.test_b_mid_stream import DONE_EVENT, LAST, is_cut
from tests.chaos.test_e_clients import BODY, PHASES
from tests.support.harness import (
    GOOD,
    STREAM_HEAD,
    RawEngine,
    Script,
    chunk,
    event,
    resets,
    says,
    spend,
    stands_still,
    until,
    words,
)

RACES = 20_000
LOOPS = 16
LOST = 1000
FAULTS = 500


def is_fine(got: Got) -> bool:
    return got.status == 200 and got.is_clean and got.text == "fine"


@pytest.mark.timeout(900)
async def test_r1_keep_alive_race(rig: Floor, tmp_path: Path) -> None:
    """The instance closes after each reply, now at once and now a little later."""
    dice = random.Random(1)

    async def answers_then_closes(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await GOOD(reader, writer)
        for _ in range(dice.choice((0, dice.randrange(40)))):
            await asyncio.sleep(0)
        raise ConnectionError

    async def loop(url: str, count: int) -> Counter[str]:
        found: Counter[str] = Counter()
        connection = await connect(url)
        for _ in range(count):
            connection.send(request(BODY, {}))
            try:
                got = await connection.get()
                found["good" if is_fine(got) else f"{got.status}"] += 1
            except ConnectionError:
                found["lost"] += 1
                connection = await connect(url)
        connection.close()
        return found

    async with RawEngine(answers_then_closes) as engine:
        async with command(tmp_path / "c", [engine.address]) as proxy:
            await proxy.up(1)
            parts = await asyncio.gather(*(loop(proxy.url, RACES // LOOPS) for _ in range(LOOPS)))
            total = sum(parts, Counter[str]())
            replays = await proxy.metric("upstream_replays_total")
            retries = await proxy.metric("upstream_retries_total")
            asked = len(engine.posts)
    figures.say(
        "R1",
        f"keep-alive race: {RACES - total['good']} of {RACES} POSTs lost; "
        f"{replays:.0f} replays, {retries:.0f} retries, {asked} reached the engine",
    )
    assert total == {"good": RACES}
    rig.checked += 1


async def gone_after(r: Rig, phase: str, how: str) -> float:
    """Seconds from a client's leaving in this phase until nothing works for it."""
    reach, _ = PHASES[phase]
    loop = asyncio.get_running_loop()
    for link in r.links:
        link.asked.clear()
    connection = await reach(r)
    if how == "pipelined":
        connection.send(request(BODY, {}) * 40)
        await stands_still(connection.writer.transport.get_write_buffer_size)
    start_s = loop.time()
    if how == "pipelined" and phase in ("header", "upload"):
        how = "FIN"
    connection.close("RST" if how == "RST" else "FIN")
    if phase == "queued":
        while r.metric("queued_requests"):
            await asyncio.sleep(0)
        end_s = loop.time()
        r.connections[-2].close()
        await until(lambda: not r.engines[0].busy and not r.state.in_flight.count)
        return end_s - start_s
    # After [DONE] the engine works for nobody: its connection has a second to end by itself.
    is_over = phase == "last_byte"
    while r.state.in_flight.count or (r.engines[0].busy and not is_over):
        await asyncio.sleep(0)
        assert loop.time() - start_s < 60, f"{phase} {how}: still at work"
    return loop.time() - start_s


@pytest.mark.timeout(600)
async def test_r3_disconnect_matrix(rig: Floor) -> None:
    """7 phases x 3 ways to leave: the instance is let go, and counters are at zero."""
    took: dict[tuple[str, str], list[float]] = {}
    for phase, (_, script) in PHASES.items():
        options: dict[str, Any] = dict(SLOW_PROBES)
        if phase == "queued":
            options["active_prefill_tokens_threshold"] = 0
        for how in ("FIN", "RST", "pipelined"):
            async with rig([script], flow=False, **options) as r:
                took[phase, how] = [await gone_after(r, phase, how) for _ in range(8)]
                await until(lambda: not r.state.in_flight.count, f"at rest after {phase} {how}")
    every = [t for times in took.values() for t in times]
    worst = max(took, key=lambda key: max(took[key]))
    figures.say(
        "R3",
        f"client gone -> instance let go: {len(took)}/21 cells of phase and way, "
        f"p99 {percentile(sorted(every), 99) * 1e3:.1f} ms, "
        f"worst {max(every) * 1e3:.1f} ms ({'/'.join(worst)})",
    )
    assert len(took) == 21


LOSSES: tuple[Script, ...] = (
    resets(STREAM_HEAD + chunk(event("half"))),
    says(STREAM_HEAD + chunk(event("half")), close=True),
    says(STREAM_HEAD + chunk(event("half")) + LAST),
    says(STREAM_HEAD + chunk(event("half")) + chunk(b'data: {"cho') + LAST),
    says(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event("half"), close=True),
    resets(STREAM_HEAD + chunk(event("half")) + b"40\r\ndata: {"),
    says(STREAM_HEAD + chunk(event("half")) + b"zz\r\n", close=True),
    says(STREAM_HEAD + chunk(event("half") + DONE_EVENT[:9]), close=True),
)


@pytest.mark.timeout(600)
async def test_r4_stream_loss(rig: Floor) -> None:
    engine = RawEngine(*(LOSSES[i % len(LOSSES)] for i in range(LOST)))
    async with rig([engine], **SLOW_PROBES) as r:

        async def some(count: int) -> list[Got]:
            return [await r.ask() for _ in range(count)]

        # Eight at a time: an instance that only loses streams is not let go for that.
        parts = await asyncio.gather(*(some(LOST // 8) for _ in range(8)))
        answers = [got for part in parts for got in part]
        cut = sum(is_cut(got) for got in answers)
        clean = sum(got.status == 200 and got.is_clean for got in answers)
        statuses = Counter(got.status for got in answers)
    figures.say(
        "R4",
        f"stream loss: {cut} of {len(answers)} lost streams said so inside the stream, "
        f"{clean} clean ends, statuses {dict(statuses)}",
    )
    assert clean == 0
    assert cut == statuses[200]
    assert cut + statuses[502] == LOST, "what broke before its first byte is refused"


KINDS: dict[str, Script] = {
    "500": says(REFUSED),
    "reset": resets(),
    "hang-up": says(b"", close=True),
    "garbage": says(b"SSH-2.0\r\n\r\n", close=True),
}


@pytest.mark.timeout(600)
async def test_r11_retry_amplification(rig: Floor) -> None:
    """Every engine fails, whatever it is."""
    worst = 0.0
    for kind, script in KINDS.items():
        async with rig([script] * 3, flow=False, health_interval=1.0) as r:

            async def some(r: Rig = r) -> list[Got]:
                return [await r.ask(f"prompt {i}") for i in range(100)]

            parts = await asyncio.gather(*(some() for _ in range(5)))
            answers = [got for part in parts for got in part]
            assert all(got.status in (500, 502, 503) for got in answers), kind
            ratio = r.attempts / len(answers)
            worst = max(worst, ratio)
            assert ratio <= 1.2, f"{kind}: {ratio:.2f}"
    figures.say(
        "R11", f"retry amplification, every engine failing in {len(KINDS)} ways: {worst:.2f}"
    )


async def test_r12_breaker(rig: Floor) -> None:
    after: list[int] = []
    for script in (resets(), says(REFUSED)):
        async with rig([script, GOOD, GOOD], health_interval=0.1) as r:
            for i in range(100):
                got = await r.ask(words(200, f"p{i}"), headers={"X-Session-ID": f"s{i % 9}"})
                assert is_fine(got)
            after.append(sum(asked.request_id.startswith("chaos-") for asked in r.links[0].posts))
            assert 0 < after[-1] <= 5, "and the proxy's own request"
    async with rig([resets(), GOOD], **SLOW_PROBES) as r:
        assert is_fine(await r.ask())
        assert r.is_up("i0"), "one client's request opens no breaker"
    async with rig([GOOD, GOOD], health_interval=0.1) as r:
        await r.links[0].accept("refuse")
        await until(lambda: not r.is_up("i0"), "gone")
        start_s = time.monotonic()
        await r.links[0].accept("serve")
        await until(lambda: r.is_up("i0"), "back")
        back_s = time.monotonic() - start_s
    figures.say(
        "R12",
        f"a dead engine got {max(after)} clients' requests; back {back_s:.2f} s after it was up "
        "(probes every 0.1 s)",
    )


Fault = Callable[[Rig, random.Random], Awaitable[None]]


async def kill_one(r: Rig, dice: random.Random) -> None:
    """P or D: killed in mid-flight, and started again."""
    i = dice.randrange(2)
    await r.kill(i)
    await spend(0.01)  # away for a moment, in which others are asked
    await r.start(i)


async def cut_links(r: Rig, dice: random.Random) -> None:
    dice.choice(r.links).cut(resets=True)


async def no_pulls(r: Rig, dice: random.Random) -> None:
    await dice.choice(r.boots).accept("reset")


async def cut_pulls(r: Rig, dice: random.Random) -> None:
    for gate in r.boots:
        gate.cut(resets=True)


async def stall_pulls(r: Rig, dice: random.Random) -> None:
    for gate in r.boots:
        gate.down.stalls = True


async def stall_p(r: Rig, dice: random.Random) -> None:
    dice.choice(r.links).down.stalls = True


HAND_OVER_FAULTS: dict[str, Fault] = {
    "killed": kill_one,
    "links cut": cut_links,
    "bootstrap gone": no_pulls,
    "pull cut": cut_pulls,
    "pull hangs": stall_pulls,
    "instance hangs": stall_p,
}


async def heal(r: Rig) -> None:
    for link in r.links:
        link.heal()
    for gate in r.boots:
        gate.down.stalls = False
        if gate.way != "serve":
            await gate.accept("serve")


@pytest.mark.timeout(900)
async def test_r21_hand_over_faults(rig: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fault at a random moment of a hand-over: the client has its whole answer all the same.

    A fault after the first token cannot be hidden; so late it is let be. Each begins with both
    instances in use; so that this takes no hours, they return sooner than they would.
    """
    for name, seconds in (("CALM_S", 0.05), ("OPEN_S", 0.1), ("OPEN_MAX_S", 0.2)):
        monkeypatch.setattr(health, name, seconds)
    dice = random.Random(21)
    options: dict[str, Any] = {
        "boots": True,
        "warm_threshold": 100,
        "heavy_threshold": 500,
        "offload_policy": "always",
        "prefill_timeout": 0.3,
        "transfer_timeout": 0.2,
        "ttft_timeout": 2.0,
        "health_timeout": 0.3,
        "slow_start": 0.0,
    }
    found: Counter[str] = Counter()
    fallbacks: Counter[str] = Counter()
    sim = {"speed": 100.0, "abort_timeout": 50.0, "x0": 1.0}
    async with rig(sims=2, sim=sim, flow=False, **options) as r:
        for i in range(FAULTS):
            kind = dice.choice(list(HAND_OVER_FAULTS))
            asked = asyncio.create_task(r.ask(words(1200, f"r{i}-"), max_tokens=2))
            await spend(dice.random() * 0.03)  # at any moment of a hand-over
            if not asked.done():
                await HAND_OVER_FAULTS[kind](r, dice)
            got = await asked
            told_before = not any(b'"content":"' in e for e in got.events)
            whole = got.status == 200 and got.is_clean and got.is_done
            found["whole" if whole else "early" if told_before else "late"] += 1
            await heal(r)
            await until(lambda: r.is_up("i0") and r.is_up("i1"), f"both up after {kind}")
        records = await r.records(FAULTS)
        fallbacks.update(str(record["fallback"]) for record in records)
    figures.say(
        "R21",
        f"hand-over faults: {found['whole']} of {FAULTS} whole, {found['early']} refused before "
        f"the first token, {found['late']} cut after it; {dict(fallbacks.most_common(5))}",
    )
    assert found["early"] == 0
    assert found["whole"] + found["late"] == FAULTS


async def test_r10_overload(rig: Floor) -> None:
    """Far more than fits: who is let in is served, who is not is told when to come back."""

    one_is_refused = asyncio.Event()

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await one_is_refused.wait()
        await spend(0.02)  # less would be no overload
        await GOOD(reader, writer)

    options = SLOW_PROBES | {"active_prefill_tokens_threshold": 200, "max_queue": 8}
    async with rig([slowly, slowly], **options) as r:
        refused_s: list[float] = []

        async def client(number: int) -> Counter[str]:
            seen: Counter[str] = Counter()
            for i in range(20):
                start_s = time.monotonic()
                got = await r.ask(words(20, f"c{number}-{i}"))
                seen["served" if is_fine(got) else str(got.status)] += 1
                if got.status == 503:
                    one_is_refused.set()
                    refused_s.append(time.monotonic() - start_s)
                    assert 1 <= int(got.headers["retry-after"]) <= 30
            return seen

        parts = await asyncio.gather(*(client(n) for n in range(40)))
        total = sum(parts, Counter[str]())
    figures.say(
        "R10",
        f"overload: {total['served']} served, {total['503']} refused, each with Retry-After; "
        f"a refusal took {percentile(sorted(refused_s) or [0.0], 50) * 1e3:.1f} ms at the median",
    )
    assert set(total) <= {"served", "503"}
    assert total["served"] > 0 < total["503"]

"""Limits and alarms on one tick: never early, at most a tick late, and not for lost time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest

from proxy.net.timeouts import (
    FAR_S,
    FAR_TICKS,
    TICK_S,
    Alarm,
    Clock,
    IdleLimit,
    Limit,
    MayHang,
    RateLimit,
)
from tests.support.harness import WAIT_S
from tests.support.virtual_time import VirtualLoop, run


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def ended_s(limit: Limit, body_s: float = 3600.0) -> float | None:
    """When the limit ended a body that takes so long; None where it did not."""
    began_s = now_s()
    try:
        with limit:
            await asyncio.sleep(body_s)
    except TimeoutError:
        return now_s() - began_s
    return None


@pytest.mark.parametrize("seconds", [0.01, 0.05, 0.12, 1.0, FAR_S - 0.01])
def test_a_limit_is_met_within_a_tick(seconds: float) -> None:
    async def test() -> None:
        took_s = await ended_s(Limit(seconds))
        assert took_s is not None
        assert seconds <= took_s <= seconds + TICK_S + 1e-6

    run(test())


def test_a_far_limit_is_looked_at_in_each_tenth_tick_only() -> None:
    async def test() -> None:
        took_s = await ended_s(Limit(FAR_S))
        assert took_s is not None
        assert FAR_S <= took_s <= FAR_S + FAR_TICKS * TICK_S + 1e-6

    run(test())


def test_a_body_that_ends_in_time_is_let_be() -> None:
    async def test() -> None:
        assert await ended_s(Limit(1.0), 0.99) is None
        await asyncio.sleep(10.0)  # and nothing comes later

    run(test())


def test_a_cancel_from_outside_stays_one() -> None:
    async def test() -> None:
        task = asyncio.create_task(ended_s(Limit(5.0)))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test())


def test_another_end_may_be_set_also_one_that_has_passed() -> None:
    async def test() -> None:
        limit = Limit(1.0)
        task = asyncio.create_task(ended_s(limit))
        await asyncio.sleep(0.5)
        limit.reschedule(3.0)
        await asyncio.sleep(2.0)
        assert not task.done()
        limit.reschedule(2.0)
        assert await task == pytest.approx(2.5)

    run(test())


@pytest.mark.parametrize("kind", ["limit", "alarm"])
def test_time_in_which_the_process_was_stopped_counts_against_nobody(kind: str) -> None:
    async def test() -> None:
        rung_s: list[float] = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        if kind == "alarm":
            Alarm(2.0, lambda: rung_s.append(now_s()))
        else:
            limited = asyncio.create_task(ended_s(Limit(2.0)))
            limited.add_done_callback(lambda _: rung_s.append(now_s()))
        await asyncio.sleep(1.0)
        loop.jump(100.0)
        await asyncio.sleep(0.5)
        assert not rung_s
        await asyncio.sleep(1.0)
        assert [round(s) for s in rung_s] == [102]

    run(test())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_alarm_rings_once_unless_it_is_stopped(is_stopped: bool) -> None:
    async def test() -> None:
        rung_s: list[float] = []
        alarm = Alarm(1.0, lambda: rung_s.append(now_s()))
        await asyncio.sleep(0.9)
        if is_stopped:
            alarm.stop()
        await asyncio.sleep(10.0)
        assert rung_s == ([] if is_stopped else [pytest.approx(1.0, abs=TICK_S + 1e-6)])

    run(test())


def test_silence_is_counted_from_the_last_progress_and_has_its_beats() -> None:
    async def test() -> None:
        seen, beats_s = [0], list[float]()
        limit = IdleLimit(2.0, lambda: seen[0], 0.5, lambda: beats_s.append(now_s()))
        task = asyncio.create_task(ended_s(limit))
        for _ in range(5):
            await asyncio.sleep(1.0)
            seen[0] += 1
        took_s = await task
        assert took_s is not None
        assert 7.0 <= took_s <= 7.0 + 3 * TICK_S
        assert len([s for s in beats_s if s < 5.0]) == 5, "one in each second between events"
        assert len([s for s in beats_s if s > 5.0]) >= 3

    run(test())


@pytest.mark.parametrize("where", ["beat", "progress", "ring"])
def test_one_callbacks_fault_is_nobody_elses(where: str) -> None:
    """Every other limit ends when it should, and the tick goes on though nobody makes a limit."""

    def fails() -> None:
        raise TypeError("a fault")

    def fails_later() -> int:
        return 1 // (now_s() < 0.5)

    async def test() -> None:
        faults: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        beats_s, rung_s = list[float](), list[float]()
        tasks = [
            asyncio.create_task(ended_s(limit))
            for limit in (Limit(3.0), IdleLimit(4.0, lambda: 0), Limit(FAR_S + 5.0))
        ]
        beating = IdleLimit(6.0, lambda: 0, 1.0, lambda: beats_s.append(now_s()))
        tasks.append(asyncio.create_task(ended_s(beating)))
        Alarm(2.0, lambda: rung_s.append(now_s()))
        broken = []
        for _ in range(40):
            if where == "ring":
                Alarm(0.5, fails)
            elif where == "beat":
                broken.append(asyncio.create_task(ended_s(IdleLimit(50.0, lambda: 0, 0.5, fails))))
            else:
                broken.append(asyncio.create_task(ended_s(IdleLimit(5.0, fails_later))))
        assert [s and round(s) for s in await asyncio.gather(*tasks)] == [3, 4, 15, 6]
        assert len(beats_s) == 5
        assert [round(s) for s in rung_s] == [2]
        took_s = await asyncio.gather(*broken)
        assert all(s is not None and s < 1.0 for s in took_s), "what cannot be looked at ends"
        assert len(faults) == 40, "each once"

    run(test())


def test_silence_may_be_allowed_less_from_now_on() -> None:
    async def test() -> None:
        limit = IdleLimit(60.0, lambda: 0)
        task = asyncio.create_task(ended_s(limit))
        await asyncio.sleep(1.0)
        limit.change(2.0)
        took_s = await task
        assert took_s is not None
        assert 3.0 <= took_s <= 3.0 + 2 * TICK_S

    run(test())


@pytest.mark.parametrize(
    ("progress", "earliest_s", "latest_s"),
    [
        (lambda s: 0.0, 2.0, 2.2),
        (lambda s: 9.0 * s, 2.0, 2.2),
        (lambda s: 11.0 * s, 6.0, 6.2),
        (lambda s: 50.0, 5.0, 5.2),
    ],
    ids=["nothing", "too slow", "fast enough", "much, then nothing"],
)
def test_a_rate_has_a_third_of_the_time_to_begin(
    progress: Callable[[float], float], earliest_s: float, latest_s: float
) -> None:
    """The whole limit holds all the same."""

    async def test() -> None:
        took_s = await ended_s(RateLimit(6.0, lambda: progress(now_s()), 10.0))
        assert took_s is not None
        assert earliest_s - 1e-6 <= took_s <= latest_s

    run(test())


def test_a_moment_in_unix_time_keeps_its_distance() -> None:
    clock = Clock()
    assert clock.unix(clock.now_s() + 5.0) - clock.unix_now() == pytest.approx(5.0, abs=1.0)


def test_the_systems_clock_moves_and_the_anchor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, real = Clock(), time.time_ns
    assert clock.drift_s(clock.unix_now()) == 0.0
    for turn, moved_s in enumerate((3600.0, -3600.0), 1):
        before_s = clock.unix_now()
        monkeypatch.setattr(time, "time_ns", lambda s=moved_s: real() + int(s * 1e9))
        assert 0.0 <= clock.unix_now() - before_s < 30.0
        later_s = clock.unix_now() + turn * 10.0
        drift_s = clock.drift_s(later_s)
        assert drift_s == pytest.approx(moved_s, abs=30.0)
        assert clock.unix_now() + drift_s == pytest.approx(clock.wall_now(), abs=30.0)
        monkeypatch.setattr(time, "time_ns", real)
        assert clock.drift_s(later_s) == drift_s, "not compared for every request"


async def test_a_call_that_hangs_is_given_up_and_leaves_room_when_it_ends() -> None:
    calls, ends = MayHang[bool]("hangs", 2), threading.Event()
    with pytest.raises(OSError, match=r"no answer in 0\.05 s"):
        await calls.run(ends.wait, 0.05)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "hangs")
    assert thread.daemon, "no exit waits for it"
    assert await calls.run(lambda: True, WAIT_S), "there is room for one more"
    late = calls.begin(ends.wait)
    with pytest.raises(OSError, match="earlier calls have not come back"):
        await calls.run(lambda: True, WAIT_S)
    ends.set()
    assert await late
    thread.join()
    assert await calls.run(lambda: True, WAIT_S)


@pytest.mark.parametrize("failure", [OSError("gone"), TimeoutError("late"), ValueError("odd")])
async def test_what_a_call_raises_is_raised_or_goes_unseen(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise failure

    calls = MayHang[None]("fails")
    with pytest.raises(type(failure), match=str(failure)):
        await calls.run(fails, WAIT_S)
    done = calls.begin(fails)
    await asyncio.wait([done])
    del done
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR], "nobody waited for it"


async def test_a_thread_that_cannot_start_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = MayHang[bool]("few")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="can't start new thread"):
            await calls.run(lambda: True, WAIT_S)
    assert await calls.run(lambda: True, WAIT_S)

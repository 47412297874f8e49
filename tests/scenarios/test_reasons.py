"""Why an instance, in the answer and in the logs; who failed before, and why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.harness import (
    ANSWER,
    RawEngine,
    ServedProxy,
    chat,
    plain,
    proxied,
    resets,
    says,
    words,
)

SESSION = {"X-Session-ID": "s"}


async def test_the_answer_says_why_this_instance(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2, kv_connector="none") as (proxy, _):
        first = await proxy.post(chat(words(2000)), headers=SESSION)
        second = await proxy.post(chat(words(2000)), headers=SESSION)
        said = [one.headers["X-Cache-Proxy-Reason"] for one in (first, second)]
        assert re.fullmatch(r"load 0 of \d+k cached; [a-z_]+", said[0])
        found = re.fullmatch(r"home (\d+)k of (\d+)k cached; [a-z_]+", said[1])
        assert found is not None
        assert 0 < int(found[1]) <= int(found[2])
        now_s = proxy.server.state.clock.now_s()
        proxy.router.known.gate.mark_busy(first.headers["X-Cache-Proxy-Instance"], now_s + 60)
        third = await proxy.post(chat(words(2000)), headers=SESSION)
        assert third.headers["X-Cache-Proxy-Reason"].startswith("home_away 0 of ")
        records = await proxy.records(3)
        assert [one["place"] for one in records] == ["load", "home", "home_away"]
        assert all(one["first_failed_instance"] is None for one in records)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_repeated_request_names_who_failed_first_and_why(
    tmp_path: Path, stream: bool
) -> None:
    good_answer = ANSWER if stream else plain(b'{"choices":[{"message":{"content":"x"}}]}')
    async with RawEngine(resets()) as bad, RawEngine(says(good_answer)) as good:
        instances = [f"bad={bad.address}", f"good={good.address}"]
        async with ServedProxy(tmp_path / "log", instances, kv_connector="none") as proxy:
            await proxy.up()
            answers = [await proxy.post(chat(f"x{n}", stream=stream)) for n in range(4)]
            assert [one.status for one in answers] == [200] * 4
            records = await proxy.records(4)
        repeated = [one for one in records if one["retries"]]
        assert repeated, "one of them was sent to it"
        for one in repeated:
            assert one["first_failed_instance"] == "bad"
            assert one["first_failure"].startswith("reset: ")
            assert (one["decode_instance"], one["place"]) == ("good", "retry")
        reasons = [one.headers["X-Cache-Proxy-Reason"] for one in answers]
        assert sum(one.startswith("retry ") for one in reasons) == len(repeated)


async def test_one_that_fails_for_good_names_it_too(tmp_path: Path) -> None:
    async with RawEngine(resets()) as bad:
        async with ServedProxy(tmp_path / "log", [f"bad={bad.address}"]) as proxy:
            await proxy.up()
            assert (await proxy.post(chat("x"))).status == 502
            (record,) = await proxy.records(1)
            assert record["first_failed_instance"] == "bad"
            assert record["first_failure"].startswith("reset: ")
